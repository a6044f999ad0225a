"""Losses over many views against plain double loops over pairs in float64, and the chord against its formula."""

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import curvssl
from curvssl import BarlowTwinsLoss, Chord, Curvature, CurvSSLLoss, KernelCurvSSLLoss, VICRegLoss
from curvssl.losses import Loss, Sum, ViewPath, pairs, partners, standardise


def views(n: int, b: int = 12, d: int = 4) -> Tensor:
    """Two global and n local views of the same images, (2 + n, b, d)."""
    numbers = torch.Generator().manual_seed(n)
    z = torch.randn((3 + n, b, d), dtype=torch.float64, generator=numbers)
    return z[0] + 0.6 * z[1:]


def double_loop(loss: Loss, z: Tensor) -> Tensor:
    """Half the loss of the two global views, half the mean over every global and every local view."""
    apart = [loss(z[g], z[v]) for g in (0, 1) for v in range(2, len(z))]
    return (loss(z[0], z[1]) + torch.stack(apart).mean()) / 2


def test_every_pair_has_a_global_view_and_comes_once() -> None:
    assert pairs(2) == [(0, 1)]
    both_orders = {frozenset((g, v)) for g in (0, 1) for v in range(6) if v != g}
    assert {frozenset(pair) for pair in pairs(6)} == both_orders
    assert len(pairs(6)) == len(both_orders) == 9


def test_every_target_is_compared_with_all_views_but_its_own() -> None:
    assert pairs(2, both=True) == [(0, 1), (1, 0)]
    assert pairs(4, both=True) == [(0, 1), (0, 2), (0, 3), (1, 0), (1, 2), (1, 3)]


@pytest.mark.parametrize("n", [0, 1, 4])
def test_barlow_twins_over_views_is_half_the_global_pair_and_half_the_mean_of_the_others(n: int) -> None:
    z = views(n)
    first, *others = (oracles.barlow(z[g].numpy(), z[v].numpy(), weight=0.3, eps=1e-5) for g, v in pairs(2 + n))
    expected = first / 2 + sum(others) / (4 * n) if n else first
    np.testing.assert_allclose(BarlowTwinsLoss(lambda_emb=0.3)(*z), expected, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 3])
def test_any_other_term_over_views_is_that_mean_of_what_it_is_for_two(n: int) -> None:
    class Agreement(Loss):
        names = ("agreement",)

        def numbers(self, z: Tensor) -> Tensor:
            z0, z1 = standardise(z, eps=1e-5)
            return (1 - (z0 * z1).mean()).view(1)

        def weights(self) -> dict[str, float]:
            return {"agreement": 1.0}

    z = views(n)
    for loss in (VICRegLoss(), Agreement()):
        torch.testing.assert_close(loss(*z), double_loop(loss, z), rtol=1e-12, atol=0)


def against(targets: Tensor, loss: Loss, z: Tensor) -> Tensor:
    """Half the mean over each global view and the target of the other one, half that over targets and local views."""
    together = torch.stack([loss(targets[g], z[1 - g]) for g in (0, 1)]).mean()
    apart = [loss(targets[g], view) for g in (0, 1) for view in z[2:]]
    return (together + torch.stack(apart).mean()) / 2 if apart else together


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("loss", [BarlowTwinsLoss(lambda_emb=0.3), VICRegLoss()])
def test_with_targets_each_view_is_compared_with_them_and_not_with_other_views(loss: Loss, n: int) -> None:
    z, targets = views(n), views(0) + 0.3 * views(0).roll(1, 1)
    terms = loss.terms_of(z, targets=targets)
    torch.testing.assert_close(loss.weigh(terms), against(targets, loss, z), rtol=1e-12, atol=0)


def test_with_targets_curvature_is_aligned_with_that_of_the_other_views_target() -> None:
    z, targets, loss = views(2), views(0) + 0.3 * views(0).roll(1, 1), Curvature(k=3)
    terms = loss.terms_of(z, targets=targets)
    torch.testing.assert_close(loss.weigh(terms), against(targets, loss, z[:2]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", [CurvSSLLoss(k=3), KernelCurvSSLLoss(k=3), Curvature(k=3)])
def test_curvature_is_taken_over_the_two_global_views(loss: Loss) -> None:
    z = views(3)
    many, two = loss.terms(*z), loss.terms(z[0], z[1])
    for name in ("curvature_alignment", "curvature_decorrelation", "rho"):
        torch.testing.assert_close(many[name], two[name], rtol=1e-12, atol=0)


def test_the_gradient_over_views_is_that_of_the_double_loop() -> None:
    z = views(4).requires_grad_()
    loss = BarlowTwinsLoss(lambda_emb=0.3)
    (ours,) = torch.autograd.grad(loss(*z), z)
    (theirs,) = torch.autograd.grad(double_loop(loss, z), z)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_views_of_other_shapes_are_refused() -> None:
    z = views(1)
    with pytest.raises(ValueError, match=r"views of one shape \(b, d\), got \(12, 4\) and \(12, 4\) and \(12, 3\)"):
        BarlowTwinsLoss()(z[0], z[1], z[2, :, :3])


# ---- the chord ----


def test_the_chord_is_the_loop_over_blends() -> None:
    z, blended = views(0).numpy()
    t = np.linspace(0, 1, len(z))
    mean, deviation = z.mean(0), z.std(0) + 1e-5
    off = 0.0
    for i in range(len(z)):
        partner = i + 1 if i % 2 == 0 else i - 1
        on = t[i] * (z[i] - mean) / deviation + (1 - t[i]) * (z[partner] - mean) / deviation
        off += sum(((blended[i] - mean) / deviation - on) ** 2)
    value = Chord()(*map(torch.from_numpy, (z, blended, t)))
    np.testing.assert_allclose(value, off / z.size, rtol=1e-12)


def test_the_chord_of_a_straight_embedding_is_zero_and_of_a_bent_one_is_not() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 5, dtype=torch.float64)
    blended, t = curvssl.blend(x)
    assert t.shape == (16,)
    straight = nn.Linear(5, 3, dtype=torch.float64).requires_grad_(False)
    assert float(Chord()(straight(x), straight(blended), t)) < 1e-20
    assert float(Chord()(straight(x).square(), straight(blended).square(), t)) > 1e-3


def test_the_middle_of_a_chord_is_half_a_second_difference_away() -> None:
    """At t = 1/2 the distance is that of the second difference z(x) − 2 z(blend) + z(x'), over 2."""
    z, blended = views(0)
    scaled, middle = ((one - z.mean(0)) / z.std(0, unbiased=False) for one in (z, blended))
    second = scaled - 2 * middle + partners(scaled)
    half = torch.full((len(z),), 0.5, dtype=torch.float64)
    torch.testing.assert_close(Chord(eps=0)(z, blended, half), (second / 2).square().mean(), rtol=1e-12, atol=0)


@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-10, 10))
def test_the_chord_does_not_change_when_the_embedding_is_scaled_and_shifted(scale: float, shift: float) -> None:
    z, blended = views(0)
    t = torch.linspace(0, 1, len(z), dtype=torch.float64)
    moved = Chord(eps=0)(scale * z + shift, scale * blended + shift, t)
    torch.testing.assert_close(moved, Chord(eps=0)(z, blended, t), rtol=1e-8, atol=1e-12)


def test_a_blend_is_the_weighted_mean_of_two_images() -> None:
    x, t = torch.arange(8.0).view(4, 2), torch.tensor([1.0, 1.0, 0.25, 0.5])
    expected = [[0.0, 1.0], [2.0, 3.0], [5.5, 6.5], [5.0, 6.0]]
    torch.testing.assert_close(curvssl.blend(x, t)[0], torch.tensor(expected))
    with pytest.raises(ValueError, match="3 images do not form pairs to blend"):
        curvssl.blend(x[:3])


def test_the_path_of_views_is_the_loop_over_middle_views() -> None:
    z = views(1).numpy()
    ends = np.concatenate(z[:2])
    z0, z1, middle = (z - ends.mean(0)) / (ends.std(0) + 1e-5)
    half = torch.full((len(z0),), 0.5, dtype=torch.float64)
    value = ViewPath().exactly(torch.from_numpy(z), t=half)
    np.testing.assert_allclose(value, [np.mean((middle - (z0 + z1) / 2) ** 2)], rtol=1e-12)


def test_a_loss_with_the_chord_is_the_sum_of_both() -> None:
    z, t = views(2), torch.linspace(0, 1, 12, dtype=torch.float64)
    loss = Sum(CurvSSLLoss(k=3), (7.0, Chord()))
    terms = loss.terms_of(z, t=t)  # the last view are the blends
    expected = CurvSSLLoss(k=3)(*z[:3]) + 7 * Chord()(z[0], z[3], t)
    torch.testing.assert_close(loss.weigh(terms), expected)
    with pytest.raises(ValueError, match="the chord needs the embeddings of blends"):
        loss(*z)


@pytest.mark.parametrize("shapes", [((4, 3), (4, 2), (4,)), ((4, 3), (4, 3), (4, 1)), ((4,), (4,), (4,))])
def test_a_chord_of_wrong_shapes_says_what_came(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"expected z and blended \(b, d\) and t \(b,\), got"):
        Chord()(*map(torch.zeros, shapes))
