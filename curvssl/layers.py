"""The layers of a ResNet in a captured step, as hand-written GPU kernels: BatchNorm of two views with what follows it,
and the max-pool.

torchvision's blocks and models.PerView are the meaning of every line here, and the tests hold the two against each
other. A batch (2b, C, H, W) in channels_last is a matrix of pixels × channels, one view in its upper half and one in
its lower, and each view is normalised by its own statistics.
"""

import itertools
import math
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
LARGE = 2**22  # numbers in an activation: smaller ones are left to the compiler (docs/performance.md)
PROGRAMS = 528  # four for each of 132 multiprocessors: a sum over pixels is spread over about this many

# ---- BatchNorm, then a residual to add, then ReLU ----
# Sums are of x − x₀, x₀ the view's first pixel: it has about the size of the others, so the variance keeps its digits.


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
    view = tl.program_id(2)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < c
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
    view = tl.program_id(2)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < c
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
    view = tl.program_id(2)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < c
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
    view = tl.program_id(2)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = cols < c
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


# ---- max-pool, 3×3, stride 2, padding 1 ----


@triton.jit
def _pool(x_ptr, y_ptr, code_ptr, outputs, h, w, c, PIXELS: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest of each window, and which of its nine places it was in, row by row; the first one of equals."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row, col = pixel // (w // 2) % (h // 2) * 2 - 1, pixel % (w // 2) * 2 - 1
    image = pixel // ((h // 2) * (w // 2))
    inside = (pixel < outputs)[:, None] & (cols < c)[None, :]
    best = tl.full((PIXELS, COLUMNS), float("-inf"), tl.float32)
    code = tl.full((PIXELS, COLUMNS), 4, tl.int8)
    for place in tl.static_range(9):
        y, x = row + place // 3, col + place % 3
        live = inside & ((y >= 0) & (x >= 0))[:, None]  # h and w are even, so a window ends inside
        there = ((image * h + y) * w + x)[:, None] * c + cols[None, :]
        value = tl.load(x_ptr + there, live, other=float("-inf")).to(tl.float32)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        code = tl.where(better, place, code).to(tl.int8)
    there = pixel[:, None] * c + cols[None, :]
    tl.store(y_ptr + there, best, inside)
    tl.store(code_ptr + there, code, inside)


@triton.jit
def _taken(dy_ptr, code_ptr, there, live, PLACE: tl.constexpr):
    """The gradient of windows that took what is in one of their nine places."""
    code = tl.load(code_ptr + there, live, other=-1)
    return tl.where(code == PLACE, tl.load(dy_ptr + there, live, other=0.0).to(tl.float32), 0.0)


@triton.jit
def _pool_gradient(dy_ptr, code_ptr, dx_ptr, outputs, h, w, c, PIXELS: tl.constexpr, COLUMNS: tl.constexpr):
    """Window (i, j) has pixel (2i, 2j) in its middle. Of the four pixels from there on, one is in one window, two are
    in two, and (2i+1, 2j+1) is in four."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i, j = pixel // (w // 2) % (h // 2), pixel % (w // 2)
    image = pixel // ((h // 2) * (w // 2))
    here = (pixel < outputs)[:, None] & (cols < c)[None, :]
    right, below = here & (j + 1 < w // 2)[:, None], here & (i + 1 < h // 2)[:, None]
    at = pixel[:, None] * c + cols[None, :]
    at_right, at_below = at + c, at + (w // 2) * c
    out = ((image * h + 2 * i) * w + 2 * j)[:, None] * c + cols[None, :]
    tl.store(dx_ptr + out, _taken(dy_ptr, code_ptr, at, here, 4), here)
    two = _taken(dy_ptr, code_ptr, at, here, 5) + _taken(dy_ptr, code_ptr, at_right, right, 3)
    tl.store(dx_ptr + out + c, two, here)
    two = _taken(dy_ptr, code_ptr, at, here, 7) + _taken(dy_ptr, code_ptr, at_below, below, 1)
    tl.store(dx_ptr + out + w * c, two, here)
    four = _taken(dy_ptr, code_ptr, at, here, 8) + _taken(dy_ptr, code_ptr, at_right, right, 6)
    four += _taken(dy_ptr, code_ptr, at_below, below, 2)
    four += _taken(dy_ptr, code_ptr, at_below + c, right & below, 0)
    tl.store(dx_ptr + out + w * c + c, four, here)


@triton_op("curvssl::pool", mutates_args={})
def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Max-pool of (n, C, H, W) with even H and W, and where each maximum was."""
    x = x.contiguous(memory_format=torch.channels_last)
    n, c, h, w = x.shape
    y = torch.empty((n, c, h // 2, w // 2), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    code = torch.empty_like(y, dtype=torch.int8)
    outputs = n * (h // 2) * (w // 2)
    grid = (triton.cdiv(outputs, 32), triton.cdiv(c, COLUMNS))
    wrap_triton(_pool)[grid](x, y, code, outputs, h, w, c, PIXELS=32, COLUMNS=COLUMNS, num_warps=4)
    return y, code


@triton_op("curvssl::pool_gradient", mutates_args={})
def pool_gradient(dy: Tensor, code: Tensor) -> Tensor:
    dy = dy.contiguous(memory_format=torch.channels_last)
    n, c, h, w = dy.shape
    dx = torch.empty((n, c, 2 * h, 2 * w), dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    grid = (triton.cdiv(n * h * w, 32), triton.cdiv(c, COLUMNS))
    wrap_triton(_pool_gradient)[grid](dy, code, dx, n * h * w, 2 * h, 2 * w, c, PIXELS=32, COLUMNS=COLUMNS, num_warps=4)
    return dx


def _keep_code(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])


def _pool_backward(ctx: Any, dy: Tensor, _: Tensor) -> Tensor:
    return pool_gradient(dy, ctx.saved_tensors[0])


pool.register_autograd(_pool_backward, setup_context=_keep_code)


# ---- torchvision's ResNet with these layers ----


class QuickBlock(nn.Module):
    """Mixed into torchvision's BasicBlock."""

    forks = False  # another block comes next: it reads this one's output twice, and takes a pair

    def forward(self: Any, x: Tensor | tuple[Tensor, Tensor]) -> Any:
        x, shortcut = x if isinstance(x, tuple) else (x, x)
        if not _quick(self, x, size=x.numel()):
            return super().forward(x)
        out = norm(self.bn1, self.conv1(x), relu=True)
        if self.downsample is not None:
            shortcut = norm(self.downsample[1], self.downsample[0](shortcut))
        out = self.conv2(out)
        return norm(self.bn2, out, residual=shortcut, relu=True, fork=self.forks and out.numel() >= LARGE)


class QuickResNet(nn.Module):
    """Mixed into torchvision's ResNet."""

    def forward(self: Any, x: Tensor) -> Tensor:
        pixels = x.shape[2] * x.shape[3] // math.prod(self.conv1.stride)
        if not _quick(self, x, size=len(x) * self.conv1.out_channels * pixels):
            return super().forward(x)
        x = self.conv1(x)
        fork = isinstance(self.maxpool, nn.Identity) and isinstance(self.layer1[0], QuickBlock) and x.numel() >= LARGE
        x = norm(self.bn1, x, relu=True, fork=fork)
        pools = isinstance(self.maxpool, nn.MaxPool2d) and x.shape[2] % 2 == x.shape[3] % 2 == 0
        x = pool(x)[0] if pools else self.maxpool(x)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(self.avgpool(x).flatten(1))


def _quick(module: nn.Module, x: Tensor, *, size: int) -> bool:
    return module.training and x.dtype != torch.float64 and size >= LARGE


def quicken(net: nn.Module) -> None:
    """Give torchvision's ResNets and their blocks the layers above for large activations while they train."""
    from torchvision.models.resnet import BasicBlock, ResNet

    for module in net.modules():
        for kind, quick in ((BasicBlock, QuickBlock), (ResNet, QuickResNet)):
            if type(module) is kind:
                module.__class__ = type(f"Quick{kind.__name__}", (quick, kind), {})
    for module in net.modules():
        chain = list(module) if isinstance(module, nn.Sequential) else []
        if isinstance(module, QuickResNet):
            chain = [part for part in module.modules() if isinstance(part, QuickBlock)]
        for block, reader in itertools.pairwise(chain):
            if isinstance(block, QuickBlock) and isinstance(reader, QuickBlock):
                block.forks = True
