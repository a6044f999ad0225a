"""The whole system through its command line, on data that needs no download."""

import dataclasses
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline import SHORT, TINY, finish, flags, one_thread, rows, start, trained, weights

import curvssl
from curvssl.cli import main
from curvssl.config import CHOICES
from curvssl.data import named as data
from curvssl.evaluate.features import extract
from curvssl.evaluate.probes import knn

LONGER = dataclasses.replace(TINY, epochs=3, warmup_epochs=0, checkpoint_seconds=0.2)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As in the processes that are started here: sums then are the same to the last bit."""
    with one_thread():
        yield


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
    for step, number in ((3, signal.SIGKILL), (9, signal.SIGTERM), (15, signal.SIGINT)):
        process = start(*pretraining(out))
        wait_for(process, out, step=step)
        if step == 3:  # while it trains, nobody else may
            with pytest.raises(SystemExit) as end:
                main(pretraining(out))
            assert end.value.code == 2
            assert "another process trains in" in capsys.readouterr().err
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.communicate()
            assert process.returncode == -signal.SIGKILL
        else:
            _, said = finish(process, code=128 + number)
            assert said.endswith("\nstopped; the same command goes on from here\n")
        assert not (out / "encoder.safetensors").exists()
        assert len(list(out.glob("checkpoint-*.pt"))) <= 2
    main(pretraining(out))
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
