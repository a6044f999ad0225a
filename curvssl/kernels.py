"""Kernels k(a, b) over rows, Eq. (7), (…, n, d) × (…, m, d) → (…, n, m), each with its distance and its width γ.

Squares of the entries have to fit into the dtype, so entries up to 1e18 in float32: beyond, the result may be NaN. A
value that does not fit is infinite. The cosine needs no such care, and `kernel_curvature` and the losses rescale their
points where that changes nothing.
To add a kernel: write a function with the signature of `rbf` and add one line to KERNELS.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvssl.names import unknown

MEDIAN_POINTS = 512  # the median heuristic uses the pairs of at most this many points
GAMMAS = ("median", "scale", "auto")

Distance = Callable[[Tensor, Tensor], Tensor]  # (…, n, d) × (…, m, d) → (…, n, m)


# ---- products in full precision ----


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in full float32 precision, also where torch's settings allow TF32 or bfloat16."""
    if a.dtype == torch.float32 and _rounds(a.device.type):
        return exact_product(a, b)
    return a @ b


def _rounds(device: str) -> bool:
    """Whether torch may round the factors of a float32 product on this kind of device."""
    return device in ("cpu", "cuda") and _settings(device).fp32_precision in ("tf32", "bf16")


# As torch.compiler.assume_constant_result, but without importing the compiler, which takes as long as torch itself.
_rounds._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _settings(device: str) -> Any:
    backends: Any = torch.backends
    return backends.cuda.matmul if device == "cuda" else backends.mkldnn.matmul


@torch.library.custom_op("curvssl::exact_product", mutates_args=())
def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in full precision, whatever torch's settings are. A custom op, so that autograd and compilers keep it."""
    settings = _settings(a.device.type)
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        return a @ b
    finally:
        settings.fp32_precision = before


@exact_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    return exact_product(grad, b.mT).sum_to_size(a.shape), exact_product(a.mT, grad).sum_to_size(b.shape)


exact_product.register_autograd(
    _product_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


# ---- distances and directions ----


@torch.no_grad()
def rescaling(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """A power of two that brings the largest |x| over `dim`, which keeps length 1, into [1, 2); 0 if x is not finite.

    Times a power of two, a number keeps all its digits, and squares of numbers below 2 do not overflow. So sums of
    squares of very large or very small numbers are right, and those of others are the same to the last bit. No value is
    read by the host.
    """
    largest = torch.linalg.vector_norm(x.detach(), torch.inf, dim, keepdim=True)
    integer, exponent = (torch.int64, 0x7FF << 52) if x.dtype == torch.float64 else (torch.int32, 0xFF << 23)
    power = (largest.view(integer) & exponent).view(x.dtype)  # without its other bits a float is a power of two
    return power.clamp_min(torch.finfo(x.dtype).tiny).reciprocal()


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ over the last dimension; a zero vector stays zero, and so does its gradient."""
    return directions(x)[0]


def directions(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / ‖x‖ over the last dimension, and whether each vector has a direction, (…, d) → (…, d), (…, 1)."""
    scale = rescaling_with_gradient(x, -1)
    x = x * scale
    return x * inverse_root(x.square().sum(-1, keepdim=True)), scale > 0


def rescaling_with_gradient(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """`rescaling`, or 0 if the largest |x| is below 2e-34 in float32: a gradient over lengths so small overflows."""
    scale = rescaling(x, dim)
    return torch.where(scale <= 2**-14 / torch.finfo(x.dtype).tiny, scale, 0)


def inverse_root(square: Tensor) -> Tensor:
    """1/√s; 0 with gradient 0 where s is 0 or so small (1e-31 in float32) that the gradient would overflow."""
    zero = square <= torch.finfo(square.dtype).tiny / torch.finfo(square.dtype).eps
    # Not rsqrt: its gradient contains s^(−3/2), which overflows in float32 from √s = 1e-13 downwards.
    return torch.where(zero, 0, torch.where(zero, 1, square).sqrt().reciprocal())


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_j‖², (…, n, d) × (…, m, d) → (…, n, m), by one matrix product."""
    square = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :] - 2 * product(a, b.mT)
    return square.clamp_min(0)  # ‖a‖²+‖b‖²−2ab can be negative in float32


def doubled_squares(a: Tensor, b: Tensor) -> Tensor:
    """2‖a_i − b_j‖²; 0 where that is only rounding, so that equal points have no distance."""
    square = squared_distances(a, b)
    rounding = 4 * torch.finfo(square.dtype).eps * square.amax((-2, -1), keepdim=True)
    return 2 * torch.where(square > rounding, square, 0)


def centre(x: Tensor) -> Tensor:
    """Points minus their mean, through which no gradient flows. What a large mean's rounding leaves goes with the
    second one: it would hide distances from a matrix product."""
    for _ in range(2):
        x = x - x.detach().mean(-2, keepdim=True)
    return x


def city_block(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_j‖₁."""
    return torch.cdist(a, b, p=1.0)


# ---- the kernels ----


def rbf(a: Tensor, b: Tensor, *, gamma: Tensor | float) -> Tensor:
    """exp(−γ ‖a − b‖²)."""
    return torch.exp(-gamma * squared_distances(a, b))


def laplacian(a: Tensor, b: Tensor, *, gamma: Tensor | float) -> Tensor:
    """exp(−γ ‖a − b‖₁)."""
    return torch.exp(-gamma * city_block(a, b))


def linear(a: Tensor, b: Tensor, *, gamma: Tensor | float) -> Tensor:
    """⟨a, b⟩; γ is ignored."""
    return product(a, b.mT)


def polynomial(a: Tensor, b: Tensor, *, gamma: Tensor | float) -> Tensor:
    """(γ ⟨a, b⟩ + 1)³."""
    return (gamma * product(a, b.mT) + 1) ** 3


def cosine(a: Tensor, b: Tensor, *, gamma: Tensor | float) -> Tensor:
    """⟨a, b⟩ / (‖a‖ ‖b‖); γ is ignored. A zero vector has cosine 0 with every vector."""
    return product(unit(a), unit(b).mT)


@dataclass(frozen=True)
class Kernel:
    """A kernel and its properties that the geometry needs.

    gram: k(a, b; γ) over rows.
    distance: sorts points in the same order as ‖φ(a) − φ(b)‖; None computes that distance from `gram`, Eq. (8).
    centred: k depends only on a − b and k(x, x) = 1, so the centre of a neighbourhood cancels between its edges.
    spread: a distance s such that γ = 1 / s is a good width, for γ = "median".
    """

    gram: Callable[..., Tensor]
    distance: Distance | None = None
    centred: bool = False
    spread: Distance = doubled_squares

    def __call__(self, a: Tensor, b: Tensor, *, gamma: Tensor | float) -> Tensor:
        return self.gram(a, b, gamma=gamma)


KERNELS = {
    "rbf": Kernel(rbf, distance=squared_distances, centred=True),
    "laplacian": Kernel(laplacian, distance=city_block, centred=True, spread=city_block),
    "linear": Kernel(linear, distance=squared_distances),
    "polynomial": Kernel(polynomial),
    "cosine": Kernel(cosine),
}

# A name, a Kernel, one of the functions above, or any callable (a, b) → Gram matrix.
AnyKernel = str | Kernel | Callable[..., Tensor]


def resolve(kernel: AnyKernel) -> Kernel:
    """The `Kernel` for a name or a function. A user's own function is called without γ."""
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, str):
        if kernel not in KERNELS:
            raise ValueError(f"{unknown('kernel', kernel, KERNELS)}, or any callable (a, b) → Gram matrix")
        return KERNELS[kernel]
    for known in KERNELS.values():
        if kernel is known.gram:
            return known
    return Kernel(lambda a, b, *, gamma: kernel(a, b))


def scale_free(kernel: Kernel, gamma: float | str) -> bool:
    """Whether the curvature stays the same if all points are multiplied by a number: γ follows them or has no part."""
    if kernel not in KERNELS.values():
        return False
    if gamma == "scale" and kernel.gram is laplacian:
        return False  # this γ is one over a square
    return gamma in ("median", "scale") or kernel.gram in (linear, cosine)


def check_gamma(gamma: float | str) -> None:
    """Raise ValueError if γ is neither a positive number nor one of GAMMAS."""
    if isinstance(gamma, str):
        if gamma not in GAMMAS:
            raise ValueError(f"{unknown('gamma', gamma, GAMMAS)}, or a positive number")
    elif not 0 < gamma <= torch.finfo(torch.float32).max:
        raise ValueError(f"gamma={gamma} needs to be a positive number, or 'median', 'scale', 'auto'")


@torch.no_grad()
def kernel_width(x: Tensor, *, kernel: AnyKernel, gamma: float | str) -> Tensor:
    """γ for the points x (v, n, d), one for each of the v sets, (v, 1, 1). No gradient flows through it.

    A number is used as it is. "auto" is 1/d and "scale" is 1/(d · Var x), as in scikit-learn's SVC. "median" is
    1/(2m²), and 1/m for the Laplacian's ‖·‖₁. Here m is a median of medians: the median over the points of each
    point's median distance to the others. This is close to the usual median over all pairs, but not equal to it. Of
    more than 512 points, every second, third, … row is taken, so that at most 512 are left. If m or the variance is 0,
    because points are equal, γ is 1.
    """
    check_gamma(gamma)
    if not isinstance(gamma, str):
        width = torch.full((len(x),), float(gamma), dtype=x.dtype, device=x.device)
    elif gamma == "auto":
        width = torch.full((len(x),), 1 / x.shape[-1], dtype=x.dtype, device=x.device)
    elif gamma == "scale":
        width = _inverse(x.shape[-1] * x.flatten(1).var(1, correction=0))
    else:
        sample = x[:, :: -(-x.shape[1] // MEDIAN_POINTS)]
        sample = centre(sample)
        distance = resolve(kernel).spread(sample, sample)
        itself = torch.eye(sample.shape[1], dtype=torch.bool, device=x.device)
        # Medians by row take an eighth of the time of one median over all pairs.
        width = _inverse(distance.masked_fill(itself, torch.inf).median(2).values.median(1).values)
    return width[:, None, None]


def _inverse(x: Tensor) -> Tensor:
    positive = x > torch.finfo(x.dtype).tiny  # 1/x overflows below this
    return torch.where(positive, 1 / torch.where(positive, x, 1), 1)
