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

TINY = tl.constexpr(torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps)  # as in kernels.inverse_root
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
TAKEN = tl.constexpr(2**63 - 1)
LAST = tl.constexpr(2**31 - 1)


def fits(x: Tensor, *, k: int) -> bool:
    """Whether the kernels take these v sets of points (v, n, d)."""
    return x.is_cuda and x.dtype == torch.float32 and x.shape[1] <= POINTS and x.shape[2] <= WIDTH and k <= NEIGHBORS


@triton.jit
def _select(
    x_ptr, index_ptr, sum_ptr, score_ptr, distance_ptr, done_ptr, n, d, SCORE: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """For ROWS points: their K nearest, and with SCORE S = Σ_a u_a and c = (‖S‖² − Σ_a ‖u_a‖²) / 2, else distances."""
    view = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    points = tl.arange(0, N)
    x_ptr += view * n * d

    square = tl.zeros((ROWS, N, CHUNK), tl.float32)
    for start in range(0, d, CHUNK):
        column = start + tl.arange(0, CHUNK)
        inside = column < d
        q = tl.load(x_ptr + rows[:, None] * d + column[None, :], (rows < n)[:, None] & inside[None, :], other=0.0)
        p = tl.load(x_ptr + points[:, None] * d + column[None, :], (points < n)[:, None] & inside[None, :], other=0.0)
        edge = p[None, :, :] - q[:, None, :]
        square += edge * edge
    distance = tl.sum(square, 2)  # (ROWS, N)

    # A float that is not negative sorts like its bits: distance and index in one number find both with one minimum.
    key = (distance.to(tl.int32, bitcast=True).to(tl.int64) << 32) | points[None, :].to(tl.int64)
    key = tl.where((points[None, :] == rows[:, None]) | (points >= n)[None, :], TAKEN, key)
    if not SCORE:
        place = (view * n + rows)[:, None] * n + points[None, :]
        tl.store(distance_ptr + place, distance, (rows < n)[:, None] & (points < n)[None, :])
        if tl.program_id(0) == 0:
            tl.store(done_ptr + view, 0)

    dims = tl.arange(0, D)
    live = (rows < n)[:, None] & (dims < d)[None, :]
    centre = tl.load(x_ptr + rows[:, None] * d + dims[None, :], live, other=0.0)
    total = tl.zeros((ROWS, D), tl.float32)
    units = tl.zeros((ROWS,), tl.float32)
    for a in tl.static_range(K):
        least = tl.min(key, 1)
        key = tl.where(key == least[:, None], TAKEN, key)
        index = (least & 0xFFFFFFFF).to(tl.int32)
        square_a = (least >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(index_ptr + (view * n + rows) * K + a, index, rows < n)
        if SCORE:
            edge = tl.load(x_ptr + index[:, None] * d + dims[None, :], live, other=0.0) - centre
            zero = square_a <= TINY
            total += edge * tl.where(zero, 0.0, 1 / tl.sqrt(tl.where(zero, 1.0, square_a)))[:, None]
            units += tl.where(zero, 0.0, 1.0)
    if SCORE:
        tl.store(sum_ptr + (view * n + rows)[:, None] * d + dims[None, :], total, live)
        tl.store(score_ptr + view * n + rows, (tl.sum(total * total, 1) - units) / 2, rows < n)


@triton.jit
def _middle(bits, n):
    """The lower median of n floats that are not negative, given as their bits: built bit by bit from the highest."""
    found = 0
    for i in tl.static_range(31):
        larger = found + (1 << (30 - i))
        found = tl.where(tl.sum((bits < larger).to(tl.int32)) < (n - 1) // 2 + 1, larger, found)
    return found


@triton.jit
def _width(distance_ptr, median_ptr, done_ptr, width_ptr, n, N: tl.constexpr):
    """One point's median distance; who comes last takes the median m² of all points', and γ = 1/(2m²)."""
    row, view = tl.program_id(0), tl.program_id(1)
    points = tl.arange(0, N)
    distance = tl.load(distance_ptr + (view * n + row) * n + points, points < n, other=0.0)
    bits = tl.where((points < n) & (points != row), distance.to(tl.int32, bitcast=True), LAST)
    tl.store(median_ptr + view * n + row, _middle(bits, n))
    if tl.atomic_add(done_ptr + view, 1, sem="acq_rel") == n - 1:
        medians = tl.load(median_ptr + view * n + points, points < n, other=LAST, cache_modifier=".cg")
        twice = 2 * _middle(medians, n).to(tl.float32, bitcast=True)
        tl.store(width_ptr + view, tl.where(twice > SMALLEST, 1 / tl.where(twice > SMALLEST, twice, 1.0), 1.0))


@triton.jit
def _score_gradient(
    grad_ptr, x_ptr, index_ptr, sum_ptr, out_ptr, n, d, K: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """∂c/∂e_a = (S − u_a ⟨u_a, S⟩) / ‖e_a‖, added to the neighbour and taken from the centre."""
    view = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    live = (rows < n)[:, None] & (dims < d)[None, :]
    x_ptr += view * n * d
    out_ptr += view * n * d
    place = rows[:, None] * d + dims[None, :]
    centre = tl.load(x_ptr + place, live, other=0.0)
    total = tl.load(sum_ptr + view * n * d + place, live, other=0.0)
    grad = tl.load(grad_ptr + view * n + rows, rows < n, other=0.0)
    own = tl.zeros((ROWS, D), tl.float32)
    for a in tl.static_range(K):
        index = tl.load(index_ptr + (view * n + rows) * K + a, rows < n, other=0)
        there = index[:, None] * d + dims[None, :]
        edge = tl.load(x_ptr + there, live, other=0.0) - centre
        square = tl.sum(edge * edge, 1)
        zero = square <= TINY
        inverse = tl.where(zero, 0.0, 1 / tl.sqrt(tl.where(zero, 1.0, square)))
        u = edge * inverse[:, None]
        push = (total - u * tl.sum(u * total, 1)[:, None]) * (grad * inverse)[:, None]
        tl.atomic_add(out_ptr + there, push, live, sem="relaxed")
        own -= push
    tl.atomic_add(out_ptr + place, own, live, sem="relaxed")


@triton.jit
def _rbf(
    grad_ptr, x_ptr, index_ptr, width_ptr, out_ptr, n, d,
    K: tl.constexpr, PAD: tl.constexpr, D: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
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
    gamma = tl.load(width_ptr + view)
    own = tl.sum(edge * edge, 1)
    product = tl.dot(edge, tl.trans(edge), input_precision=PRECISION)
    square = tl.maximum(own[:, None] + own[None, :] - 2 * product, 0.0)
    pair = (a < K)[:, None] & (a < K)[None, :] & (a[:, None] != a[None, :])
    local = tl.where(pair, tl.exp(-gamma * square), 0.0)
    if BACKWARD:
        grad = tl.load(grad_ptr + view * n + row)
        pull = edge * tl.sum(local, 1)[:, None] - tl.dot(local, edge, input_precision=PRECISION)
        tl.atomic_add(out_ptr + there, -2 * gamma * grad * pull, live, sem="relaxed")
    else:
        tl.store(out_ptr + view * n + row, tl.sum(local) / 2)


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


def _shape(n: int, d: int) -> dict[str, int]:
    """Block sizes that leave each of 256 threads 32 of the sums (rows × points × dimensions) to hold."""
    points = triton.next_power_of_2(n)
    chunk = min(32, triton.next_power_of_2(d), 4096 // points)
    return {"ROWS": 2, "N": points, "D": triton.next_power_of_2(d), "CHUNK": chunk, "num_warps": 8}


@triton_op("curvssl::select_and_score", mutates_args={})
def select_and_score(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbours (v, n, k) int32, Σ u (v, n, d) and curvature (v, n) of v sets of points (v, n, d)."""
    x = x.contiguous()
    v, n, d = x.shape
    index = x.new_empty(v, n, k, dtype=torch.int32)
    total, score = torch.empty_like(x), x.new_empty(v, n)
    shape = _shape(n, d)
    grid = (triton.cdiv(n, shape["ROWS"]), v)
    some = (x, index, total, score, score, index)  # distances are not asked for
    wrap_triton(_select)[grid](*some, n, d, SCORE=True, K=k, **shape)
    return score, index, total


@triton_op("curvssl::select_and_width", mutates_args={})
def select_and_width(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Neighbours (v, n, k) int32, and each set's γ (v,) by the median heuristic of kernels.kernel_width."""
    x = x.contiguous()
    v, n, d = x.shape
    index, done = x.new_empty(v, n, k, dtype=torch.int32), x.new_empty(v, dtype=torch.int32)
    distance, median, width = x.new_empty(v, n, n), x.new_empty(v, n, dtype=torch.int32), x.new_empty(v)
    shape = _shape(n, d)
    grid = (triton.cdiv(n, shape["ROWS"]), v)
    wrap_triton(_select)[grid](x, index, x, x, distance, done, n, d, SCORE=False, K=k, **shape)
    wrap_triton(_width)[(n, v)](distance, median, done, width, n, N=shape["N"], num_warps=1)
    return index, width


@triton_op("curvssl::score_gradient", mutates_args={})
def score_gradient(grad: Tensor, x: Tensor, index: Tensor, total: Tensor) -> Tensor:
    x, grad = x.contiguous(), grad.contiguous()
    v, n, d = x.shape
    out = torch.zeros_like(x)
    shape = {"K": index.shape[-1], "ROWS": 2, "D": triton.next_power_of_2(d)}
    wrap_triton(_score_gradient)[(triton.cdiv(n, 2), v)](grad, x, index, total, out, n, d, **shape, num_warps=4)
    return out


def _rbf_shape(index: Tensor, d: int, *, backward: bool) -> dict[str, Any]:
    shape: dict[str, Any] = {"K": index.shape[-1], "PAD": NEIGHBORS, "D": max(16, triton.next_power_of_2(d))}
    # Three products of the matrix units are as exact as one in float32; of long points they need too much memory.
    short = {"PRECISION": "tf32x3", "num_warps": 1}  # a warp that need not wait for others takes two thirds of the time
    return shape | {"BACKWARD": backward} | (short if d <= 256 else {"PRECISION": "ieee", "num_warps": 4})


@triton_op("curvssl::rbf_score", mutates_args={})
def rbf_score(x: Tensor, index: Tensor, width: Tensor) -> Tensor:
    """Kernel curvature (v, n) for neighbours (v, n, k) and γ (v,)."""
    x = x.contiguous()
    v, n, d = x.shape
    score = x.new_empty(v, n)
    shape = _rbf_shape(index, d, backward=False)
    wrap_triton(_rbf)[(n, v)](score, x, index, width, score, n, d, **shape)
    return score


@triton_op("curvssl::rbf_gradient", mutates_args={})
def rbf_gradient(grad: Tensor, x: Tensor, index: Tensor, width: Tensor) -> Tensor:
    x, grad = x.contiguous(), grad.contiguous()
    v, n, d = x.shape
    out = torch.zeros_like(x)
    shape = _rbf_shape(index, d, backward=True)
    wrap_triton(_rbf)[(n, v)](grad, x, index, width, out, n, d, **shape)
    return out


@triton_op("curvssl::alignment", mutates_args={})
def align(score: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Alignment, decorrelation and ρ (3,) of two views' scores (2, n), and the gradients (2, 2, n) of the first two."""
    score = score.contiguous()
    n = score.shape[1]
    terms, gradients = score.new_empty(3), score.new_empty(2, 2, n)
    wrap_triton(_alignment)[(1,)](score, terms, gradients, n, EPS=eps, N=triton.next_power_of_2(n), num_warps=4)
    return terms, gradients


def _keep_score(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], output[1], output[2])


def _score_backward(ctx, grad, *_) -> tuple[Tensor, None]:
    return score_gradient(grad, *ctx.saved_tensors), None


def _keep_rbf(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _rbf_backward(ctx, grad) -> tuple[Tensor, None, None]:
    return rbf_gradient(grad, *ctx.saved_tensors), None, None


def _keep_gradients(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])


def _align_backward(ctx, grad, _) -> tuple[Tensor, None]:
    (gradients,) = ctx.saved_tensors
    return grad[0] * gradients[0] + grad[1] * gradients[1], None


select_and_score.register_autograd(_score_backward, setup_context=_keep_score)
rbf_score.register_autograd(_rbf_backward, setup_context=_keep_rbf)
align.register_autograd(_align_backward, setup_context=_keep_gradients)


def alignment(score: Tensor, *, eps: float) -> tuple[Tensor, ...]:
    """The two terms of L_curv, and ρ, which has no gradient here, of two views' curvature (2, n)."""
    return align(score, eps)[0].unbind()


def curvature(x: Tensor, *, k: int) -> Tensor:
    """Eq. (6) for v sets of points, (v, n, d) → (v, n)."""
    return select_and_score(x, k)[0]


def rbf_curvature(x: Tensor, *, k: int, width: Tensor | None) -> Tensor:
    """Eq. (10) with the RBF kernel for v sets of points, (v, n, d) → (v, n); γ by the median heuristic if None."""
    if width is None:
        return rbf_score(x, *select_and_width(x.detach(), k))
    return rbf_score(x, select_and_score(x.detach(), k)[1], width.flatten())
