"""The paper's equations as slow, plain loops over float64 numbers, and solids whose curvature is known."""

from collections.abc import Callable
from itertools import product

import numpy as np

Array = np.ndarray
Pair = Callable[[Array, Array], float]  # k(x, y) of two vectors

GAMMA = 0.3
# Each kernel of two vectors, as textbooks write it.
PAIRS: dict[str, Pair] = {
    "rbf": lambda x, y: float(np.exp(-GAMMA * sum((s - t) ** 2 for s, t in zip(x, y, strict=True)))),
    "laplacian": lambda x, y: float(np.exp(-GAMMA * sum(abs(s - t) for s, t in zip(x, y, strict=True)))),
    "linear": lambda x, y: float(sum(s * t for s, t in zip(x, y, strict=True))),
    "polynomial": lambda x, y: float((GAMMA * sum(s * t for s, t in zip(x, y, strict=True)) + 1) ** 3),
    "cosine": lambda x, y: float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y))) if x.any() and y.any() else 0.0,
}


def nearest(x: Array, *, k: int, pair: Pair = PAIRS["linear"]) -> Array:
    """k-NN by √(k(x,x) − 2k(x,y) + k(y,y)), the Euclidean distance by default; never the point itself."""
    neighbors = []
    for i, xi in enumerate(x):
        distance = {j: pair(xi, xi) - 2 * pair(xi, xj) + pair(xj, xj) for j, xj in enumerate(x) if j != i}
        neighbors.append(sorted(distance, key=lambda j: distance[j])[:k])
    return np.array(neighbors)


def curvature(x: Array, *, neighbors: Array) -> Array:
    """Eq. (6): Σ_{a<b} of the cosines between edges; an edge of length zero has no direction and counts as zero."""
    c = np.zeros(len(x))
    for i, row in enumerate(neighbors):
        for a in range(len(row) - 1):
            for b in range(a + 1, len(row)):
                ea, eb = x[row[a]] - x[i], x[row[b]] - x[i]
                if ea.any() and eb.any():
                    c[i] += ea @ eb / (np.linalg.norm(ea) * np.linalg.norm(eb))
    return c


def polyhedron_curvature(x: Array, *, neighbors: Array) -> Array:
    """Eq. (5): the cyclic sum of cosines, the last edge followed by the first."""
    c = np.zeros(len(x))
    for i, row in enumerate(neighbors):
        for a in range(len(row)):
            ea, eb = x[row[a]] - x[i], x[row[(a + 1) % len(row)]] - x[i]
            c[i] += ea @ eb / (np.linalg.norm(ea) * np.linalg.norm(eb))
    return c


def kernel_curvature(x: Array, *, neighbors: Array, pair: Pair) -> Array:
    """Eq. (9) and (10): the normalised kernel of the edges, summed over a < b."""
    c = np.zeros(len(x))
    for i, row in enumerate(neighbors):
        for a in range(len(row) - 1):
            for b in range(a + 1, len(row)):
                ea, eb = x[row[a]] - x[i], x[row[b]] - x[i]
                own = pair(ea, ea) * pair(eb, eb)
                c[i] += pair(ea, eb) / np.sqrt(own) if own > 0 else 0
    return c


def barlow(a: Array, b: Array, *, weight: float, eps: float) -> float:
    """L_emb of two views (b, d): every entry of the cross-correlation matrix one by one."""
    a, b = (a - a.mean(0)) / (a.std(0) + eps), (b - b.mean(0)) / (b.std(0) + eps)
    loss = 0.0
    for u in range(a.shape[1]):
        for v in range(a.shape[1]):
            c = sum(a[i, u] * b[i, v] for i in range(len(a))) / len(a)
            loss += (c - 1) ** 2 if u == v else weight * c**2
    return loss


def curvature_loss(c0: Array, c1: Array, *, weight: float, eps: float) -> float:
    """L_curv of two views' scores (b,): every entry of the b × b matrix M one by one."""
    c0, c1 = (c0 - c0.mean()) / (c0.std() + eps), (c1 - c1.mean()) / (c1.std() + eps)
    loss = 0.0
    for i in range(len(c0)):
        for j in range(len(c0)):
            m = c0[i] * c1[j] / len(c0)
            loss += (m - 1) ** 2 if i == j else weight * m**2
    return loss


PHI = (1 + 5**0.5) / 2


def _cyclic(*numbers: float) -> list[tuple[float, ...]]:
    """All signs of three numbers, in their three cyclic orders."""
    signed = {tuple(s * t for s, t in zip(numbers, signs, strict=True)) for signs in product((1, -1), repeat=3)}
    return sorted({p[i:] + p[:i] for p in signed for i in range(3)})


def _around(axis: Array, points: Array, which: Array) -> list[int]:
    """`which` of the points, in order around the axis."""
    start = points[which[0]] - axis * (points[which[0]] @ axis) / (axis @ axis)
    side = np.cross(axis, start) / np.linalg.norm(axis)
    return sorted(which.tolist(), key=lambda j: np.arctan2(points[j] @ side, points[j] @ start))


class Solid:
    """A Platonic solid from its vertices and its dual's: each vertex of the dual is the direction of one face."""

    def __init__(self, vertices: list[tuple[float, ...]], dual: list[tuple[float, ...]]) -> None:
        self.vertices = x = np.array(vertices, dtype=float)
        outward = np.array(dual, dtype=float)
        height = outward @ x.T
        self.faces = [_around(n, x, np.flatnonzero(h > h.max() - 1e-9)) for n, h in zip(outward, height, strict=True)]
        self.edges = {frozenset(pair) for face in self.faces for pair in zip(face, face[1:] + face[:1], strict=True)}
        beside = [np.array([j for j in range(len(x)) if frozenset((i, j)) in self.edges]) for i in range(len(x))]
        self.neighbors = np.array([_around(x[i], x, near) for i, near in enumerate(beside)])


_TETRAHEDRON: list[tuple[float, ...]] = [(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)]
_ICOSAHEDRON = _cyclic(0, PHI, 1)
_DODECAHEDRON = _cyclic(1, 1, 1) + _cyclic(0, 1 / PHI, PHI)
SOLIDS = {
    "tetrahedron": Solid(_TETRAHEDRON, [(-x, -y, -z) for x, y, z in _TETRAHEDRON]),
    "cube": Solid(_cyclic(1, 1, 1), _cyclic(1, 0, 0)),
    "octahedron": Solid(_cyclic(1, 0, 0), _cyclic(1, 1, 1)),
    "dodecahedron": Solid(_DODECAHEDRON, _ICOSAHEDRON),
    "icosahedron": Solid(_ICOSAHEDRON, _DODECAHEDRON),
}


def torus(m: int, n: int) -> tuple[Array, list[list[int]]]:
    """A torus of revolution with m·n vertices and m·n faces, each a planar trapezoid."""
    around, along = np.meshgrid(np.arange(m) * 2 * np.pi / m, np.arange(n) * 2 * np.pi / n, indexing="ij")
    ring = 3 + np.cos(along)
    x = np.stack((ring * np.cos(around), ring * np.sin(around), np.sin(along)), -1).reshape(-1, 3)
    index = np.arange(m * n).reshape(m, n)
    after, above = np.roll(index, -1, 0), np.roll(index, -1, 1)
    return x, np.stack((index, after, np.roll(after, -1, 1), above), -1).reshape(-1, 4).tolist()
