"""Metrics during training: ρ, warnings of a collapse, and the monitor: kNN accuracy and measures without labels."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipeline import SHORT, TINY, one_thread, trained
from torch import Tensor

from curvssl.config import UserError
from curvssl.data import named as data
from curvssl.data.order import hold_out
from curvssl.data.views import Augment
from curvssl.evaluate import quality
from curvssl.evaluate.features import extract, extract_views
from curvssl.evaluate.quality import MEASURES, effective_rank, rank_from
from curvssl.geometry import curvature, kernel_curvature
from curvssl.losses import BarlowTwinsLoss, CurvSSLLoss, KernelCurvSSLLoss
from curvssl.train import watch
from curvssl.train.loop import pretrain
from curvssl.train.watch import alarm, geometry_of

FINE = {"epoch": 3, "loss": 1.0, "z_std": 0.5, "effective_rank": 20.0}
NOISE = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("criterion", [BarlowTwinsLoss(), CurvSSLLoss(k=6), KernelCurvSSLLoss(k=6, gamma=0.3)])
def test_rho_is_the_correlation_of_the_two_views_curvature(criterion: BarlowTwinsLoss):
    z0 = torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    z1 = z0 + 0.2 * torch.randn(50, 5, generator=torch.Generator().manual_seed(1))
    kernel = isinstance(criterion, KernelCurvSSLLoss)
    c = [kernel_curvature(z, k=6, gamma=0.3) if kernel else curvature(z, k=6) for z in (z0, z1)]
    measured = geometry_of(z0, z1, criterion=criterion, k=6)
    assert float(measured["rho"]) == pytest.approx(np.corrcoef(*(x.double().numpy() for x in c))[0, 1], abs=1e-4)
    assert float(measured["z_std"]) == pytest.approx(z0.numpy().std(0, ddof=1).mean(), rel=1e-5)
    assert rank_from(measured["gram"]) == pytest.approx(effective_rank(z0))


def test_the_rho_that_is_watched_is_the_one_that_the_loss_reports():
    z = torch.randn(2, 50, 5, generator=torch.Generator().manual_seed(0))
    criterion = CurvSSLLoss(k=6)
    assert float(geometry_of(*z, criterion=criterion, k=6)["rho"]) == pytest.approx(
        float(criterion.terms(*z)["rho"]), abs=1e-4
    )


def test_healthy_embeddings_are_passed_in_silence(capsys: pytest.CaptureFixture[str]):
    alarm(FINE, d_z=64, batch_size=128, warned=set())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("z", "name", "advice"),
    [
        (torch.ones(40, 8) + 1e-6 * torch.randn(40, 8), "collapse in epoch 3: all images get nearly the same", "--lr"),
        (
            torch.randn(40, 1) * torch.ones(8),
            "dimensional collapse in epoch 3: the embeddings use 1.0 of 8",
            "--lambda-emb",
        ),
    ],
)
def test_a_collapse_is_named_once_with_what_to_try(
    z: Tensor, name: str, advice: str, capsys: pytest.CaptureFixture[str]
):
    measured = geometry_of(z, z, criterion=BarlowTwinsLoss(), k=5)
    row = FINE | {"z_std": float(measured["z_std"]), "effective_rank": rank_from(measured["gram"])}
    warned: set[str] = set()
    alarm(row, d_z=8, batch_size=40, warned=warned)
    said = capsys.readouterr().err
    assert said.count(name) == 1
    assert advice in said
    alarm(row, d_z=8, batch_size=40, warned=warned)
    assert capsys.readouterr().err == ""


def test_a_run_that_collapses_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plain = dataclasses.replace(
        TINY, schedule="constant", warmup_epochs=0, optimizer="sgd", momentum=0, monitor_every=0
    )
    # No term keeps the variance up, and weight decay halves the weights at every step.
    config = dataclasses.replace(plain, method="vicreg", variance=0, covariance=0, weight_decay=5, lr=0.1)
    pretrain(config, out=tmp_path, progress=False)
    assert "collapse in epoch" in capsys.readouterr().err


def test_a_run_that_does_not_learn_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(quality, "WINDOW_STEPS", 10)  # a hundred take long
    noise = torch.randint(256, (64, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    crops = dataclasses.replace(TINY.augment, crop_scale=(0.05, 0.1))  # two of them have nothing in common
    still: dict[str, Any] = {"optimizer": "sgd", "lr": 1e-9, "schedule": "constant", "warmup_epochs": 0}
    still |= {"batch_size": 32, "monitor_every": 0, "holdout": 0.0, "method": "barlow-twins", "augment": crops}
    pretrain(dataclasses.replace(TINY, epochs=12, **still), out=tmp_path, images=noise, progress=False)
    said = capsys.readouterr().err
    assert said.count("no learning in epoch") == 1
    assert "the two views of an image hardly agree (correlation" in said
    assert "--warmup-epochs" in said


def test_a_loss_that_is_no_number_stops_and_names_what_broke():
    row = FINE | {"loss": math.nan, "rho": math.inf}
    with pytest.raises(UserError) as error:
        alarm(row, d_z=8, batch_size=40, warned=set(), broken_since=lambda: 1234)
    said = str(error.value)
    assert said.startswith(
        "the loss is not a number in step 1,234, epoch 3 (loss, rho): the last checkpoint is from before it; try a"
    )


@pytest.mark.parametrize("share", [0.1, 0.0])
def test_the_monitor_asks_about_images_whose_labels_it_was_not_told(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    told: list[set[int]] = []
    asked: list[set[int]] = []
    real = watch.judge

    def record(*args: Any, known: Tensor, held: Tensor, **settings: Any) -> dict[str, float]:
        told.append(set(known.tolist()))
        asked.append(set(held.tolist()))
        return real(*args, known=known, held=held, **settings)

    monkeypatch.setattr(watch, "judge", record)
    pretrain(dataclasses.replace(TINY, holdout=share, epochs=1, batch_size=640), out=tmp_path, progress=False)
    assert (len(told), len(asked)) == (1, 1)
    assert len(asked[0]) == 143
    assert told[0].isdisjoint(asked[0])


def test_the_monitor_runs_every_few_epochs_and_leaves_the_network_alone():
    run = trained("vicreg")
    assert SHORT.monitor_every == 2
    assert [row["epoch"] for row in run.metrics() if "knn" in row] == [2, 4]
    digits, net = data.load("digits"), run.load_net().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    _, held, known = hold_out(len(digits.train.images), share=SHORT.holdout, seed=SHORT.seed)
    shape: dict[str, Any] = {"size": 8, "mean": digits.mean, "std": digits.std}
    augment = Augment(**shape, **vars(run.config.augment))
    settings = shape | {"classes": 10, "augment": augment}
    images, labels = digits.train.images, digits.train.labels
    found = watch.judge(net, images, labels, known=known, held=held, device=torch.device("cpu"), **settings)
    assert found == pytest.approx({name: run.metrics()[-1][name] for name in ("knn", *MEASURES)})
    h = extract(net.encoder, images[known], **shape).h
    views = extract_views(net.encoder, images[known[:200]], augment, views=10)
    for name, measure in MEASURES.items():
        assert found[name] == pytest.approx(measure(views if measure.views else h)), name
    blind = watch.judge(net, images, None, known=known, held=held, device=torch.device("cpu"), **settings)
    assert blind == {name: found[name] for name in MEASURES}  # the same without labels
    assert net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
