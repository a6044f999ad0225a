"""README's commands and the demo, as written, on data that needs no download."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from PIL import Image
from pipeline import one_thread

from curvssl.cli import commands, defaults_in, main, value_of
from curvssl.data import named as data
from curvssl.data.sources import PARTS, SHA256
from curvssl.evaluate import runs
from curvssl.methods import METHODS, title_of
from curvssl.rundir import Run
from curvssl.train import loop

ROOT = Path(__file__).parents[2]
# README has two commands, the guide all others.
README = (ROOT / "README.md").read_text() + (ROOT / "docs/guide.md").read_text()


def readme_lines() -> list[str]:
    """The lines of all shell blocks, without comments; continued lines are joined."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


LINES = readme_lines()
OURS = [line for line in LINES if line.startswith("curvssl ")]
Command = Callable[..., tuple[str, str]]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command as its process would, in this one: UMAP is compiled once for all of them. Return what it wrote."""

    def run(*words: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["curvssl", *words])
        try:
            main()
            ended = 0
        except SystemExit as end:
            ended = end.code
        assert ended == code
        return capsys.readouterr()

    return run


def test_the_demo_trains_probes_and_draws_all_four_methods(command: Command, tmp_path: Path):
    out, bar = command("demo", "--out", str(tmp_path), "--epochs", "1")
    table = {line.split("  ")[0].strip(): line for line in out.splitlines() if re.search(r"\d\d\.\d ± \d", line)}
    assert list(table) == ["raw pixels", "random encoder", *map(title_of, METHODS)]
    assert re.search(r"linear +mlp +knn", out)
    assert "views/s" in bar
    for method in METHODS:
        run = Run.read(tmp_path / method)
        assert run.finished
        assert run.config.method == method
        found = run.read_json("probes.json")
        assert f"{found['linear']['mean']:.1f} ± " in table[title_of(method)]
        picture = run.path / "map-h-test.png"
        assert str(picture) in out
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        with np.load(picture.with_suffix(".npz")) as points:
            assert points["xy"].shape == (360, 2)
        facts = json.loads((run.path / "provenance.json").read_text())
        assert facts["command"].endswith(f"demo --out {tmp_path} --epochs 1")


def test_readmes_commands_are_commands():
    assert "make demo" in LINES
    assert "make test" in LINES
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {line.split()[1] for line in LINES if line.startswith("make ")} <= set(targets)
    fenced = "".join(README.split("```")[1::2])
    assert len(OURS) == len(re.findall(r"^\W*curvssl ", fenced, flags=re.MULTILINE)) > 0  # none is missed
    for line in OURS:
        words = shlex.split(line)[1:]
        tyro.extras.subcommand_cli_from_dict(commands(defaults_in(words)), prog="curvssl", args=words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, in which the commands run one after another."""
    folder = tmp_path_factory.mktemp("readme")
    digits = data.load("digits").train
    enough = 140  # a tenth is the test split, a tenth of the rest is held out: the remaining 113 fill batches of 16
    np.save(folder / "pixels.npy", digits.images.pixels[:enough, 0].numpy())
    for i in range(enough):
        file = folder / "photos" / f"class {int(digits.labels[i]) % 2}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images.pixels[i, 0].numpy()).save(file)
    Image.fromarray(digits.images.pixels[enough, 0].numpy()).save(folder / "sunset.jpg")
    shutil.copytree(ROOT / "weights", folder / "weights")
    return folder


@pytest.mark.parametrize("line", OURS)
def test_readmes_command_works_as_written(line: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch):
    """Each to its end, except a long pretraining, which is stopped in its first step."""
    words = shlex.split(line)[1:]
    root = Path(os.environ.get("CURVSSL_DATA") or "~/.cache/curvssl").expanduser()
    for name in (SHA256.keys() - {"digits"}) & {word.removeprefix("paper-") for word in words}:
        if not all((root / name / f"{part}.npy").exists() for part in PARTS):
            pytest.skip(f"{name} is not in {root}: run `curvssl data {name}` to test it")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(runs, "LIDAR_IMAGES", 100)  # a thousand take ten seconds
    if words[0] == "pretrain" and value_of("--preset", words) != "demo":
        stop_in_the_first_step(words, command, monkeypatch)
    else:
        out, _ = command(*words)
        assert out
    if "--out" in words:
        assert (folder / words[words.index("--out") + 1]).exists()


def stop_in_the_first_step(words: list[str], command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C before the first step: it is finished and saved, and no other runs."""
    rate = loop.learning_rate

    def stopping(*args: Any, **settings: Any) -> float:
        signal.raise_signal(signal.SIGINT)
        return rate(*args, **settings)

    monkeypatch.setattr(loop, "learning_rate", stopping)
    out, said = command(*words, code=128 + signal.SIGINT)
    assert not out
    assert said.endswith("\nstopped; the same command goes on from here\n")
    (name,) = set(re.findall(r"^(\S+) +0%\|", said.replace("\r", "\n"), flags=re.MULTILINE))
    begun = Run.read(Path("runs") / name)
    state = begun.load_checkpoint()
    assert state
    assert state["step"] == 1
    assert not begun.finished
    # The next commands need an encoder, and training for a hundred epochs would take too long.
    net = begun.make_net(channels=3)
    net.load_state_dict(state["net"])
    begun.save_net(net, channels=3)
