"""BatchNorm of V views, with the residual and the ReLU that follow it, as hand-written GPU kernels.

torch's layers and models.PerView define what is computed; the tests compare the two. A batch (V · b, C, H, W) in
channels_last is a matrix of pixels × channels, with one view below the other. Each view is normalised by its own
statistics.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 64  # channels of a tile
TILE = {"ROWS": 64, "COLUMNS": COLUMNS, "num_warps": 4}  # of the elementwise kernels
# For sums over pixels: while a tile is added up, the loads of the next STAGES − 1 tiles are in flight. Four warps load
# FOLD rows in bfloat16 at once, so folding a tile to FOLD rows only adds numbers that a thread holds already.
SUMS = {"ROWS": 32, "FOLD": 16, "COLUMNS": COLUMNS, "STAGES": 3, "num_warps": 4}
PROGRAMS = 528  # four for each of 132 multiprocessors: a sum over pixels uses about this many programs,
LEAST = 4  # or fewer with at least this many tiles each: adding up their results takes time, too

# Numbers that are read for the last time in a pass should leave the cache first (evict_first).
# Sums are of x − x₀, x₀ the view's first pixel: it is about as large as the others, so the variance keeps its digits.


@triton.jit
def _channels(c, COLUMNS: tl.constexpr):
    """For a program of a sum kernel: its view, its channels, and which of these exist."""
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return tl.program_id(2), cols, cols < c


@triton.jit
def _place(c, VIEWS: tl.constexpr, COLUMNS: tl.constexpr):
    """For a program of an elementwise kernel: its tile, view and channels, and which channels exist. Programs process
    all channels and views of a tile before the next tile, as the sum kernels do, whose programs all run at once."""
    index, across = tl.program_id(0), tl.cdiv(c, COLUMNS)
    cols = index // VIEWS % across * COLUMNS + tl.arange(0, COLUMNS)
    return index // (VIEWS * across), index % VIEWS, cols, cols < c


@triton.jit
def _moments(statistics_ptr, cols, inside, view, rows, c):
    """Mean and population variance of some channels of one view."""
    ptr = statistics_ptr + view * 2 * c + cols
    return tl.load(ptr, inside, other=0.0), tl.load(ptr + c, inside, other=0.0) * ((rows - 1) / rows)


@triton.jit
def _tile(index, view, cols, inside, rows, c, ROWS: tl.constexpr):
    """Mask and offsets of the numbers of a view's tile."""
    row = index * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None] & inside[None, :]
    return live, (view * rows + row).to(tl.int64)[:, None] * c + cols[None, :]


@triton.jit
def _fold(x, FOLD: tl.constexpr):
    """Add up a tile's rows to FOLD rows."""
    return tl.sum(tl.reshape(x, (x.shape[0] // FOLD, FOLD, x.shape[1])), 0)


@triton.jit
def _add_up(sum_ptr, once, twice, cols, inside, view, c):
    """Sum two tiles over their pixels, and add the results to (view, 2, c)."""
    sum_ptr += view * 2 * c
    tl.atomic_add(sum_ptr + cols, tl.sum(once, 0), inside, sem="relaxed")
    tl.atomic_add(sum_ptr + c + cols, tl.sum(twice, 0), inside, sem="relaxed")


@triton.jit
def _sums(
    x_ptr, sum_ptr, rows, c, tiles,
    STAGES: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ (x − x₀) and Σ (x − x₀)² of one view, added to (view, 2, c)."""
    view, cols, inside = _channels(c, COLUMNS)
    first = tl.load(x_ptr + view * rows * c + cols, inside, other=0.0).to(tl.float32)
    once = tl.zeros((FOLD, COLUMNS), tl.float32)
    twice = tl.zeros((FOLD, COLUMNS), tl.float32)
    for t in tl.range(tiles, num_stages=STAGES):
        live, offsets = _tile(t * tl.num_programs(0) + tl.program_id(0), view, cols, inside, rows, c, ROWS)
        x = tl.load(x_ptr + offsets, live, other=0.0).to(tl.float32)
        x = tl.where(live, x - first[None, :], 0.0)
        once += _fold(x, FOLD)
        twice += _fold(x * x, FOLD)
    _add_up(sum_ptr, once, twice, cols, inside, view, c)


@triton.jit
def _forward(
    x_ptr, residual_ptr, y_ptr, sum_ptr, statistics_ptr, weight_ptr, bias_ptr, rows, c,
    EPS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr, VIEWS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = relu(γ (x − μ) / √(σ² + ε) + β + residual); also writes the statistics."""
    tile, view, cols, inside = _place(c, VIEWS, COLUMNS)
    live, offsets = _tile(tile, view, cols, inside, rows, c, ROWS)
    shift = tl.load(sum_ptr + view * 2 * c + cols, inside, other=0.0) / rows
    square = tl.load(sum_ptr + view * 2 * c + c + cols, inside, other=0.0) / rows
    mean = tl.load(x_ptr + view * rows * c + cols, inside, other=0.0).to(tl.float32) + shift
    variance = tl.maximum(square - shift * shift, 0.0)
    if tile == 0:
        ptr = statistics_ptr + view * 2 * c + cols
        tl.store(ptr, mean, inside)
        tl.store(ptr + c, variance * (rows / (rows - 1)), inside)
    scale = tl.load(weight_ptr + cols, inside, other=0.0) / tl.sqrt(variance + EPS)
    x = tl.load(x_ptr + offsets, live, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y = (x - mean[None, :]) * scale[None, :] + tl.load(bias_ptr + cols, inside, other=0.0)[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + offsets, live, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # not tl.maximum, which would hide a NaN
    tl.store(y_ptr + offsets, y, live)


@triton.jit
def _gradient_sums(
    dy_ptr, more_ptr, x_ptr, y_ptr, statistics_ptr, weight_ptr, bias_ptr, sum_ptr, passed_ptr, rows, c, tiles,
    EPS: tl.constexpr, RELU: tl.constexpr, MORE: tl.constexpr, RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ ∂ and Σ ∂ x̂ of a view; ∂ is what the ReLU lets pass of ∂y (+ more). Writes ∂, the residual's gradient, too."""
    view, cols, inside = _channels(c, COLUMNS)
    mean, variance = _moments(statistics_ptr, cols, inside, view, rows, c)
    inverse = 1 / tl.sqrt(variance + EPS)
    weight = tl.load(weight_ptr + cols, inside, other=0.0)
    bias = tl.load(bias_ptr + cols, inside, other=0.0)
    once = tl.zeros((FOLD, COLUMNS), tl.float32)
    twice = tl.zeros((FOLD, COLUMNS), tl.float32)
    for t in tl.range(tiles, num_stages=STAGES):
        live, offsets = _tile(t * tl.num_programs(0) + tl.program_id(0), view, cols, inside, rows, c, ROWS)
        d = tl.load(dy_ptr + offsets, live, other=0.0).to(tl.float32)
        if MORE:
            d += tl.load(more_ptr + offsets, live, other=0.0).to(tl.float32)
        hat = (tl.load(x_ptr + offsets, live, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
        if RESIDUAL and RELU:
            d = tl.where(tl.load(y_ptr + offsets, live, other=0.0).to(tl.float32) <= 0, 0.0, d)
        elif RELU:
            d = tl.where(hat * weight[None, :] + bias[None, :] <= 0, 0.0, d)
        if MORE or RESIDUAL:
            tl.store(passed_ptr + offsets, d, live)
        d = tl.where(live, d, 0.0)
        once += _fold(d, FOLD)
        twice += _fold(d * hat, FOLD)
    _add_up(sum_ptr, once, twice, cols, inside, view, c)


@triton.jit
def _backward(
    dy_ptr, x_ptr, statistics_ptr, weight_ptr, bias_ptr, sum_ptr, dx_ptr, d_weight_ptr, d_bias_ptr, rows, c,
    EPS: tl.constexpr, RELU: tl.constexpr, VIEWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """∂x = γ / √(σ² + ε) · (∂ − ⟨∂⟩ − x̂ ⟨∂ x̂⟩), averages over a view's pixels; ∂γ, ∂β are sums over all views."""
    tile, view, cols, inside = _place(c, VIEWS, COLUMNS)
    live, offsets = _tile(tile, view, cols, inside, rows, c, ROWS)
    mean, variance = _moments(statistics_ptr, cols, inside, view, rows, c)
    inverse = 1 / tl.sqrt(variance + EPS)
    weight = tl.load(weight_ptr + cols, inside, other=0.0)
    d = tl.load(dy_ptr + offsets, live, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, live, other=0.0, eviction_policy="evict_first").to(tl.float32)
    hat = (x - mean[None, :]) * inverse[None, :]
    if RELU:
        bias = tl.load(bias_ptr + cols, inside, other=0.0)
        d = tl.where(hat * weight[None, :] + bias[None, :] <= 0, 0.0, d)
    ptr = sum_ptr + view * 2 * c + cols
    total, slope = tl.load(ptr, inside, other=0.0), tl.load(ptr + c, inside, other=0.0)
    dx = (weight * inverse)[None, :] * (d - (total / rows)[None, :] - hat * (slope / rows)[None, :])
    tl.store(dx_ptr + offsets, dx, live)
    if (tile == 0) & (view == 0):
        for other in tl.static_range(1, VIEWS):
            total += tl.load(ptr + 2 * other * c, inside, other=0.0)
            slope += tl.load(ptr + (2 * other + 1) * c, inside, other=0.0)
        tl.store(d_bias_ptr + cols, total, inside)
        tl.store(d_weight_ptr + cols, slope, inside)


def _grid(x: Tensor, views: int) -> tuple[int, int, dict[str, int], tuple[int, int, int], tuple[int]]:
    """Pixels per view, channels, settings of a sum kernel, and the grids of a sum kernel and of an elementwise one."""
    c = x.shape[1]
    rows = x.numel() // c // views
    down, across = triton.cdiv(rows, SUMS["ROWS"]), triton.cdiv(c, COLUMNS)
    tiles = max(LEAST, triton.cdiv(views * down * across, PROGRAMS))
    sum_grid = triton.cdiv(down, tiles), across, views
    return rows, c, {"tiles": tiles, **SUMS}, sum_grid, (views * across * triton.cdiv(rows, TILE["ROWS"]),)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, zeros: Tensor, eps: float,
        relu: bool, fork: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x = x.contiguous(memory_format=torch.channels_last)
        add = x if residual is None else residual.contiguous(memory_format=torch.channels_last)
        y, statistics = torch.empty_like(x), torch.empty_like(zeros[0])
        views = len(statistics)
        rows, c, settings, sum_grid, grid = _grid(x, views)
        _sums[sum_grid](x, zeros[0], rows, c, **settings)
        flags = {"EPS": eps, "RELU": relu, "RESIDUAL": residual is not None, "VIEWS": views}
        _forward[grid](x, add, y, zeros[0], statistics, weight, bias, rows, c, **flags, **TILE)
        ctx.save_for_backward(x, None if residual is None else y, statistics, weight, bias, zeros)
        ctx.eps, ctx.relu = eps, relu
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # so that no zero gradient is made for them
        return (statistics, y, y.view_as(y)) if fork else (statistics, y)

    @staticmethod
    def backward(ctx: Any, _: Tensor, dy: Tensor, more: Tensor | None = None) -> Any:
        x, y, statistics, weight, bias, zeros = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        second = dy if more is None else more.contiguous(memory_format=torch.channels_last)
        writes = more is not None or y is not None  # the sum of two gradients, or the residual's gradient
        dx, passed = torch.empty_like(x), torch.empty_like(dy) if writes else dy
        views = len(statistics)
        rows, c, settings, sum_grid, grid = _grid(x, views)
        flags = {"EPS": ctx.eps, "RELU": ctx.relu, "MORE": more is not None, "RESIDUAL": y is not None}
        common = (statistics, weight, bias, zeros[1])
        _gradient_sums[sum_grid](dy, second, x, x if y is None else y, *common, passed, rows, c, **flags, **settings)
        d_weight, d_bias = torch.empty_like(weight), torch.empty_like(bias)
        flags = {"EPS": ctx.eps, "RELU": ctx.relu and not writes, "VIEWS": views}
        _backward[grid](passed, x, *common, dx, d_weight, d_bias, rows, c, **flags, **TILE)
        return dx, None if y is None else passed, d_weight, d_bias, None, None, None, None


def normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, zeros: Tensor, eps: float, relu: bool, fork: bool
) -> tuple[Tensor, ...]:
    """Statistics (V, 2, C), a mean and a variance for each view, and y of V views x (V · b, C, H, W).

    With `fork`, y is returned twice, once for each of two readers, so that their gradients arrive separately. Sums are
    added to `zeros` (2, V, 2, C): to one half forward, to the other backward. The variance is the sample variance, as
    in running statistics.
    """
    return cast(tuple[Tensor, ...], _Normalise.apply(x, residual, weight, bias, zeros, eps, relu, fork))
