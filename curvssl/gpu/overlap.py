"""Weight gradients of convolutions, and the updates of the weights, on a second stream beside the backward pass.

Only the optimiser needs a layer's weight gradient, and only the next step needs the updated weight. Small layers leave
most of a GPU idle meanwhile. (steps.py also runs terms of the loss on the second stream, layers.py the running
statistics.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from curvssl.gpu import adam, lars, stem
from curvssl.lars import Lars

# The optimisers whose weights are updated here, one at a time, and the functions that do it.
UPDATES: dict[type, Callable[..., None]] = {torch.optim.Adam: adam.update, Lars: lars.update}
MANY = 2**14  # a weight with at least this many numbers is updated faster by them than by the optimiser's own step
# The main stream has the global views. Weight gradients and updates are on the second. Where kernels are small, local
# views are on the third, and their weight gradients on the fourth.
SECOND, THIRD, FOURTH = 2, 3, 4
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # of a device and a number
# Set in a backward pass by `backward_and_step`: takes a weight, its gradients, and whether it may be updated at once.
_receive: list[Callable[..., None]] = []
_used: set[int] = set()  # the numbers of the streams that had weight gradients in this backward pass


def stream(number: int) -> torch.cuda.Stream:
    """A stream of the current device."""
    key = torch.cuda.current_device(), number
    if key not in _streams:
        # The rest of the step waits for the third stream as it does for the main one (steps.py), so both have priority.
        _streams[key] = torch.cuda.Stream(priority=-1 if number == THIRD else 0)
    return _streams[key]


@contextmanager
def beside_this(number: int = SECOND) -> Iterator[torch.cuda.Stream]:
    """Run the block on another stream, after everything that the current stream has been given so far."""
    other = stream(number)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        yield other


@contextmanager
def one_stream() -> Iterator[None]:
    """Use a single stream: for the first step, in which cuDNN times its algorithms for every convolution."""
    device = torch.cuda.current_device()
    before = {(device, number): stream(number) for number in (SECOND, THIRD, FOURTH)}
    _streams.update(dict.fromkeys(before, torch.cuda.current_stream()))
    try:
        yield
    finally:
        _streams.update(before)


class Uses:
    """The gradients of a weight that one or two passes of a step use: it is updated when the last one is there."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.gradients: list[tuple[Tensor, torch.cuda.Event]] = []

    def all_with(self, gradient: Tensor) -> list[Tensor]:
        """All gradients, if this is the last one, else none; the current stream waits for those of other streams."""
        here = torch.cuda.current_stream()
        for other, there in self.gradients:
            here.wait_event(there)
            other.record_stream(here)
        self.gradients.append((gradient, here.record_event()))
        return [other for other, _ in self.gradients] if len(self.gradients) == self.passes else []


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, low: Tensor, uses: Uses, stride: list[int], padding: list[int]
    ) -> Tensor:
        ctx.save_for_backward(x, low)
        ctx.weight, ctx.uses, ctx.stride, ctx.padding = weight, uses, stride, padding
        # On a single pixel, a 3×3 convolution uses only its centre weight: all else is padding.
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
        return d_x, d_weight, None, None, None, None


def convolve(x: Tensor, weight: Tensor, low: Tensor, uses: Uses, stride: list[int], padding: list[int]) -> Tensor:
    """conv2d(x, low), where low is the weight in x's precision; the gradient goes to `weight`."""
    return cast(Tensor, _Convolve.apply(x, weight, low, uses, stride, padding))


def _input_gradient(ctx: Any, grad: Tensor, x: Tensor, low: Tensor) -> Tensor:
    if ctx.centre:
        return (grad.flatten(1) @ low[:, :, 1, 1])[..., None, None]
    return _gradients(ctx, grad, x, low, [True, False, False])[0]


def _weight_gradient(ctx: Any, grad: Tensor, x: Tensor, low: Tensor) -> Tensor:
    if ctx.centre:
        gradient = torch.zeros_like(low)
        gradient[:, :, 1, 1] = grad.flatten(1).T @ x.flatten(1)
        return gradient
    if ctx.first:
        return stem.weight_gradient(grad, x, low.shape[2], ctx.stride[0], ctx.padding[0])
    return _gradients(ctx, grad, x, low, [False, True, False])[1]


def _gradients(ctx: Any, grad: Tensor, x: Tensor, low: Tensor, wanted: list[bool]) -> Any:
    settings = (None, ctx.stride, ctx.padding, [1, 1], False, [0, 0], 1)
    return torch.ops.aten.convolution_backward(grad, x, low, *settings, wanted)


def _beside(ctx: Any, grad: Tensor, x: Tensor, low: Tensor) -> Tensor | None:
    """∂L/∂W in float32, computed on another stream; None if `backward_and_step` has received it, or if the gradient of
    another pass is still to come."""
    here = torch.cuda.current_stream()
    number = FOURTH if here == stream(THIRD) else SECOND
    _used.add(number)
    with beside_this(number) as second:
        for tensor in (grad, x):
            tensor.record_stream(second)  # its memory must not be reused before
        gradients = ctx.uses.all_with(_weight_gradient(ctx, grad, x, low))
        if not gradients:
            return None
        if _receive:
            # In float32 `low` is the weight itself, which the rest of the backward pass still reads.
            _receive[0](ctx.weight, *gradients, at_once=low.dtype != ctx.weight.dtype)
            return None
        gradient = _sum(gradients, like=ctx.weight)
    gradient.record_stream(here)
    here.wait_stream(second)
    return gradient


def _sum(gradients: Sequence[Tensor], *, like: Tensor) -> Tensor:
    total = torch.empty_like(like).copy_(gradients[0])
    for more in gradients[1:]:
        total += more
    return total


def moves(optimizer: torch.optim.Optimizer) -> bool:
    """Whether weights of this optimiser are updated here: it is LARS, or torch's Adam without these options."""
    options = ("amsgrad", "maximize", "decoupled_weight_decay")
    return type(optimizer) in UPDATES and not any(
        group.get(name) for group in optimizer.param_groups for name in options
    )


def backward_and_step(backward: Callable[[], None], optimizer: torch.optim.Optimizer) -> None:
    """The backward pass and the optimiser's step. A weight of `convolve` is updated as soon as its gradient is
    computed, if `moves` says so. Otherwise the optimiser updates it, which waits for all gradients at once."""
    moved: dict[Tensor, Tensor] = {}  # updated weights → their gradients
    kept: dict[Tensor, Tensor] = {}  # weights of `convolve` that the optimiser will update → their gradients
    groups = {weight: group for group in optimizer.param_groups for weight in group["params"]}
    states, here = optimizer.state, torch.cuda.current_stream()
    update = UPDATES[type(optimizer)] if moves(optimizer) else None

    def move(weight: Tensor, *grads: Tensor) -> bool:
        if update is None or weight not in groups or not states.get(weight):  # the optimiser's first step makes states
            return False
        moved[weight] = torch.empty_like(weight)
        update(weight, *grads, found=moved[weight], state=states[weight], group=groups[weight])
        return True

    def receive(weight: Tensor, *grads: Tensor, at_once: bool) -> None:
        if not (at_once and move(weight, *grads)):
            kept[weight] = _sum(grads, like=weight)
            kept[weight].record_stream(here)

    def wait() -> None:
        for number in {SECOND, *_used}:  # a stream that is captured must not wait for one that is not
            here.wait_stream(stream(number))

    _receive.append(receive)
    _used.clear()
    try:
        backward()
    finally:
        _receive.clear()
    if kept:
        wait()
    for weight, gradient in kept.items():
        weight.grad = gradient
    for weight in groups:
        if weight.grad is not None and weight.numel() >= MANY and move(weight, weight.grad):
            weight.grad = None  # so that the optimiser skips it
    optimizer.step()
    wait()
    counts = [states[weight]["step"] for weight in moved if "step" in states[weight]]  # Adam counts its steps
    if counts:
        torch._foreach_add_(counts, 1)
    for weight, gradient in moved.items():
        weight.grad = gradient
