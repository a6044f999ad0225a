"""Adam for one weight as one GPU kernel, small enough to run beside other kernels.

torch's fused Adam gives a thread block 65,536 numbers, so a single weight leaves most of a GPU idle. The arithmetic
is torch.optim.Adam's; the tests compare the two.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvssl.gpu.driver import leave_room

BLOCK = 1024


@triton.jit
def _adam(
    weight_ptr, grad_ptr, more_ptr, found_ptr, first_ptr, second_ptr, step_ptr, rate_ptr, n,
    DECAY: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr,
    MORE: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient in float32; update the weight and its two moments. 1 − βᵗ is small, hence in float64."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = offsets < n
    grad = tl.load(grad_ptr + offsets, live, other=0.0).to(tl.float32)
    if MORE:
        grad += tl.load(more_ptr + offsets, live, other=0.0).to(tl.float32)
    tl.store(found_ptr + offsets, grad, live)
    weight = tl.load(weight_ptr + offsets, live, other=0.0)
    grad += DECAY * weight
    first = BETA1 * tl.load(first_ptr + offsets, live, other=0.0) + (1 - BETA1) * grad
    second = BETA2 * tl.load(second_ptr + offsets, live, other=0.0) + (1 - BETA2) * grad * grad
    tl.store(first_ptr + offsets, first, live)
    tl.store(second_ptr + offsets, second, live)
    t = tl.load(step_ptr).to(tl.float64) + 1
    rate = (tl.load(rate_ptr) / (1 - tl.exp(t * LOG1))).to(tl.float32)
    root = (1 / tl.sqrt(1 - tl.exp(t * LOG2))).to(tl.float32)
    tl.store(weight_ptr + offsets, weight - rate * first / (tl.sqrt(second) * root + EPS), live)


def update(
    weight: Tensor,
    grad: Tensor,
    more: Tensor | None = None,
    *,
    found: Tensor,
    state: dict[str, Tensor],
    group: dict[str, Any],
) -> None:
    """One step of Adam with the gradient, or with the sum of two. `found` receives it in float32. The step count is not
    changed."""
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = laid_out(state[name], weight)
    beta1, beta2 = group["betas"]
    constants = {"MORE": more is not None, "DECAY": group["weight_decay"], "EPS": group["eps"], "BLOCK": BLOCK}
    constants |= {"BETA1": beta1, "BETA2": beta2, "LOG1": math.log(beta1), "LOG2": math.log(beta2)}
    grads = laid_out(grad, weight), laid_out(grad if more is None else more, weight)
    tensors = (weight.detach(), *grads, found, state["exp_avg"], state["exp_avg_sq"])
    grid = (triton.cdiv(weight.numel(), BLOCK),)
    leave_room(_adam[grid](*tensors, state["step"], group["lr"], weight.numel(), **constants))


def laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x with the memory layout of another tensor."""
    dimensions = zip(x.shape, x.stride(), like.stride(), strict=True)
    if all(n == 1 or mine == theirs for n, mine, theirs in dimensions):
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)
