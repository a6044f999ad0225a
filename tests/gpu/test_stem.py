"""The hand-written first convolution against torch's: in Triton's interpreter, and on a GPU if there is one."""

import pytest
import torch
import torch.nn.functional as F
from pipeline import in_tritons_interpreter
from torch import Tensor

STEMS = {"imagenet": (7, 2, 3), "small": (3, 1, 1), "coarse": (5, 4, 1)}  # size, stride, padding
SHAPES = [(5, 3, 8, 8), (2, 3, 9, 7), (3, 1, 28, 28), (2, 4, 12, 10), (7, 3, 28, 28)]

COMPARE = """
import test_stem
from curvssl.gpu import stem as kernels
for name in ("FORWARD", "GRADIENT"):  # few programs, so that each goes through several images
    setattr(kernels, name, tuple((*setting[:3], 8) for setting in getattr(kernels, name)))
for stem in test_stem.STEMS:
    for shape in test_stem.SHAPES:
        test_stem.compare(stem, shape, outputs=40 if shape[2] == 9 else 64, device="cpu")
"""


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def compare(stem: str, shape: tuple[int, int, int, int], *, outputs: int, device: str) -> None:
    """Outputs and weight gradient against torch's in float64, from the same 16-bit numbers."""
    from curvssl.gpu.stem import convolve, weight_gradient

    size, stride, padding = STEMS[stem]
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter's dot does not support bfloat16

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype).contiguous(memory_format=torch.channels_last)

    torch.manual_seed(0)
    x, weight = numbers(*shape) + 0.5, numbers(outputs, shape[1], size, size)
    exact = weight.double().requires_grad_()
    expected = F.conv2d(x.double(), exact, None, stride, padding)
    y = convolve(x, weight, stride, padding)
    assert (y.shape, y.dtype) == (expected.shape, dtype)
    assert y.is_contiguous(memory_format=torch.channels_last)
    # Number by number, too: one that was never written, or a wrong border, differs by far more than rounding.
    torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-2, atol=1e-2)
    assert relative_error(y, expected.detach()) < 2**-8

    dy = numbers(*y.shape)
    expected.backward(dy.double())
    assert exact.grad is not None
    gradient = weight_gradient(dy, x, size, stride, padding)
    assert (gradient.shape, gradient.dtype) == (weight.shape, torch.float32)
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    assert relative_error(gradient, exact.grad) < 1e-4


def test_kernels_equal_torchs_convolution_in_tritons_interpreter() -> None:
    in_tritons_interpreter(COMPARE)


@pytest.mark.gpu
@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("shape", [*SHAPES, (512, 3, 32, 32)])
def test_kernels_equal_torchs_convolution_on_the_device(stem: str, shape: tuple[int, int, int, int]) -> None:
    compare(stem, shape, outputs=64, device="cuda")
