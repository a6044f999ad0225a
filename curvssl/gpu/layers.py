"""A hand-written forward pass through torchvision's ResNets, for the captured step. It computes what torchvision does.

Convolutions are cuDNN's, or stem.py's for the first one. BatchNorm, ReLU and residuals are norm.py's. Weight gradients
and running statistics are computed on the second stream (overlap.py). Compiling it would take time and gain nothing.
"""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from curvssl.gpu.norm import normalise
from curvssl.gpu.overlap import THIRD, Uses, beside_this, convolve, stream
from curvssl.gpu.stem import pool
from curvssl.losses import GLOBAL
from curvssl.models import no_search

Batch = Callable[[], Tensor]


def takes(net: Any) -> bool:
    """Whether `encode` supports this network: a plain ResNet of basic blocks, like ResNet-18 and 34."""
    from torchvision.models.resnet import BasicBlock, ResNet

    if type(net) is not ResNet:
        return False
    blocks = blocks_of(net)
    if any(type(block) is not BasicBlock for block in blocks):
        return False
    shortcuts = [block.downsample for block in blocks if block.downsample is not None]
    if any(not isinstance(shortcut, nn.Sequential) or len(shortcut) != 2 for shortcut in shortcuts):
        return False
    convs = [net.conv1, *(conv for block in blocks for conv in (block.conv1, block.conv2)), *(s[0] for s in shortcuts)]
    norms = [net.bn1, *(norm for block in blocks for norm in (block.bn1, block.bn2)), *(s[1] for s in shortcuts)]
    return (
        all(isinstance(conv, nn.Conv2d) and conv.bias is None and not isinstance(conv.padding, str) for conv in convs)
        and {(conv.groups, conv.dilation, conv.padding_mode) for conv in convs} == {(1, (1, 1), "zeros")}
        and all(isinstance(norm, nn.BatchNorm2d) and norm.affine and norm.training for norm in norms)
        and all(norm.track_running_stats and norm.momentum == net.bn1.momentum is not None for norm in norms)
        and all(isinstance(part.relu, nn.ReLU) for part in (net, *blocks))
        and str(net.maxpool) in (str(nn.MaxPool2d(3, 2, 1)), str(nn.Identity()))
        and str(net.avgpool) == str(nn.AdaptiveAvgPool2d((1, 1)))
        and isinstance(net.fc, nn.Identity)
    )


def blocks_of(net: Any) -> list[Any]:
    return [block for stage in (net.layer1, net.layer2, net.layer3, net.layer4) for block in stage]


def encode(net: Any, *batches: Batch, passes: tuple[int, ...] = (GLOBAL,), dtype: torch.dtype) -> list[Tensor]:
    """h of batches of views; each is a function that makes them, (views · b, C, H, W) in channels_last and in `dtype`.
    `passes` are the numbers of views. Training mode only: BatchNorm view by view, with running statistics as in
    models.Net."""
    weights = _low_weights(net, dtype, passes=len(passes))
    first, *others = batches
    # Small kernels leave much of a GPU idle: other batches go beside the first one, in the backward pass as well.
    third = stream(THIRD) if others and net.conv1.weight.is_cuda else None
    if third is not None:
        for low, _ in weights.values():
            low.record_stream(third)
    with nullcontext() if third is None else beside_this(THIRD):
        h = [_pass(net, make(), _Layers(net, weights, views)) for make, views in zip(others, passes[1:], strict=True)]
    layers = _Layers(net, weights, passes[0])
    h.insert(0, _pass(net, first(), layers))
    if third is not None:
        here = torch.cuda.current_stream()
        here.wait_stream(third)
        for y in h[1:]:
            y.record_stream(here)
    layers.keep_statistics()
    return h


def _pass(net: Any, x: Tensor, layers: "_Layers") -> Tensor:
    blocks = blocks_of(net)
    pools = not isinstance(net.maxpool, nn.Identity)
    y = layers.normalise(net.bn1, layers.convolve(net.conv1, x), fork=not pools)
    if pools:
        even = y.shape[2] % 2 == y.shape[3] % 2 == 0
        y = pool(y) if even else (net.maxpool(y),) * 2
    for block, next_block in itertools.zip_longest(blocks, blocks[1:]):
        x, shortcut = y
        out = layers.normalise(block.bn1, layers.convolve(block.conv1, x))
        if block.downsample is not None:
            shortcut = layers.normalise(block.downsample[1], layers.convolve(block.downsample[0], shortcut), relu=False)
        out = layers.convolve(block.conv2, out)
        y = layers.normalise(block.bn2, out, residual=shortcut, fork=next_block is not None)
    # The mean over the pixels of (pixels, channels) has a gradient in channels_last; the mean over H and W does not.
    return y.flatten(1) if y.shape[2:] == (1, 1) else y.permute(0, 2, 3, 1).flatten(1, 2).mean(1)


def rehearse(
    net: Any, b: int, sizes: list[int], passes: tuple[int, ...], dtype: torch.dtype, stream: torch.cuda.Stream
) -> None:
    """Compile the kernels for such views of b images, by one forward and backward pass of a copy of the network."""
    # Without cuDNN's search: its result belongs to this thread, and timings beside other work could be wrong.
    with torch.cuda.stream(stream), no_search():
        shapes = [(views * b, net.conv1.in_channels, size, size) for views, size in zip(passes, sizes, strict=True)]
        batches = [torch.zeros(shape, dtype=dtype, device=stream.device) for shape in shapes]
        makers = [partial(x.contiguous, memory_format=torch.channels_last) for x in batches]
        torch.cat(encode(copy.deepcopy(net), *makers, passes=passes, dtype=dtype)).sum().backward()


def _low_weights(net: nn.Module, dtype: torch.dtype, *, passes: int) -> dict[Tensor, tuple[Tensor, Uses]]:
    """Each convolution's weight in low precision, and what the passes share of it."""
    weights = [module.weight for module in net.modules() if isinstance(module, nn.Conv2d)]
    low = exact = [weight.detach() for weight in weights]
    if dtype != exact[0].dtype:
        low = [torch.empty_like(weight, dtype=dtype) for weight in exact]
        torch._foreach_copy_(low, exact)  # all in one launch
    return {weight: (small, Uses(passes)) for weight, small in zip(weights, low, strict=True)}


class _Layers:
    """What the layers share in one pass: weights in low precision, zeros for sums, and BatchNorm statistics."""

    def __init__(self, net: nn.Module, weights: dict[Tensor, tuple[Tensor, Uses]], views: int) -> None:
        self.weights, self.views = weights, views
        norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
        sizes = [4 * views * bn.num_features for bn in norms]
        self.zeros = dict(zip(norms, torch.zeros(sum(sizes), device=norms[0].weight.device).split(sizes), strict=True))
        self.statistics: dict[nn.Module, Tensor] = {}

    def convolve(self, layer: nn.Conv2d, x: Tensor) -> Tensor:
        stride, padding = (list(cast(tuple[int, ...], pair)) for pair in (layer.stride, layer.padding))
        return convolve(x, layer.weight, *self.weights[layer.weight], stride, padding)

    def normalise(
        self, layer: Any, x: Tensor, *, residual: Tensor | None = None, relu: bool = True, fork: bool = False
    ) -> Any:
        """With `fork`, the output twice, once for each of two readers; their gradients then arrive separately."""
        zeros = self.zeros[layer].view(2, self.views, 2, -1)
        self.statistics[layer], *y = normalise(x, residual, layer.weight, layer.bias, zeros, layer.eps, relu, fork)
        return tuple(y) if fork else y[0]

    @torch.no_grad()
    def keep_statistics(self) -> None:
        """Update the running statistics once per global view, on the second stream because nothing waits for them."""
        statistics = list(self.statistics.values())
        if not statistics[0].is_cuda:
            return self._move(statistics)
        with beside_this() as second:
            self._move(statistics)
        for tensor in statistics:
            tensor.record_stream(second)
        return None

    def _move(self, found: list[Tensor]) -> None:
        norms: Any = list(self.statistics)
        kinds = enumerate(("running_mean", "running_var"))
        for view, (row, name) in itertools.product(range(GLOBAL), kinds):
            running = [getattr(bn, name) for bn in norms]
            torch._foreach_lerp_(running, [statistics[view, row] for statistics in found], norms[0].momentum)
        torch._foreach_add_([bn.num_batches_tracked for bn in norms], GLOBAL)
