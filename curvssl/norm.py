"""BatchNorm of two views with the residual and the ReLU that follow it, as hand-written GPU kernels.

torch's layers and models.PerView are the meaning of every line here, and the tests hold the two against each other. A
batch (2b, C, H, W) in channels_last is a matrix of pixels × channels, one view in its upper half and one in its lower,
and each view is normalised by its own statistics.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

COLUMNS = 64  # channels of a tile
TILE = {"ROWS": 64, "COLUMNS": COLUMNS, "num_warps": 4}  # of a map over all pixels
# Of sums over pixels: while a tile is added up, the loads of the STAGES − 1 next ones are under way. Four warps load
# FOLD rows in bfloat16 at once, so folding a tile to these adds up what each thread has anyway.
SUMS = {"ROWS": 32, "FOLD": 16, "COLUMNS": COLUMNS, "STAGES": 3, "num_warps": 4}
PROGRAMS = 528  # four for each of 132 multiprocessors: a sum over pixels is spread over about this many

# Sums are of x − x₀, x₀ the view's first pixel: it has about the size of the others, so the variance keeps its digits.


@triton.jit
def _channels(c, COLUMNS: tl.constexpr):
    """A program's view and channels, and which of these there are."""
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return tl.program_id(2), cols, cols < c


@triton.jit
def _moments(x_ptr, sum_ptr, cols, inside, view, rows, c):
    """Mean and variance of some channels of one view."""
    first = tl.load(x_ptr + view * rows * c + cols, inside, other=0.0).to(tl.float32)
    away = tl.load(sum_ptr + view * 2 * c + cols, inside, other=0.0) / rows
    square = tl.load(sum_ptr + view * 2 * c + c + cols, inside, other=0.0) / rows
    return first + away, tl.maximum(square - away * away, 0.0)


@triton.jit
def _tile(index, view, cols, inside, rows, c, ROWS: tl.constexpr):
    """Which numbers of a view's tile there are, and where they lie."""
    row = index * ROWS + tl.arange(0, ROWS)
    return (row < rows)[:, None] & inside[None, :], (view * rows + row)[:, None] * c + cols[None, :]


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
    x_ptr, sum_ptr, rows, c,
    TILES: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ (x − x₀) and Σ (x − x₀)² of one view, added to (view, 2, c)."""
    view, cols, inside = _channels(c, COLUMNS)
    first = tl.load(x_ptr + view * rows * c + cols, inside, other=0.0).to(tl.float32)
    once = tl.zeros((FOLD, COLUMNS), tl.float32)
    twice = tl.zeros((FOLD, COLUMNS), tl.float32)
    for t in tl.range(TILES, num_stages=STAGES):
        live, there = _tile(tl.program_id(0) * TILES + t, view, cols, inside, rows, c, ROWS)
        x = tl.load(x_ptr + there, live, other=0.0).to(tl.float32)
        x = tl.where(live, x - first[None, :], 0.0)
        once += _fold(x, FOLD)
        twice += _fold(x * x, FOLD)
    _add_up(sum_ptr, once, twice, cols, inside, view, c)


@triton.jit
def _forward(
    x_ptr, residual_ptr, y_ptr, sum_ptr, weight_ptr, bias_ptr, rows, c,
    EPS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = relu(γ (x − μ) / √(σ² + ε) + β + residual)."""
    view, cols, inside = _channels(c, COLUMNS)
    live, there = _tile(tl.program_id(0), view, cols, inside, rows, c, ROWS)
    mean, variance = _moments(x_ptr, sum_ptr, cols, inside, view, rows, c)
    scale = tl.load(weight_ptr + cols, inside, other=0.0) / tl.sqrt(variance + EPS)
    x = tl.load(x_ptr + there, live, other=0.0).to(tl.float32)
    y = (x - mean[None, :]) * scale[None, :] + tl.load(bias_ptr + cols, inside, other=0.0)[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + there, live, other=0.0).to(tl.float32)
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # and not maximum, which would hide a NaN
    tl.store(y_ptr + there, y, live)


@triton.jit
def _gradient_sums(
    dy_ptr, more_ptr, x_ptr, y_ptr, sum_ptr, weight_ptr, bias_ptr, out_ptr, passed_ptr, rows, c,
    EPS: tl.constexpr, RELU: tl.constexpr, MORE: tl.constexpr, RESIDUAL: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Σ ∂ and Σ ∂ x̂ of one view, where ∂ is what the ReLU lets pass of ∂y (and more); the residual's gradient too."""
    view, cols, inside = _channels(c, COLUMNS)
    mean, variance = _moments(x_ptr, sum_ptr, cols, inside, view, rows, c)
    inverse = 1 / tl.sqrt(variance + EPS)
    weight = tl.load(weight_ptr + cols, inside, other=0.0)
    bias = tl.load(bias_ptr + cols, inside, other=0.0)
    once = tl.zeros((FOLD, COLUMNS), tl.float32)
    twice = tl.zeros((FOLD, COLUMNS), tl.float32)
    for t in tl.range(TILES, num_stages=STAGES):
        live, there = _tile(tl.program_id(0) * TILES + t, view, cols, inside, rows, c, ROWS)
        d = tl.load(dy_ptr + there, live, other=0.0).to(tl.float32)
        if MORE:
            d += tl.load(more_ptr + there, live, other=0.0).to(tl.float32)
        hat = (tl.load(x_ptr + there, live, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
        if RESIDUAL:
            d = tl.where(tl.load(y_ptr + there, live, other=0.0).to(tl.float32) <= 0, 0.0, d)
        elif RELU:
            d = tl.where(hat * weight[None, :] + bias[None, :] <= 0, 0.0, d)
        if MORE or RESIDUAL:
            tl.store(passed_ptr + there, d, live)
        d = tl.where(live, d, 0.0)
        once += _fold(d, FOLD)
        twice += _fold(d * hat, FOLD)
    _add_up(out_ptr, once, twice, cols, inside, view, c)


@triton.jit
def _backward(
    dy_ptr, x_ptr, sum_ptr, weight_ptr, bias_ptr, grad_sum_ptr, dx_ptr, rows, c,
    EPS: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """∂x = γ / √(σ² + ε) · (∂ − ⟨∂⟩ − x̂ ⟨∂ x̂⟩), the averages over the view's pixels."""
    view, cols, inside = _channels(c, COLUMNS)
    live, there = _tile(tl.program_id(0), view, cols, inside, rows, c, ROWS)
    mean, variance = _moments(x_ptr, sum_ptr, cols, inside, view, rows, c)
    inverse = 1 / tl.sqrt(variance + EPS)
    weight = tl.load(weight_ptr + cols, inside, other=0.0)
    d = tl.load(dy_ptr + there, live, other=0.0).to(tl.float32)
    hat = (tl.load(x_ptr + there, live, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
    if RELU:
        bias = tl.load(bias_ptr + cols, inside, other=0.0)
        d = tl.where(hat * weight[None, :] + bias[None, :] <= 0, 0.0, d)
    average = tl.load(grad_sum_ptr + view * 2 * c + cols, inside, other=0.0) / rows
    slope = tl.load(grad_sum_ptr + view * 2 * c + c + cols, inside, other=0.0) / rows
    dx = (weight * inverse)[None, :] * (d - average[None, :] - hat * slope[None, :])
    tl.store(dx_ptr + there, dx, live)


def _grid(x: Tensor) -> tuple[int, int, dict[str, int], tuple[int, int, int], tuple[int, int, int]]:
    """Pixels of a view, channels, the tiles of a sum, and the grids of a sum and of a map over all tiles."""
    c = x.shape[1]
    rows = x.numel() // c // 2
    down, across = triton.cdiv(rows, SUMS["ROWS"]), triton.cdiv(c, COLUMNS)
    tiles = triton.cdiv(2 * down * across, PROGRAMS)
    some = triton.cdiv(down, tiles), across, 2
    return rows, c, {"TILES": tiles, **SUMS}, some, (triton.cdiv(rows, TILE["ROWS"]), across, 2)


@triton_op("curvssl::normalise", mutates_args={})
def normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """y and the sums (2, 2, C) that its statistics come from, of two views x (2b, C, H, W)."""
    x = x.contiguous(memory_format=torch.channels_last)
    add = x if residual is None else residual.contiguous(memory_format=torch.channels_last)
    y = torch.empty_like(x)
    sums = torch.zeros(2, 2, x.shape[1], device=x.device)
    rows, c, tiles, some, every = _grid(x)
    wrap_triton(_sums)[some](x, sums, rows, c, **tiles)
    flags = {"EPS": eps, "RELU": relu, "RESIDUAL": residual is not None}
    wrap_triton(_forward)[every](x, add, y, sums, weight, bias, rows, c, **flags, **TILE)
    return y, sums


@triton_op("curvssl::normalise_gradient", mutates_args={})
def normalise_gradient(
    dy: Tensor, more: Tensor | None, x: Tensor, y: Tensor | None, sums: Tensor, weight: Tensor, bias: Tensor,
    eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """∂x, what the ReLU let pass of ∂y + more (or nothing: see `writes`), and the sums (2, 2, C) for ∂β and ∂γ."""
    dy, x = (t.contiguous(memory_format=torch.channels_last) for t in (dy, x))
    second = dy if more is None else more.contiguous(memory_format=torch.channels_last)
    seen = x if y is None else y.contiguous(memory_format=torch.channels_last)
    dx, out = torch.empty_like(x), torch.zeros_like(sums)
    writes = more is not None or y is not None  # a sum is written once for the next kernel, and so is a residual's ∂
    passed = torch.empty_like(dy) if writes else dy.new_empty(0)
    rows, c, tiles, some, every = _grid(x)
    flags = {"EPS": eps, "RELU": relu, "MORE": more is not None, "RESIDUAL": y is not None}
    wrap_triton(_gradient_sums)[some](dy, second, x, seen, sums, weight, bias, out, passed, rows, c, **flags, **tiles)
    source, flags = passed if writes else dy, {"EPS": eps, "RELU": relu and not writes}
    wrap_triton(_backward)[every](source, x, sums, weight, bias, out, dx, rows, c, **flags, **TILE)
    return dx, passed, out


class _Norm(torch.autograd.Function):
    """The sums and y; with `fork` y once more, so that the gradients of its two readers arrive apart."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, relu: bool, fork: bool
    ) -> tuple[Tensor, ...]:
        y, sums = normalise(x, residual, weight, bias, eps, relu)
        ctx.save_for_backward(x, None if residual is None else y, sums, weight, bias)
        ctx.eps, ctx.relu = eps, relu
        ctx.mark_non_differentiable(sums)
        return (sums, y, y.view_as(y)) if fork else (sums, y)

    @staticmethod
    def backward(ctx: Any, _: Tensor, dy: Tensor, more: Tensor | None = None) -> Any:
        x, y, sums, weight, bias = ctx.saved_tensors
        dx, passed, out = normalise_gradient(dy, more, x, y, sums, weight, bias, ctx.eps, ctx.relu)
        d_bias, d_weight = out.sum(0)
        return dx, None if y is None else passed, d_weight, d_bias, None, None, None


def norm(
    layer: nn.BatchNorm2d, x: Tensor, *, residual: Tensor | None = None, relu: bool = False, fork: bool = False
) -> Any:
    """What the layer does with each of two views, then the residual and the ReLU; running statistics move twice.

    With `fork` it comes as a pair, one for each of two readers.
    """
    sums, *y = _Norm.apply(x, residual, layer.weight, layer.bias, layer.eps, relu, fork)
    with torch.no_grad():
        n = x.numel() // x.shape[1] // 2
        first = x.view(2, -1, *x.shape[1:])[:, 0, :, 0, 0].float()  # (2, C)
        away, square = sums.unbind(1)
        mean = first + away / n
        variance = (square - away * away / n) / (n - 1)
        assert layer.running_mean is not None and layer.running_var is not None  # noqa: PT018
        assert layer.momentum is not None and layer.num_batches_tracked is not None  # noqa: PT018
        for view in range(2):
            layer.running_mean.lerp_(mean[view], layer.momentum)
            layer.running_var.lerp_(variance[view], layer.momentum)
        layer.num_batches_tracked.add_(2)
    return tuple(y) if fork else y[0]
