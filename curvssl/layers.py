"""torchvision's ResNet with the hand-written layers of stem.py and norm.py while it trains in a captured step.

A block's output has two readers, the next block's first convolution and its shortcut. Between blocks it goes as a pair,
so that the gradients of the two arrive apart and are added where they are summed.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from curvssl.norm import norm
from curvssl.stem import pool

LARGE = 2**22  # numbers in an activation: smaller ones are left to the compiler (docs/performance.md)


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
