"""Neighbours and curvature of one batch as hand-written GPU kernels: a few launches where geometry.py needs a dozen.

They replace `losses.Curvature` for float32 batches that are small enough (see `numbers`). geometry.py and losses.py
define what is computed; the tests compare the two. Distances are sums of squared differences, so a common offset costs
no digits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from curvssl.collectives import world_size
from curvssl.gpu.driver import leave_room
from curvssl.kernels import KERNELS, MEDIAN_POINTS, kernel_width
from curvssl.losses import Curvature, Loss

POINTS = 1024  # the distances to this many points fit into one warp's registers
WIDTH = 2048  # dimensions; with more, geometry.py's matrix products are used
NEIGHBORS = 16
UNROLL = tl.constexpr(4)
TILE = 32  # a program computes TILE × TILE distances, DEPTH dimensions at a time
DEPTH = 16
RBF_WIDE = 32  # dimensions that the RBF kernel processes at a time

TINY = tl.constexpr(torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps)  # as in kernels.inverse_root
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
LAST = tl.constexpr(2**31 - 1)
EXACT = tl.constexpr("tf32x3")  # three TF32 products on the matrix units are as exact as one in float32


def fits(x: Tensor, *, k: int) -> bool:
    """Whether the kernels support these v sets of points (v, n, d)."""
    return x.is_cuda and x.dtype == torch.float32 and x.shape[1] <= POINTS and x.shape[2] <= WIDTH and k <= NEIGHBORS


@triton.jit
def _distances(x_ptr, distance_ptr, n, d, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """Squared distances between two tiles of points of the same view, written for both directions."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    points = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) <= tl.program_id(1):  # the other programs leave the multiprocessors to other kernels
        x_ptr += tl.program_id(2) * n * d
        distance_ptr += tl.program_id(2) * n * n
        squares = tl.zeros((TILE, TILE, DEPTH), tl.float32)
        for start in tl.range(0, d, DEPTH, loop_unroll_factor=UNROLL):
            column = start + tl.arange(0, DEPTH)
            inside = (column < d)[None, :]
            q = tl.load(x_ptr + rows[:, None] * d + column[None, :], (rows < n)[:, None] & inside, other=0.0)
            p = tl.load(x_ptr + points[:, None] * d + column[None, :], (points < n)[:, None] & inside, other=0.0)
            edge = p[None, :, :] - q[:, None, :]
            squares += edge * edge
        distance = tl.sum(squares, 2)
        live = (rows < n)[:, None] & (points < n)[None, :]
        tl.store(distance_ptr + rows[:, None] * n + points[None, :], distance, live)
        tl.store(distance_ptr + points[None, :] * n + rows[:, None], distance, live)


@triton.jit
def _select(
    x_ptr, distance_ptr, index_ptr, sum_ptr, score_ptr, median_ptr, n, d, SCORE: tl.constexpr, STEP: tl.constexpr,
    K: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One point's K nearest neighbours. With SCORE also its S = Σ_a u_a and c = (‖S‖² − Σ_a ‖u_a‖²) / 2. With STEP,
    for every STEP-th point, also the median of its distances to the other such points, as bits."""
    row, view = tl.program_id(0), tl.program_id(1)
    points = tl.arange(0, N)
    a = tl.arange(0, PAD)
    here = view * n + row
    distance = tl.load(distance_ptr + here * n + points, points < n, other=0.0)
    # Non-negative floats sort like their bits. NaN sorts last, but before points that are taken already (LAST).
    bits = tl.minimum(distance.to(tl.int32, bitcast=True), LAST - 1)
    bits = tl.where((points < n) & (points != row), bits, LAST)
    left = bits
    index = tl.zeros((PAD,), tl.int32)
    for i in tl.static_range(K):
        nearest = tl.min(tl.where(left == tl.min(left), points, N))
        left = tl.where(points == nearest, LAST, left)
        index = tl.where(a == i, nearest, index)
    tl.store(index_ptr + here * K + a, index, a < K)
    if STEP > 0:  # noqa: SIM102 — Triton would evaluate both sides of an `and`
        if row % STEP == 0:
            count = tl.cdiv(n, STEP)
            middle = _middle(tl.where(points % STEP == 0, bits, LAST), count)
            tl.store(median_ptr + view * count + row // STEP, middle)
    if SCORE:
        x_ptr += view * n * d
        live = a < K
        square = tl.zeros((PAD,), tl.float32)
        for start in range(0, d, WIDE):
            edge = _edges(x_ptr, row, index, live, start + tl.arange(0, WIDE), d)
            square += tl.sum(edge * edge, 1)
        inverse = _inverse_root(square, live)
        norm = 0.0
        for start in range(0, d, WIDE):
            dims = start + tl.arange(0, WIDE)
            total = tl.sum(_edges(x_ptr, row, index, live, dims, d) * inverse[:, None], 0)
            tl.store(sum_ptr + here * d + dims, total, dims < d)
            norm += tl.sum(total * total)
        tl.store(score_ptr + here, (norm - tl.sum(tl.where(inverse > 0, 1.0, 0.0))) / 2)


@triton.jit
def _edges(x_ptr, row, index, live, dims, d):
    """Some dimensions of a point's edges to its neighbours: (PAD, WIDE), all loads in flight at once."""
    centre = tl.load(x_ptr + row * d + dims, dims < d, other=0.0)
    mask = live[:, None] & (dims < d)[None, :]
    neighbors = tl.load(x_ptr + index[:, None] * d + dims[None, :], mask, other=0.0)
    return tl.where(mask, neighbors - centre[None, :], 0.0)


@triton.jit
def _inverse_root(square, live):
    """1/√, or 0 for an edge without a direction."""
    zero = (square <= TINY) | ~live
    return tl.where(zero, 0.0, 1 / tl.sqrt(tl.where(zero, 1.0, square)))


@triton.jit
def _middle(bits, n):
    """The lower median of n non-negative floats given as bits, built bit by bit from the highest."""
    median = 0
    for i in tl.static_range(31):
        larger = median + (1 << (30 - i))
        median = tl.where(tl.sum((bits < larger).to(tl.int32)) < (n - 1) // 2 + 1, larger, median)
    return median


@triton.jit
def _weigh(weight_ptr, gradient_ptr, place, n):
    """The gradient of the weighted sum of the two terms for one score, from the terms' gradients (2, 2, n)."""
    first, second = tl.load(gradient_ptr + place), tl.load(gradient_ptr + 2 * n + place)
    return tl.load(weight_ptr) * first + tl.load(weight_ptr + 1) * second


@triton.jit
def _score_gradient(
    weight_ptr, gradient_ptr, x_ptr, index_ptr, sum_ptr, out_ptr, n, d,
    K: tl.constexpr, PAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """∂c/∂e_a = (S − u_a ⟨u_a, S⟩) / ‖e_a‖, added to the neighbour and subtracted from the centre."""
    row, view = tl.program_id(0), tl.program_id(1)
    a = tl.arange(0, PAD)
    live = a < K
    index = tl.load(index_ptr + (view * n + row) * K + a, live, other=0)
    grad = _weigh(weight_ptr, gradient_ptr, view * n + row, n)
    x_ptr += view * n * d
    sum_ptr += view * n * d
    out_ptr += view * n * d
    square = tl.zeros((PAD,), tl.float32)
    along = tl.zeros((PAD,), tl.float32)
    for start in range(0, d, WIDE):
        dims = start + tl.arange(0, WIDE)
        total = tl.load(sum_ptr + row * d + dims, dims < d, other=0.0)
        edge = _edges(x_ptr, row, index, live, dims, d)
        square += tl.sum(edge * edge, 1)
        along += tl.sum(edge * total[None, :], 1)
    inverse = _inverse_root(square, live)
    for start in range(0, d, WIDE):
        dims = start + tl.arange(0, WIDE)
        total = tl.load(sum_ptr + row * d + dims, dims < d, other=0.0)
        edge = _edges(x_ptr, row, index, live, dims, d)
        push = (total[None, :] - edge * (along * inverse * inverse)[:, None]) * (grad * inverse)[:, None]
        mask = live[:, None] & (dims < d)[None, :]
        tl.atomic_add(out_ptr + index[:, None] * d + dims[None, :], push, mask, sem="relaxed")
        tl.atomic_add(out_ptr + row * d + dims, -tl.sum(push, 0), dims < d, sem="relaxed")


@triton.jit
def _rbf(
    weight_ptr, gradient_ptr, x_ptr, index_ptr, median_ptr, medians, width_ptr, used_ptr, out_ptr, n, d,
    K: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """For one point's neighbours: Σ_{a<b} exp(−γ‖x_a − x_b‖²), or its gradient −2γ (x_a Σ_b k_ab − Σ_b k_ab x_b)."""
    row, view = tl.program_id(0), tl.program_id(1)
    a = tl.arange(0, PAD)
    live = a < K
    index = tl.load(index_ptr + (view * n + row) * K + a, live, other=0)
    x_ptr += view * n * d
    if N > 0:  # γ = 1/(2m²), m² the median of the points' medians: each program computes it, so that none has to wait
        points = tl.arange(0, N)
        bits = tl.load(median_ptr + view * medians + points, points < medians, other=LAST)
        twice = 2 * _middle(bits, medians).to(tl.float32, bitcast=True)
        gamma = tl.where(twice > SMALLEST, 1 / tl.where(twice > SMALLEST, twice, 1.0), 1.0)
    else:
        gamma = tl.load(width_ptr + view)
    own = tl.zeros((PAD,), tl.float32)
    product = tl.zeros((PAD, PAD), tl.float32)
    for start in range(0, d, WIDE):
        edge = _edges(x_ptr, row, index, live, start + tl.arange(0, WIDE), d)
        own += tl.sum(edge * edge, 1)
        product += tl.dot(edge, tl.trans(edge), input_precision=EXACT)
    square = tl.maximum(own[:, None] + own[None, :] - 2 * product, 0.0)
    pair = live[:, None] & live[None, :] & (a[:, None] != a[None, :])
    local = tl.where(pair, tl.exp(-gamma * square), 0.0)
    if BACKWARD:
        pull = -2 * gamma * _weigh(weight_ptr, gradient_ptr, view * n + row, n)
        row_sum = tl.sum(local, 1)[:, None]
        for start in range(0, d, WIDE):
            dims = start + tl.arange(0, WIDE)
            edge = _edges(x_ptr, row, index, live, dims, d)
            grad = pull * (edge * row_sum - tl.dot(local, edge, input_precision=EXACT))
            mask = live[:, None] & (dims < d)[None, :]
            tl.atomic_add(out_ptr + view * n * d + index[:, None] * d + dims[None, :], grad, mask, sem="relaxed")
    else:
        tl.store(out_ptr + view * n + row, tl.sum(local) / 2)
        if row == 0:
            tl.store(used_ptr + view, gamma)


@triton.jit
def _standardise(s, live, n, EPS: tl.constexpr):
    """s minus its mean; 1/(σ + ε); and 1/(nσ(σ + ε)²), or 0 if σ = 0, where it has no gradient."""
    # The correctly rounded division makes the deviation of equal scores exactly zero.
    c = tl.where(live, s - tl.div_rn(tl.sum(s), tl.sum(tl.where(live, 1.0, 0.0))), 0.0)
    deviation = tl.sqrt(tl.sum(c * c) / n)
    inverse = 1 / (deviation + EPS)
    constant = deviation == 0
    return c, inverse, tl.where(constant, 0.0, inverse * inverse / (n * tl.where(constant, 1.0, deviation)))


@triton.jit
def _unstandardise(g, c, inverse, slope, live, n):
    """The gradient for s, from that for c / (σ + ε)."""
    g = tl.where(live, g * inverse - c * (slope * tl.sum(g * c)), 0.0)
    return g - tl.sum(g) / n


@triton.jit
def _alignment(score_ptr, term_ptr, grad_ptr, n, EPS: tl.constexpr, N: tl.constexpr):
    """For M = c̃ c̃'ᵀ / n with diagonal m: Σ (m − 1)², the sum of the squares off the diagonal, and Σ m. Also the
    gradients of the first two, as (2, 2, n)."""
    i = tl.arange(0, N)
    live = i < n
    c0, inverse0, slope0 = _standardise(tl.load(score_ptr + i, live, other=0.0), live, n, EPS)
    c1, inverse1, slope1 = _standardise(tl.load(score_ptr + n + i, live, other=0.0), live, n, EPS)
    t0, t1 = c0 * inverse0, c1 * inverse1
    m = t0 * t1 / n
    trace, squares = tl.sum(m), tl.sum(m * m)
    q0, q1 = tl.sum(t0 * t0) / n, tl.sum(t1 * t1) / n
    tl.store(term_ptr, squares - 2 * trace + n)
    tl.store(term_ptr + 1, q0 * q1 - squares)
    tl.store(term_ptr + 2, trace)
    pull, push = (2 * m - 2) / n, -2 * m / n
    tl.store(grad_ptr + i, _unstandardise(pull * t1, c0, inverse0, slope0, live, n), live)
    tl.store(grad_ptr + n + i, _unstandardise(pull * t0, c1, inverse1, slope1, live, n), live)
    grad_ptr += 2 * n
    tl.store(grad_ptr + i, _unstandardise(push * t1 + 2 * t0 * q1 / n, c0, inverse0, slope0, live, n), live)
    tl.store(grad_ptr + n + i, _unstandardise(push * t0 + 2 * t1 * q0 / n, c1, inverse1, slope1, live, n), live)


def _launch(kernel: Any, grid: tuple[int, ...], *places: Any, **shape: Any) -> None:
    leave_room(wrap_triton(kernel)[grid](*places, **shape))


def _add_up(kernel: Any, weights: Tensor, gradients: Tensor, x: Tensor, *kept: Any, **shape: Any) -> Tensor:
    """The gradient of points (v, n, d), which a kernel adds to zeros; one program per point."""
    x = x.contiguous()
    out = torch.zeros_like(x)
    v, n, d = x.shape
    _launch(kernel, (n, v), weights.contiguous(), gradients, x, *kept, out, n, d, **shape)
    return out


def _select_nearest(
    x: Tensor, k: int, *, score: Tensor | None = None, median: Tensor | None = None, step: int = 0
) -> tuple[Tensor, Tensor]:
    """The neighbours (v, n, k) of v sets of points (v, n, d), and Σ u (v, n, d) if `score` is given."""
    v, n, d = x.shape
    distance, index = x.new_empty(v, n, n), x.new_empty(v, n, k, dtype=torch.int32)
    total = x if score is None else torch.empty_like(x)
    across, depth = triton.cdiv(n, TILE), min(DEPTH, triton.next_power_of_2(d))
    _launch(_distances, (across, across, v), x, distance, n, d, TILE=TILE, DEPTH=depth, num_warps=8)
    places = (x, distance, index, total, x if score is None else score, index if median is None else median)
    wanted = {"SCORE": score is not None, "STEP": step}
    shape = {"K": k, "PAD": NEIGHBORS, "N": triton.next_power_of_2(n), "WIDE": min(128, triton.next_power_of_2(d))}
    _launch(_select, (n, v), *places, n, d, **wanted, **shape, num_warps=1)
    return index, total


def scores(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. (6) for v sets of points (v, n, d): scores (v, n), neighbours (v, n, k) int32, and Σ u (v, n, d)."""
    score = x.new_empty(x.shape[:2])
    return score, *_select_nearest(x, k, score=score)


def rbf_scores(x: Tensor, k: int, width: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. (10) with the RBF kernel: scores, neighbours, and γ (v,), as given or by the median as in kernel_width."""
    v, n, d = x.shape
    step = triton.cdiv(n, MEDIAN_POINTS) if width is None else 0
    medians = triton.cdiv(n, step) if step else 0
    score, used, median = x.new_empty(v, n), x.new_empty(v), x.new_empty(v, medians, dtype=torch.int32)
    index, _ = _select_nearest(x, k, median=median, step=step)
    places = (score, score, x, index, median, medians, used if width is None else width, used, score)
    _launch(_rbf, (n, v), *places, n, d, **_rbf_shape(medians, d, k), BACKWARD=False)
    return score, index, used


def _rbf_shape(medians: int, d: int, k: int) -> dict[str, int]:
    """A single warp never waits for others: it takes two thirds of the time. Few dimensions at a time leave it enough
    registers, and leave shared memory to other kernels."""
    points = triton.next_power_of_2(medians) if medians else 0
    wide = min(RBF_WIDE, max(16, triton.next_power_of_2(d)))
    return {"K": k, "PAD": NEIGHBORS, "N": points, "WIDE": wide, "num_warps": 1}


def align(score: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Alignment, decorrelation and ρ (3,) of two views' scores (2, n), and the gradients (2, 2, n) of the first two."""
    n = score.shape[1]
    terms, gradients = score.new_empty(3), score.new_empty(2, 2, n)
    shape = {"N": triton.next_power_of_2(n), "num_warps": 1 if n <= 512 else 4}  # enough warps for the registers
    _launch(_alignment, (1,), score, terms, gradients, n, EPS=eps, **shape)
    return terms, gradients


@triton_op("curvssl::terms", mutates_args={})
def _terms(x: Tensor, k: int, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    score, index, total = scores(x.contiguous(), k)
    return *align(score, eps), index, total


@triton_op("curvssl::terms_gradient", mutates_args={})
def _terms_gradient(weights: Tensor, x: Tensor, gradients: Tensor, index: Tensor, total: Tensor) -> Tensor:
    shape = {"K": index.shape[-1], "PAD": NEIGHBORS, "WIDE": min(128, triton.next_power_of_2(x.shape[2]))}
    return _add_up(_score_gradient, weights, gradients, x, index, total, **shape, num_warps=1)


@triton_op("curvssl::rbf_terms", mutates_args={})
def _rbf_terms(x: Tensor, k: int, eps: float, width: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    score, index, used = rbf_scores(x.contiguous(), k, width)
    return *align(score, eps), index, used


@triton_op("curvssl::rbf_terms_gradient", mutates_args={})
def _rbf_terms_gradient(weights: Tensor, x: Tensor, gradients: Tensor, index: Tensor, width: Tensor) -> Tensor:
    shape = _rbf_shape(0, x.shape[2], index.shape[-1])  # no medians: γ is known
    return _add_up(_rbf, weights, gradients, x, index, index, 0, width, width, **shape, BACKWARD=True)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], *output[1:])
    ctx.set_materialize_grads(False)  # no zero gradients for the outputs that are only saved


def _terms_backward(ctx, grad, *_) -> tuple[Tensor, None, None]:
    return _terms_gradient(grad, *ctx.saved_tensors), None, None


def _rbf_terms_backward(ctx, grad, *_) -> tuple[Tensor, None, None, None]:
    return _rbf_terms_gradient(grad, *ctx.saved_tensors), None, None, None


_terms.register_autograd(_terms_backward, setup_context=_keep)
_rbf_terms.register_autograd(_rbf_terms_backward, setup_context=_keep)


def terms(x: Tensor, *, k: int, eps: float) -> Tensor:
    """The two terms of L_curv, and ρ, of two views' points (2, n, d): (3,). ρ has no gradient here."""
    return _terms(x, k, eps)[0]


def rbf_terms(x: Tensor, *, k: int, eps: float, width: Tensor | None) -> Tensor:
    """The same with the RBF kernel's curvature. `width` is γ, without gradient; None means the median heuristic."""
    return _rbf_terms(x, k, eps, width)[0]


def numbers(part: Loss, z: Tensor) -> Tensor | None:
    """The numbers of a term of two views (2, b, d) by these kernels, or None where they do not support it."""
    if type(part) is not Curvature or world_size() > 1 or not fits(z, k=part.k):
        return None
    if part.kernel is None:
        return terms(z, k=part.k, eps=part.eps)
    if part.kernel is not KERNELS["rbf"]:
        return None
    median = part.gamma == "median"  # the kernels compute it themselves
    width = None if median else kernel_width(z, kernel=part.kernel, gamma=part.gamma).flatten()
    return rbf_terms(z, k=part.k, eps=part.eps, width=width)
