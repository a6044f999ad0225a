"""Weight gradients of convolutions, and Adam with them, on a second stream beside the rest of the backward pass.

Nobody waits for a layer's weight gradient but the optimiser, and nobody for the optimiser but the next step; meanwhile
small layers leave most of a GPU idle. (steps.py puts terms of the loss there too, layers.py the running statistics.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from curvssl.gpu import adam, stem

_streams: dict[int, torch.cuda.Stream] = {}
# Of the step whose backward pass is under way: takes a weight and its gradient, and says whether it has moved it.
_update: list[Callable[[Tensor, Tensor], bool]] = []


def second_stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]


@contextmanager
def beside_this() -> Iterator[torch.cuda.Stream]:
    """What follows goes to the second stream, behind what this one has been given so far."""
    second = second_stream()
    second.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(second):
        yield second


@contextmanager
def one_stream() -> Iterator[None]:
    """Nothing runs beside: for a first step, in which cuDNN times its algorithms for every convolution."""
    device = torch.cuda.current_device()
    second = second_stream()
    _streams[device] = torch.cuda.current_stream()
    try:
        yield
    finally:
        _streams[device] = second


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, low: Tensor, stride: list[int], padding: list[int]) -> Tensor:
        ctx.save_for_backward(x, low)
        ctx.weight, ctx.stride, ctx.padding = weight, stride, padding
        # A 3×3 convolution of a single pixel sees nothing but its centre.
        ctx.centre = (x.shape[2:], low.shape[2:], *stride, *padding) == ((1, 1), (3, 3), 1, 1, 1, 1)
        if ctx.centre:
            return (x.flatten(1) @ low[:, :, 1, 1].T)[..., None, None]
        ctx.first = len({*stride}) == len({*padding}) == 1 and stem.fits(x, low)
        if ctx.first:
            return stem.convolve(x, low, stride[0], padding[0])
        return nn.functional.conv2d(x, low, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, low) = grads, ctx.saved_tensors
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = _beside(ctx, grad, x, low) if x.is_cuda else _weight_gradient(ctx, grad, x, low).to(ctx.weight)
        d_x = _input_gradient(ctx, grad, x, low) if ctx.needs_input_grad[0] else None
        return d_x, d_weight, None, None, None


def convolve(x: Tensor, weight: Tensor, low: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """conv2d(x, low), where low is the weight in x's precision; the gradient goes to the weight."""
    return cast(Tensor, _Convolve.apply(x, weight, low, stride, padding))


def _input_gradient(ctx: Any, grad: Tensor, x: Tensor, low: Tensor) -> Tensor:
    if ctx.centre:
        return (grad.flatten(1) @ low[:, :, 1, 1])[..., None, None]
    return _gradients(ctx, grad, x, low, [True, False, False])[0]


def _weight_gradient(ctx: Any, grad: Tensor, x: Tensor, low: Tensor) -> Tensor:
    if ctx.centre:
        found = torch.zeros_like(low)
        found[:, :, 1, 1] = grad.flatten(1).T @ x.flatten(1)
        return found
    if ctx.first:
        return stem.weight_gradient(grad, x, low.shape[2], ctx.stride[0], ctx.padding[0])
    return _gradients(ctx, grad, x, low, [False, True, False])[1]


def _gradients(ctx: Any, grad: Tensor, x: Tensor, low: Tensor, wanted: list[bool]) -> Any:
    place = (None, ctx.stride, ctx.padding, [1, 1], False, [0, 0], 1)
    return torch.ops.aten.convolution_backward(grad, x, low, *place, wanted)


def _beside(ctx: Any, grad: Tensor, x: Tensor, low: Tensor) -> Tensor | None:
    """∂L/∂W in float32, or nothing if the weight has been moved by it already; on the second stream."""
    here = torch.cuda.current_stream()
    with beside_this() as beside:
        for tensor in (grad, x):
            tensor.record_stream(beside)  # its memory may not be given to others before
        found = _weight_gradient(ctx, grad, x, low)
        # In float32 `low` is the weight itself, which the rest of the backward pass still reads.
        if _update and low.dtype != ctx.weight.dtype and _update[0](ctx.weight, found):
            return None
        found = torch.empty_like(ctx.weight).copy_(found)
    found.record_stream(here)
    here.wait_stream(beside)
    return found


def moves(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `backward_and_step` knows this optimiser: torch's Adam and no relative of it, in its plain form."""
    return type(optimizer) is torch.optim.Adam and not any(
        group[name] for group in optimizer.param_groups for name in ("amsgrad", "maximize", "decoupled_weight_decay")
    )


def backward_and_step(backward: Callable[[], None], optimizer: torch.optim.Optimizer) -> None:
    """The backward pass and Adam's step; weights of `convolve` are moved as soon as their gradients are there."""
    moved: dict[Tensor, Tensor] = {}  # and their gradients
    groups = {weight: group for group in optimizer.param_groups for weight in group["params"]}
    states = optimizer.state

    def update(weight: Tensor, grad: Tensor) -> bool:
        if weight not in groups or not states.get(weight):  # Adam's first step makes the state
            return False
        moved[weight] = torch.empty_like(weight)
        adam.update(weight, grad, found=moved[weight], state=states[weight], group=groups[weight])
        return True

    _update.append(update)
    try:
        backward()
    finally:
        _update.clear()
    for weight in groups:
        if weight.grad is not None and weight.numel() >= adam.MANY and update(weight, weight.grad):
            weight.grad = None  # the optimiser passes over it
    optimizer.step()
    torch.cuda.current_stream().wait_stream(second_stream())
    if moved:
        torch._foreach_add_([states[weight]["step"] for weight in moved], 1)
    for weight, gradient in moved.items():
        weight.grad = gradient
