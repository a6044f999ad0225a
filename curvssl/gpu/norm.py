"""BatchNorm of two views with the residual and the ReLU that follow it, as hand-written GPU kernels.

torch's layers and models.PerView are the meaning of every line here, and the tests hold the two against each other. A
batch (2b, C, H, W) in channels_last is a matrix of pixels × channels, one view in its upper half and one in its lower,
and each view is normalised by its own statistics.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 64  # channels of a tile
TILE = {"ROWS": 64, "COLUMNS": COLUMNS, "num_warps": 4}  # of a map over all pixels
# Of sums over pixels: while a tile is added up, the loads of the STAGES − 1 next ones are under way. Four warps load
# FOLD rows in bfloat16 at once, so folding a tile to these adds up what each thread has anyway.
SUMS = {"ROWS": 32, "FOLD": 16, "COLUMNS": COLUMNS, "STAGES": 3, "num_warps": 4}
PROGRAMS = 528  # four for each of 132 multiprocessors: a sum over pixels is spread over about this many,
LEAST = 4  # or fewer, of which each has this many tiles: what they find has to be added up, too

# What is read for the last time in a pass is the first to leave the cache (evict_first).
# Sums are of x − x₀, x₀ the view's first pixel: it has about the size of the others, so the variance keeps its digits.


@triton.jit
def _channels(c, COLUMNS: tl.constexpr):
    """Of a program that adds up: its view and channels, and which of these there are."""
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return tl.program_id(2), cols, cols < c


@triton.jit
def _place(c, COLUMNS: tl.constexpr):
    """Of a program of a map: its tile, and as above; programs go through a tile's channels and views before the next
    tile, as do those that add up, which run all at once."""
    index, across = tl.program_id(0), tl.cdiv(c, COLUMNS)
    cols = index // 2 % across * COLUMNS + tl.arange(0, COLUMNS)
    return index // (2 * across), index % 2, cols, cols < c


@triton.jit
def _moments(statistics_ptr, cols, inside, view, rows, c):
    """Mean and variance of some channels of one view."""
    at = statistics_ptr + view * 2 * c + cols
    return tl.load(at, inside, other=0.0), tl.load(at + c, inside, other=0.0) * ((rows - 1) / rows)


@triton.jit
def _tile(index, view, cols, inside, rows, c, ROWS: tl.constexpr):
    """Which numbers of a view's tile there are, and where they lie."""
    row = index * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None] & inside[None, :]
    return live, (view * rows + row).to(tl.int64)[:, None] * c + cols[None, :]


@triton.jit
def _fold(x, FOLD: tl.constexpr):
    """A tile's rows added up to FOLD rows."""
    return tl.sum(tl.reshape(x, (x.shape[0] // FOLD, FOLD, x.shape[1])), 0)


@triton.jit
def _add_up(sum_ptr, once, twice, cols, inside, view, c):
    """Add two tiles, summed over their pixels, to (view, 2, c)."""
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
        live, there = _tile(t * tl.num_programs(0) + tl.program_id(0), view, cols, inside, rows, c, ROWS)
        x = tl.load(x_ptr + there, live, other=0.0).to(tl.float32)
        x = tl.where(live, x - first[None, :], 0.0)
        once += _fold(x, FOLD)
        twice += _fold(x * x, FOLD)
    _add_up(sum_ptr, once, twice, cols, inside, view, c)


@triton.jit
def _forward(
    x_ptr, residual_ptr, y_ptr, sum_ptr, statistics_ptr, weight_ptr, bias_ptr, rows, c,
    EPS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = relu(γ (x − μ) / √(σ² + ε) + β + residual); the statistics too."""
    tile, view, cols, inside = _place(c, COLUMNS)
    live, there = _tile(tile, view, cols, inside, rows, c, ROWS)
    away = tl.load(sum_ptr + view * 2 * c + cols, inside, other=0.0) / rows
    square = tl.load(sum_ptr + view * 2 * c + c + cols, inside, other=0.0) / rows
    mean = tl.load(x_ptr + view * rows * c + cols, inside, other=0.0).to(tl.float32) + away
    variance = tl.maximum(square - away * away, 0.0)
    if tile == 0:
        at = statistics_ptr + view * 2 * c + cols
        tl.store(at, mean, inside)
        tl.store(at + c, variance * (rows / (rows - 1)), inside)
    scale = tl.load(weight_ptr + cols, inside, other=0.0) / tl.sqrt(variance + EPS)
    x = tl.load(x_ptr + there, live, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y = (x - mean[None, :]) * scale[None, :] + tl.load(bias_ptr + cols, inside, other=0.0)[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + there, live, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # and not maximum, which would hide a NaN
    tl.store(y_ptr + there, y, live)


@triton.jit
def _gradient_sums(
    dy_ptr, more_ptr, x_ptr, y_ptr, statistics_ptr, weight_ptr, bias_ptr, sum_ptr, passed_ptr, rows, c, tiles,
    EPS: tl.constexpr, RELU: tl.constexpr, MORE: tl.constexpr, RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ ∂ and Σ ∂ x̂ of one view, where ∂ is what the ReLU lets pass of ∂y (and more); the residual's gradient too."""
    view, cols, inside = _channels(c, COLUMNS)
    mean, variance = _moments(statistics_ptr, cols, inside, view, rows, c)
    inverse = 1 / tl.sqrt(variance + EPS)
    weight = tl.load(weight_ptr + cols, inside, other=0.0)
    bias = tl.load(bias_ptr + cols, inside, other=0.0)
    once = tl.zeros((FOLD, COLUMNS), tl.float32)
    twice = tl.zeros((FOLD, COLUMNS), tl.float32)
    for t in tl.range(tiles, num_stages=STAGES):
        live, there = _tile(t * tl.num_programs(0) + tl.program_id(0), view, cols, inside, rows, c, ROWS)
        d = tl.load(dy_ptr + there, live, other=0.0).to(tl.float32)
        if MORE:
            d += tl.load(more_ptr + there, live, other=0.0).to(tl.float32)
        hat = (tl.load(x_ptr + there, live, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
        if RESIDUAL and RELU:
            d = tl.where(tl.load(y_ptr + there, live, other=0.0).to(tl.float32) <= 0, 0.0, d)
        elif RELU:
            d = tl.where(hat * weight[None, :] + bias[None, :] <= 0, 0.0, d)
        if MORE or RESIDUAL:
            tl.store(passed_ptr + there, d, live)
        d = tl.where(live, d, 0.0)
        once += _fold(d, FOLD)
        twice += _fold(d * hat, FOLD)
    _add_up(sum_ptr, once, twice, cols, inside, view, c)


@triton.jit
def _backward(
    dy_ptr, x_ptr, statistics_ptr, weight_ptr, bias_ptr, sum_ptr, dx_ptr, d_weight_ptr, d_bias_ptr, rows, c,
    EPS: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """∂x = γ / √(σ² + ε) · (∂ − ⟨∂⟩ − x̂ ⟨∂ x̂⟩), the averages over the view's pixels; ∂γ and ∂β are sums over both."""
    tile, view, cols, inside = _place(c, COLUMNS)
    live, there = _tile(tile, view, cols, inside, rows, c, ROWS)
    mean, variance = _moments(statistics_ptr, cols, inside, view, rows, c)
    inverse = 1 / tl.sqrt(variance + EPS)
    weight = tl.load(weight_ptr + cols, inside, other=0.0)
    d = tl.load(dy_ptr + there, live, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + there, live, other=0.0, eviction_policy="evict_first").to(tl.float32)
    hat = (x - mean[None, :]) * inverse[None, :]
    if RELU:
        bias = tl.load(bias_ptr + cols, inside, other=0.0)
        d = tl.where(hat * weight[None, :] + bias[None, :] <= 0, 0.0, d)
    at = sum_ptr + view * 2 * c + cols
    total, slope = tl.load(at, inside, other=0.0), tl.load(at + c, inside, other=0.0)
    dx = (weight * inverse)[None, :] * (d - (total / rows)[None, :] - hat * (slope / rows)[None, :])
    tl.store(dx_ptr + there, dx, live)
    if (tile == 0) & (view == 0):
        tl.store(d_bias_ptr + cols, total + tl.load(at + 2 * c, inside, other=0.0), inside)
        tl.store(d_weight_ptr + cols, slope + tl.load(at + 3 * c, inside, other=0.0), inside)


def _grid(x: Tensor) -> tuple[int, int, dict[str, int], tuple[int, int, int], tuple[int]]:
    """Pixels of a view, channels, the tiles of a sum, and the grids of a sum and of a map over all tiles."""
    c = x.shape[1]
    rows = x.numel() // c // 2
    down, across = triton.cdiv(rows, SUMS["ROWS"]), triton.cdiv(c, COLUMNS)
    tiles = max(LEAST, triton.cdiv(2 * down * across, PROGRAMS))
    some = triton.cdiv(down, tiles), across, 2
    return rows, c, {"tiles": tiles, **SUMS}, some, (2 * across * triton.cdiv(rows, TILE["ROWS"]),)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, zeros: Tensor, eps: float,
        relu: bool, fork: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x = x.contiguous(memory_format=torch.channels_last)
        add = x if residual is None else residual.contiguous(memory_format=torch.channels_last)
        y, statistics = torch.empty_like(x), torch.empty_like(zeros[0])
        rows, c, tiles, some, every = _grid(x)
        _sums[some](x, zeros[0], rows, c, **tiles)
        flags = {"EPS": eps, "RELU": relu, "RESIDUAL": residual is not None}
        _forward[every](x, add, y, zeros[0], statistics, weight, bias, rows, c, **flags, **TILE)
        ctx.save_for_backward(x, None if residual is None else y, statistics, weight, bias, zeros)
        ctx.eps, ctx.relu = eps, relu
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # nor is a gradient of zeros made for them
        return (statistics, y, y.view_as(y)) if fork else (statistics, y)

    @staticmethod
    def backward(ctx: Any, _: Tensor, dy: Tensor, more: Tensor | None = None) -> Any:
        x, y, statistics, weight, bias, zeros = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        second = dy if more is None else more.contiguous(memory_format=torch.channels_last)
        writes = more is not None or y is not None  # a sum, or what is also the residual's gradient
        dx, passed = torch.empty_like(x), torch.empty_like(dy) if writes else dy
        rows, c, tiles, some, every = _grid(x)
        flags = {"EPS": ctx.eps, "RELU": ctx.relu, "MORE": more is not None, "RESIDUAL": y is not None}
        common = (statistics, weight, bias, zeros[1])
        _gradient_sums[some](dy, second, x, x if y is None else y, *common, passed, rows, c, **flags, **tiles)
        d_weight, d_bias = torch.empty_like(weight), torch.empty_like(bias)
        flags = {"EPS": ctx.eps, "RELU": ctx.relu and not writes}
        _backward[every](passed, x, *common, dx, d_weight, d_bias, rows, c, **flags, **TILE)
        return dx, None if y is None else passed, d_weight, d_bias, None, None, None, None


def normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, zeros: Tensor, eps: float, relu: bool, fork: bool
) -> tuple[Tensor, ...]:
    """Statistics (2, 2, C), a mean and a variance for each view, and y of two views x (2b, C, H, W).

    With `fork` y comes twice, one for each of two readers, so that their gradients arrive apart. `zeros` (2, 2, 2, C)
    are there to be added to, once forward and once backward. The variance is the sample's, as running statistics have.
    """
    return cast(tuple[Tensor, ...], _Normalise.apply(x, residual, weight, bias, zeros, eps, relu, fork))
