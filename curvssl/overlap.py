"""Weight gradients of convolutions, and Adam with them, on a second stream beside the rest of the backward pass.

Nobody waits for a layer's weight gradient but the optimiser, and nobody for the optimiser but the next step; meanwhile
small layers leave most of a GPU idle. A compiled step runs on one stream, so the second is opened inside an operation
that the compiler does not look into. (step.py puts parts of the loss there too.)
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

if torch.cuda.is_available() and find_spec("triton"):
    from curvssl import adam, stem

# What the compiler may not do, for it does not see that a buffer is still being read on the other stream.
OPTIONS: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}

_streams: dict[int, torch.cuda.Stream] = {}
# Of the step whose backward pass is under way: takes a weight's number and gradient, gives the gradient in float32.
_update: list[Callable[[int, Tensor], Tensor | None]] = []


def second_stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]


@torch.library.custom_op("curvssl::weight_gradient", mutates_args=())
def weight_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, number: int, stride: list[int], padding: list[int]
) -> Tensor:
    """∂L/∂W in float32 of y = conv2d(x, W), and the update of weight `number`, on the second stream."""
    here, beside = torch.cuda.current_stream(), second_stream()
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        if _of_pixels(x, weight, stride, padding):
            low = stem.weight_gradient(grad, x, weight.shape[2], stride[0], padding[0])
        else:
            low = _gradients(grad, x, weight, stride, padding, [False, True, False])[1]
        # In float32 `weight` is the weight itself, which the rest of the backward pass still reads.
        found = _update[0](number, low) if _update and weight.dtype != torch.float32 else None
        updated = found is not None
        if found is None:
            found = torch.empty_like(weight, dtype=torch.float32).copy_(low)
    for tensor in (grad, x):
        tensor.record_stream(beside)  # its memory may not be given to others before
    found.record_stream(here)
    if not updated:
        here.wait_stream(beside)
    return found


@weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, number: int, stride: list[int], padding: list[int]) -> Tensor:
    return torch.empty_like(weight, dtype=torch.float32)


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], wanted: Any) -> Any:
    """∂L/∂x and ∂L/∂W, those of them that are wanted."""
    return torch.ops.aten.convolution_backward(grad, x, weight, None, stride, padding, [1, 1], False, [0, 0], 1, wanted)


def _of_pixels(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> bool:
    """Whether the kernels for a network's first convolution take this one."""
    return len({*stride}) == len({*padding}) == 1 and stem.fits(x, weight)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, number: int, stride: list[int], padding: list[int]) -> Tensor:
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        ctx.number, ctx.stride, ctx.padding = number, stride, padding
        if _of_pixels(x, low, stride, padding):
            return stem.convolve(x, low, stride[0], padding[0])
        return nn.functional.conv2d(x, low, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, low = ctx.saved_tensors
        d_weight = weight_gradient(grads[0], x, low, ctx.number, ctx.stride, ctx.padding)
        wanted = [ctx.needs_input_grad[0], False, False]
        d_x = _gradients(grads[0], x, low, ctx.stride, ctx.padding, wanted)[0]
        return d_x, d_weight, None, None, None


class Beside(nn.Conv2d):
    """A convolution whose weight has a number."""

    number: int

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        return _Convolve.apply(x.to(low), self.weight, self.number, list(self.stride), list(self.padding))


def beside(net: nn.Module) -> list[Tensor]:
    """Make every plain convolution of a network take its weight gradient on the second stream; these weights."""
    weights: list[Tensor] = []
    for module in net.modules():
        if type(module) is not nn.Conv2d or module.bias is not None or module.groups > 1 or module.dilation != (1, 1):
            continue
        if not isinstance(module.padding, str) and module.padding_mode == "zeros":
            module.__class__ = Beside
            cast(Beside, module).number = len(weights)
            weights.append(module.weight)
    return weights


def backward_and_step(backward: Callable[[], None], optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> None:
    """The backward pass and Adam's step, the weights above updated as soon as their gradients are there."""
    updated: dict[Tensor, Tensor] = {}  # and their gradients
    group, states = optimizer.param_groups[0], optimizer.state

    def update(weight: Tensor, grad: Tensor) -> Tensor | None:
        if not states.get(weight):  # Adam's first step makes it
            return None
        updated[weight] = torch.empty_like(weight)
        adam.update(weight, grad, found=updated[weight], state=states[weight], group=group)
        return updated[weight]

    _update.append(lambda number, grad: update(weights[number], grad))
    try:
        backward()
    finally:
        _update.clear()
    torch.cuda.current_stream().wait_stream(second_stream())
    for weight in group["params"]:
        if weight.grad is not None and weight not in updated and weight.numel() >= adam.MANY:
            update(weight, weight.grad)
    for weight in updated:
        weight.grad = None  # the optimiser passes over it
    optimizer.step()
    if updated:
        torch._foreach_add_([states[weight]["step"] for weight in updated], 1)
    for weight, gradient in updated.items():
        weight.grad = gradient
