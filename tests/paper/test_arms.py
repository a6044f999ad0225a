"""The losses of the study of curvature: each against its equation or another library, in training, and recorded."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from lightly.loss import NTXentLoss
from pipeline import TINY, one_thread, rows, weights
from torch import Tensor, nn

from curvssl.config import UserError
from curvssl.losses import BarlowTwinsLoss, Curvature
from curvssl.paper import reproduce, studies
from curvssl.paper.arms import Arm, Bank, Flow, NTXent, Profile
from curvssl.paper.studies import Cell
from curvssl.train.loop import Stopped, pretrain

OWN = dataclasses.replace(TINY, method="own", batch_size=320, holdout=0.0, monitor_every=0)  # four steps an epoch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def flat() -> nn.Module:
    """An encoder that takes no time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 12))


def views(seed: int, b: int = 24, d: int = 6) -> Tensor:
    z = torch.randn((2, b, d), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.stack((z[0], z[0] + 0.5 * z[1])).requires_grad_()


def test_nt_xent_is_lightlys():
    z = views(0)
    ours, theirs = NTXent(temperature=0.3)(*z), NTXentLoss(temperature=0.3)(*z)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, z)[0] for loss in (ours, theirs)))


def test_the_profile_is_the_equation_over_sorted_parts_that_sum_to_the_curvature():
    z, (b, k) = views(1), (24, 5)
    p = np.zeros((2, b, k))
    for v, x in enumerate(z.detach().numpy()):
        near = oracles.nearest(x, k=k)
        for i in range(b):
            u = [(x[a] - x[i]) / np.linalg.norm(x[a] - x[i]) for a in near[i]]
            p[v, i] = sorted(sum(u[a] @ u[c] for c in range(k) if c != a) / 2 for a in range(k))
        np.testing.assert_allclose(p[v].sum(1), oracles.curvature(x, neighbors=near))
    p = (p - p.mean(1, keepdims=True)) / (p.std(1, keepdims=True) + 1e-5)
    m = p[0] @ p[1].T / (b * k)
    terms = Profile(k=k).terms(*z)
    off = m - np.diag(np.diag(m))
    expected = [((np.diag(m) - 1) ** 2).sum(), (off**2).sum(), np.trace(m)]
    np.testing.assert_allclose([term.item() for term in terms.values()], expected)


@pytest.mark.parametrize("kernel", [None, "rbf"])
def test_a_bank_seeks_neighbours_among_the_last_embeddings_too_and_gives_them_no_gradient(kernel: str | None):
    settings: dict[str, Any] = {"k": 4, "kernel": kernel, "gamma": oracles.GAMMA}
    seen = [views(seed) for seed in range(3)]

    def loss_of(z: np.ndarray, old: np.ndarray) -> float:
        scores = []
        for x in np.concatenate((z, old), 1):
            near = oracles.nearest(x, k=4)
            if kernel is None:
                scores.append(oracles.curvature(x, neighbors=near)[:24])
            else:
                scores.append(oracles.kernel_curvature(x, neighbors=near, pair=oracles.PAIRS[kernel])[:24])
            assert (near[:24] >= 24).any()
        return oracles.curvature_loss(*scores, weight=1.0, eps=1e-5)

    bank = Bank(d=6, size=40, **settings).double()
    assert bank(*seen[0]).item() == pytest.approx(Curvature(**settings)(*seen[0]).item())  # nobody's neighbour is empty
    bank(*seen[1])
    z, old = seen[2], torch.cat((seen[1], seen[0]), 1)[:, :40].detach()  # the newest first, as many as there is room
    torch.testing.assert_close(bank.bank, old)
    loss = bank(*z)
    assert loss.item() == pytest.approx(loss_of(z.detach().numpy(), old.numpy()))
    way = views(3).detach()
    slope = [loss_of((z + h * way).detach().numpy(), old.numpy()) / (2 * h) for h in (1e-5, -1e-5)]
    assert float((torch.autograd.grad(loss, z)[0] * way).sum()) == pytest.approx(sum(slope), rel=1e-3)


def test_a_flow_moves_targets_towards_the_mean_of_their_neighbours_in_a_bank_that_is_full():
    exact = {"eps": 1e-12}  # standardising twice is then standardising once
    flow, twins = Flow(d=6, share=0.7, k=3, size=40, **exact).double(), BarlowTwinsLoss(**exact)
    seen = [views(seed).detach() for seed in range(3)]
    for targets in seen[:2]:  # 48 of the first view in the end, so that nothing flows yet
        z = views(9)
        terms = flow.terms_of(z, targets=targets)
        torch.testing.assert_close(flow.weigh(terms), twins.weigh(twins.terms_of(z, targets=targets)))
    old, targets = np.concatenate((standard(seen[1])[0], standard(seen[0])[0]))[:40], standard(seen[2])
    np.testing.assert_allclose(flow.bank, old)  # the newest first, as many as there is room
    moved = np.empty_like(targets)
    for g, i in np.ndindex(2, 24):
        cosines = old @ targets[g, i] / np.linalg.norm(old, axis=1)
        moved[g, i] = 0.3 * targets[g, i] + 0.7 * old[np.argsort(-cosines)[:3]].mean(0)
    z = views(9)
    loss = flow.weigh(flow.terms_of(z, targets=seen[2]))
    expected = twins.weigh(twins.terms_of(z, targets=torch.from_numpy(moved)))
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(of, z)[0] for of in (loss, expected)))
    with pytest.raises(ValueError, match="moves the targets of a teacher: train with teacher=True"):
        flow(*z)


def standard(z: Tensor) -> np.ndarray:
    x = z.numpy()
    return (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-12)


def test_a_run_without_any_flow_is_barlow_twins_with_a_teacher_and_a_criterion_that_sees_no_targets_is_refused(
    tmp_path: Path,
):
    taught = dataclasses.replace(OWN, average=0.9, teacher=True)
    named = pretrain(
        dataclasses.replace(taught, method="barlow-twins"), out=tmp_path / "named", progress=False, encoder=flat()
    )
    losses = {}
    for share in (0.0, 0.5):
        flow = Flow(d=OWN.d_z, share=share, size=320, lambda_emb=OWN.lambda_emb)
        run = pretrain(taught, out=tmp_path / f"{share}", progress=False, criterion=flow, encoder=flat())
        losses[share] = [row["loss"] for row in rows(run.path)]
    expected = [row["loss"] for row in rows(named.path)]
    assert losses[0.0] == pytest.approx(expected, rel=1e-4)
    assert losses[0.5] != pytest.approx(expected, rel=1e-2)
    with pytest.raises(UserError, match="a teacher's targets are for the losses of curvssl"):
        pretrain(taught, out=tmp_path / "own", progress=False, criterion=nn.MSELoss(), encoder=flat())


def test_a_late_term_has_no_weight_in_the_first_half_and_a_stopped_run_goes_on_with_its_schedule(
    tmp_path: Path, stop_at: Callable[[int], None]
):
    arm = Arm("barlow-twins", alpha=3.0, k=5, term="bank", kernel="rbf", late=True)
    whole = pretrain(OWN, out=tmp_path / "whole", progress=False, criterion=arm.make(OWN), encoder=flat())
    first, second = rows(whole.path)
    shares = [2 * s / 8 - 1 for s in range(8)]
    emb = [row["invariance"] + OWN.lambda_emb * row["redundancy"] for row in (first, second)]
    assert first["loss"] == pytest.approx(emb[0], rel=1e-5)
    weight = 3.0 * sum(shares[4:]) / 4  # L_curv is about b + 1 in all steps
    assert second["loss"] - emb[1] == pytest.approx(weight * 320, rel=0.02)

    stop_at(5)
    with pytest.raises(Stopped):
        pretrain(OWN, out=tmp_path / "stopped", progress=False, criterion=arm.make(OWN), encoder=flat())
    stop_at(-1)
    other = dataclasses.replace(arm, alpha=2.0)
    with pytest.raises(UserError, match=r"another criterion \(final \(3.0,\) → \(2.0,\)\)"):
        pretrain(OWN, out=tmp_path / "stopped", progress=False, criterion=other.make(OWN), encoder=flat())
    run = pretrain(OWN, out=tmp_path / "stopped", progress=False, criterion=arm.make(OWN), encoder=flat())
    assert weights(run.path) == weights(whole.path)
    assert rows(run.path) == rows(whole.path)


def test_a_cell_with_an_arm_says_so_and_is_refused_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = dataclasses.replace(OWN, epochs=1, warmup_epochs=0)
    arm = Arm("nt-xent", alpha=0.5, k=5, term="profile")
    monkeypatch.setitem(studies.STUDIES, "arms", lambda: {"digits-nt-xent": Cell(config, arm)})
    monkeypatch.setattr(reproduce, "judge", lambda run, **_: {})  # probes take long, and do not see the criterion
    assert reproduce.run_study("arms", results=tmp_path / "results", runs=tmp_path / "runs") == ["digits-nt-xent"]
    found = json.loads((tmp_path / "results/arms/digits-nt-xent.json").read_text())
    assert found["criterion"] == {
        "loss": "nt-xent", "alpha": 0.5, "term": "profile", "k": 5, "kernel": None, "late": False
    }  # fmt: skip
    assert {"nt_xent", "profile_rho"} <= {*found["curves"][-1]}
    monkeypatch.setitem(studies.STUDIES, "arms", lambda: {"digits-nt-xent": config})
    with pytest.raises(
        UserError, match=r"has other settings than the study \(criterion \{'loss': 'nt-xent'.* → None\)"
    ):
        reproduce.read_results("arms", results=tmp_path / "results")
