"""LARS for one weight as two GPU kernels, small enough to run beside other kernels.

The arithmetic is Lars.step's; the tests compare the two. Its operations on lists of tensors read or write memory of the
weights' size 17 times, these kernels 8 times.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvssl.gpu.adam import BLOCK, laid_out
from curvssl.gpu.driver import leave_room
from curvssl.lars import EPS, ETA

PARTS = 256  # partial sums of each norm: programs enough for the device's memory, and few for `_move` to add up


@triton.jit
def _sums(
    weight_ptr, grad_ptr, more_ptr, found_ptr, sum_ptr, n, tiles,
    MORE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient in float32, and this program's part of Σ w² and Σ g². Without atomics, so that the order of
    the sums, and with it their rounding, is always the same."""
    part = tl.program_id(0)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_grad = tl.zeros((BLOCK,), tl.float32)
    for t in tl.range(tiles):
        offsets = (t * PARTS + part) * BLOCK + tl.arange(0, BLOCK)
        live = offsets < n
        grad = tl.load(grad_ptr + offsets, live, other=0.0).to(tl.float32)
        if MORE:
            grad += tl.load(more_ptr + offsets, live, other=0.0).to(tl.float32)
        tl.store(found_ptr + offsets, grad, live)
        weight = tl.load(weight_ptr + offsets, live, other=0.0)
        of_weight += weight * weight
        of_grad += grad * grad
    tl.store(sum_ptr + part, tl.sum(of_weight, 0))
    tl.store(sum_ptr + PARTS + part, tl.sum(of_grad, 0))


@triton.jit
def _move(
    weight_ptr, grad_ptr, velocity_ptr, sum_ptr, rate_ptr, n,
    ADAPT: tl.constexpr, DECAY: tl.constexpr, MOMENTUM: tl.constexpr, ETA: tl.constexpr, EPS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """v ← μ v + min(1, η ‖w‖ / ((‖g‖ + β ‖w‖) lr)) (g + β w),   w ← w − lr v"""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = offsets < n
    grad = tl.load(grad_ptr + offsets, live, other=0.0)
    weight = tl.load(weight_ptr + offsets, live, other=0.0)
    rate = tl.load(rate_ptr)
    if ADAPT:
        parts = sum_ptr + tl.arange(0, PARTS)
        w = tl.sqrt(tl.sum(tl.load(parts), 0))
        g = tl.sqrt(tl.sum(tl.load(parts + PARTS), 0))
        share = ETA * w / (g + DECAY * w + EPS) / rate
        grad = (grad + DECAY * weight) * tl.where((w > 0) & (g > 0) & (share < 1), share, 1.0)
    velocity = MOMENTUM * tl.load(velocity_ptr + offsets, live, other=0.0) + grad
    tl.store(velocity_ptr + offsets, velocity, live)
    tl.store(weight_ptr + offsets, weight - rate * velocity, live)


def update(
    weight: Tensor,
    grad: Tensor,
    more: Tensor | None = None,
    *,
    found: Tensor,
    state: dict[str, Tensor],
    group: dict[str, Any],
) -> None:
    """One step of LARS with the gradient, or with the sum of two. `found` receives it in float32."""
    state["velocity"] = laid_out(state["velocity"], weight)
    grads = laid_out(grad, weight), laid_out(grad if more is None else more, weight)
    sums, n = torch.empty(2 * PARTS, device=weight.device), weight.numel()
    size = {"PARTS": PARTS, "BLOCK": BLOCK}
    tiles = triton.cdiv(n, PARTS * BLOCK)
    leave_room(_sums[(PARTS,)](weight.detach(), *grads, found, sums, n, tiles, MORE=more is not None, **size))
    constants = {"ADAPT": group["adapt"], "DECAY": group["weight_decay"], "MOMENTUM": group["momentum"]}
    constants |= {"ETA": ETA, "EPS": EPS, **size}
    tensors = (weight.detach(), found, state["velocity"], sums, group["lr"])
    leave_room(_move[(triton.cdiv(n, BLOCK),)](*tensors, n, **constants))
