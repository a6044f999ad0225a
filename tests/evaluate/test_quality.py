"""Measures of features without labels, against values by hand, numpy's formulas, and shapes of known dimension."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from curvssl.evaluate.quality import (
    MEASURES,
    WINDOW_EPOCHS,
    agreement,
    alpha_req,
    effective_rank,
    lidar,
    nesum,
    not_learning,
    rankme,
    said_last,
    selfcluster,
    stable_rank,
    twonn,
    verdict,
    warning,
)
from curvssl.losses import BarlowTwinsLoss, VICRegLoss

RESULTS = Path(__file__).parents[2] / "results"
FLAT = {name: measure for name, measure in MEASURES.items() if not measure.views}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cross(lengths: list[float]) -> Tensor:
    """±length along each axis: centred, with singular values √2 · length."""
    return torch.cat((torch.diag(torch.tensor(lengths)), -torch.diag(torch.tensor(lengths))))


def test_equal_directions_have_full_effective_rank():
    assert effective_rank(cross([1.0] * 7)) == pytest.approx(7)
    assert effective_rank(cross([1.0] * 7) + 100) == pytest.approx(7, rel=1e-4)  # a common offset does not matter


def test_one_direction_has_effective_rank_one():
    assert effective_rank(cross([1.0, 0, 0, 0])) == pytest.approx(1)
    assert effective_rank(torch.ones(8, 4)) == pytest.approx(1)  # so have equal points


def test_shares_of_three_to_one_have_the_exponential_of_their_entropy():
    # −¾ ln ¾ − ¼ ln ¼ = ln 4 − ¾ ln 3
    assert effective_rank(cross([3.0, 1.0])) == pytest.approx(4 / 3**0.75)


def test_the_rank_of_embeddings_that_are_no_numbers_is_no_number():
    assert math.isnan(effective_rank(torch.tensor([[1.0, math.nan], [0.0, 1.0]])))


def test_rankme_is_d_for_equal_singular_values_and_counts_a_common_offset():
    assert rankme(cross([2.0] * 7)) == pytest.approx(7, rel=1e-4)
    assert rankme(torch.eye(7)) == pytest.approx(7, rel=1e-4)
    assert effective_rank(torch.eye(7)) == pytest.approx(6, rel=1e-4)  # centring removes one direction
    assert rankme(torch.ones(50, 7)) == pytest.approx(1, rel=1e-4)
    assert rankme(cross([1.0] * 7) + 1e6) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("shape", [(200, 12), (12, 200)])
def test_rankme_is_its_formula_over_the_singular_values(shape: tuple[int, int]):
    x = normal(*shape).exp()
    s = np.linalg.svd(x.numpy(), compute_uv=False)
    p = s / s.sum() + 1e-7
    assert rankme(x) == pytest.approx(np.exp(-(p * np.log(p)).sum()))


def test_the_slope_of_a_power_law_is_its_exponent():
    for alpha in (0.0, 0.5, 1.0, 2.5):
        lengths = torch.arange(1, 21).double() ** (-alpha / 2)  # λ_i ∝ i^−α
        assert alpha_req(cross(lengths.tolist()) + 3) == pytest.approx(alpha, abs=1e-4)


def test_alpha_req_is_the_straight_line_that_numpy_fits():
    x = normal(300, 15).exp()
    falling = np.linalg.eigvalsh(np.cov(x.numpy(), rowvar=False))[::-1]
    slope = np.polyfit(np.log(np.arange(1, 16)), np.log(falling), 1)[0]
    assert alpha_req(x) == pytest.approx(-slope)


def test_nesum_and_stable_rank_differ_by_the_centring_alone():
    x = normal(100, 6) @ torch.diag(torch.tensor([3.0, 2, 1, 1, 1, 1]).double()) + 5
    found = np.linalg.eigvalsh(np.cov(x.numpy(), rowvar=False))
    assert nesum(x) == pytest.approx(found.sum() / found.max())
    assert stable_rank(x) == pytest.approx(np.linalg.norm(x) ** 2 / np.linalg.norm(x.numpy(), 2) ** 2)
    assert stable_rank(x - x.mean(0)) == pytest.approx(nesum(x))
    # ±2 along one axis and ±1 along another: variances 4 : 1
    assert nesum(cross([2.0, 1.0])) == stable_rank(cross([2.0, 1.0])) == pytest.approx(1.25)
    assert nesum(cross([1.0] * 5) + 9) == pytest.approx(5)


def test_selfcluster_is_one_on_a_line_and_zero_for_an_even_spread():
    assert selfcluster(torch.outer(normal(30), normal(5))) == pytest.approx(1)
    assert selfcluster(normal(4000, 16)) == pytest.approx(0, abs=2e-3)
    assert math.isnan(selfcluster(torch.zeros(9, 4)))  # no direction at all
    # Two orthogonal pairs of equal points in the plane: Q = 8, n(n−1)/d = 6, so (8 − 4 − 6) / (16 − 4 − 6)
    assert selfcluster(torch.tensor([[1.0, 0], [3, 0], [0, 1], [0, 2]])) == pytest.approx(-1 / 3)


def test_selfcluster_is_its_sum_over_pairs():
    x = normal(40, 9) + 1
    u = x.numpy() / np.linalg.norm(x.numpy(), axis=1, keepdims=True)
    q, random = ((u @ u.T) ** 2).sum(), 40 * 39 / 9
    assert selfcluster(x) == pytest.approx((q - 40 - random) / (40**2 - 40 - random))


def test_lidar_counts_the_directions_that_differ_between_images_and_not_between_views():
    noise = normal(500, 20, 6, seed=1)
    images = torch.cat((cross([1.0] * 6), torch.zeros(488, 6))).double()[:, None]  # alike in six directions
    assert lidar(images + 0.1 * noise) == pytest.approx(6, abs=0.5)
    assert lidar(cross([1.0] * 6).double()[:, None].expand(-1, 4, -1)) == pytest.approx(6, rel=1e-4)
    noise[..., 1:] *= 1e-3
    three = torch.zeros(6, 1, 6, dtype=torch.float64)
    three[:, 0, :3] = cross([1.0] * 3)
    assert lidar(three + noise[:6] * torch.tensor([0, 0, 0, 1.0, 1, 1])) == pytest.approx(3, abs=0.05)


@pytest.mark.parametrize("shape", [(60, 5, 8), (6, 5, 8)])
def test_lidar_is_its_formula_with_the_inverse_root_of_the_covariance(shape: tuple[int, int, int]):
    x = normal(shape[0], 1, shape[2]) + normal(*shape, seed=1).exp()
    means = x.mean(1).numpy()
    off, inside = means - means.mean(0), (x.numpy() - means[:, None]).reshape(-1, shape[2])
    within = inside.T @ inside / len(inside) + 1e-4 * np.eye(shape[2])
    values, vectors = np.linalg.eigh(within)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    found = np.linalg.eigvalsh(root @ (off.T @ off / len(off)) @ root).clip(0)
    p = found / found.sum() + 1e-7
    assert lidar(x) == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-4)


def test_the_intrinsic_dimension_is_that_of_the_shape_not_of_the_space():
    turn = torch.linalg.qr(normal(20, 20)).Q
    for dim in (1, 2, 5):
        flat = torch.rand(4000, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
        assert twonn(flat @ turn[:dim] + 7) == pytest.approx(dim, rel=0.06)
    sphere = torch.nn.functional.normalize(normal(4000, 3), dim=1)
    assert twonn(sphere @ turn[:3]) == pytest.approx(2, rel=0.06)


def test_the_intrinsic_dimension_of_four_points_is_worked_out_by_hand():
    # Nearest two distances on the line 0, 1, 3, 7: (1, 3), (1, 2), (2, 3), (4, 6); an equal point changes nothing.
    x = torch.tensor([[0.0], [1], [3], [7], [7]])
    assert twonn(x) == pytest.approx(3 / math.log(3 * 2 * 1.5 * 1.5))


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_measure_depends_on_neither_the_scale_nor_the_axes(name: str, scale: float):
    x = normal(80, 5, 6) + 3 * normal(80, 1, 6, seed=1) if MEASURES[name].views else normal(80, 6).exp()
    turn = torch.linalg.qr(normal(6, 6, seed=2)).Q
    if MEASURES[name].views:  # δ is absolute, as published
        scale = max(scale, 1.0)
    assert MEASURES[name](scale * x @ turn) == pytest.approx(MEASURES[name](x), rel=1e-3)


@pytest.mark.parametrize("name", MEASURES)
def test_odd_features_give_a_number_or_nan_and_never_an_error(name: str):
    measure = MEASURES[name]
    shape = (4, 3) if measure.views else (4,)
    odd = [
        torch.zeros(*shape, 5),
        torch.ones(*shape, 5),
        torch.ones(*shape, 1),
        normal(*shape, 9),
        normal(*shape, 5)[:1],
    ]
    for x in odd:  # zeros, constants, one dimension, fewer points than dimensions, one point
        assert isinstance(measure(x), float)
    x = normal(*shape, 5)
    x[1] = math.nan
    assert math.isnan(measure(x))


def test_features_that_collapsed_look_worse_than_a_spread_in_every_measure():
    x = normal(400, 16)
    collapsed = 1 + 1e-3 * torch.outer(normal(400, seed=1), normal(16, seed=2)) + 1e-6 * x
    for name, measure in FLAT.items():
        better = {"higher": 1, "lower": -1}.get(measure.good)
        if better:
            assert better * measure(x) > better * measure(collapsed), name
    assert abs(alpha_req(collapsed) - 1) > abs(alpha_req(x @ torch.diag(1 / torch.arange(1, 17).double().sqrt())) - 1)


@pytest.mark.parametrize(
    ("h", "lidar_gain", "agreed", "said"),
    [
        (normal(400, 32), 3.0, 0.8, "healthy: RankMe 31.7 of 32, before training 9; LiDAR 30, before training 10"),
        (normal(400, 32), 3.0, math.nan, "healthy"),  # a criterion without an invariance
        (normal(400, 32), 3.0, 0.1, "has not learnt: the two views of an image agreed to 0.10"),
        (
            normal(400, 32),
            1.1,
            0.8,
            "hardly better than before training: RankMe 31.7 of 32, before training 9; LiDAR 11",
        ),
        (normal(400, 5) @ normal(5, 32), 3.0, 0.8, "hardly better than before training: RankMe 4"),
        (normal(400, 3) @ normal(3, 64), 3.0, 0.8, "low rank: few directions are used, RankMe 2.97 of 64"),
        (normal(400, 1) @ normal(1, 32), 3.0, 0.8, "collapsed: all images get nearly the same features, 1.0 of 32"),
        (1 + 1e-5 * normal(400, 32), 3.0, 0.8, "collapsed"),
        (torch.ones(400, 32), 3.0, 0.8, "collapsed"),
        (torch.zeros(400, 32), math.nan, 0.8, "collapsed"),
        (normal(400, 32) / 0, math.nan, 0.8, "broken: the features hold values that are no numbers"),
    ],
)
def test_the_verdict_names_what_is_wrong(h: Tensor, lidar_gain: float, agreed: float, said: str):
    found = {"rankme": rankme(h), "lidar": 10 * lidar_gain}
    untrained = {"rankme": 9.0 if h.shape[1] == 32 else 2.0, "lidar": 10.0}
    assert verdict(found, untrained, h=h, agreed=agreed).startswith(said)


# ---- does a run learn?

CELLS = {file.relative_to(RESULTS).as_posix(): json.loads(file.read_text()) for file in RESULTS.glob("*/*.json")}
CELLS = {name: cell for name, cell in CELLS.items() if "curves" in cell}


def learned(cell: dict[str, Any]) -> bool:
    """By the labels: the linear probe is better than on the features of runs that fell into the trap."""
    return cell["probes"]["linear"]["mean"] > {"mnist": 90, "cifar10": 50}[cell["config"]["dataset"]]


@pytest.mark.parametrize("name", CELLS)
def test_every_published_run_that_did_not_learn_is_found_out_and_no_other(name: str):
    rows, d_z = CELLS[name]["curves"], CELLS[name]["config"]["d_z"]
    said = [text for i in range(len(rows)) if (text := not_learning(rows[: i + 1], d_z=d_z))]
    assert bool(said) != learned(CELLS[name])
    assert bool(said_last(rows, d_z=d_z)) != learned(CELLS[name])
    assert bool(warning(rows, d_z=d_z, batch_size=CELLS[name]["config"]["batch_size"])) != learned(CELLS[name])
    # ... and by its last rows, which the verdict reads
    ends = np.mean([agreement(row, d_z=d_z) for row in rows[-WINDOW_EPOCHS:]])
    if "invariance" in rows[-1]:
        assert (ends > 0.5) if learned(CELLS[name]) else (ends < 0.2)
    else:  # NT-Xent
        assert math.isnan(ends)


def test_both_kinds_of_runs_are_published():
    trapped = {name for name, cell in CELLS.items() if not learned(cell)}
    assert {f"literal/cifar10-{m}-seed{s}.json" for m in ("barlow-twins", "curvssl") for s in range(3)} <= trapped
    assert not any(name.startswith("faithful/") for name in trapped)


def rows_of(steps: int = 100, **columns: list[float]) -> list[dict[str, Any]]:
    n = len(next(iter(columns.values())))
    base = {"rho": [0.1] * n, "z_std": [1.0] * n} | columns
    return [{"epoch": i + 1, "step": steps * (i + 1)} | {k: v[i] for k, v in base.items()} for i in range(n)]


def test_the_agreement_is_the_correlation_that_gives_the_invariance():
    z0 = normal(20_000, 4)
    z1 = 0.6 * z0 + 0.8 * normal(20_000, 4, seed=1)  # correlation 0.6
    for criterion in (BarlowTwinsLoss(), VICRegLoss()):
        row = {name: float(value) for name, value in criterion.terms(z0, z1).items()} | {
            "z_std": float(z0.std(0).mean())
        }
        assert agreement(row, d_z=4) == pytest.approx(0.6, abs=0.02)
    assert math.isnan(agreement({"loss": 1.0, "z_std": 1.0}, d_z=4))


def test_invariance_that_rises_is_told_with_both_numbers_and_one_that_falls_is_not():
    rising = [79.0] * 5 + [108.0] * 5  # agreement 1 − √(79/128) = 0.21, then 1 − √(108/128) = 0.08
    said = not_learning(rows_of(invariance=rising, redundancy=[1.0] * 10), d_z=128)
    assert said == "the two views of an image hardly agree (correlation 0.08, and 0.21 in the 5 epochs before)"
    assert not not_learning(rows_of(invariance=rising[::-1], redundancy=[1.0] * 10), d_z=128)
    assert not not_learning(rows_of(invariance=rising[:9], redundancy=[1.0] * 9), d_z=128)  # too early to say


def test_a_small_rise_at_the_end_does_not_unsay_that_a_run_does_not_learn_but_agreement_does():
    flat, little, much = [120.0] * 10, [117.0] * 5, [20.0] * 5  # agreement 0.03, 0.04 and 0.60
    rows = rows_of(invariance=flat + little, redundancy=[1.0] * 15)
    assert not not_learning(rows, d_z=128)
    assert said_last(rows, d_z=128).startswith("the two views of an image hardly agree (correlation 0.0")
    assert said_last(rows_of(invariance=flat + little + much, redundancy=[1.0] * 20), d_z=128) == ""
    assert said_last([], d_z=128) == said_last(rows[:3], d_z=128) == ""


def test_epochs_of_few_steps_are_given_more_epochs():
    rows = rows_of(steps=5, invariance=[120.0] * 40, redundancy=[1.0] * 40)  # a hundred steps are twenty epochs
    assert not not_learning(rows[:39], d_z=128)
    assert "in the 20 epochs before" in not_learning(rows, d_z=128)


def test_a_rho_that_was_high_and_is_lost_is_told():
    lost = [0.1] * 3 + [0.6] * 6 + [0.2] * 5
    assert not_learning(rows_of(rho=lost), d_z=128) == "ρ has fallen to 0.20 from 0.60"
    assert not not_learning(rows_of(rho=[value / 2 for value in lost]), d_z=128)  # it was never clear
    assert not not_learning(rows_of(rho=lost[:-2]), d_z=128)
