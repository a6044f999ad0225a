"""Losses against plain float64, and measures without labels against singular values."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import curvssl
from curvssl.evaluate import quality
from curvssl.geometry import neighbors_of
from curvssl.kernels import KERNELS
from fuzzing.inputs import (
    WRONG,
    Array,
    Draw,
    a_type,
    eps_of,
    floor_of,
    long,
    near,
    need,
    numbers,
    refused,
    spoilt,
    values,
)
from fuzzing.points import CosinesOf, distances


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


def need_finite(loss: Any, views: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """The gradients are finite, but for what float16 does not hold: it does not hold them in float32 either."""
    if views[0].dtype == torch.float16:
        wide = [z.detach().float().requires_grad_() for z in views]
        held = [g.abs() < 6e4 for g in torch.autograd.grad(loss(*wide), wide)]
    else:
        held = [torch.ones_like(g, dtype=torch.bool) for g in gradients]
    for gradient, fits in zip(gradients, held, strict=True):
        need(gradient[fits].isfinite().all(), "gradient is not finite")


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

    return compare_loss(loss(z0, z1), (z0, z1), plain, scales, max(1, blur) * eps_of(z0) * (1 + d * (weight > 0)), room)


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
    found = [CosinesOf(long(z), index.numpy(), floor_of(z)) for z, index in zip(both, neighbors, strict=True)]
    value = loss(z0, z1)
    gradients = torch.autograd.grad(value, (z0, z1))
    need(value.isfinite(), "value is not finite")
    need_finite(loss, (z0, z1), gradients)
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
    need_finite(loss, (z0, z1), gradients)
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
    need(value.isfinite(), "value is not finite")
    need_finite(loss, (z0, z1), gradients)
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
    quiet = np.linalg.svd(within)[2][n * (views - 1) :]  # directions in which views of an image do not differ
    if len(quiet) and scale > 1e3:  # δ is nothing beside the others, so that these are all that counts
        found = np.linalg.svd(off @ quiet.T, compute_uv=False) ** 2
    else:
        found = np.linalg.eigvals(np.linalg.solve(noise / level, off.T @ off / n)).real.clip(0)
    p = np.where(found > 1e-13 * found.max(), found, 0) / found.sum() + 1e-7
    most = min(d, n)
    p = np.sort(p)[::-1][:most]
    # At large scales rounding of Σ_w is not much less than what takes the place of δ.
    near(ours, np.exp(-(p * np.log(p)).sum()), (2e-2 if len(quiet) else 2e-3) * most)
    return "right"
