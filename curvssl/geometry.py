"""Discrete curvature of points: neighbours, curvature scores, their kernel form, and the angular defect behind them.

Tensors in, tensors out. The public functions take one set of points (n, d): a tensor, an array or lists of numbers.
Integers are computed in float64. Points that are not finite are refused on CPU; on other devices the host would have to
wait for the values, so there the results are NaN. The losses use the functions below them, such as `scores`: these take
v sets at once (the two views of a batch) and the points of all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from operator import index
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from curvssl.kernels import (
    AnyKernel,
    Kernel,
    centre,
    directions,
    inverse_root,
    kernel_width,
    linear,
    product,
    rescaling,
    rescaling_with_gradient,
    resolve,
    scale_free,
    squared_distances,
    unit,
)

GRAM_POINTS = 2048  # up to here one Gram matrix of all points (16 MB) is cheaper than one for each neighbourhood
GROUP = 32  # size of the groups whose minima are compared first in a long row of distances


def nearest_neighbors(x: Tensor, *, k: int = 10) -> Tensor:
    """The k nearest neighbours of each row of x (n, d) by Euclidean distance, nearest first, (n, k) int64.

    A point is not its own neighbour, by its index: two equal points are neighbours of each other. Each block of rows
    is ranked by one matrix product, so memory grows as n. That product loses digits where points are close to each
    other and far from the centre. So it only selects candidates, and their exact distances decide. On CPU, a row that
    may have missed a neighbour is searched again in float64 and, if that is not sure either, without the product.
    """
    x = _points(x, k=k, least=1).detach()
    everyone = torch.arange(len(x), device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        if not readable(x):
            # To select rows for a second search the host must read results, which a compiled or captured step may not.
            return _search(x, everyone, k=k, dtype=_widest(x), rank=_euclidean)[0]
        index, left = everyone.new_empty(len(x), k), everyone
        products = [(dtype, _euclidean) for dtype in dict.fromkeys((x.dtype, torch.float64))]
        for dtype, rank in [*products, (torch.float64, _by_difference)]:
            index[left], sure = _search(x, left, k=k, dtype=dtype, rank=rank)
            left = left[~sure]
            if not len(left):
                break
    return index


def curvature(x: Tensor, *, k: int = 10, neighbors: Tensor | None = None) -> Tensor:
    """Sum of cosines over the pairs of edges that leave each point, Eq. (6), (n, d) → (n,).

        c_i = Σ_{a<b} ⟨u_ia, u_ib⟩,   u_ia = (x_a − x_i) / ‖x_a − x_i‖

    Edges that cancel each other give −k/2; parallel edges give k(k−1)/2. An edge to an equal point is zero and
    contributes nothing. So does one shorter than 2e-34 in float32: its gradient would overflow. With `neighbors` (n, k)
    no search is made.
    """
    x = _points(x, k=k, neighbors=neighbors)
    if neighbors is None:
        neighbors = nearest_neighbors(x, k=k)
    return scores(x[None], x[None], neighbors=neighbors[None])[0]


def kernel_curvature(
    x: Tensor,
    *,
    k: int = 10,
    kernel: AnyKernel = "rbf",
    gamma: float | str = "median",
    neighbors: Tensor | None = None,
) -> Tensor:
    """Curvature in the kernel's feature space, Eq. (10), (n, d) → (n,): neighbours by the distance of Eq. (8), then

        c_i = Σ_{a<b} k(e_a, e_b) / √(k(e_a, e_a) k(e_b, e_b)),   e_a = x_a − x_i

    `kernel` is a name or a function of curvssl.kernels (rbf, laplacian, linear, polynomial, cosine), a `Kernel`, or a
    callable (a, b) → Gram matrix over batches of rows. `gamma` is a number, "median", "scale" or "auto" (see
    `kernel_width`). The linear kernel gives the same as `curvature`. On CPU all is computed in float64: the distances
    come from a matrix product, which in float32 loses those below a thousandth of the largest. Points that are all
    within 2e-34 of zero in float32 count as equal, if γ is taken from them: the gradient would overflow.
    """
    chosen = resolve(kernel)
    given = _points(x, k=k, neighbors=neighbors, edges=False)
    with torch.autocast(given.device.type, enabled=False):
        x = given[None].to(torch.float64 if given.device.type == "cpu" else given.dtype)
        if scale_free(chosen, gamma):
            x = x * rescaling_with_gradient(given[None], (1, 2))
        width = kernel_width(x, kernel=chosen, gamma=gamma)
        if neighbors is None and chosen.distance is squared_distances:
            neighbors = nearest_neighbors(x[0], k=k)
        elif neighbors is None:
            neighbors = kernel_neighbors(x, x, k=k, kernel=chosen, width=width)[0]
        found = kernel_scores(x, x, kernel=chosen, width=width, neighbors=neighbors[None])[0].to(given.dtype)
    if readable(found) and not found.isfinite().all():
        raise ValueError(
            f"the kernel of points up to {given.abs().max():.3g} is not finite: scale them down, or use gamma='median'"
        )
    return found


def polyhedron_curvature(x: Tensor, neighbors: Tensor) -> Tensor:
    """Sum of the cosines of the face angles at each vertex, Eq. (5), (n, d) → (n,).

        c_i = Σ_a ⟨u_a, u_{a+1}⟩,   u_{k+1} = u_1

    `neighbors` (n, k) go around the vertex in order: two consecutive ones share a face.
    """
    x = _points(x, neighbors=neighbors)
    u = unit(_edges(x[None], x[None], neighbors[None])[0])  # (n, k, d)
    return (u * u.roll(-1, dims=1)).sum((1, 2))


def angular_defect(vertices: Tensor, faces: Sequence[Sequence[int]] | Tensor) -> Tensor:
    """Descartes's defect 2π − Σ τ at each vertex of a polyhedral mesh, Eq. (2), (v, d) → (v,).

    Each face lists its vertices in order. On a closed mesh the defects sum to 2π(v − e + f), Eq. (3): 4π on a sphere, 0
    on a torus.
    """
    vertices = _points(vertices)
    defect = torch.full_like(vertices[:, 0], 2 * torch.pi)
    by_length: dict[int, list[list[int]]] = {}
    for face in _lists(faces):
        if len(face) < 3:
            raise ValueError(f"face {list(face)} has {len(face)} vertices: a polygon needs 3 or more")
        if not 0 <= min(face) <= max(face) < len(vertices):
            raise ValueError(f"face {list(face)} has vertices outside 0 … {len(vertices) - 1}: number them from 0")
        by_length.setdefault(len(face), []).append(list(face))
    for group in by_length.values():
        corners = torch.tensor(group, device=vertices.device)  # (f, m)
        at = vertices[corners]
        to_next, to_last = unit(at.roll(-1, 1) - at), unit(at.roll(1, 1) - at)
        # 2·atan2(‖u−v‖, ‖u+v‖) keeps its digits near 0 and π, where arccos ⟨u, v⟩ loses them.
        angles = 2 * torch.atan2((to_next - to_last).norm(dim=-1), (to_next + to_last).norm(dim=-1))
        defect = defect.index_add(0, corners.flatten(), -angles.flatten())
    return defect


def _lists(faces: Any) -> Iterator[list[int]]:
    """Each face as a list of row numbers."""
    try:
        for face in faces.tolist() if isinstance(faces, Tensor | np.ndarray) else faces:
            yield [index(vertex) for vertex in face]
    except TypeError as error:
        raise ValueError(f"faces are not lists of vertex numbers ({error}): needed [[0, 1, 2], …]") from error


# ---- v sets of points at once; the b queries are rows first, first+1, … of the n points; first=None: other points ----


def neighbors_of(queries: Tensor, points: Tensor, *, k: int, first: int | None = 0, centred: bool = False) -> Tensor:
    """Indices (v, b, k) of each query's nearest points by Euclidean distance; rounding decides between near-ties.

    Points that are `centred` already are taken as they are: their mean may be far from most of them.
    """
    scale = rescaling(points, (1, 2))  # of the squares, too
    queries, points = queries.detach() * scale, points.detach() * scale
    if not centred:  # with a common offset the matrix product would lose digits
        middle = points.mean(1, keepdim=True)
        queries, points = queries - middle, points - middle
    # ‖p‖² − 2⟨q, p⟩ by one product: ‖p‖² is one more dimension, in which a query is 1. To add it separately costs a
    # pass over all distances. Products are fastest if the row length is a multiple of 4.
    spare = 3 - points.shape[-1] % 4
    q = F.pad(F.pad(-2 * queries, (0, 1), value=1.0), (0, spare))
    p = F.pad(torch.cat((points, points.square().sum(-1, keepdim=True)), -1), (0, spare))
    return _nearest(q, p, k=k, first=first, rank=lambda q, p: product(q, p.mT))


def scores(queries: Tensor, points: Tensor, *, neighbors: Tensor) -> Tensor:
    """Eq. (6) for v sets: (v, b, d), (v, n, d), (v, b, k) → (v, b)."""
    u, exists = directions(_edges(queries, points, neighbors))  # (v, b, k, d)
    # Σ_{a<b}⟨u_a,u_b⟩ = (‖Σu‖² − Σ‖u‖²)/2 is O(kd) per point, a Gram matrix O(k²d); ‖u‖² is 1, or 0 for a zero edge.
    return (u.sum(2).square().sum(-1) - exists.sum((2, 3))) / 2


def edge_scores(queries: Tensor, points: Tensor, *, neighbors: Tensor) -> Tensor:
    """Each edge's part of Eq. (6), ½ Σ_{b≠a} ⟨u_a, u_b⟩: (v, b, d), (v, n, d), (v, b, k) → (v, b, k)."""
    u, exists = directions(_edges(queries, points, neighbors))
    return ((u * u.sum(2, keepdim=True)).sum(-1) - exists[..., 0].to(u.dtype)) / 2


def kernel_neighbors(
    queries: Tensor,
    points: Tensor,
    *,
    k: int,
    kernel: Kernel,
    width: Tensor,
    first: int | None = 0,
    centred: bool = False,
) -> Tensor:
    """Indices (v, b, k) of the nearest points by ‖φ(x) − φ(y)‖² = k(x,x) − 2k(x,y) + k(y,y), Eq. (8)."""
    if kernel.distance is squared_distances:
        return neighbors_of(queries, points, k=k, first=first, centred=centred)
    queries, points = queries.detach(), points.detach()
    if kernel.distance is not None:
        return _nearest(queries, points, k=k, first=first, rank=kernel.distance)
    own = kernel(points[..., None, :], points[..., None, :], gamma=width[..., None])[..., 0, 0]  # (v, n)
    # k(x, x) is constant in a row, so it does not change the order.
    return _nearest(queries, points, k=k, first=first, rank=lambda q, p: own[:, None] - 2 * kernel(q, p, gamma=width))


def kernel_scores(queries: Tensor, points: Tensor, *, kernel: Kernel, width: Tensor, neighbors: Tensor) -> Tensor:
    """Eq. (10) for v sets: (v, b, d), (v, n, d), (v, b, k) → (v, b)."""
    k = neighbors.shape[-1]
    if kernel.centred:
        # The centre cancels in e_a − e_b, so the local Gram matrix is a submatrix of the points' Gram matrix.
        if queries.shape[1] == points.shape[1] <= GRAM_POINTS:
            around = centre(points)
            gram = kernel(around, around, gamma=width)  # (v, n, n)
            rows = neighbors[..., None].expand(*neighbors.shape, k)  # (v, n, k, k)
            cell = (rows * points.shape[1] + rows.mT).flatten(1)
            local = gram.flatten(1).gather(1, cell).view(rows.shape)
        else:
            around = _edges(queries.detach(), points, neighbors)
            local = kernel(around, around, gamma=width[..., None])
        return (local.sum((2, 3)) - local.diagonal(dim1=2, dim2=3).sum(-1)) / 2
    edges = _edges(queries, points, neighbors)
    if kernel.gram is linear:  # only directions matter, and squares of edges far shorter than the points would be 0
        edges = unit(edges)
    local = kernel(edges, edges, gamma=width[..., None])  # K, (v, b, k, k)
    scale = inverse_root(local.diagonal(dim1=2, dim2=3))
    local = local * scale[..., :, None] * scale[..., None, :]  # K', Eq. (9)
    return (local.sum((2, 3)) - local.diagonal(dim1=2, dim2=3).sum(-1)) / 2


def _edges(queries: Tensor, points: Tensor, neighbors: Tensor) -> Tensor:
    """x_a − x_i, (v, b, d), (v, n, d), (v, b, k) → (v, b, k, d)."""
    v, n, d = points.shape
    flat = (neighbors + n * torch.arange(v, device=points.device)[:, None, None]).flatten()
    # index_select, because its gradient is one index_add; the gradient of points[neighbors] sorts the indices first.
    return points.reshape(v * n, d).index_select(0, flat).view(*neighbors.shape, d) - queries[:, :, None]


def _euclidean(queries: Tensor, points: Tensor) -> Tensor:
    """‖p‖² − 2⟨q, p⟩: the squared distance without ‖q‖², which does not change the order in a row."""
    return product(-2 * queries, points.mT).add_(points.square().sum(-1)[:, None])  # in place: it may take a gigabyte


def _by_difference(queries: Tensor, points: Tensor) -> Tensor:
    """‖q − p‖ from the differences, which lose no digits."""
    return torch.cdist(queries, points, compute_mode="donot_use_mm_for_euclid_dist")


@torch.no_grad()
def _nearest(
    queries: Tensor, points: Tensor, *, k: int, first: int | None, rank: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Indices (v, b, k) of the points with the smallest `rank`, computed in blocks of rows."""
    own = None if first is None else torch.arange(first, first + queries.shape[1], device=points.device)
    indices = []
    for rows in _blocks(queries, points.shape[1]):
        distance = rank(queries[:, rows], points)
        indices.append(_best(distance, None if own is None else own[rows], k=k)[1])
    return torch.cat(indices, 1)


@torch.no_grad()
def _search(
    x: Tensor, own: Tensor, *, k: int, dtype: torch.dtype, rank: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Neighbours (b, k) of the rows `own` of x (n, d), and (b,) whether no nearer point can have been missed.

    `rank` in `dtype` selects 2k candidates per row, and their differences in float64 decide the order. In units of the
    rounding error ε/2 a product is wrong by at most (d+4)(‖q‖+‖p‖)² ≤ (d+4)(8‖q‖² + 2‖q−p‖²). This bounds how near a
    point outside the candidates can be.
    """
    n, d = x.shape
    scale = rescaling(x, (0, 1))
    points = x.to(dtype) * scale.to(dtype)
    if rank is _euclidean:
        # Most points are near the median, so the norms that cancel are small; one outlier would move the mean far away.
        points = points - points.median(0).values
    points = points[None]
    slack = (d + 4) * torch.finfo(dtype).eps / 2
    lost = (d + 4) * torch.finfo(dtype).tiny  # what the products of the smallest numbers leave out
    indices, sure = [], []
    for rows in _blocks(own[None], max(n, 4 * k * d), dtype=dtype):
        queries = points[:, own[rows]]
        values, index = _best(rank(queries, points), own[rows], k=min(2 * k, n - 1))
        wide = _widest(x)
        edges = x[index[0]].to(wide) * scale.to(wide) - x[own[rows], None].to(wide) * scale.to(wide)
        square, order = edges.square().sum(-1).sort(stable=True)
        indices.append(index[0].gather(1, order[:, :k]))
        norm = queries[0].square().sum(-1)
        least_missed = (values[0, :, -1] + norm - 8 * slack * norm - lost) / (1 + 2 * slack)
        found = (square[:, k - 1] <= least_missed) | (square[:, k - 1] == 0)
        sure.append(found | (n - 1 <= 2 * k) | (rank is _by_difference))
    return torch.cat(indices), torch.cat(sure)


def _best(distance: Tensor, own: Tensor | None, *, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest distances of each row of (v, b, n) and their indices, without a query's distance to itself."""
    if own is not None:
        distance.scatter_(2, own[None, :, None].expand(len(distance), -1, 1), torch.inf)
    n = distance.shape[-1]
    if n < 4 * GROUP * k:
        values, index = distance.topk(k, largest=False)
        return values, index
    # topk takes longer than the matrix product, minima far less. The k groups with the smallest minima contain the k
    # smallest values: these k minima are already ≤ every value of any other group. Group j is j, j + m, j + 2m, …
    m = n // GROUP
    groups = distance[..., : m * GROUP].unflatten(-1, (GROUP, m)).amin(-2).topk(k, largest=False).indices
    inside = (groups[..., None] + m * torch.arange(GROUP, device=distance.device)).flatten(-2)
    rest = torch.arange(m * GROUP, n, device=distance.device).expand(*inside.shape[:-1], -1)
    candidates = torch.cat((inside, rest), -1)
    values, index = distance.gather(-1, candidates).topk(k, largest=False)
    return values, candidates.gather(-1, index)


def _blocks(queries: Tensor, cells: int, *, dtype: torch.dtype = torch.float32) -> Iterator[slice]:
    """Slices of the rows of (v, b, …); a row takes `cells` numbers, a block 16 MB on CPU and 1 GB on an accelerator.

    A larger block does not fit into the cache. A block has at least 256 rows, because a product with fewer is slow.
    """
    room = (2**24 if queries.device.type == "cpu" else 2**30) // dtype.itemsize
    rows = max(256, room // (cells * len(queries)))
    for start in range(0, queries.shape[1], rows):
        yield slice(start, min(start + rows, queries.shape[1]))


def _widest(x: Tensor) -> torch.dtype:
    return x.dtype if x.device.type == "mps" else torch.float64  # mps has no float64


def readable(x: Tensor) -> bool:
    """Whether the host may read values: on other devices it would wait, and traced tensors (a subclass) have none."""
    return x.device.type == "cpu" and type(x.detach()) is Tensor and not torch.compiler.is_compiling()


def _points(x: Any, *, k: int | None = None, least: int = 2, neighbors: Any = None, edges: bool = True) -> Tensor:
    """x as rows of at least float32, after the checks that all functions here share. With `edges`, only the directions
    of the edges matter, so points whose edges would overflow are divided by 4."""
    x = _tensor(x)
    if x.ndim != 2:
        raise ValueError(f"expected points as rows, (n, d), got shape {tuple(x.shape)}: reshape them")
    if x.is_complex() or x.layout != torch.strided or x.is_quantized:
        kind = "complex" if x.is_complex() else "sparse or quantised"
        raise ValueError(f"points are {kind} ({x.dtype}, {x.layout}): needed real numbers in a dense tensor")
    if not x.shape[1]:
        raise ValueError(f"points have shape {tuple(x.shape)}: needed one dimension or more")
    if neighbors is not None:
        _check_neighbors(neighbors, n=len(x))
    elif k is not None:
        check_k(k, n=len(x), least=least)
    exact = torch.float32 if x.is_floating_point() or x.device.type == "mps" else torch.float64
    x = x.to(torch.promote_types(x.dtype, exact)).contiguous()  # ties are broken the same way in every memory layout
    if readable(x) and x.numel():
        low, high = x.detach().aminmax()
        if not (low.isfinite() and high.isfinite()):
            raise ValueError(f"points hold values from {low} to {high}: needed finite numbers, so leave those rows out")
        if edges and not (high - low).isfinite():
            x = x / 4
    return x


def _tensor(x: Any) -> Tensor:
    """x as a tensor, also if it is an array with negative strides or of another byte order, or lists of numbers."""
    if isinstance(x, Tensor):
        return x
    try:
        array = np.asarray(x)
        wanted = array.dtype.newbyteorder("=") if array.dtype.kind in "biufc" else None
        return torch.from_numpy(np.require(array, wanted, ["C", "W"]))
    except (TypeError, ValueError, RuntimeError) as error:
        came = f"array of {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
        raise ValueError(f"points are of type {came}: needed a tensor or an array of numbers, (n, d)") from error


def _check_neighbors(neighbors: Any, *, n: int) -> None:
    if not isinstance(neighbors, Tensor):
        raise ValueError(f"neighbors are of type {type(neighbors).__name__}: needed a tensor of row numbers, int64")
    if neighbors.ndim != 2 or len(neighbors) != n or neighbors.shape[1] < 2:
        raise ValueError(
            f"neighbors have shape {tuple(neighbors.shape)}: needed ({n}, k), one row a point, k of 2 or more"
        )
    if neighbors.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"neighbors are {neighbors.dtype}: needed the rows' numbers, int64")
    if readable(neighbors) and neighbors.numel():
        low, high = neighbors.aminmax()
        if low < 0 or high >= n:
            raise ValueError(f"neighbors are {low} … {high}: needed row numbers of x, 0 … {n - 1}")


def check_k(k: int, *, n: int, least: int = 2) -> None:
    if not isinstance(k, Integral):
        raise ValueError(f"k={k!r} is no number of neighbours: use an integer")
    if k >= n:
        raise ValueError(f"k={k} needs at least {k + 1} points, got {n}: lower k or raise the batch size")
    if k < least:
        raise ValueError(f"k={k} has no {'pair of neighbours' if least == 2 else 'neighbour'}: use {least} or more")
