"""Random inputs to the library: is every result right, or the error a ValueError?

    python benchmarks/fuzz.py [--cases 100000] [--seed 0] [--out results/fuzz.json]

A case is a function and an input. Inputs have 0 to 40 rows; scales from 1e-30 to 1e30 (float64: 1e±150), for the whole,
by row or by column; twins, constant columns, common offsets, subnormal numbers; every dtype and memory layout; wrong types,
NaN and infinity. Results and gradients are compared with the equations in extended precision (numpy's longdouble, 64 bits
and numbers to 1e4932) or, for losses, with plain float64. Outcomes:

right      finite, and the equation's to rounding
refused    a ValueError that says what came and what was needed, where the input deserves it
shown      NaN or infinity in, and the result shows it, as documented for losses and measures
finite     finite, but the rounding of the input decides the result, so there is nothing to compare with
FAULT      anything else
"""

import argparse
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import curvssl
from curvssl import kernels
from curvssl.evaluate import quality
from curvssl.files import write_json
from curvssl.geometry import neighbors_of
from curvssl.kernels import KERNELS
from curvssl.rundir import provenance

Draw = np.random.Generator
Array = Any  # of np.longdouble
TYPES = {torch.float32: 5, torch.float64: 2, torch.float16: 1, torch.bfloat16: 1}
WRONG: tuple[Any, ...] = (None, "points", [["a", "b"]], {}, 3.5, [[1, 2], [3]], object())


class Fault(AssertionError):
    """What the function did is neither right nor documented."""


def need(condition: Any, what: str) -> None:
    if not condition:
        raise Fault(what)


# ---- inputs ----


def numbers(draw: Draw, n: int, d: int, *, most: float) -> np.ndarray:
    """Float64 (n, d), of magnitudes up to 10^most."""
    x = draw.normal(size=(n, d))
    if draw.random() < 0.15:
        x = draw.integers(-2, 3, (n, d)).astype(float)  # many ties and twins
    if n and draw.random() < 0.2:
        x[draw.integers(n, size=n // 2)] = x[draw.integers(n)]
    if d and draw.random() < 0.15:
        x[:, draw.integers(d)] = draw.normal()
    kind = draw.choice(
        ["plain", "whole", "rows", "columns", "outlier", "offset", "subnormal"], p=[0.2, 0.3, *[0.1] * 5]
    )
    if kind == "whole":
        x *= 10 ** draw.uniform(-most, most)
    if kind == "rows":
        x *= 10 ** draw.uniform(-most, most, (n, 1))
    if kind == "columns":
        x *= 10 ** draw.uniform(-most, most, (1, d))
    if kind == "outlier" and n:
        x[draw.integers(n)] *= 10 ** draw.uniform(0, most)
    if kind == "offset":
        x += 10 ** draw.uniform(-2, 6)
    if kind == "subnormal":
        x *= 10 ** draw.uniform(-45, -36)
    return x


def a_type(draw: Draw) -> torch.dtype:
    weights = np.array([*TYPES.values()]) / sum(TYPES.values())
    return [*TYPES][draw.choice(len(TYPES), p=weights)]


def values(draw: Draw, n: int, d: int) -> Tensor:
    """A tensor of any dtype, with scales that it holds."""
    dtype = a_type(draw)
    most = {torch.float16: 3.0, torch.float64: 150.0}.get(dtype, 30.0)
    x = torch.tensor(numbers(draw, n, d, most=most)).reshape(n, d)
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def laid_out(draw: Draw, x: Tensor) -> Any:
    """The same numbers as another kind of tensor or array."""
    kind = draw.integers(8)
    if kind == 0 and x.numel():
        return x.t().contiguous().t()
    if kind == 1:
        return torch.stack((x, x), 1)[:, 1]  # not contiguous
    if kind == 2 and x.dtype != torch.bfloat16:
        return np.ascontiguousarray(x.numpy()[::-1])[::-1]  # negative strides
    if kind == 3 and x.dtype == torch.float64:
        return x.numpy().astype(">f8")
    if kind == 4 and x.dtype == torch.float64 and len(x):
        return x.tolist()
    if kind == 5 and x.dtype != torch.bfloat16:
        array = x.numpy().copy()
        array.flags.writeable = False
        return array
    return x


def spoilt(draw: Draw, x: Tensor) -> Tensor:
    """One entry that is no finite number."""
    x = x.clone()
    x[draw.integers(len(x)), draw.integers(x.shape[1])] = draw.choice([math.nan, math.inf, -math.inf])
    return x


def long(x: Tensor) -> Array:
    """Exact."""
    return x.detach().double().numpy().astype(np.longdouble)


def eps_of(x: Tensor) -> float:
    """The rounding error of what is computed with x."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps


def floor_of(x: Tensor) -> float:
    """Edges below this count as zero (kernels.directions)."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).tiny * 2**14


def refused(call: Callable[[], Any]) -> str:
    """The call has to raise a ValueError with a sentence."""
    try:
        call()
    except ValueError as error:
        need(len(str(error)) > 20, f"ValueError says only {error}")
        return "refused"
    raise Fault("accepted")


def near(ours: Any, expected: Array, allowed: Any, what: str = "value") -> None:
    ours = np.asarray(ours, dtype=np.longdouble)
    need(np.isfinite(ours).all(), f"{what} is not finite")
    off = np.abs(ours - expected) - allowed
    need(
        not off.size or (off <= 0).all(),
        f"{what} is off by {np.max(off + allowed, initial=0):.3g}, allowed {np.max(allowed, initial=0):.3g}",
    )


# ---- points: neighbours, curvature, kernel curvature, solids ----


def bad_points(draw: Draw, call: Callable[[Any], Any]) -> str | None:
    """Now and then an input that has to be refused."""
    kind = draw.integers(60)
    x = torch.tensor(draw.normal(size=(12, 3))).float()
    wrong: dict[int, Any] = {
        0: WRONG[draw.integers(len(WRONG))],
        1: spoilt(draw, x),
        2: x.to_sparse(),
        3: x.to(torch.complex64),
        4: x[0],
        5: x[None],
        6: x[:, :0],
        7: x[: draw.integers(0, 3)],  # k = 3 needs four points
    }
    return refused(lambda: call(wrong[kind])) if kind in wrong else None


def distances(x: Array) -> Array:
    """All Euclidean distances (n, n); infinity from a point to itself."""
    scale = max(np.abs(x).max(initial=0), np.longdouble(10) ** -4000)
    square = np.square((x[:, None] - x[None]) / scale).sum(-1)
    np.fill_diagonal(square, np.inf)
    return np.sqrt(square)


def check_neighbors(draw: Draw) -> str:
    if done := bad_points(draw, lambda x: curvssl.nearest_neighbors(x, k=3)):
        return done
    n, d = int(draw.integers(2, 40)), int(draw.integers(1, 9))
    k = int(draw.integers(1, n + 2))
    x = values(draw, n, d)
    if draw.random() < 0.1:
        x = (x.double().clamp(-1e9, 1e9)).to(torch.int64)
    if k >= n:
        return refused(lambda: curvssl.nearest_neighbors(x, k=k))
    check_order(x, curvssl.nearest_neighbors(laid_out(draw, x), k=k), allowed=1e-12)
    return "right"


def check_order(x: Tensor, index: Tensor, *, allowed: Any) -> None:
    """The distances are the smallest ones, in order; `allowed` is relative to each."""
    found = np.take_along_axis(every := distances(long(x)), index.numpy(), axis=1)
    best = np.sort(every, axis=1)[:, : index.shape[1]]
    need(all(len({*row}) == len(row) for row in index.tolist()), "a neighbour comes twice")
    # In float64, squared distances below 1e-300 of the largest distance are equal.
    need((found <= best * (1 + allowed) + np.longdouble(1e-150)).all(), "a nearer point was missed")


def check_curvature(draw: Draw) -> str:
    if done := bad_points(draw, lambda x: curvssl.curvature(x, k=3)):
        return done
    n, d = int(draw.integers(3, 40)), int(draw.integers(1, 9))
    k = int(draw.integers(2, n))
    x = values(draw, n, d).requires_grad_()
    c = curvssl.curvature(x, k=k)
    neighbors = curvssl.nearest_neighbors(x, k=k)
    same = curvssl.curvature(laid_out(draw, x.detach()), k=k)
    need(torch.equal(c.detach(), same), "another memory layout gives another result")
    expected, unsure = cosines(x, neighbors)
    near(c.detach(), expected.sums, 8 * eps_of(x) * k**2)
    weights = torch.tensor(draw.normal(size=n)).to(c.dtype)
    (gradient,) = torch.autograd.grad((c * weights).sum(), x)
    need(gradient.isfinite().all(), "gradient is not finite")
    if x.dtype in (torch.float32, torch.float64) and not unsure:
        close, allowed = expected.gradient(long(weights), eps=eps_of(x))
        near(gradient, close, allowed, "gradient")
    return "right"


class cosines_of:
    """Eq. (6) and its gradient from the edges (n, k, d), pair by pair through their sum."""

    def __init__(self, x: Array, neighbors: np.ndarray, floor: float) -> None:
        self.x, self.neighbors = x, neighbors
        edges = x[neighbors] - x[:, None]
        largest = np.abs(edges).max(-1, keepdims=True)
        self.live = largest >= floor
        scaled = np.where(self.live, edges / np.where(self.live, largest, 1), 0)
        norm = np.sqrt(np.square(scaled).sum(-1, keepdims=True))
        self.u = np.where(self.live, scaled / np.where(self.live, norm, 1), 0)
        self.length = np.where(self.live, norm * largest, np.inf)
        self.near_floor = bool(((largest > floor / 8) & (largest < floor * 8)).any())
        cos = np.einsum("iad,ibd->iab", self.u, self.u)
        self.sums = (cos.sum((1, 2)) - np.einsum("iaa->i", cos)) / 2

    def gradient(self, weights: Array, *, eps: float) -> tuple[Array, Array]:
        """∂/∂x Σ_i w_i c_i, and how much rounding may change it."""
        total = self.u.sum(1, keepdims=True)
        push = (total - self.u * (self.u * total).sum(-1, keepdims=True)) / self.length * weights[:, None, None]
        size = np.broadcast_to(len(self.u[0]) / self.length * np.abs(weights)[:, None, None], push.shape)
        out, room = np.zeros_like(self.x), np.zeros_like(self.x)
        np.add.at(out, self.neighbors, push)
        np.add.at(room, self.neighbors, size)
        return out - push.sum(1), (room + size.sum(1)) * 64 * eps + 1e-44


def cosines(x: Tensor, neighbors: Tensor) -> tuple[cosines_of, bool]:
    found = cosines_of(long(x), neighbors.numpy(), floor_of(x))
    # Rounded differences can be zero or not where the exact ones are near the floor.
    return found, found.near_floor


def kernel_values(a: Array, b: Array, *, name: str, gamma: Any) -> Array:
    """Each kernel as textbooks write it, (…, n, d) × (…, m, d) → (…, n, m)."""
    inner = np.einsum("...nd,...md->...nm", a, b)
    edges = a[..., :, None, :] - b[..., None, :, :]
    if name == "rbf":
        return np.exp(-gamma * np.square(edges).sum(-1))
    if name == "laplacian":
        return np.exp(-gamma * np.abs(edges).sum(-1))
    if name == "polynomial":
        return (gamma * inner + 1) ** 3
    if name == "linear":
        return inner
    norms = [np.sqrt(np.square(part).sum(-1)) for part in (a, b)]
    size = norms[0][..., :, None] * norms[1][..., None, :]
    return np.where(size > 0, inner / np.where(size > 0, size, 1), 0)


def width(x: Array, *, name: str, gamma: Any) -> Any:
    """γ as docs define it."""
    n, d = x.shape
    if not isinstance(gamma, str):
        return np.longdouble(gamma)
    if gamma == "auto":
        return 1 / np.longdouble(d)
    if gamma == "scale":
        spread = d * x.var()
    else:
        edges = x[:, None] - x[None]
        every = np.abs(edges).sum(-1) if name == "laplacian" else 2 * np.square(edges).sum(-1)
        np.fill_diagonal(every, np.inf)
        lower = (n - 1) // 2
        spread = np.sort(np.sort(every, axis=1)[:, lower])[lower]
    return 1 / spread if spread > 0 else np.longdouble(1)


def check_kernel_curvature(draw: Draw) -> str:
    if done := bad_points(draw, lambda x: curvssl.kernel_curvature(x, k=3)):
        return done
    name = str(draw.choice([*KERNELS]))
    gamma = draw.choice(["median", "scale", "auto", "number"])
    gamma = float(10 ** draw.uniform(-3, 3)) if gamma == "number" else str(gamma)
    if draw.random() < 0.02:
        bad: Any = draw.choice([0.0, -1.0, math.nan, math.inf])
        return refused(lambda: curvssl.kernel_curvature(torch.ones(9, 2), k=3, kernel=name, gamma=bad))
    n, d = int(draw.integers(4, 30)), int(draw.integers(1, 7))
    k = int(draw.integers(2, n))
    x = values(draw, n, d).requires_grad_()
    neighbors = curvssl.nearest_neighbors(x, k=k)
    exact = long(x)
    try:
        c = curvssl.kernel_curvature(laid_out(draw, x) if draw.random() < 0.5 and not x.requires_grad else x, k=k,
                                     kernel=name, gamma=gamma, neighbors=neighbors)  # fmt: skip
        free = curvssl.kernel_curvature(x, k=k, kernel=name, gamma=gamma)
    except ValueError as error:
        huge = np.abs(exact).max() > (1e50 if name == "polynomial" else 1e140)
        free = gamma == "median" or (gamma == "scale" and name != "laplacian")
        need("is not finite" in str(error) and huge and not free, f"refused: {error}")
        return "refused"
    need(c.isfinite().all() and free.isfinite().all(), "value is not finite")
    (gradient,) = torch.autograd.grad(c.sum(), x)
    need(gradient.isfinite().all() or not scale_free_gradient(exact, gamma), "gradient is not finite")
    g = width(exact, name=name, gamma=gamma)
    # What float64's products and differences leave of the distances, in units of 1/γ.
    reach = np.abs(exact - exact.mean(0)).max() if name in ("rbf", "linear") else np.abs(exact).max()
    middle = np.abs(exact - exact.mean(0)).max()
    blur = {"rbf": g * middle**2, "laplacian": g * middle, "polynomial": g * middle**2}.get(name, 0) * 64 * d * 2.3e-16
    spread = 64 * d * 2.3e-16 * max(middle**2, reach**2)
    if isinstance(gamma, str) and gamma == "median" and name != "laplacian" and g * spread > 1e-4:
        return "finite"  # γ itself is rounding
    if blur > 1e-4 or np.abs(exact).max() < 8 * floor_of(x):
        return "finite"
    edges = exact[neighbors.numpy()] - exact[:, None]
    local = kernel_values(edges, edges, name=name, gamma=g)
    own = np.einsum("iaa->ia", local)
    if name == "linear" and (own[own > 0] < 1e-280 * own.max()).any():
        return "finite"  # squares of these edges leave float64
    live = own > (0 if name != "linear" else np.max(own) * 1e-290)
    root = np.where(live, 1 / np.sqrt(np.where(live, own, 1)), 0)
    local = local * root[:, :, None] * root[:, None, :]
    expected = (local.sum((1, 2)) - np.einsum("iaa->i", local)) / 2
    near(c.detach(), expected, k**2 * (8 * eps_of(x) + 40 * float(blur) + 1e-11 * (name != "linear")))
    return "right"


def scale_free_gradient(x: Array, gamma: Any) -> bool:
    """Whether the gradient of kernel curvature, about 1 over the typical distance, fits into float32."""
    return bool(np.abs(x).max() > 1e-30)


def check_polyhedron(draw: Draw) -> str:
    if done := bad_points(draw, lambda x: curvssl.polyhedron_curvature(x, torch.tensor([[1, 2, 3]] * 12))):
        return done
    n, d, k = int(draw.integers(3, 20)), int(draw.integers(1, 6)), int(draw.integers(2, 7))
    x = values(draw, n, d).requires_grad_()
    neighbors = torch.tensor(draw.integers(n, size=(n, k)))
    if draw.random() < 0.05:
        neighbors[0, 0] = n if draw.random() < 0.5 else -1
        return refused(lambda: curvssl.polyhedron_curvature(x, neighbors))
    c = curvssl.polyhedron_curvature(x, neighbors)
    found, _ = cosines(x, neighbors)
    near(c.detach(), (found.u * np.roll(found.u, -1, axis=1)).sum((1, 2)), 8 * eps_of(x) * k)
    need(torch.autograd.grad(c.sum(), x)[0].isfinite().all(), "gradient is not finite")
    return "right"


def check_defect(draw: Draw) -> str:
    if done := bad_points(draw, lambda x: curvssl.angular_defect(x, [[0, 1, 11]])):
        return done
    v, d = int(draw.integers(3, 12)), int(draw.integers(2, 5))
    x = values(draw, v, d).requires_grad_()
    faces: Any = [draw.permutation(v)[: draw.integers(3, min(v, 5) + 1)].tolist() for _ in range(draw.integers(1, 8))]
    if draw.random() < 0.06:
        wrong: list[Any] = [None, "faces", [[0, 1]], [[0, 1, v]], [[0, 1, -1]], [0, 1, 2], [[0.5, 1, 2]], [["a", 1, 2]]]
        return refused(lambda: curvssl.angular_defect(x, wrong[draw.integers(len(wrong))]))
    defect = curvssl.angular_defect(x, faces)
    exact, floor = long(x), floor_of(x)
    expected, corners = np.full(v, 2 * np.arccos(np.longdouble(-1))), np.zeros(v)
    for face in faces:
        for a, b, c in zip(face[-1:] + face[:-1], face, face[1:] + face[:1], strict=True):
            sides = [exact[a] - exact[b], exact[c] - exact[b]]
            sides = [s / np.abs(s).max() if np.abs(s).max() >= floor else s * 0 for s in sides]
            sides = [s / np.sqrt(s @ s) if s.any() else s for s in sides]
            apart, along = (np.sqrt(np.square(sides[0] + sign * sides[1]).sum()) for sign in (-1, 1))
            expected[b] -= 2 * np.arctan2(apart, along)
            corners[b] += 1
    near(defect.detach(), expected, 32 * eps_of(x) * (corners + 1))
    need(torch.autograd.grad(defect.sum(), x)[0].isfinite().all(), "gradient is not finite")
    return "right"


def check_kernels(draw: Draw) -> str:
    name = str(draw.choice([*KERNELS, "unit"]))
    n, m, d = (int(draw.integers(1, 12)) for _ in range(3))
    dtype = torch.float32 if draw.random() < 0.6 else torch.float64
    most = 30 if name in ("unit", "cosine") else 5 if name == "polynomial" else 15
    a, b = (torch.tensor(numbers(draw, rows, d, most=most)).to(dtype).requires_grad_() for rows in (n, m))
    if name == "unit":
        u, exact = kernels.unit(a), long(a)
        found = cosines_of(np.concatenate((np.zeros_like(exact[:1]), exact)),
                           np.arange(1, n + 1)[None].repeat(n + 1, 0), floor_of(a))  # fmt: skip
        near(u.detach(), found.u[0], 4 * eps_of(a))
        need(torch.autograd.grad(u.sum(), a)[0].isfinite().all(), "gradient is not finite")
        return "right"
    gamma = float(10 ** draw.uniform(-3, 3))
    k = KERNELS[name](a, b, gamma=gamma)
    exact_a, exact_b = long(a), long(b)
    gamma = float(torch.tensor(gamma, dtype=dtype))
    expected = kernel_values(exact_a, exact_b, name=name, gamma=gamma)
    norms = [np.sqrt(np.square(part).sum(-1)) for part in (exact_a, exact_b)]
    product = norms[0][:, None] * norms[1][None]
    both = (norms[0][:, None] + norms[1][None]) ** 2
    rounding = (2 * d + 8) * eps_of(a)
    allowed = {
        "rbf": np.minimum(1, gamma * both * rounding) + 2 * eps_of(a),
        "laplacian": np.minimum(1, gamma * np.sqrt(both * d) * rounding) + 2 * eps_of(a),
        "linear": product * rounding,
        "polynomial": 3 * (gamma * product + 1) ** 3 * rounding,
        "cosine": 4 * rounding,
    }[name]
    if name == "cosine":  # below the floor a vector has no direction
        live = [np.abs(part).max(-1) >= floor_of(a) for part in (exact_a, exact_b)]
        expected = expected * live[0][:, None] * live[1][None]
    near(k.detach(), expected, allowed + 1e-40)
    for gradient in torch.autograd.grad(k.sum(), (a, b)):
        need(gradient.isfinite().all(), "gradient is not finite")
    return "right"


# ---- losses, against plain float64 ----


def two_views(draw: Draw, *, most: float = 30.0) -> tuple[Tensor, Tensor]:
    b, d = int(draw.integers(2, 24)), int(draw.integers(1, 10))
    dtype = a_type(draw)
    most = {torch.float16: 3.0, torch.float64: 2 * most}.get(dtype, most)
    state = draw.bit_generator.state
    x = numbers(draw, b, d, most=most)
    after, draw.bit_generator.state = draw.bit_generator.state, state
    again = numbers(draw, b, d, most=most)  # the same kind and scale …
    draw.bit_generator.state = after
    other = again * (1 + 0.3 * draw.normal(size=(b, d)))  # … and other numbers
    limit = torch.finfo(dtype).max
    z0, z1 = (torch.tensor(z).clamp(-limit, limit).to(dtype) for z in (x, other))
    return z0.requires_grad_(), z1.requires_grad_()


def scaled(z: Tensor) -> tuple[Tensor, float]:
    """z in float64, times a power of two, and that."""
    largest = float(z.detach().abs().double().max())
    scale = 2.0 ** -math.frexp(largest)[1] if largest else 1.0
    return z.detach().double() * scale, scale


def plain_standardise(z: Tensor, eps: Any) -> tuple[Tensor, float]:
    """(z − μ)/(σ + ε) by column, and the largest share of a standardised value that rounding of the input decides."""
    constant = (z == z[:1]).all(0)
    off = torch.where(constant, z - z[:1], z - z.mean(0))
    variance = off.square().mean(0)
    sigma = torch.where(variance > 0, torch.where(variance > 0, variance, 1).sqrt(), 0)
    blur = torch.where(constant, 0, z.abs().amax(0) / (sigma + eps).clamp_min(1e-300))
    return off / (sigma + eps), float(blur.detach().max())


def bad_views(draw: Draw, call: Callable[[Any, Any], Any]) -> str | None:
    kind = draw.integers(50)
    z = torch.tensor(draw.normal(size=(12, 3))).float()
    wrong: dict[int, tuple[Any, Any]] = {
        0: (WRONG[draw.integers(len(WRONG))], z),
        1: (z, z[:-1]),
        2: (z[:1], z[:1]),
        3: (z.to(torch.complex64), z.to(torch.complex64)),
        4: (z.to_sparse(), z),
        5: (z.int(), z.int()),
        6: (z[:0], z[:0]),
        7: (z[:, :0], z[:, :0]),
    }
    if kind in wrong:
        return refused(lambda: call(*wrong[kind]))
    if kind == 8:
        value = call(spoilt(draw, z), z)
        need(not value.isfinite(), "the loss hides what is not finite")
        return "shown"
    return None


def compare_loss(
    loss: Tensor, inputs: tuple[Tensor, ...], plain: Callable[..., Tensor], scales: Any, blur: float, room: Any
) -> str:
    """Value and gradients of a loss against plain float64, on inputs in other units. `room` is how large the gradients
    of each are before what cancels in them."""
    need(loss.isfinite(), "value is not finite")
    gradients = torch.autograd.grad(loss, inputs)
    for gradient, z in zip(gradients, inputs, strict=True):
        need(z.dtype == torch.float16 or gradient.isfinite().all(), "gradient is not finite")
    if blur > 1e-3:
        return "finite"
    twins = [scaled(z)[0].requires_grad_() for z in inputs]
    expected = plain(*twins)
    near(
        float(loss.detach()),
        np.longdouble(float(expected.detach())),
        (1 + abs(float(expected.detach()))) * (200 * blur + 1e-12),
    )
    for i, (ours, theirs) in enumerate(zip(gradients, torch.autograd.grad(expected, twins), strict=True)):
        if inputs[i].dtype in (torch.float32, torch.float64):
            size = long(theirs.abs().amax(0) + room[i]) * scales[i]
            near(ours.double(), long(theirs) * scales[i], size * (1000 * blur + 1e-9) + 1e-37, "gradient")
    return "right"


def check_barlow(draw: Draw) -> str:
    weight, eps = float(draw.choice([0.0, 0.005, 1.0])), float(draw.choice([1e-5, 1e-3]))
    loss = curvssl.BarlowTwinsLoss(lambda_emb=weight, eps=eps)
    if done := bad_views(draw, loss):
        return done
    z0, z1 = two_views(draw)
    scales = [scaled(z)[1] for z in (z0, z1)]
    blur, d = (
        max(plain_standardise(scaled(z)[0], eps * s)[1] for z, s in zip((z0, z1), scales, strict=True)),
        z0.shape[1],
    )
    room = []
    for z, s in zip((z0, z1), scales, strict=True):
        base = scaled(z)[0]
        room.append(2 * (1 + weight * d) * len(z) ** 0.5 / (base.std(0, correction=0) + eps * s))

    def plain(a: Tensor, b: Tensor) -> Tensor:
        a, b = (plain_standardise(z, eps * s)[0] for z, s in zip((a, b), scales, strict=True))
        c = a.T @ b / len(a)
        square = c.square()
        return (c.diagonal() - 1).square().sum() + weight * (square.sum() - square.diagonal().sum())

    return compare_loss(loss(z0, z1), (z0, z1), plain, scales, blur * eps_of(z0) * (1 + d * (weight > 0)), room)


def check_curvature_loss(draw: Draw) -> str:
    k, eps, weight = int(draw.integers(2, 8)), 1e-5, float(draw.choice([0.0, 1.0]))
    loss = curvssl.Curvature(k=k, lambda_curv=weight, eps=eps)
    if done := bad_views(draw, loss):
        return done
    z0, z1 = two_views(draw)
    if k >= len(z0):
        return refused(lambda: loss(z0, z1))
    both = torch.stack((z0, z1)).detach()
    both = both.to(torch.promote_types(both.dtype, torch.float32))
    neighbors = neighbors_of(both, both, k=k)
    for z, index in zip(both, neighbors, strict=True):
        exact = long(z)
        reach = np.square(exact - exact.mean(0)).sum(1).max() + (64 * eps_of(z) * np.abs(exact).max()) ** 2 / eps_of(z)
        every = np.square(exact[:, None] - exact[None]).sum(-1)
        np.fill_diagonal(every, np.inf)
        found = np.take_along_axis(every, index.numpy(), axis=1).max(1)
        best = np.sort(every, axis=1)[:, k - 1]
        need(
            (found <= best * (1 + 1e-5) + 16 * (z.shape[1] + 8) * eps_of(z) * reach).all(), "a nearer point was missed"
        )
    found = [cosines_of(long(z), index.numpy(), floor_of(z)) for z, index in zip(both, neighbors, strict=True)]
    value = loss(z0, z1)
    gradients = torch.autograd.grad(value, (z0, z1))
    need(value.isfinite(), "value is not finite")
    need(z0.dtype == torch.float16 or all(bool(g.isfinite().all()) for g in gradients), "gradient is not finite")
    sigma = min(float(of.sums.std()) for of in found)
    blur = 8 * k**2 * eps_of(both) / (sigma + eps)  # the share of a standardised score that is rounding
    if blur > 1e-3 or any(of.near_floor for of in found):
        return "finite"
    c = [torch.tensor(of.sums.astype(float)).requires_grad_() for of in found]
    tilde = [(x - x.mean()) / (x.var(correction=0).clamp_min(1e-30).sqrt() + eps) for x in c]
    m = torch.outer(*tilde) / len(z0)
    expected = (m.diagonal() - 1).square().sum() + weight * (m.square().sum() - m.diagonal().square().sum())
    near(
        float(value.detach()), np.longdouble(float(expected.detach())), (abs(float(expected.detach())) + 1) * 200 * blur
    )
    if z0.dtype in (torch.float32, torch.float64):
        for ours, pull, of in zip(gradients, torch.autograd.grad(expected, c), found, strict=True):
            close, allowed = of.gradient(long(pull), eps=eps_of(both))
            loose = of.gradient(np.full(len(z0), float(pull.abs().max()) + 1 / len(z0)), eps=20 * blur)[1]
            near(ours, close, allowed + loose, "gradient")
    return "right"


def check_vicreg(draw: Draw) -> str:
    loss = curvssl.VICRegLoss()
    if done := bad_views(draw, loss):
        return done
    z0, z1 = two_views(draw)

    def plain(a: Tensor, b: Tensor) -> tuple[Tensor, float]:
        n, d = a.shape
        centred = [z - z.mean(0) for z in (a, b)]
        c = [z.T @ z / (n - 1) for z in centred]
        size = float(sum(x.detach().square().sum() for x in c) + (a - b).detach().square().sum())
        hinge = sum(torch.relu(1 - (x.diagonal() + 1e-4).sqrt()).mean() for x in c) / 2
        off = sum(x.square().sum() - x.diagonal().square().sum() for x in c) / d
        return 25 * (a - b).square().mean() + 25 * hinge + off, size

    with np.errstate(over="ignore"):
        twins = [z.detach().double().requires_grad_() for z in (z0, z1)]
        expected, size = plain(*twins)
    limit = torch.finfo(torch.promote_types(z0.dtype, torch.float32)).max
    try:
        value = loss(z0, z1)
    except ValueError as error:
        need("does not fit" in str(error) and not size < limit / 1e3, f"refused: {error}")
        return "refused"
    gradients = torch.autograd.grad(value, (z0, z1))
    need(value.isfinite(), "value is not finite")
    need(z0.dtype == torch.float16 or all(bool(g.isfinite().all()) for g in gradients), "gradient is not finite")
    reach = max(float(z.detach().double().abs().max()) for z in (z0, z1))
    if not reach < 1e70:
        return "finite"
    rounding = eps_of(z0) * len(z0) * (size + reach**4 * eps_of(z0) ** 2 + reach**2 + reach + 1) * 32
    near(float(value.detach()), np.longdouble(float(expected.detach())), rounding)
    return "right"


def check_whole_losses(draw: Draw) -> str:
    """CurvSSL and kernel CurvSSL are the sums of their parts, which other cases check; with kernels, finite."""
    k = int(draw.integers(2, 6))
    kernel = str(draw.choice(["none", *KERNELS]))
    gamma = "median" if kernel == "laplacian" else str(draw.choice(["median", "scale"]))
    settings: dict[str, Any] = {"k": k, "alpha_curv": 0.5}
    loss = (
        curvssl.CurvSSLLoss(**settings)
        if kernel == "none"
        else curvssl.KernelCurvSSLLoss(**settings, kernel=kernel, gamma=gamma)
    )
    if done := bad_views(draw, loss):
        return done
    z0, z1 = two_views(draw)
    if k >= len(z0):
        return refused(lambda: loss(z0, z1))
    value = loss(z0, z1)
    gradients = torch.autograd.grad(value, (z0, z1))
    need(value.isfinite() and all(bool(g.isfinite().all()) for g in gradients), "not finite")
    parts = curvssl.BarlowTwinsLoss()(z0, z1) + 0.5 * loss.curvature(z0, z1)
    near(float(value.detach()), np.longdouble(float(parts.detach())), 1e-5 * max(1.0, float(parts.detach())))
    if kernel != "none" and z0.dtype == torch.float32:
        twice = (
            loss.curvature(z0 * 2.0**20, z1 * 2.0**20) if max(z.detach().abs().max() for z in (z0, z1)) < 1e30 else 0
        )
        if isinstance(twice, Tensor) and min(z.detach().abs().max() for z in (z0, z1)) > 1e-30:
            size = max(1.0, float(twice.detach()))
            near(
                float(twice.detach()),
                np.longdouble(float(loss.curvature(z0, z1).detach())),
                1e-3 * size,
                "rescaled loss",
            )
    return "right"


def check_chord(draw: Draw) -> str:
    loss, eps = curvssl.Chord(), 1e-5
    if draw.random() < 0.08:
        z = torch.ones(6, 3)
        wrong: list[Any] = [(z, z, None), (z, z[:4], z[:, 0]), (z[:5], z[:5], z[:5, 0]), (z, "z", z[:, 0]), (z, z, z)]
        return refused(lambda: loss(*wrong[draw.integers(len(wrong))]))
    z, blended = two_views(draw, most=12)
    t = torch.tensor(draw.random(len(z))).to(z.dtype)
    if len(z) % 2:
        return refused(lambda: loss(z, blended, t))
    base, scale = scaled(z)
    blur = max(plain_standardise(base, eps * scale)[1] * eps_of(z), eps_of(z))

    def plain(a: Tensor, b: Tensor) -> Tensor:
        b = b * (scale / scaled(blended)[1])
        constant = (a == a[:1]).all(0)
        mean = torch.where(constant, a[0], a.mean(0))
        sigma = torch.where(constant, 1, (a - mean).square().mean(0)).sqrt() * ~constant
        a, b = ((x - mean) / (sigma + eps * scale) for x in (a, b))
        swapped = a.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
        share = t.double()[:, None]
        return (b - share * a - (1 - share) * swapped).square().mean()

    expected = float(plain(base, scaled(blended)[0]))
    try:
        value = loss(z, blended, t)
    except ValueError as error:
        need("does not fit" in str(error) and not expected * z.numel() < 1e37, f"refused: {error}")
        return "refused"
    if not expected < 1e30:
        return "finite"
    below = base.std(0, correction=0) + eps * scale
    room = 4 * (1 + expected) * (1 + expected**0.5 + len(z) ** 0.5) / below
    more = room * (scale / scaled(blended)[1])
    return compare_loss(value, (z, blended), plain, (scale, scaled(blended)[1]), blur, (room, more))


def check_blend(draw: Draw) -> str:
    b = int(draw.integers(0, 9))
    x = torch.tensor(draw.normal(size=(b, 3, 2)) * 10 ** draw.uniform(-30, 30)).float()
    if draw.random() < 0.1:
        wrong: list[Any] = [(None,), ("x",), (x, torch.ones(b + 1)), (torch.tensor(3.0),), (x, "t")]
        return refused(lambda: curvssl.blend(*wrong[draw.integers(len(wrong))]))
    if b % 2:
        return refused(lambda: curvssl.blend(x))
    t = torch.tensor(draw.random(b)).float() if draw.random() < 0.5 else None
    mixed, share = curvssl.blend(x, t)
    exact, part = long(x), long(share).reshape(b, 1, 1)
    partner = exact.reshape(-1, 2, 3, 2)[:, ::-1].reshape(exact.shape)
    near(mixed, part * exact + (1 - part) * partner, 4 * 1.2e-7 * (np.abs(exact) + np.abs(partner)))
    return "right"


# ---- measures without labels, against singular values ----


def check_measures(draw: Draw) -> str:
    name = str(draw.choice(["effective_rank", *quality.MEASURES]))
    n, d = int(draw.integers(3, 20)), int(draw.integers(1, 8))
    x = values(draw, n, d)
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    if name == "lidar":
        return check_lidar(draw, n, d)
    measure = getattr(quality, name)
    if draw.random() < 0.05:
        need(math.isnan(measure(spoilt(draw, x))), "NaN is hidden")
        return "shown"
    ours = measure(x)
    exact = long(x)
    if name == "twonn":
        return check_twonn(exact, ours)
    if name == "selfcluster":
        exact = exact[(exact != 0).any(1)]
        rows, dim = exact.shape
        exact = exact / np.abs(exact).max(1, keepdims=True, initial=0) if rows else exact
        unit = exact / np.sqrt(np.square(exact).sum(1, keepdims=True)) if rows else exact
        random = rows * (rows - 1) / dim
        below = rows**2 - rows - random
        if below == 0:
            need(math.isnan(ours), "a value where there is none")
            return "right"
        near(ours, (np.square(unit @ unit.T).sum() - rows - random) / below, 1e-10 * (rows**2 / abs(below) + 1))
        return "right"
    centre = name in ("effective_rank", "alpha_req", "nesum")
    scale = max(np.abs(exact).max(), np.longdouble(10) ** -4000)
    exact = exact / scale
    if centre:
        off = exact - exact.mean(0)
        if np.abs(off).max() < 1e-4 * np.abs(exact).max() or np.abs(off).max() == 0:
            need(math.isnan(ours) or math.isfinite(ours), "infinite")
            return "finite"  # the features are rounding around an offset
        exact = off
    sigma = np.linalg.svd(exact.astype(float), compute_uv=False)
    if not sigma[0]:
        need(math.isnan(ours) or abs(ours - 1) < 1e-3, f"{ours} of zeros")
        return "right"
    share = (sigma / sigma[0]) ** 2
    if ((share > 1e-17) & (share < 1e-8)).any():
        need(math.isfinite(ours) or math.isnan(ours), "infinite")
        return "finite"  # the rounding of squares decides
    share = np.where(share < 1e-13, 0, share)
    rank = len(share)
    p = np.sqrt(share) / np.sqrt(share).sum()
    logs = np.log(share[share > 0])
    index = np.log(np.arange(1, len(logs) + 1))
    index = index - index.mean()
    p_eps = p + 1e-7
    expected = {
        "effective_rank": np.exp(-(p[p > 0] * np.log(p[p > 0])).sum()),
        "rankme": np.exp(-(p_eps * np.log(p_eps)).sum()),
        "nesum": share.sum(),
        "stable_rank": share.sum(),
        "alpha_req": -(index @ logs) / (index @ index) if len(logs) > 1 else math.nan,
    }[name]
    if math.isnan(expected):
        need(math.isnan(ours), "a value where there is none")
    else:
        near(ours, expected, 1e-4 * rank * max(1, abs(expected)))
    return "right"


def check_twonn(x: Array, ours: float) -> str:
    x = np.unique(x, axis=0)
    if len(x) < 3:
        need(math.isnan(ours), "a value where there is none")
        return "right"
    r = np.sort(distances(x), axis=1)[:, :2]
    if (r[:, 0] < 1e-140).any():
        return "finite"
    total = np.log(r[:, 1] / r[:, 0]).sum()
    if total < 1e-9 * len(x):
        need(math.isnan(ours) or ours > 0, "negative")
        return "finite"
    near(ours, (len(x) - 1) / total, 1e-7 * (len(x) - 1) / total * (1 + len(x) / total))
    return "right"


def check_lidar(draw: Draw, n: int, d: int) -> str:
    views = int(draw.integers(2, 5))
    scale = 10 ** draw.uniform(-30, 30)
    x = torch.tensor(draw.normal(size=(n, 1, d)) + 0.5 * draw.normal(size=(n, views, d))) * scale
    if draw.random() < 0.05:
        x[0, 0, 0] = math.nan
        need(math.isnan(quality.lidar(x)), "NaN is hidden")
        return "shown"
    ours = quality.lidar(x)
    exact = x.numpy() / scale
    means = exact.mean(1)
    off, within = means - means.mean(0), (exact - means[:, None]).reshape(-1, d)
    noise = within.T @ within / len(within) + 1e-4 / scale / scale * np.eye(d)
    level = max(1.0, np.abs(noise).max())  # at small scales δ is everything
    found = np.linalg.eigvals(np.linalg.solve(noise / level, off.T @ off / n)).real.clip(0)
    p = np.where(found > 1e-13 * found.max(), found, 0) / found.sum() + 1e-7
    most = min(d, n)
    p = np.sort(p)[::-1][:most]
    near(ours, np.exp(-(p * np.log(p)).sum()), 2e-3 * most)
    return "right"


# ---- the estimator ----


def check_detector(draw: Draw) -> str:
    settings: dict[str, Any] = {}
    kind = str(
        draw.choice(["auto", "plain", "rbf", "laplacian", "linear", "polynomial", "cosine"], p=[0.4, *[0.1] * 6])
    )
    if kind != "auto":
        settings["n_neighbors"] = int(draw.integers(2, 12))
    if kind not in ("auto", "plain"):
        settings["kernel"] = kind
    detector = curvssl.CurvatureOutlierDetector(**settings)
    bad = draw.integers(40)
    x = draw.normal(size=(20, 3))
    wrong: dict[int, Any] = {
        0: WRONG[draw.integers(4)],
        1: np.where(np.arange(60).reshape(20, 3) == 7, draw.choice([math.nan, math.inf]), x),
        2: x[: draw.integers(0, 3)],
        3: x[0],
        4: x[:, :0],
        5: x.astype(complex),
    }
    if bad in wrong:
        return refused(lambda: detector.fit(wrong[bad]))
    if bad == 6:
        broken: list[dict[str, Any]] = [{"n_neighbors": 1}, {"n_neighbors": 2.5}, {"contamination": 0.0}, {"gamma": -1.0,
            "kernel": "rbf", "n_neighbors": 3}, {"n_neighbors": 3, "kernel": "gauss"}, {"contamination": math.nan}]  # fmt: skip
        return refused(lambda: curvssl.CurvatureOutlierDetector(**broken[draw.integers(len(broken))]).fit(x))
    n, d = int(draw.integers(13, 50)), int(draw.integers(1, 6))
    x = numbers(draw, n, d, most=float(draw.choice([30.0, 140.0]))).clip(-1e300, 1e300)
    far = np.sign(draw.normal(size=(2, d))) * 10.0 ** draw.integers(100, 300)
    try:
        detector.fit(x[::-1] if draw.random() < 0.2 else np.asfortranarray(x))
        new = detector.decision_function(far)
    except ValueError as error:
        need("is not finite" in str(error) and kind in ("polynomial", "cosine", "linear"), f"refused: {error}")
        return "refused"
    need(np.isfinite(detector.scores_).all() and np.isfinite(new).all(), "scores are not finite")
    if kind == "auto" and np.abs(x).max() < 1e80 and np.ptp(x) > 0:
        need((detector.predict(far) == -1).all(), "a point at 1e100 is an inlier")
    again = detector.fit(x).scores_.copy()
    if kind in ("polynomial", "cosine"):
        return "finite"
    power = 2.0 ** int(draw.integers(-60, 60))
    other = detector.fit(x * power).scores_
    if np.abs(x).min() > 1e-280:
        near(other, again, 1e-9 * (1 + np.abs(again)), "score of rescaled rows")
    exact = x.astype(np.longdouble)
    every = distances(exact)
    last = np.sort(every, axis=1)
    if kind == "auto":
        return check_equation(detector, exact, every, other, last)
    if kind != "plain":
        return "right"
    k = min(settings["n_neighbors"], n - 1)
    gap = (last[:, k] - last[:, k - 1]) / last[:, k] if k < n - 1 else np.ones(n)
    sure = (gap > 1e-6) & (last[:, 0] > 1e-7 * np.sqrt(np.square(exact - np.median(exact, axis=0)).sum(1).max())
                           / max(np.abs(exact).max(), np.longdouble(10) ** -4000))  # fmt: skip
    found = cosines_of(exact, np.argsort(every, axis=1)[:, :k], 0.0)
    near(again[sure], -found.sums[sure], 1e-7 * k**2)
    return "right"


def check_equation(detector: Any, x: Array, every: Array, ours: np.ndarray, last: Array) -> str:
    """The default score, neighbourhood by neighbourhood; ties and twins left out."""
    off = np.abs(x - np.median(x, axis=0))
    typical = np.median(off[off > 0]) if off.any() else 1
    reach = np.sqrt(np.square(x - np.median(x, axis=0)).sum(1))
    if (
        last[:, 0] * max(np.abs(x).max(), np.longdouble(10) ** -4000) < 1e-6 * reach
    ).any() or reach.max() > 1e139 * typical:
        return "finite"  # rounding makes twins of such points, as documented
    total: Array = 0
    for k in detector.n_neighbors_:
        if k < len(x) - 1 and ((last[:, k] - last[:, k - 1]) < 1e-7 * last[:, k]).any():
            return "finite"
        edges = (x[np.argsort(every, axis=1)[:, :k]] - x[:, None]) / max(np.abs(x).max(), np.longdouble(10) ** -4000)
        spread = np.sqrt(pairs_of(edges))
        if not np.median(spread):
            return "finite"  # most points are twins: another scale is used
        total = total - spread / np.median(spread)
    near(ours, total / len(detector.n_neighbors_), 1e-6 * np.abs(total))
    return "right"


def pairs_of(edges: Array) -> Array:
    """Mean over a < b of ⟨e_a, e_b⟩ + ‖e_a − e_b‖², pair by pair, (n, k, d) → (n,)."""
    k = edges.shape[1]
    first, second = np.triu_indices(k, 1)
    a, b = edges[:, first], edges[:, second]
    return ((a * b).sum(-1) + np.square(a - b).sum(-1)).mean(1)


CHECKS: dict[str, tuple[Callable[[Draw], str], int]] = {  # and their shares of the cases
    "nearest_neighbors": (check_neighbors, 15),
    "curvature": (check_curvature, 15),
    "kernel_curvature": (check_kernel_curvature, 12),
    "polyhedron_curvature": (check_polyhedron, 6),
    "angular_defect": (check_defect, 5),
    "kernels": (check_kernels, 8),
    "BarlowTwinsLoss": (check_barlow, 8),
    "Curvature": (check_curvature_loss, 8),
    "CurvSSLLoss and KernelCurvSSLLoss": (check_whole_losses, 4),
    "VICRegLoss": (check_vicreg, 5),
    "Chord": (check_chord, 4),
    "blend": (check_blend, 2),
    "measures without labels": (check_measures, 5),
    "CurvatureOutlierDetector": (check_detector, 3),
}


NAMES = [name for name, (_, share) in CHECKS.items() for _ in range(share)]


def case(i: int, *, seed: int) -> tuple[str, Callable[[], str]]:
    """The function of case i, and its check. It does not depend on the number of cases."""
    draw = np.random.default_rng((seed, i))
    name = NAMES[draw.integers(len(NAMES))]
    return name, lambda: CHECKS[name][0](draw)


def run(cases: int, *, seed: int) -> tuple[dict[str, Counter[str]], list[dict[str, Any]]]:
    """Outcomes by function, and what went wrong."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in CHECKS}
    faults = []
    for i in range(cases):
        name, check = case(i, seed=seed)
        try:
            with np.errstate(all="ignore"):
                counts[name][check()] += 1
        except Exception as error:
            counts[name]["FAULT"] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {(str(error) or ' ').splitlines()[0]}"
            faults.append({"case": i, "function": name, "what": f"{what} ({Path(where.filename).name}:{where.lineno})"})
    return counts, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case, with its traceback")
    parser.add_argument("--out", type=Path, default=Path("results/fuzz.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only is not None:
        print(case(arguments.only, seed=arguments.seed)[1]())
        return
    started = time.monotonic()
    counts, faults = run(arguments.cases, seed=arguments.seed)
    outcomes = ("right", "refused", "shown", "finite", "FAULT")
    print(f"{'':36}" + "".join(f"{outcome:>9}" for outcome in outcomes))
    for name, found in counts.items():
        print(f"{name:36}" + "".join(f"{found[outcome]:9}" for outcome in outcomes))
    for fault in faults[:50]:
        print(fault)
    result = {"counts": {name: {o: found[o] for o in outcomes} for name, found in counts.items()}, "faults": faults}
    facts = {"cases": arguments.cases, "seed": arguments.seed, "seconds": round(time.monotonic() - started)}
    write_json(arguments.out, facts | result | {"provenance": provenance(device="CPU")})
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
