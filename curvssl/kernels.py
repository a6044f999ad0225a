"""Kernels k(a, b) over rows, (…, n, d) × (…, m, d) → (…, n, m), and how wide they should be.

To add one: write a function with this signature and add one line to KERNELS.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Kernel = Callable[..., Tensor]

MEDIAN_POINTS = 512  # the median heuristic looks at the pairs of at most this many points


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ over the last dimension; a zero vector stays zero, and so does its gradient."""
    return x * inverse_root(x.square().sum(-1, keepdim=True))


def inverse_root(square: Tensor) -> Tensor:
    """1/√s, and 0 with a zero gradient where s is 0 or so small (1e-31 in float32) that the gradient would overflow."""
    zero = square <= torch.finfo(square.dtype).tiny / torch.finfo(square.dtype).eps
    # Not rsqrt: its gradient passes through s^(−3/2), which overflows in float32 from √s = 1e-13.
    return torch.where(zero, 0, torch.where(zero, 1, square).sqrt().reciprocal())


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_j‖², (…, n, d) × (…, m, d) → (…, n, m), by one matrix product."""
    square = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :] - 2 * a @ b.mT
    return square.clamp_min(0)  # ‖a‖²+‖b‖²−2ab can dip below 0 in float32


def rbf(a: Tensor, b: Tensor, *, gamma: Tensor | float) -> Tensor:
    """exp(−γ ‖a − b‖²)."""
    return torch.exp(-gamma * squared_distances(a, b))


def laplacian(a: Tensor, b: Tensor, *, gamma: Tensor | float) -> Tensor:
    """exp(−γ ‖a − b‖₁)."""
    return torch.exp(-gamma * torch.cdist(a, b, p=1.0))


def linear(a: Tensor, b: Tensor, *, gamma: Tensor | float) -> Tensor:
    """⟨a, b⟩; γ plays no part."""
    return a @ b.mT


def polynomial(a: Tensor, b: Tensor, *, gamma: Tensor | float) -> Tensor:
    """(γ ⟨a, b⟩ + 1)³."""
    return (gamma * (a @ b.mT) + 1) ** 3


def cosine(a: Tensor, b: Tensor, *, gamma: Tensor | float) -> Tensor:
    """⟨a, b⟩ / (‖a‖ ‖b‖); γ plays no part, and a zero vector has cosine 0 with everything."""
    return unit(a) @ unit(b).mT


KERNELS: dict[str, Kernel] = {
    "rbf": rbf,
    "laplacian": laplacian,
    "linear": linear,
    "polynomial": polynomial,
    "cosine": cosine,
}

# These see only a − b, so the centre of a neighbourhood cancels between two of its edges, and k(x, x) = 1.
SHIFT_INVARIANT = ("rbf", "laplacian")


def resolve(kernel: str | Kernel) -> Kernel:
    """The function behind a kernel's name; a callable is taken as it is."""
    if callable(kernel):
        return lambda a, b, *, gamma: kernel(a, b)
    if kernel not in KERNELS:
        raise ValueError(
            f"unknown kernel {kernel!r}; known: {', '.join(KERNELS)}, or any callable (a, b) -> Gram matrix"
        )
    return KERNELS[kernel]


@torch.no_grad()
def kernel_width(x: Tensor, *, kernel: str | Kernel, gamma: float | str) -> Tensor:
    """γ for the points x (v, n, d), one for each of the v sets, (v, 1, 1); never part of the gradient.

    A number stands for itself. "auto" is 1/d and "scale" is 1/(d · Var x), as in scikit-learn's SVC. "median" is
    1/(2m²), and 1/m for the Laplacian's ‖·‖₁, with m the distance from the others at which the typical point lies: the
    median over the points of each one's median distance. A width that the data cannot give, because all points are
    equal, is 1.
    """
    if not isinstance(gamma, str):
        if not gamma > 0:
            raise ValueError(f"gamma={gamma} needs to be a positive number, or 'median', 'scale', 'auto'")
        width = torch.full((len(x),), float(gamma), dtype=x.dtype, device=x.device)
    elif gamma == "auto":
        width = torch.full((len(x),), 1 / x.shape[-1], dtype=x.dtype, device=x.device)
    elif gamma == "scale":
        width = _inverse(x.shape[-1] * x.flatten(1).var(1, correction=0))
    elif gamma == "median":
        sample = x[:, :: -(-x.shape[1] // MEDIAN_POINTS)]
        sample = sample - sample.mean(1, keepdim=True)
        city_block = kernel == "laplacian"
        distance = torch.cdist(sample, sample, p=1.0) if city_block else 2 * squared_distances(sample, sample)
        itself = torch.eye(sample.shape[1], dtype=torch.bool, device=x.device)
        # A median of medians, because rows side by side take a GPU an eighth of the time of all pairs in one row.
        width = _inverse(distance.masked_fill(itself, torch.inf).median(2).values.median(1).values)
    else:
        raise ValueError(f"unknown gamma {gamma!r}; use a positive number, 'median', 'scale' or 'auto'")
    return width[:, None, None]


def _inverse(x: Tensor) -> Tensor:
    some = x > torch.finfo(x.dtype).tiny  # 1/x overflows below
    return torch.where(some, 1 / torch.where(some, x, 1), 1)
