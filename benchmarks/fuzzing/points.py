"""Neighbours, curvatures, kernels and the estimator against their equations in extended precision."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import curvssl
from curvssl import kernels
from curvssl.kernels import KERNELS
from fuzzing.inputs import (
    WRONG,
    Array,
    Draw,
    eps_of,
    floor_of,
    laid_out,
    long,
    near,
    need,
    numbers,
    refused,
    spoilt,
    values,
)


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
    need(x.dtype == torch.float16 or gradient.isfinite().all(), "gradient is not finite")  # it may not fit into float16
    if x.dtype in (torch.float32, torch.float64) and not unsure:
        close, allowed = expected.gradient(long(weights), eps=eps_of(x))
        near(gradient, close, allowed, "gradient")
    return "right"


class CosinesOf:
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


def cosines(x: Tensor, neighbors: Tensor) -> tuple[CosinesOf, bool]:
    found = CosinesOf(long(x), neighbors.numpy(), floor_of(x))
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
    if spread > 0:
        return 1 / spread
    # Most points are equal: 1, in units of the power of two below the largest number.
    unit = np.longdouble(2) ** -np.floor(np.log2(np.abs(x).max())) if x.any() else np.longdouble(1)
    return unit if name == "laplacian" else unit**2


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
    fits = x.dtype != torch.float16 and scale_free_gradient(exact, gamma)
    need(gradient.isfinite().all() or not fits, "gradient is not finite")
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
    if name == "linear" and (own[own > 0] < (1e-290 * np.abs(exact).max()) ** 2).any():
        return "finite"  # these edges leave float64 when the points are of order one
    live = own > 0
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
    (gradient,) = torch.autograd.grad(c.sum(), x)
    need(x.dtype == torch.float16 or gradient.isfinite().all(), "gradient is not finite")
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
    (gradient,) = torch.autograd.grad(defect.sum(), x)
    need(x.dtype == torch.float16 or gradient.isfinite().all(), "gradient is not finite")
    return "right"


def check_kernels(draw: Draw) -> str:
    name = str(draw.choice([*KERNELS, "unit"]))
    n, m, d = (int(draw.integers(1, 12)) for _ in range(3))
    dtype = torch.float32 if draw.random() < 0.6 else torch.float64
    most = 30 if name in ("unit", "cosine") else 5 if name == "polynomial" else 15
    a, b = (torch.tensor(numbers(draw, rows, d, most=most)).to(dtype).requires_grad_() for rows in (n, m))
    if name == "unit":
        u, exact = kernels.unit(a), long(a)
        found = CosinesOf(np.concatenate((np.zeros_like(exact[:1]), exact)),
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
    beyond = np.abs(expected) > torch.finfo(dtype).max
    if beyond.any():
        need((k.detach().numpy()[beyond] == np.sign(expected[beyond]) * np.inf).all(), "neither right nor infinite")
        return "shown"
    near(k.detach(), expected, allowed + 1e-40)
    for gradient in torch.autograd.grad(k.sum(), (a, b)):
        need(gradient.isfinite().all(), "gradient is not finite")
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
        broken: list[dict[str, Any]] = [
            {"n_neighbors": 1},
            {"n_neighbors": 2.5},
            {"contamination": 0.0},
            {"contamination": math.nan},
            {"n_neighbors": 3, "kernel": "rbf", "gamma": -1.0},
            {"n_neighbors": 3, "kernel": "gauss"},
        ]
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
    if too_far(exact):
        return "finite"
    k = min(settings["n_neighbors"], n - 1)
    gap = (last[:, k] - last[:, k - 1]) / last[:, k] if k < n - 1 else np.ones(n)
    sure = (gap > 1e-6) & (last[:, 0] > 1e-7 * np.sqrt(np.square(exact - np.median(exact, axis=0)).sum(1).max())
                           / max(np.abs(exact).max(), np.longdouble(10) ** -4000))  # fmt: skip
    found = CosinesOf(exact, np.argsort(every, axis=1)[:, :k], 0.0)
    near(again[sure], -found.sums[sure], 1e-7 * k**2)
    return "right"


def too_far(x: Array) -> bool:
    """Whether a point is beyond 1e140 typical deviations, where the detector takes it for nearer."""
    off = np.abs(x - np.median(x, axis=0))
    return bool(off.any() and np.sqrt(np.square(off).sum(1)).max() > 1e139 * np.median(off[off > 0]))


def check_equation(detector: Any, x: Array, every: Array, ours: np.ndarray, last: Array) -> str:
    """The default score, neighbourhood by neighbourhood; ties and twins left out."""
    reach = np.sqrt(np.square(x - np.median(x, axis=0)).sum(1))
    if (last[:, 0] * max(np.abs(x).max(), np.longdouble(10) ** -4000) < 1e-6 * reach).any() or too_far(x):
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
