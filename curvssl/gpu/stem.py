"""A ResNet's first layers as hand-written GPU kernels: the convolution of the image, and the max-pool.

torch.nn.functional defines what is computed; the tests compare the two. With few channels a convolution is a small
matrix product of patches and weights, and most of its time should go into writing or reading the 64 outputs of each
pixel. In channels_last a row of a patch is one run of size · channels numbers. To be read V numbers at a time, it
begins SKIP numbers early, at a multiple of V, and is RUN numbers long. The padding has weight zero.
"""

import math
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

CHANNELS, OUTPUTS = 4, 64
NUMBERS = 256  # in a patch: with more, a tile of patches does not fit on a multiprocessor
SMALL = 64

# A program computes the same tile of many images, because the offsets of its patches are the same in all of them.
# Pixels of a tile, warps, stages and programs: for small patches (3×3), then for larger ones (7×7).
FORWARD = ((64, 4, 2, 132 * 10), (64, 4, 2, 132 * 2))
GRADIENT = ((128, 8, 3, 132 * 3), (64, 4, 3, 132 * 2))
SUMS = 16  # partial sums: at a single one, programs that finish together would wait for each other
POOL = {"PIXELS": 16, "COLUMNS": OUTPUTS, "num_warps": 4}  # for one program of the max-pool


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels support these pixels and weights."""
    if x.dim() != 4 or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    outputs, channels, height, width = weight.shape
    small = outputs <= OUTPUTS and channels <= CHANNELS and channels * height * width <= NUMBERS
    return small and channels == x.shape[1] and height == width


@triton.jit
def _places(
    pixel, FIRST: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    V: tl.constexpr, SKIP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Offsets in an image of numbers FIRST, FIRST + 1, … of the patches of some pixels; negative outside the image."""
    k = FIRST + tl.arange(0, COUNT)
    y = (pixel // ACROSS * STRIDE - PADDING)[:, None] + (k // RUN)[None, :]
    x = ((pixel % ACROSS * STRIDE - PADDING) * C - SKIP)[:, None] + (k % RUN)[None, :]
    live = (pixel < DOWN * ACROSS)[:, None] & (k < SIZE * RUN)[None, :]
    offsets = tl.where(live & (y >= 0) & (y < H) & (x >= 0) & (x < W * C), y * (W * C) + x, -V)
    return tl.max_contiguous(tl.multiple_of(offsets, (1, V)), (1, V))


@triton.jit
def _weights(
    FIRST: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, SKIP: tl.constexpr,
    RUN: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Offsets of each output's weights for numbers FIRST, FIRST + 1, … of a patch, and which of them exist."""
    o, k = tl.arange(0, TILE), FIRST + tl.arange(0, COUNT)
    column = k % RUN - SKIP
    exists = (k < SIZE * RUN) & (column >= 0) & (column < SIZE * C)
    offsets = o[:, None] * (SIZE * SIZE * C) + (k // RUN * (SIZE * C) + column)[None, :]
    return offsets, (o < OUTPUTS)[:, None] & exists[None, :]


@triton.jit
def _convolve(
    x_ptr, weight_ptr, y_ptr, images, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, V: tl.constexpr,
    SKIP: tl.constexpr, RUN: tl.constexpr, PART: tl.constexpr, REST: tl.constexpr, OUTPUTS: tl.constexpr,
    TILE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """y = patches · Wᵀ, with the numbers of a patch in two parts."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    o = tl.arange(0, TILE)
    out = pixel[:, None] * OUTPUTS + o[None, :]
    live = (pixel < DOWN * ACROSS)[:, None] & (o < OUTPUTS)[None, :]
    offsets = _places(pixel, 0, PART, C, H, W, DOWN, ACROSS, SIZE, STRIDE, PADDING, V, SKIP, RUN)
    weight_offsets, exists = _weights(0, PART, C, SIZE, SKIP, RUN, OUTPUTS, TILE)
    weight = tl.trans(tl.load(weight_ptr + weight_offsets, exists, other=0.0))
    if REST:
        rest_offsets = _places(pixel, PART, REST, C, H, W, DOWN, ACROSS, SIZE, STRIDE, PADDING, V, SKIP, RUN)
        weight_offsets, exists = _weights(PART, REST, C, SIZE, SKIP, RUN, OUTPUTS, TILE)
        rest_weight = tl.trans(tl.load(weight_ptr + weight_offsets, exists, other=0.0))
    for image in range(tl.program_id(1).to(tl.int64), images, tl.num_programs(1)):
        pixels_ptr = x_ptr + image * (H * W * C)
        y = tl.dot(tl.load(pixels_ptr + offsets, offsets >= 0, other=0.0), weight)
        if REST:
            y = tl.dot(tl.load(pixels_ptr + rest_offsets, rest_offsets >= 0, other=0.0), rest_weight, y)
        tl.store(y_ptr + image * (DOWN * ACROSS * OUTPUTS) + out, y, live)


@triton.jit
def _weight_gradient(
    x_ptr, dy_ptr, out_ptr, images, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, V: tl.constexpr,
    SKIP: tl.constexpr, RUN: tl.constexpr, PART: tl.constexpr, REST: tl.constexpr, OUTPUTS: tl.constexpr,
    TILE: tl.constexpr, PIXELS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """∂W = ∂yᵀ · patches, added to one of SUMS partial sums (outputs, size² · channels)."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    o = tl.arange(0, TILE)
    dy_offsets = pixel[:, None] * OUTPUTS + o[None, :]
    live = (pixel < DOWN * ACROSS)[:, None] & (o < OUTPUTS)[None, :]
    offsets = _places(pixel, 0, PART, C, H, W, DOWN, ACROSS, SIZE, STRIDE, PADDING, V, SKIP, RUN)
    total = tl.zeros((TILE, PART), tl.float32)
    if REST:
        rest_offsets = _places(pixel, PART, REST, C, H, W, DOWN, ACROSS, SIZE, STRIDE, PADDING, V, SKIP, RUN)
        rest_total = tl.zeros((TILE, REST), tl.float32)
    for image in range(tl.program_id(1).to(tl.int64), images, tl.num_programs(1)):
        pixels_ptr = x_ptr + image * (H * W * C)
        dy = tl.trans(tl.load(dy_ptr + image * (DOWN * ACROSS * OUTPUTS) + dy_offsets, live, other=0.0))
        total = tl.dot(dy, tl.load(pixels_ptr + offsets, offsets >= 0, other=0.0), total)
        if REST:
            rest_total = tl.dot(dy, tl.load(pixels_ptr + rest_offsets, rest_offsets >= 0, other=0.0), rest_total)
    out_ptr += tl.program_id(1) % SUMS * (OUTPUTS * SIZE * SIZE * C)
    weight_offsets, exists = _weights(0, PART, C, SIZE, SKIP, RUN, OUTPUTS, TILE)
    tl.atomic_add(out_ptr + weight_offsets, total, exists, sem="relaxed")
    if REST:
        weight_offsets, exists = _weights(PART, REST, C, SIZE, SKIP, RUN, OUTPUTS, TILE)
        tl.atomic_add(out_ptr + weight_offsets, rest_total, exists, sem="relaxed")


def _launch(
    settings: tuple[tuple[int, int, int, int], ...], x: Tensor, y: Tensor, size: int, stride: int, padding: int
) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid (tiles of an image × programs that share the images) and the constants that a kernel is compiled for."""
    c, h, w = x.shape[1:]
    v = math.gcd(w * c, stride * c, 8)
    skip = -padding * c % v
    run = triton.cdiv(skip + size * c, v) * v
    # A 7×7 patch of RGB pixels has 154 numbers: parts of 128 and 32 hold them, one power of two would be 256.
    part = max(16, triton.next_power_of_2(size * run) // 2)
    rest = max(16, triton.next_power_of_2(size * run - part)) if size * run > part else 0
    part, rest = (2 * part, 0) if rest == part else (part, rest)
    pixels, warps, stages, programs = settings[size * run > SMALL]
    shape = {"C": c, "H": h, "W": w, "DOWN": y.shape[2], "ACROSS": y.shape[3], "SIZE": size, "STRIDE": stride}
    shape |= {"PADDING": padding, "V": v, "SKIP": skip, "RUN": run, "PART": part, "REST": rest}
    shape |= {"OUTPUTS": y.shape[1], "TILE": OUTPUTS, "PIXELS": pixels, "num_warps": warps, "num_stages": stages}
    tiles = triton.cdiv(y.shape[2] * y.shape[3], pixels)
    return (tiles, min(len(y), triton.cdiv(programs, tiles))), shape


@triton_op("curvssl::stem", mutates_args={})
def convolve(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """conv2d(x, weight), summed in float32."""
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    size = weight.shape[2]
    down, across = ((length + 2 * padding - size) // stride + 1 for length in x.shape[2:])
    form: Any = {"dtype": x.dtype, "device": x.device, "memory_format": torch.channels_last}
    y = torch.empty((len(x), len(weight), down, across), **form)
    grid, shape = _launch(FORWARD, x, y, size, stride, padding)
    wrap_triton(_convolve)[grid](x, weight, y, len(x), **shape)
    return y


@triton_op("curvssl::stem_gradient", mutates_args={})
def weight_gradient(dy: Tensor, x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """∂L/∂W in float32 of y = convolve(x, W)."""
    dy, x = (t.contiguous(memory_format=torch.channels_last) for t in (dy, x))
    out = torch.zeros((SUMS, dy.shape[1], size, size, x.shape[1]), device=x.device)
    grid, shape = _launch(GRADIENT, x, dy, size, stride, padding)
    wrap_triton(_weight_gradient)[grid](x, dy, out, len(x), SUMS=SUMS, **shape)
    return out.sum(0).permute(0, 3, 1, 2)


# ---- max-pool, 3×3, stride 2, padding 1 ----


@triton.jit
def _pool(x_ptr, y_ptr, code_ptr, outputs, h, w, c, PIXELS: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest number of each window, and which of the nine places (row by row) has it; the first of equal ones."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row, col = pixel // (w // 2) % (h // 2) * 2 - 1, pixel % (w // 2) * 2 - 1
    image = (pixel // ((h // 2) * (w // 2))).to(tl.int64)
    inside = (pixel < outputs)[:, None] & (cols < c)[None, :]
    best = tl.full((PIXELS, COLUMNS), float("-inf"), tl.float32)
    code = tl.full((PIXELS, COLUMNS), 4, tl.int8)
    for place in tl.static_range(9):
        y, x = row + place // 3, col + place % 3
        live = inside & ((y >= 0) & (x >= 0))[:, None]  # h and w are even, so no window leaves the image below or right
        offsets = ((image * h + y) * w + x)[:, None] * c + cols[None, :]
        value = tl.load(x_ptr + offsets, live, other=float("-inf")).to(tl.float32)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        code = tl.where(better, place, code).to(tl.int8)
    offsets = pixel.to(tl.int64)[:, None] * c + cols[None, :]
    tl.store(y_ptr + offsets, best, inside)
    tl.store(code_ptr + offsets, code, inside)


@triton.jit
def _window(dy_ptr, more_ptr, code_ptr, there, live):
    """For some windows: which of the nine places had the largest number, and the sum of the two readers' gradients."""
    dy = tl.load(dy_ptr + there, live, other=0.0).to(tl.float32) + tl.load(more_ptr + there, live, other=0.0)
    return tl.load(code_ptr + there, live, other=-1), dy


@triton.jit
def _pool_gradient(dy_ptr, more_ptr, code_ptr, dx_ptr, outputs, h, w, c, PIXELS: tl.constexpr, COLUMNS: tl.constexpr):
    """Window (i, j) is centred on pixel (2i, 2j). Of the four pixels from (2i, 2j) to (2i+1, 2j+1), the first is in one
    window, the next two are in two, and the last is in four."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i, j = pixel // (w // 2) % (h // 2), pixel % (w // 2)
    image = (pixel // ((h // 2) * (w // 2))).to(tl.int64)
    inside = (pixel < outputs)[:, None] & (cols < c)[None, :]
    right, below = inside & (j + 1 < w // 2)[:, None], inside & (i + 1 < h // 2)[:, None]
    offsets = pixel.to(tl.int64)[:, None] * c + cols[None, :]
    under = offsets + (w // 2) * c
    code, d = _window(dy_ptr, more_ptr, code_ptr, offsets, inside)
    code_r, d_r = _window(dy_ptr, more_ptr, code_ptr, offsets + c, right)
    code_b, d_b = _window(dy_ptr, more_ptr, code_ptr, under, below)
    code_rb, d_rb = _window(dy_ptr, more_ptr, code_ptr, under + c, right & below)
    out = ((image * h + 2 * i) * w + 2 * j)[:, None] * c + cols[None, :]
    tl.store(dx_ptr + out, tl.where(code == 4, d, 0.0), inside)
    tl.store(dx_ptr + out + c, tl.where(code == 5, d, 0.0) + tl.where(code_r == 3, d_r, 0.0), inside)
    out += w * c
    tl.store(dx_ptr + out, tl.where(code == 7, d, 0.0) + tl.where(code_b == 1, d_b, 0.0), inside)
    four = tl.where(code == 8, d, 0.0) + tl.where(code_r == 6, d_r, 0.0)
    four += tl.where(code_b == 2, d_b, 0.0) + tl.where(code_rb == 0, d_rb, 0.0)
    tl.store(dx_ptr + out + c, four, inside)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.contiguous(memory_format=torch.channels_last)
        n, c, h, w = x.shape
        y = torch.empty((n, c, h // 2, w // 2), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        code = torch.empty_like(y, dtype=torch.int8)
        outputs, grid = _pool_grid(y)
        _pool[grid](x, y, code, outputs, h, w, c, **POOL)
        ctx.save_for_backward(code)
        return y, y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (code,) = ctx.saved_tensors
        n, c, h, w = code.shape
        dy, more = (grad.contiguous(memory_format=torch.channels_last) for grad in grads)
        dx = torch.empty((n, c, 2 * h, 2 * w), dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        outputs, grid = _pool_grid(code)
        places = (dy, more, code, dx)
        _pool_gradient[grid](*places, outputs, 2 * h, 2 * w, c, **POOL)
        return dx


def _pool_grid(y: Tensor) -> tuple[int, tuple[int, int]]:
    n, c, h, w = y.shape
    return n * h * w, (triton.cdiv(n * h * w, POOL["PIXELS"]), triton.cdiv(c, POOL["COLUMNS"]))


def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Max-pool of (n, C, H, W) with even H and W, returned twice: the gradients of two readers arrive separately."""
    return cast(tuple[Tensor, Tensor], _Pool.apply(x))
