"""The whole system through its command line, on data that needs no download."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from PIL import Image
from pipeline import SHORT, TINY, finish, flags, rows, start, trained, weights

import curvssl
from curvssl.cli import commands, main, preset_in
from curvssl.config import CHOICES
from curvssl.data import named as data
from curvssl.data.sources import SHA256
from curvssl.evaluate.features import extract
from curvssl.evaluate.probes import knn
from curvssl.methods import METHODS, title_of
from curvssl.rundir import Run

ROOT = Path(__file__).parents[2]
LONGER = dataclasses.replace(TINY, epochs=3, warmup_epochs=0, checkpoint_seconds=0.2)


@pytest.fixture(autouse=True, scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The demo, started before the other tests of this file so that it has the second core to itself."""
    out = tmp_path_factory.mktemp("demo")
    with start("demo", "--out", out, "--epochs", "1") as process:
        yield process, out
        process.kill()


# ---- training improves the features ----


def knn_on_test(encoder: torch.nn.Module) -> float:
    """Accuracy of kNN on the test digits, with the training digits as neighbours."""
    digits = data.load("digits")
    settings: dict[str, Any] = {"size": SHORT.image_size, "mean": digits.mean, "std": digits.std}
    known, asked = (extract(encoder, part.images, **settings).h for part in (digits.train, digits.test))
    return knn(known, digits.train.labels, asked, digits.test.labels, classes=10).accuracy[0]


@pytest.mark.parametrize("method", CHOICES["method"])
def test_every_method_learns_features_that_beat_the_random_encoders(method: str):
    run = trained(method)
    before, after = knn_on_test(run.make_net(channels=3).encoder), knn_on_test(curvssl.load_encoder(run.path))
    assert 80 < before < 90  # the accuracy without training
    assert after > before + 4
    losses = [row["loss"] for row in run.metrics()]
    assert losses[-1] < losses[0]


# ---- interrupted at any moment ----


def pretraining(out: Path) -> list[str]:
    return ["pretrain", *flags(LONGER), "--out", str(out)]


def wait_for(process: subprocess.Popen[str], out: Path, *, step: int) -> None:
    """Wait for a checkpoint of this step or a later one."""
    while not any(int(file.stem.split("-")[1]) >= step for file in out.glob("checkpoint-*.pt")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.003)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of the same command."""
    out = tmp_path_factory.mktemp("system") / "whole"
    said, bar = finish(start(*pretraining(out)))
    assert said.startswith(f"{out}: 3 epochs, loss ")
    assert re.search(r"100%.*loss .* views/s", bar)
    assert re.search(r"\d\d:\d\d<\d\d:\d\d", bar)  # elapsed and remaining time
    assert [row["epoch"] for row in rows(out)] == [1, 2, 3]
    return out


def test_a_run_that_is_killed_and_asked_to_stop_goes_on_to_the_same_weights(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "interrupted"
    for step, moment, number in (
        (3, 0.0, signal.SIGKILL),
        (9, 0.0, signal.SIGTERM),
        (15, 0.0, signal.SIGINT),
        (21, 0.05, signal.SIGKILL),
    ):
        process = start(*pretraining(out))
        wait_for(process, out, step=step)
        if step == 3:  # while it trains, nobody else may
            with pytest.raises(SystemExit) as end:
                main(pretraining(out))
            assert end.value.code == 2
            assert "another process trains in" in capsys.readouterr().err
        time.sleep(moment)
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.communicate()
            assert process.returncode == -signal.SIGKILL
        else:
            _, said = finish(process, code=128 + number)
            assert said.endswith("\nstopped; the same command goes on from here\n")
        assert not (out / "encoder.safetensors").exists()
        assert len(list(out.glob("checkpoint-*.pt"))) <= 2
    finish(start(*pretraining(out)))
    assert weights(out) == weights(whole)
    assert rows(out) == rows(whole)
    assert not list(out.glob(".*.part"))


def test_a_finished_run_answers_at_once_and_refuses_other_settings(whole: Path, capsys: pytest.CaptureFixture[str]):
    before = weights(whole)
    main(pretraining(whole))
    assert capsys.readouterr().out.startswith(f"{whole}: 3 epochs")
    with pytest.raises(SystemExit) as end:
        main([*pretraining(whole), "--lr", "0.5", "--augment.rotation", "20"])
    assert end.value.code == 2
    assert "other settings (lr 0.002 → 0.5; augment.rotation 10 → 20.0): use another --out" in capsys.readouterr().err
    assert weights(whole) == before


# ---- the demo ----


def test_the_demo_trains_probes_and_draws_all_four_methods(demo: tuple[subprocess.Popen[str], Path]):
    process, folder = demo
    out, bar = finish(process)
    table = {line.split("  ")[0].strip(): line for line in out.splitlines() if re.search(r"\d\d\.\d ± \d", line)}
    assert list(table) == ["raw pixels", "random encoder", *map(title_of, METHODS)]
    assert re.search(r"linear +mlp +knn", out)
    assert "views/s" in bar
    for method in CHOICES["method"]:
        run = Run.read(folder / method)
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
        assert facts["command"].endswith(f"demo --out {folder} --epochs 1")


# ---- README ----

# README has two commands, the guide all others.
README = (ROOT / "README.md").read_text() + (ROOT / "docs/guide.md").read_text()


def readme_blocks() -> list[list[str]]:
    """The lines of each shell block, without comments; continued lines are joined."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = [block.replace("\\\n", " ").splitlines() for block in blocks]
    return [[shlex.join(shlex.split(line, comments=True)) for line in block] for block in lines]


ONE_CORE = threading.Lock()  # for the large networks; the demo, which takes longest, uses the other core
LINES = [line for block in readme_blocks() for line in block]
OURS = [line for line in LINES if line.startswith("curvssl ")]


def test_readmes_commands_are_commands():
    assert "make demo" in LINES
    assert "make test" in LINES
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {line.split()[1] for line in LINES if line.startswith("make ")} <= set(targets)
    fenced = "".join(README.split("```")[1::2])
    assert len(OURS) == len(re.findall(r"^\W*curvssl ", fenced, flags=re.MULTILINE)) > 0  # none is missed
    for line in OURS:
        words = shlex.split(line)[1:]
        tyro.extras.subcommand_cli_from_dict(commands(preset_in(words)), prog="curvssl", args=words)


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    """Every line, started in a folder with images: blocks run in parallel, the lines of a block one after another."""
    folder = tmp_path_factory.mktemp("readme")
    digits = data.load("digits").train
    enough = 320  # a tenth is the test split, a tenth of the rest is held out: the remaining 260 fill one batch
    np.save(folder / "pixels.npy", digits.images.pixels[:enough, 0].numpy())
    for i in range(enough):
        file = folder / "photos" / f"class {int(digits.labels[i]) % 2}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images.pixels[i, 0].numpy()).save(file)
    hands = {ThreadPoolExecutor(1): [line for line in block if line in OURS] for block in readme_blocks()}
    yield {line: hand.submit(run_as_written, line, folder) for hand, lines in hands.items() for line in lines}
    for hand in hands:
        hand.shutdown(cancel_futures=True)


@pytest.mark.parametrize("line", OURS)
def test_readmes_command_works_as_written(line: str, readme: dict[str, Future[None]]):
    readme[line].result()


def run_as_written(line: str, folder: Path) -> None:
    """Run the line to its end, except a long pretraining, which is stopped after its start."""
    words = shlex.split(line)[1:]
    root = Path(os.environ.get("CURVSSL_DATA") or "~/.cache/curvssl").expanduser()
    for name in (SHA256.keys() - {"digits"}) & {word.removeprefix("paper-") for word in words}:
        if not all((root / name / f"{part}.npy").exists() for part in SHA256[name]):
            pytest.skip(f"{name} is not in {root}: run `curvssl data {name}` to test it")
    if words[0] == "pretrain" and preset_in(words) != "demo":
        with ONE_CORE:
            stop_in_the_first_step(start(*words, cwd=folder), folder)
    else:
        said, _ = finish(start(*words, cwd=folder))
        assert said
    if "--out" in words:
        assert (folder / words[words.index("--out") + 1]).exists()


def stop_in_the_first_step(process: subprocess.Popen[str], folder: Path) -> None:
    """Press Ctrl-C as soon as the progress bar is shown: the current step is finished and saved, and no other runs."""
    assert process.stderr
    seen = ""
    while "%|" not in seen:
        letter = process.stderr.read(1)
        assert letter, f"it ended before its first step: {seen}"
        seen += letter
    process.send_signal(signal.SIGINT)
    out, said = finish(process, code=128 + signal.SIGINT)
    assert not out
    assert said.endswith("\nstopped; the same command goes on from here\n")
    begun = Run.read(folder / "runs" / seen.splitlines()[-1].split()[0])  # the bar starts with the run's name
    state = begun.load_checkpoint()
    assert state
    assert not begun.finished
    # The next commands need an encoder, and training for a hundred epochs would take too long.
    net = begun.make_net(channels=3)
    net.load_state_dict(state["net"])
    begun.save_net(net, channels=3)
