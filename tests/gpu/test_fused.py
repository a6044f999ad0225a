"""The hand-written kernels against geometry.py: in Triton's interpreter, and on a GPU if there is one."""

import pytest
import torch
from pipeline import in_tritons_interpreter

from curvssl.geometry import kernel_scores, neighbors_of, scores
from curvssl.kernels import KERNELS, kernel_width

CASES = [(256, 128, 10), (100, 20, 5), (37, 3, 16), (11, 5, 10)]

COMPARE = """
from test_fused import compare, compare_alignment
from curvssl import kernels
from curvssl.gpu import fused
fused.TILE = 8  # so that distances are found in several tiles, of which the last is cut off
for n, d, k in ((12, 18, 10), (6, 140, 4)):
    compare(n, d, k, device="cpu")
    compare_alignment(n, device="cpu")
fused.MEDIAN_POINTS = kernels.MEDIAN_POINTS = 3  # so that the median is that of every third point
compare(7, 3, 4, device="cpu")
compare_alignment(21, device="cpu")
"""


def written_out(score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Alignment, decorrelation and ρ of two views' scores (2, n), from the full matrix M."""
    centred = score - score.mean(1, keepdim=True)
    variance = centred.square().mean(1, keepdim=True)
    c = centred / (torch.where(variance == 0, 0, torch.where(variance == 0, 1, variance).sqrt()) + 1e-5)
    matrix = c[0][:, None] * c[1][None, :] / score.shape[1]
    diagonal = matrix.diagonal()
    return (diagonal - 1).square().sum(), matrix.square().sum() - diagonal.square().sum(), diagonal.sum()


def compare(n: int, d: int, k: int, *, device: str) -> None:
    """Scores, neighbours, terms and gradients of float32 kernels against geometry.py in float64."""
    from curvssl.gpu import fused

    generator = torch.Generator().manual_seed(n)
    x = (torch.randn(2, n, d, generator=generator) + 3).to(device).requires_grad_()
    exact = x.detach().double().requires_grad_()
    neighbors = neighbors_of(exact, exact, k=k)
    width = kernel_width(exact, kernel="rbf", gamma="median")
    given = width.flatten().float()
    assert fused.rbf_scores(torch.ones_like(x), k, None)[2].tolist() == [1, 1]
    cases = [
        (fused.scores, (), fused.terms, {}, scores(exact, exact, neighbors=neighbors)),
        *(
            (
                *(fused.rbf_scores, (own,), fused.rbf_terms, {"width": own}),
                kernel_scores(exact, exact, kernel=KERNELS["rbf"], width=width, neighbors=neighbors),
            )
            for own in (None, given)
        ),
    ]
    weights = torch.tensor([2.0, 3.0, 0.0], device=device)
    for score_of, more, terms_of, also, oracle in cases:
        score, near, rest = score_of(x.detach(), k, *more)
        torch.testing.assert_close(score.double(), oracle.detach(), rtol=1e-5, atol=1e-5)
        assert near.equal(neighbors.int())
        if more:
            torch.testing.assert_close(rest, given, rtol=1e-5, atol=0)
        ours, theirs = terms_of(x, k=k, eps=1e-5, **also), torch.stack(written_out(oracle))
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
        (mine,) = torch.autograd.grad(ours, x, weights)
        (right,) = torch.autograd.grad(theirs, exact, weights.double(), retain_graph=True)
        assert float((mine - right).norm() / right.norm()) < 1e-4


def compare_alignment(n: int, *, device: str) -> None:
    """The terms of L_curv and their gradients against the full M in float64; also for a view with equal scores."""
    from curvssl.gpu import fused

    for spread in (1.0, 0.0):
        generator = torch.Generator().manual_seed(n)
        score = torch.randn(2, n, generator=generator)
        score[1] = 4 + spread * (score[0] + score[1])
        score = score.to(device)
        exact = score.double().requires_grad_()
        ours, gradients = fused.align(score, 1e-5)
        theirs = written_out(exact)
        torch.testing.assert_close(ours[:2].double(), torch.stack(theirs[:2]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours[2].double(), theirs[2].detach(), rtol=1e-5, atol=1e-6)
        for mine, term in zip(gradients, theirs, strict=False):  # ρ has no gradient
            (right,) = torch.autograd.grad(term, exact, retain_graph=True)
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5 if spread else 1e-1)


def test_kernels_equal_the_plain_geometry_in_tritons_interpreter() -> None:
    in_tritons_interpreter(COMPARE)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [11, 256, 300, 512, 1000])
def test_the_terms_of_the_curvature_equal_the_written_out_matrix_on_the_device(n: int) -> None:
    compare_alignment(n, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d", "k"), [*CASES, (512, 64, 10), (1024, 128, 10), (777, 33, 16), (256, 2048, 10)])
def test_kernels_equal_the_plain_geometry_on_the_device(n: int, d: int, k: int) -> None:
    compare(n, d, k, device="cuda")


@pytest.mark.gpu
def test_zero_edges_contribute_nothing_and_have_a_zero_gradient() -> None:
    from curvssl.gpu import fused

    x = torch.ones(2, 32, 8, device="cuda", requires_grad=True)
    terms = fused.terms(x, k=10, eps=1e-5)
    (gradient,) = torch.autograd.grad(terms, x, torch.tensor([1.0, 1.0, 0.0], device="cuda"))
    assert fused.scores(x.detach(), 10)[0].eq(0).all()
    assert terms.tolist() == [32, 0, 0]
    assert gradient.eq(0).all()
