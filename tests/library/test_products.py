"""Products and losses keep full float32 precision, whatever torch's settings allow."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from curvssl import BarlowTwinsLoss, CurvSSLLoss, KernelCurvSSLLoss, VICRegLoss, nearest_neighbors
from curvssl.kernels import exact_product, product


@contextmanager
def rounding(device: str, precision: str) -> Iterator[None]:
    """Allow torch to round the factors of float32 products on this kind of device."""
    backends: Any = torch.backends
    matmul = backends.cuda.matmul if device == "cuda" else backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def normal(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("shapes", [((5, 4), (4, 3)), ((2, 5, 4), (2, 4, 3)), ((2, 5, 4), (4, 3))])
def test_an_exact_product_is_the_product_with_its_gradient(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (normal(*shape).double().requires_grad_() for shape in shapes)
    torch.testing.assert_close(exact_product(a, b), a @ b)
    assert torch.autograd.gradcheck(exact_product, (a, b))


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_product_is_the_same_whether_torch_may_round_or_not(precision: str) -> None:
    a, b = normal(64, 96).requires_grad_(), normal(96, 32).requires_grad_()
    plain = a @ b
    expected = plain.detach(), *torch.autograd.grad(plain.square().sum(), (a, b))
    with rounding("cpu", precision):
        ours = product(a, b)
        found = ours.detach(), *torch.autograd.grad(ours.square().sum(), (a, b))
        compiled = torch.compile(product, fullgraph=True, backend="aot_eager")(a, b)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(compiled, expected[0], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [BarlowTwinsLoss(), VICRegLoss(), CurvSSLLoss(), KernelCurvSSLLoss()])
def test_a_loss_on_the_device_has_the_digits_of_float32_where_tf32_is_allowed(loss: Any) -> None:
    z0 = 3 + normal(256, 64)
    z1 = z0 + 0.3 * normal(256, 64).flip(0)
    wide = [z.double().requires_grad_() for z in (z0, z1)]
    exact = loss(*wide)
    expected = torch.autograd.grad(exact, wide)
    with rounding("cuda", "tf32"):
        a = normal(512, 512, device="cuda")
        wrong = (a @ a).double() - a.double() @ a.double()
        assert float(wrong.norm() / (a.double() @ a.double()).norm()) > 1e-4  # the setting has an effect
        ours = [z.cuda().requires_grad_() for z in (z0, z1)]
        value = loss(*ours)
        found = torch.autograd.grad(value, ours)
    assert float(value.detach()) == pytest.approx(float(exact.detach()), rel=1e-5)
    for mine, its in zip(found, expected, strict=True):
        assert float((mine.cpu().double() - its).norm() / its.norm()) < 1e-4


@pytest.mark.gpu
def test_neighbours_on_the_device_are_exact_where_tf32_is_allowed() -> None:
    x = normal(2000, 32)
    with rounding("cuda", "tf32"):
        found = nearest_neighbors(x.cuda(), k=10).cpu()
    assert found.equal(nearest_neighbors(x.double(), k=10))
