"""The colour kernel against the plain functions of data/views.py."""

import pytest
import torch
from pipeline import in_tritons_interpreter

from curvssl.data import views
from curvssl.data.views import Augment

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def compare_colour(*, size: int, device: str) -> None:
    """Colour jitter and grayscale in one kernel against the plain functions in float64; also with empty channels."""
    from curvssl.gpu import colour

    generator = torch.Generator().manual_seed(size)
    recipe = Augment(size=size, mean=MEAN, std=STD)
    x = torch.rand(24, 3, size, size, generator=generator)
    x[0] = x[0, :1]  # a grey image has no hue
    x[1, 1:] = 0
    parameters = recipe.jitter_parameters(torch.rand(24, sum(recipe.jitter_columns), generator=generator))
    grey = torch.rand(24, generator=generator) < 0.3
    exact = [t.double() if t.is_floating_point() else t for t in parameters]
    expected = torch.stack(views.grayscale(views.colour_jitter(x.double().unbind(1), *exact), grey), 1)
    ours = colour.jitter(x.to(device), *(t.to(device) for t in parameters), grey.to(device))
    torch.testing.assert_close(ours.cpu().double(), expected, rtol=1e-4, atol=1e-5)


def test_colours_in_one_kernel_are_the_plain_ones_in_tritons_interpreter() -> None:
    in_tritons_interpreter("import test_colour; [test_colour.compare_colour(size=s, device='cpu') for s in (5, 16)]")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [28, 32, 64])
def test_colours_in_one_kernel_are_the_plain_ones_on_the_device(size: int) -> None:
    compare_colour(size=size, device="cuda")
