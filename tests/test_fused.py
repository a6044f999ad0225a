"""The hand-written kernels against geometry.py: in Triton's interpreter anywhere, on the device where there is one."""

import pytest
import torch
from pipeline import in_tritons_interpreter

from curvssl.geometry import kernel_scores, neighbors_of, scores
from curvssl.kernels import kernel_width

CASES = [(256, 128, 10), (100, 20, 5), (37, 3, 16), (11, 5, 10)]

COMPARE = """
from test_fused import compare, compare_alignment
for n, d, k in ((21, 18, 10), (7, 3, 4)):
    compare(n, d, k, device="cpu")
    compare_alignment(n, device="cpu")
"""


def compare(n: int, d: int, k: int, *, device: str) -> None:
    """Scores, neighbours and gradients of float32 kernels against geometry.py in float64."""
    from curvssl import fused

    generator = torch.Generator().manual_seed(n)
    x = (torch.randn(2, n, d, generator=generator) + 3).to(device).requires_grad_()
    g = torch.randn(2, n, generator=generator).to(device)
    exact = x.detach().double().requires_grad_()
    neighbors = neighbors_of(exact, exact, k=k)
    assert fused.select_and_score(x.detach(), k)[1].equal(neighbors.int())

    width = kernel_width(exact, kernel="rbf", gamma="median")
    found, own_width = fused.select_and_width(x.detach(), k)
    assert found.equal(neighbors.int())
    torch.testing.assert_close(own_width.double(), width.flatten(), rtol=1e-5, atol=0)
    assert fused.select_and_width(torch.ones_like(x), k)[1].tolist() == [1, 1]
    pairs = [
        (fused.curvature(x, k=k), scores(exact, exact, neighbors=neighbors)),
        (
            fused.rbf_curvature(x, k=k, width=width.float()),
            kernel_scores(exact, exact, kernel="rbf", width=width, neighbors=neighbors),
        ),
    ]
    for ours, oracle in pairs:
        torch.testing.assert_close(ours.double(), oracle, rtol=1e-5, atol=1e-5)
        (mine,) = torch.autograd.grad(ours, x, g)
        (theirs,) = torch.autograd.grad(oracle, exact, g.double())
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-5


def compare_alignment(n: int, *, device: str) -> None:
    """The terms of L_curv and their gradients against M written out in float64; one view's scores may all be equal."""
    from curvssl import fused

    for spread in (1.0, 0.0):
        generator = torch.Generator().manual_seed(n)
        score = torch.randn(2, n, generator=generator)
        score[1] = 4 + spread * (score[0] + score[1])
        score = score.to(device).requires_grad_()
        exact = score.detach().double().requires_grad_()
        centred = exact - exact.mean(1, keepdim=True)
        variance = centred.square().mean(1, keepdim=True)
        c = centred / (torch.where(variance == 0, 0, torch.where(variance == 0, 1, variance).sqrt()) + 1e-5)
        matrix = c[0][:, None] * c[1][None, :] / n
        oracle = (matrix.diagonal() - 1).square().sum(), matrix.square().sum() - matrix.diagonal().square().sum()
        *terms, rho = fused.alignment(score, eps=1e-5)
        torch.testing.assert_close(rho.double(), matrix.trace().detach(), rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(terms, oracle, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
            (mine,) = torch.autograd.grad(ours, score, retain_graph=True)
            (right,) = torch.autograd.grad(theirs, exact, retain_graph=True)
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5 if spread else 1e-1)


def test_kernels_equal_the_plain_geometry_in_tritons_interpreter() -> None:
    in_tritons_interpreter(COMPARE)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [11, 256, 300, 512])
def test_the_terms_of_the_curvature_equal_the_written_out_matrix_on_the_device(n: int) -> None:
    compare_alignment(n, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d", "k"), [*CASES, (512, 64, 10), (256, 2048, 10)])
def test_kernels_equal_the_plain_geometry_on_the_device(n: int, d: int, k: int) -> None:
    compare(n, d, k, device="cuda")


@pytest.mark.gpu
def test_zero_edges_contribute_nothing_and_have_a_zero_gradient() -> None:
    from curvssl import fused

    x = torch.ones(2, 32, 8, device="cuda", requires_grad=True)
    score = fused.curvature(x, k=10)
    (gradient,) = torch.autograd.grad(score.sum(), x)
    assert score.eq(0).all()
    assert gradient.eq(0).all()
