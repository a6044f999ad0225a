"""Colour jitter and grayscale of a batch of RGB images as one GPU kernel that keeps an image in registers.

data/views.py defines what is computed; the tests compare the two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from curvssl.data.views import Augment

PIXELS = 4096  # of the largest image whose three colour planes fit into one program's registers

# Blend kinds and grey weights as in data/views.py: a kernel can only use constants of its own module.
CONTRAST, SATURATION = tl.constexpr(1), tl.constexpr(2)
RED, GREEN, BLUE = tl.constexpr(0.2989), tl.constexpr(0.587), tl.constexpr(0.114)


def fits(x: Tensor) -> bool:
    """Whether the kernel supports these images (b, C, H, W)."""
    return x.is_cuda and x.dtype == torch.float32 and x.shape[1] == 3 and x.shape[2] * x.shape[3] <= PIXELS


@triton.jit
def _clamp(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _luminance(r, g, b):
    return RED * r + GREEN * g + BLUE * b


@triton.jit
def _blend(r, g, b, factor, kind, live, pixels):
    grey = _luminance(r, g, b)
    mean = tl.sum(tl.where(live, grey, 0.0)) / pixels
    base = (1 - factor) * tl.where(kind == CONTRAST, mean, tl.where(kind == SATURATION, grey, 0.0))
    return _clamp(base + factor * r), _clamp(base + factor * g), _clamp(base + factor * b)


@triton.jit
def _channel(value, chroma, k):
    """One RGB channel from HSV; k is its distance from the hue, in sixths of the circle."""
    k -= 6 * tl.floor(k / 6)
    return value - chroma * _clamp(tl.minimum(k, 4 - k))


@triton.jit
def _shift_hue(r, g, b, turns):
    value = tl.maximum(tl.maximum(r, g), b)
    chroma = value - tl.minimum(tl.minimum(r, g), b)
    divisor = tl.where(chroma == 0, 1.0, chroma)
    other = tl.where(value == g, (b - r) / divisor + 2, (r - g) / divisor + 4)
    hue = tl.where(value == r, (g - b) / divisor, other) + 6 * turns
    return _channel(value, chroma, hue + 5), _channel(value, chroma, hue + 3), _channel(value, chroma, hue + 1)


@triton.jit
def _jitter(
    x_ptr, factor_ptr, kind_ptr, turns_ptr, slot_ptr, grey_ptr, out_ptr, pixels,
    BLENDS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """One image: the blends in their order, the hue shift in its slot among them, then grayscale if asked for."""
    image = tl.program_id(0)
    offsets = image.to(tl.int64) * 3 * pixels + tl.arange(0, PIXELS)
    live = tl.arange(0, PIXELS) < pixels
    r = tl.load(x_ptr + offsets, live, other=0.0)
    g = tl.load(x_ptr + offsets + pixels, live, other=0.0)
    b = tl.load(x_ptr + offsets + 2 * pixels, live, other=0.0)
    slot = tl.load(slot_ptr + image)
    for late in tl.static_range(2):
        if late:
            r, g, b = _shift_hue(r, g, b, tl.load(turns_ptr + image))
        for i in tl.static_range(BLENDS):
            factor = tl.load(factor_ptr + image * BLENDS + i)
            factor = tl.where((i >= slot) == (late == 1), factor, 1.0)
            r, g, b = _blend(r, g, b, factor, tl.load(kind_ptr + image * BLENDS + i), live, pixels)
    grey = tl.load(grey_ptr + image) != 0
    luminance = _luminance(r, g, b)
    tl.store(out_ptr + offsets, tl.where(grey, luminance, r), live)
    tl.store(out_ptr + offsets + pixels, tl.where(grey, luminance, g), live)
    tl.store(out_ptr + offsets + 2 * pixels, tl.where(grey, luminance, b), live)


@triton_op("curvssl::jitter", mutates_args={})
def jitter(x: Tensor, factors: Tensor, kinds: Tensor, turns: Tensor, slot: Tensor, grey: Tensor) -> Tensor:
    """views.colour_jitter of images x (b, 3, H, W), then grayscale where `grey` (b,) is true."""
    x, factors, kinds = x.contiguous(), factors.contiguous(), kinds.contiguous()
    out = torch.empty_like(x)
    pixels = x.shape[2] * x.shape[3]
    parameters = (factors, kinds, turns.contiguous(), slot.contiguous(), grey.contiguous())
    shape = {"BLENDS": kinds.shape[1], "PIXELS": triton.next_power_of_2(pixels)}
    warps = 4 if pixels <= 1024 else 8
    wrap_triton(_jitter)[(len(x),)](x, *parameters, out, pixels, **shape, num_warps=warps)
    return out


def speed_up(augment: Augment) -> None:
    """Make this augmentation use the kernel when it is compiled and the images fit."""
    plain = augment.jitter_and_grey

    def faster(x: Tensor, *parameters: Tensor) -> Tensor:
        return jitter(x, *parameters) if torch.compiler.is_compiling() and fits(x) else plain(x, *parameters)

    augment.jitter_and_grey = faster  # type: ignore[assignment]
