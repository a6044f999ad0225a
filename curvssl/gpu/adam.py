"""Adam of one weight as one GPU kernel, small enough to run beside others.

torch's fused Adam gives a thread block 65,536 numbers, so a single weight leaves most of a GPU idle. The arithmetic
is torch.optim.Adam's, and the tests hold the two against each other.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvssl.gpu.driver import leave_room

BLOCK = 1024
MANY = 2**14  # numbers from which on a weight is better updated here than by torch


@triton.jit
def _adam(
    weight_ptr, grad_ptr, found_ptr, first_ptr, second_ptr, step_ptr, rate_ptr, n,
    DECAY: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr,
    EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient in float32, and the weight and its two moments moved by it; 1 − βᵗ in float64, for it is small."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    grad = tl.load(grad_ptr + at, live, other=0.0).to(tl.float32)
    tl.store(found_ptr + at, grad, live)
    weight = tl.load(weight_ptr + at, live, other=0.0)
    grad += DECAY * weight
    first = BETA1 * tl.load(first_ptr + at, live, other=0.0) + (1 - BETA1) * grad
    second = BETA2 * tl.load(second_ptr + at, live, other=0.0) + (1 - BETA2) * grad * grad
    tl.store(first_ptr + at, first, live)
    tl.store(second_ptr + at, second, live)
    t = tl.load(step_ptr).to(tl.float64) + 1
    rate = (tl.load(rate_ptr) / (1 - tl.exp(t * LOG1))).to(tl.float32)
    root = (1 / tl.sqrt(1 - tl.exp(t * LOG2))).to(tl.float32)
    tl.store(weight_ptr + at, weight - rate * first / (tl.sqrt(second) * root + EPS), live)


def update(weight: Tensor, grad: Tensor, *, found: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """One step of Adam; the gradient in float32 is left in `found`. The count of steps is not touched."""
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = laid_out(state[name], weight)
    beta1, beta2 = group["betas"]
    constants = {"DECAY": group["weight_decay"], "EPS": group["eps"], "BLOCK": BLOCK}
    constants |= {"BETA1": beta1, "BETA2": beta2, "LOG1": math.log(beta1), "LOG2": math.log(beta2)}
    moved = (weight.detach(), laid_out(grad, weight), found, state["exp_avg"], state["exp_avg_sq"])
    grid = (triton.cdiv(weight.numel(), BLOCK),)
    leave_room(_adam[grid](*moved, state["step"], group["lr"], weight.numel(), **constants))


def laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x with its numbers in memory in the order of another tensor's."""
    sides = zip(x.shape, x.stride(), like.stride(), strict=True)
    if all(n == 1 or mine == theirs for n, mine, theirs in sides):
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)
