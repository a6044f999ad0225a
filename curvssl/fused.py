"""Neighbours and curvature of one batch as hand-written GPU kernels: what geometry.py does in a dozen launches, in few.

Used by the losses for float32 batches on CUDA that fit a multiprocessor (`fits`); geometry.py is the meaning of every
line here, and the tests hold the two against each other. Distances are sums of squared differences, so they lose no
digits to a common offset.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from curvssl.kernels import MEDIAN_POINTS

POINTS = MEDIAN_POINTS  # rows of distances to this many stay in one program's registers; with more, topk is faster
WIDTH = 2048  # and so does one point of this many dimensions
NEIGHBORS = 16
ROWS = 4  # points a program of the search takes
UNROLL = tl.constexpr(4)

TINY = tl.constexpr(torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps)  # as in kernels.inverse_root
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
TAKEN = tl.constexpr(2**63 - 1)
LAST = tl.constexpr(2**31 - 1)


def fits(x: Tensor, *, k: int) -> bool:
    """Whether the kernels take these v sets of points (v, n, d)."""
    return x.is_cuda and x.dtype == torch.float32 and x.shape[1] <= POINTS and x.shape[2] <= WIDTH and k <= NEIGHBORS


@triton.jit
def _select(
    x_ptr, index_ptr, sum_ptr, score_ptr, distance_ptr, n, d, SCORE: tl.constexpr, K: tl.constexpr,
    PAD: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """For ROWS points: their K nearest, and with SCORE S = Σ_a u_a and c = (‖S‖² − Σ_a ‖u_a‖²) / 2, else distances."""
    view = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    points = tl.arange(0, N)
    x_ptr += view * n * d

    squares = tl.zeros((ROWS, N, CHUNK), tl.float32)
    for start in tl.range(0, d, CHUNK, loop_unroll_factor=UNROLL):
        column = start + tl.arange(0, CHUNK)
        inside = column < d
        q = tl.load(x_ptr + rows[:, None] * d + column[None, :], (rows < n)[:, None] & inside[None, :], other=0.0)
        p = tl.load(x_ptr + points[:, None] * d + column[None, :], (points < n)[:, None] & inside[None, :], other=0.0)
        edge = p[None, :, :] - q[:, None, :]
        squares += edge * edge
    distance = tl.sum(squares, 2)  # (ROWS, N)

    # A float that is not negative sorts like its bits: distance and index in one number find both with one minimum.
    key = (distance.to(tl.int32, bitcast=True).to(tl.int64) << 32) | points[None, :].to(tl.int64)
    key = tl.where((points[None, :] == rows[:, None]) | (points >= n)[None, :], TAKEN, key)
    if not SCORE:
        place = (view * n + rows)[:, None] * n + points[None, :]
        tl.store(distance_ptr + place, distance, (rows < n)[:, None] & (points < n)[None, :])

    for i in tl.static_range(K):
        least = tl.min(key, 1)
        key = tl.where(key == least[:, None], TAKEN, key)
        tl.store(index_ptr + (view * n + rows) * K + i, (least & 0xFFFFFFFF).to(tl.int32), rows < n)
    if SCORE:
        tl.debug_barrier()  # every thread of the program sees the indices
        a = tl.arange(0, PAD)
        live = (rows < n)[:, None] & (a < K)[None, :]
        index = tl.load(index_ptr + (view * n + rows)[:, None] * K + a[None, :], live, other=0)
        square = tl.zeros((ROWS, PAD), tl.float32)
        for start in range(0, d, WIDE):
            edge = _edges(x_ptr, rows, index, live, start + tl.arange(0, WIDE), n, d)
            square += tl.sum(edge * edge, 2)
        inverse = _inverse_root(square, live)
        norm = tl.zeros((ROWS,), tl.float32)
        for start in range(0, d, WIDE):
            dims = start + tl.arange(0, WIDE)
            total = tl.sum(_edges(x_ptr, rows, index, live, dims, n, d) * inverse[:, :, None], 1)
            inside = (rows < n)[:, None] & (dims < d)[None, :]
            tl.store(sum_ptr + (view * n + rows)[:, None] * d + dims[None, :], total, inside)
            norm += tl.sum(total * total, 1)
        units = tl.sum(tl.where(inverse > 0, 1.0, 0.0), 1)
        tl.store(score_ptr + view * n + rows, (norm - units) / 2, rows < n)


@triton.jit
def _edges(x_ptr, rows, index, live, dims, n, d):
    """Of some points' edges to their neighbours, some dimensions: (ROWS, PAD, WIDE), all loads under way at once."""
    centre = tl.load(x_ptr + rows[:, None] * d + dims[None, :], (rows < n)[:, None] & (dims < d)[None, :], other=0.0)
    mask = live[:, :, None] & (dims < d)[None, None, :]
    neighbors = tl.load(x_ptr + index[:, :, None] * d + dims[None, None, :], mask, other=0.0)
    return tl.where(mask, neighbors - centre[:, None, :], 0.0)


@triton.jit
def _inverse_root(square, live):
    """1/√, or 0 for an edge that has no direction."""
    zero = (square <= TINY) | ~live
    return tl.where(zero, 0.0, 1 / tl.sqrt(tl.where(zero, 1.0, square)))


@triton.jit
def _middle(bits, n):
    """The lower median of n floats that are not negative, given as their bits: built bit by bit from the highest."""
    found = 0
    for i in tl.static_range(31):
        larger = found + (1 << (30 - i))
        found = tl.where(tl.sum((bits < larger).to(tl.int32)) < (n - 1) // 2 + 1, larger, found)
    return found


@triton.jit
def _median(distance_ptr, median_ptr, n, N: tl.constexpr):
    """One point's median distance to the others, as bits."""
    row, view = tl.program_id(0), tl.program_id(1)
    points = tl.arange(0, N)
    distance = tl.load(distance_ptr + (view * n + row) * n + points, points < n, other=0.0)
    bits = tl.where((points < n) & (points != row), distance.to(tl.int32, bitcast=True), LAST)
    tl.store(median_ptr + view * n + row, _middle(bits, n))


@triton.jit
def _weigh(weight_ptr, gradient_ptr, place, live, n):
    """The gradient for some scores of the terms' weighted sum, from those of the two terms (2, 2, n)."""
    first = tl.load(gradient_ptr + place, live, other=0.0)
    second = tl.load(gradient_ptr + 2 * n + place, live, other=0.0)
    return tl.load(weight_ptr) * first + tl.load(weight_ptr + 1) * second


@triton.jit
def _score_gradient(
    weight_ptr, gradient_ptr, x_ptr, index_ptr, sum_ptr, out_ptr, n, d,
    K: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """∂c/∂e_a = (S − u_a ⟨u_a, S⟩) / ‖e_a‖, added to the neighbour and taken from the centre."""
    view = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    a = tl.arange(0, PAD)
    live = (rows < n)[:, None] & (a < K)[None, :]
    index = tl.load(index_ptr + (view * n + rows)[:, None] * K + a[None, :], live, other=0)
    grad = _weigh(weight_ptr, gradient_ptr, view * n + rows, rows < n, n)
    x_ptr += view * n * d
    sum_ptr += view * n * d
    out_ptr += view * n * d
    square = tl.zeros((ROWS, PAD), tl.float32)
    along = tl.zeros((ROWS, PAD), tl.float32)
    for start in range(0, d, WIDE):
        dims = start + tl.arange(0, WIDE)
        inside = (rows < n)[:, None] & (dims < d)[None, :]
        total = tl.load(sum_ptr + rows[:, None] * d + dims[None, :], inside, other=0.0)
        edge = _edges(x_ptr, rows, index, live, dims, n, d)
        square += tl.sum(edge * edge, 2)
        along += tl.sum(edge * total[:, None, :], 2)
    inverse = _inverse_root(square, live)
    for start in range(0, d, WIDE):
        dims = start + tl.arange(0, WIDE)
        inside = (rows < n)[:, None] & (dims < d)[None, :]
        total = tl.load(sum_ptr + rows[:, None] * d + dims[None, :], inside, other=0.0)
        edge = _edges(x_ptr, rows, index, live, dims, n, d)
        push = total[:, None, :] - edge * (along * inverse * inverse)[:, :, None]
        push *= (grad[:, None] * inverse)[:, :, None]
        mask = live[:, :, None] & (dims < d)[None, None, :]
        tl.atomic_add(out_ptr + index[:, :, None] * d + dims[None, None, :], push, mask, sem="relaxed")
        tl.atomic_add(out_ptr + rows[:, None] * d + dims[None, :], -tl.sum(push, 1), inside, sem="relaxed")


@triton.jit
def _rbf(
    weight_ptr, gradient_ptr, x_ptr, index_ptr, median_ptr, width_ptr, out_ptr, used_ptr, n, d, K: tl.constexpr,
    PAD: tl.constexpr, N: tl.constexpr, D: tl.constexpr, MEDIAN: tl.constexpr, BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one point's neighbours: Σ_{a<b} exp(−γ‖x_a − x_b‖²), or its gradient −2γ (x_a Σ_b k_ab − Σ_b k_ab x_b)."""
    row, view = tl.program_id(0), tl.program_id(1)
    a = tl.arange(0, PAD)
    dims = tl.arange(0, D)
    index = tl.load(index_ptr + (view * n + row) * K + a, a < K, other=0)
    live = (a < K)[:, None] & (dims < d)[None, :]
    there = view * n * d + index[:, None] * d + dims[None, :]
    centre = tl.load(x_ptr + (view * n + row) * d + dims, dims < d, other=0.0)
    edge = tl.where(live, tl.load(x_ptr + there, live, other=0.0) - centre[None, :], 0.0)
    if MEDIAN:  # γ = 1/(2m²), m² the median of all points' medians: sooner found by each than waited for by all
        points = tl.arange(0, N)
        medians = tl.load(median_ptr + view * n + points, points < n, other=LAST)
        twice = 2 * _middle(medians, n).to(tl.float32, bitcast=True)
        gamma = tl.where(twice > SMALLEST, 1 / tl.where(twice > SMALLEST, twice, 1.0), 1.0)
    else:
        gamma = tl.load(width_ptr + view)
    own = tl.sum(edge * edge, 1)
    product = tl.dot(edge, tl.trans(edge), input_precision=PRECISION)
    square = tl.maximum(own[:, None] + own[None, :] - 2 * product, 0.0)
    pair = (a < K)[:, None] & (a < K)[None, :] & (a[:, None] != a[None, :])
    local = tl.where(pair, tl.exp(-gamma * square), 0.0)
    if BACKWARD:
        grad = _weigh(weight_ptr, gradient_ptr, view * n + row, True, n)
        pull = edge * tl.sum(local, 1)[:, None] - tl.dot(local, edge, input_precision=PRECISION)
        tl.atomic_add(out_ptr + there, -2 * gamma * grad * pull, live, sem="relaxed")
    else:
        tl.store(out_ptr + view * n + row, tl.sum(local) / 2)
        if row == 0:
            tl.store(used_ptr + view, gamma)


@triton.jit
def _standardise(s, live, n, EPS: tl.constexpr):
    """s less its mean; 1/(σ + ε); and 1/(nσ(σ + ε)²), or 0 where σ has no gradient."""
    # Divided as exactly as float32 can, so that equal scores have no deviation.
    c = tl.where(live, s - tl.div_rn(tl.sum(s), tl.sum(tl.where(live, 1.0, 0.0))), 0.0)
    deviation = tl.sqrt(tl.sum(c * c) / n)
    inverse = 1 / (deviation + EPS)
    constant = deviation == 0
    return c, inverse, tl.where(constant, 0.0, inverse * inverse / (n * tl.where(constant, 1.0, deviation)))


@triton.jit
def _unstandardise(g, c, inverse, slope, live, n):
    """The gradient for s, given that for c / (σ + ε)."""
    g = tl.where(live, g * inverse - c * (slope * tl.sum(g * c)), 0.0)
    return g - tl.sum(g) / n


@triton.jit
def _alignment(score_ptr, term_ptr, grad_ptr, n, EPS: tl.constexpr, N: tl.constexpr):
    """Of M = c̃ c̃'ᵀ / n, with m its diagonal: Σ (m − 1)², the sum of the other squares, and Σ m; gradients of the first
    two, as (2, 2, n)."""
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


def _select_shape(n: int, d: int, k: int) -> dict[str, int]:
    """Blocks of which each of 256 threads holds 32 of the sums (rows × points × dimensions): half the registers of a
    multiprocessor, so that what runs beside finds room."""
    points = triton.next_power_of_2(n)
    chunk = min(32, triton.next_power_of_2(d), 8192 // (ROWS * points))
    wide = min(128, triton.next_power_of_2(d))
    return {"K": k, "PAD": NEIGHBORS, "ROWS": ROWS, "N": points, "CHUNK": chunk, "WIDE": wide, "num_warps": 8}


def scores(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. (6) for v sets of points (v, n, d): (v, n); their neighbours (v, n, k) int32, and Σ u (v, n, d)."""
    v, n, d = x.shape
    score, index, total = x.new_empty(v, n), x.new_empty(v, n, k, dtype=torch.int32), torch.empty_like(x)
    places = (x, index, total, score, score)  # distances are not asked for
    wrap_triton(_select)[(triton.cdiv(n, ROWS), v)](*places, n, d, SCORE=True, **_select_shape(n, d, k))
    return score, index, total


def rbf_scores(x: Tensor, k: int, width: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. (10) with the RBF kernel, likewise, and γ (v,): that given, or that of kernels.kernel_width's median."""
    v, n, d = x.shape
    score, index, used = x.new_empty(v, n), x.new_empty(v, n, k, dtype=torch.int32), x.new_empty(v)
    distance, median = x.new_empty(v, n, n), x.new_empty(v, n, dtype=torch.int32)
    shape = _select_shape(n, d, k)
    wrap_triton(_select)[(triton.cdiv(n, ROWS), v)](x, index, x, x, distance, n, d, SCORE=False, **shape)
    if width is None:
        wrap_triton(_median)[(n, v)](distance, median, n, N=shape["N"], num_warps=1)
    places = (score, score, x, index, median, used if width is None else width, score, used)
    wrap_triton(_rbf)[(n, v)](*places, n, d, **_rbf_shape(n, d, k), MEDIAN=width is None, BACKWARD=False)
    return score, index, used


def _rbf_shape(n: int, d: int, k: int) -> dict[str, Any]:
    shape = {"K": k, "PAD": NEIGHBORS, "N": triton.next_power_of_2(n), "D": max(16, triton.next_power_of_2(d))}
    # Three products of the matrix units are as exact as one in float32; of long points they need too much memory.
    short = {"PRECISION": "tf32x3", "num_warps": 1}  # a warp that need not wait for others takes two thirds of the time
    return shape | (short if d <= 256 else {"PRECISION": "ieee", "num_warps": 4})


def align(score: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Alignment, decorrelation and ρ (3,) of two views' scores (2, n), and the gradients (2, 2, n) of the first two."""
    n = score.shape[1]
    terms, gradients = score.new_empty(3), score.new_empty(2, 2, n)
    wrap_triton(_alignment)[(1,)](score, terms, gradients, n, EPS=eps, N=triton.next_power_of_2(n), num_warps=1)
    return terms, gradients


@triton_op("curvssl::terms", mutates_args={})
def _terms(x: Tensor, k: int, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    score, *kept = scores(x.contiguous(), k)
    found, gradients = align(score, eps)
    return found, gradients, kept[0], kept[1]


@triton_op("curvssl::terms_gradient", mutates_args={})
def _terms_gradient(weights: Tensor, gradients: Tensor, x: Tensor, index: Tensor, total: Tensor) -> Tensor:
    x = x.contiguous()
    v, n, d = x.shape
    out = torch.zeros_like(x)
    places = (weights.contiguous(), gradients, x, index, total, out)
    shape = {"K": index.shape[-1], "PAD": NEIGHBORS, "ROWS": 1, "WIDE": min(128, triton.next_power_of_2(d))}
    wrap_triton(_score_gradient)[(n, v)](*places, n, d, **shape, num_warps=1)
    return out


@triton_op("curvssl::rbf_terms", mutates_args={})
def _rbf_terms(x: Tensor, k: int, eps: float, width: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    score, *kept = rbf_scores(x.contiguous(), k, width)
    found, gradients = align(score, eps)
    return found, gradients, kept[0], kept[1]


@triton_op("curvssl::rbf_terms_gradient", mutates_args={})
def _rbf_terms_gradient(weights: Tensor, gradients: Tensor, x: Tensor, index: Tensor, width: Tensor) -> Tensor:
    x = x.contiguous()
    v, n, d = x.shape
    out = torch.zeros_like(x)
    places = (weights.contiguous(), gradients, x, index, index, width, out, out)
    shape = _rbf_shape(n, d, index.shape[-1])
    wrap_triton(_rbf)[(n, v)](*places, n, d, **shape, MEDIAN=False, BACKWARD=True)
    return out


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], *output[1:])


def _terms_backward(ctx, grad, *_) -> tuple[Tensor, None, None]:
    x, gradients, index, total = ctx.saved_tensors
    return _terms_gradient(grad, gradients, x, index, total), None, None


def _rbf_terms_backward(ctx, grad, *_) -> tuple[Tensor, None, None, None]:
    x, gradients, index, width = ctx.saved_tensors
    return _rbf_terms_gradient(grad, gradients, x, index, width), None, None, None


_terms.register_autograd(_terms_backward, setup_context=_keep)
_rbf_terms.register_autograd(_rbf_terms_backward, setup_context=_keep)


def terms(x: Tensor, *, k: int, eps: float) -> Tensor:
    """The two terms of L_curv, and ρ, which has no gradient here, of two views' points (2, n, d): (3,)."""
    return _terms(x, k, eps)[0]


def rbf_terms(x: Tensor, *, k: int, eps: float, width: Tensor | None) -> Tensor:
    """The same with the RBF kernel's curvature; γ, which has no gradient here, by the median heuristic if None."""
    return _rbf_terms(x, k, eps, width)[0]
