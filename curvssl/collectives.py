"""Sums and gathers over the ranks of torch.distributed, with gradients.

With one process they do nothing. With W ranks, every rank returns the same loss L, and the backward passes below are
those of Σ_ranks L = W·L: the gradient that reaches rank r's embeddings is W·∂L/∂z_r, and the average that
DistributedDataParallel takes over W ranks is the gradient of one process with the whole batch.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _Total.apply(grads[0])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        everyone = x.new_empty((world_size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(everyone, x.contiguous())
        return everyone

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # Every rank's loss depends on our rows: sum the gradients over the ranks, then keep those of our rows.
        return _Total.apply(grads[0]).chunk(world_size())[rank()]


def total(x: Tensor) -> Tensor:
    """Σ over ranks of x."""
    return x if world_size() == 1 else _Total.apply(x)


def gather(x: Tensor) -> Tensor:
    """The rows of all ranks in the order of the ranks, (b, …) → (W·b, …); every rank must have b rows."""
    return x if world_size() == 1 else _Gather.apply(x)
