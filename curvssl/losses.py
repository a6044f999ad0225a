"""The paper's objectives: terms, which are functions of views' embeddings, and losses, weighted sums of terms.

A loss takes the embeddings of two views, (b, d) each, where row i of both comes from image i, and returns a scalar.
`terms(z0, z1)` returns its named terms without their weights. Further views may follow: the first two are global, the
others local. A term of the embeddings is then a mean over the pairs of a global view and any other view (`over_pairs`);
curvature is taken over the two global views. Inside, z (V, b, d) holds all V views.

With torch.distributed initialised, every statistic and the gradient are those of the global batch (collectives.py).
What is not finite is not refused, because a device would have to be waited for: the terms show it. If a loss of finite
embeddings is not finite, such as VICReg's of 1e20, it is a ValueError on CPU, in one process.
To add a loss: one class here, and one line in methods.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvssl.collectives import gather, rank, total, world_size
from curvssl.geometry import check_k, kernel_neighbors, kernel_scores, neighbors_of, readable, scores
from curvssl.kernels import (
    AnyKernel,
    check_gamma,
    kernel_width,
    product,
    rescaling,
    rescaling_with_gradient,
    resolve,
    scale_free,
)

GLOBAL = 2  # the first views are global, the others local


class Loss(nn.Module):
    """Σ_t w_t · term_t over `parts()`; a single term is a sum whose only part is itself.

    A term has `names`, `numbers` and `weights`. The weights are read at every call, so they may change during training.
    It computes in at least float32, whatever the settings of autocast and TF32 are.
    """

    names: tuple[str, ...] = ()

    def numbers(self, z: Tensor) -> Tensor:
        """One number for each name, from two views (2, b, d)."""
        raise NotImplementedError

    def over_views(self, z: Tensor, targets: Tensor | None, blended: Tensor | None, t: Tensor | None) -> Tensor:
        """The numbers of V views (V, b, d): a mean over the pairs of a global view and any other. With `targets`
        (2, b, d), embeddings of the global views by another network, these take the place of the first of each pair.
        `blended` and `t` are for a term of one more view, like `Chord` and `ViewPath`."""
        if len(z) == GLOBAL and targets is None:
            return self.numbers(z)
        first = z if targets is None else targets
        of = pairs(len(z), both=targets is not None)
        numbers = torch.stack([self.numbers(torch.stack((first[g], z[v]))) for g, v in of], dim=1)
        return over_pairs(numbers, both=targets is not None)

    def weights(self) -> dict[str, float]:
        """The weights of the numbers in this term; a number without a weight is only logged."""
        raise NotImplementedError

    def parts(self) -> tuple[tuple[float, "Loss"], ...]:
        """The terms with their weights; terms are independent, so a training step may compute them in parallel."""
        return ((1.0, self),)

    def forward(self, z0: Tensor, z1: Tensor, *local: Tensor) -> Tensor:
        return checked(self.weigh(self.terms(z0, z1, *local)), z0, z1, *local)

    def terms(self, z0: Tensor, z1: Tensor, *local: Tensor) -> dict[str, Tensor]:
        """The named numbers of the loss, without their weights, and those that are only logged."""
        check_views(z0, z1, *local)
        shapes = [tuple(z.shape) for z in (z0, z1, *local)]
        if len(shapes[0]) != 2 or len({*shapes}) > 1 or not shapes[0][1]:
            raise ValueError(
                f"expected views of one shape (b, d), got {' and '.join(map(str, shapes))}: "
                "row i of all must come from image i"
            )
        with torch.autocast(z0.device.type, enabled=False):
            z = torch.stack((z0, z1, *local))
        return {name: checked(number, z) for name, number in self.terms_of(z).items()}

    def terms_of(self, z: Tensor, *, targets: Tensor | None = None, t: Tensor | None = None) -> dict[str, Tensor]:
        """`terms` of all views in one tensor (V, b, d), with what `exactly` takes beside them."""
        return {
            name: number
            for _, part in self.parts()
            for name, number in zip(part.names, part.exactly(z, targets=targets, t=t), strict=True)
        }

    def exactly(self, z: Tensor, *, targets: Tensor | None = None, t: Tensor | None = None) -> Tensor:
        """`over_views` in at least float32. With t (b,), the last of the views are blends."""
        if z.shape[1] * world_size() < 2:
            raise ValueError("a batch of 1 has no statistics: use 2 or more images")
        with torch.autocast(z.device.type, enabled=False):
            z = at_least_float32(z)
            targets = None if targets is None else targets.to(z.dtype)
            if t is None:
                return self.over_views(z, targets, None, None)
            return self.over_views(z[:-1], targets, z[-1], t.to(z.dtype))

    def weigh(self, terms: Mapping[str, Any]) -> Any:
        """The loss from its named numbers."""
        return sum(
            weight * sum(own * terms[name] for name, own in part.weights().items()) for weight, part in self.parts()
        )


def pairs(views: int, *, both: bool = False) -> list[tuple[int, int]]:
    """The 1 + 2n pairs of a global view and any other, each once, with n local views; the two global ones first. With
    `both`, the global ones are there in both orders, and each global view is followed by the other one."""
    return [(g, v) for g in range(GLOBAL) for v in ([1 - g, *range(GLOBAL, views)] if both else range(g + 1, views))]


def over_pairs(numbers: Tensor, *, both: bool = False) -> Tensor:
    """Half of the global pair's numbers, half of the mean over the pairs with a local view: (n, pairs) → (n,).

    The plain mean over all pairs leaves the global pair too little weight and learns less (docs/notebook.md).
    """
    if both:
        numbers = numbers.unflatten(1, (GLOBAL, -1)).mean(1)
    together, apart = numbers[:, 0], numbers[:, 1:]
    return (together + apart.mean(1)) / 2 if apart.shape[1] else together


class BarlowTwinsLoss(Loss):
    """L_emb = Σ_u (C_uu − 1)² + λ_emb Σ_{u≠v} C_uv², Eq. (14),   C = z̃ᵀ z̃' / b, Eq. (13)."""

    names = ("invariance", "redundancy")

    def __init__(self, *, lambda_emb: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.lambda_emb, self.eps = lambda_emb, eps

    def over_views(self, z: Tensor, targets: Tensor | None, blended: Tensor | None, t: Tensor | None) -> Tensor:
        b, d = z.shape[1] * world_size(), z.shape[2]
        z = standardise(z, eps=self.eps)
        # A global view against its others, side by side, is one matrix product: (d, b) × (b, views · d).
        if targets is None:
            first, others = z, [z[g + 1 :] for g in range(GLOBAL) if len(z) > g + 1]
        else:
            first = standardise(targets, eps=self.eps)
            others = [torch.cat((z[1 - g : 2 - g], z[GLOBAL:])) for g in range(GLOBAL)]
        side_by_side = [product(first[g].mT, other.transpose(0, 1).flatten(1)) for g, other in enumerate(others)]
        c = torch.cat(side_by_side, dim=1)
        c = (total(c) / b).unflatten(1, (-1, d))  # (d, pairs, d)
        diagonal = c.diagonal(dim1=0, dim2=2)  # (pairs, d)
        invariance = (diagonal - 1).square().sum(1)
        redundancy = c.square().sum(2).sum(0) - diagonal.square().sum(1)
        return over_pairs(torch.stack((invariance, redundancy)), both=targets is not None)

    def weights(self) -> dict[str, float]:
        return {"invariance": 1.0, "redundancy": self.lambda_emb}


class Curvature(Loss):
    """L_curv = Σ_i (M_ii − 1)² + λ_curv Σ_{i≠j} M_ij², Eq. (19),   M = c̃ c̃'ᵀ / b, Eq. (18).

    c are the curvature scores of each view's embeddings, Eq. (15), with the k nearest neighbours in the global batch;
    with a kernel (as in `curvssl.kernel_curvature`) Eq. (16). Each view has its own γ. It can be added to any loss:

        loss = any_loss(z0, z1) + 10 * curvature(z0, z1)

    With λ_curv = 1 and ε → 0 it is b + 1 − 2ρ, where ρ is the correlation of the two views' scores
    (docs/mathematics.md); `terms` reports ρ as "rho".
    """

    names = ("curvature_alignment", "curvature_decorrelation", "rho")

    def __init__(
        self,
        *,
        k: int = 10,
        kernel: AnyKernel | None = None,
        gamma: float | str = "median",
        lambda_curv: float = 1.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_k(k, n=k + 1)
        check_gamma(gamma)
        self.k, self.gamma, self.lambda_curv, self.eps = k, gamma, lambda_curv, eps
        self.kernel = None if kernel is None else resolve(kernel)

    def over_views(self, z: Tensor, targets: Tensor | None, blended: Tensor | None, t: Tensor | None) -> Tensor:
        c = self.scores(z[:GLOBAL])
        if targets is None:
            return self.aligned(c)
        wanted = self.scores(targets)
        return torch.stack([self.aligned(torch.stack((wanted[g], c[1 - g]))) for g in range(GLOBAL)]).mean(0)

    def aligned(self, c: Tensor) -> Tensor:
        """The numbers of two views' scores (2, b)."""
        b = c.shape[1] * world_size()
        c = standardise(c.mT, eps=self.eps)  # (b, 2): c̃ and c̃', Eq. (17)
        m = c[:, 0] * c[:, 1] / b  # M has rank one: L_curv needs only its diagonal m and three sums
        sums = total(torch.stack((m.sum(), m.square().sum(), *c.square().sum(0))))
        rho, diagonal_squares, squares0, squares1 = sums.unbind()  # ρ is the trace of M
        alignment = diagonal_squares - 2 * rho + b
        decorrelation = squares0 * squares1 / b**2 - diagonal_squares
        return torch.stack((alignment, decorrelation, rho.detach()))

    def weights(self) -> dict[str, float]:
        return {"curvature_alignment": 1.0, "curvature_decorrelation": self.lambda_curv}

    def scores(self, z: Tensor, more: Tensor | None = None) -> Tensor:
        """Eq. (15) or (16): scores of v views, with neighbours in the global batch, (v, b, d) → (v, b). With `more`
        points (v, m, d) also among these; γ is still that of the batch."""
        check_k(self.k, n=z.shape[1] * world_size())
        everyone, first = among_all(z)
        batch = everyone.shape[1]
        everyone = everyone if more is None else torch.cat((everyone, more), 1)
        if self.kernel is None:
            return scores(z, everyone, neighbors=neighbors_of(z, everyone, k=self.k, first=first))
        if scale_free(self.kernel, self.gamma):
            scale = rescaling_with_gradient(everyone, (1, 2))
            z, everyone = z * scale, everyone * scale
        width = kernel_width(everyone[:, :batch], kernel=self.kernel, gamma=self.gamma)
        neighbors = kernel_neighbors(z, everyone, k=self.k, kernel=self.kernel, width=width, first=first)
        return kernel_scores(z, everyone, kernel=self.kernel, width=width, neighbors=neighbors)


class Chord(Loss):
    """Mean over points and dimensions of (z̃(t x + (1 − t) x') − (t z̃(x) + (1 − t) z̃(x')))².

    The embedding of a blend of two images should lie on the chord between theirs. This is the second difference of the
    embedding along the straight path between two images: zero where the path stays straight (docs/mathematics.md).
    z (b, d) are the embeddings of b images, in pairs: rows 0 and 1, rows 2 and 3, and so on. Row i of `blended` (b, d)
    is the embedding of a blend of image i, with weight t_i, and its partner (`curvssl.blend`). All are standardised by
    the mean and the deviation of z, one map for all three points. It can be added to any loss:

        x, t = curvssl.blend(views)
        loss = any_loss(z0, z1) + 10 * chord(z0, net(x), t)
    """

    names = ("chord",)

    def __init__(self, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, z: Tensor, blended: Tensor, t: Tensor) -> Tensor:  # type: ignore[override]
        check_views(z, blended, t)
        if z.ndim != 2 or z.shape != blended.shape or t.shape != z.shape[:1] or not z.shape[1]:
            raise ValueError(
                f"expected z and blended (b, d) and t (b,), got {tuple(z.shape)}, {tuple(blended.shape)} and "
                f"{tuple(t.shape)}: row i of blended must be the blend of image i and its partner"
            )
        return checked(self.exactly(torch.stack((z, blended)), t=t)[0], z, blended, t)

    def over_views(self, z: Tensor, targets: Tensor | None, blended: Tensor | None, t: Tensor | None) -> Tensor:
        if blended is None or t is None:
            raise ValueError("the chord needs the embeddings of blends and their t: give the loss both")
        scale, centre, z, deviation = centred(z[0])
        z, t = z / (deviation + self.eps * scale), t[:, None]
        blended = (blended - centre / scale) / (deviation / scale + self.eps)
        off = blended - (t * z + (1 - t) * partners(z))
        return total(off.square().sum().view(1)) / (off.numel() * world_size())

    def weights(self) -> dict[str, float]:
        return {"chord": 1.0}


class ViewPath(Loss):
    """Mean over points and dimensions of (z̃_mid − (z̃_0 + z̃_1) / 2)²: `Chord` along a path of views of one image.

    The middle view is made from the mean of the uniform numbers of the two global ones, so that its crop and colours
    lie between theirs. All are standardised by the mean and the deviation of the two global views together.
    """

    names = ("path",)

    def __init__(self, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def over_views(self, z: Tensor, targets: Tensor | None, blended: Tensor | None, t: Tensor | None) -> Tensor:
        if blended is None or t is None:
            raise ValueError("the path needs the embeddings of middle views: give the loss those")
        scale, centre, ends, deviation = centred(z[:GLOBAL].flatten(0, 1))
        first, second = (ends / (deviation + self.eps * scale)).chunk(GLOBAL)
        middle = (blended - centre / scale) / (deviation / scale + self.eps)
        off = middle - (t[:, None] * first + (1 - t[:, None]) * second)
        return total(off.square().sum().view(1)) / (off.numel() * world_size())

    def weights(self) -> dict[str, float]:
        return {"path": 1.0}


class Sum(Loss):
    """A loss plus further weighted terms."""

    def __init__(self, loss: Loss, *more: tuple[float, Loss]) -> None:
        super().__init__()
        self.loss, self.more = loss, nn.ModuleList(term for _, term in more)
        self.alphas = tuple(weight for weight, _ in more)

    def parts(self) -> tuple[tuple[float, Loss], ...]:
        return *self.loss.parts(), *zip(self.alphas, self.more, strict=True)  # type: ignore[arg-type]


def partners(x: Tensor) -> Tensor:
    """Rows 0 and 1 exchanged, rows 2 and 3, and so on: each row's partner in a blend. A pair never spans two ranks."""
    if len(x) % 2:
        raise ValueError(f"{len(x)} images do not form pairs to blend: use an even number on every rank")
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def blend(x: Tensor, t: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Blends t_i x_i + (1 − t_i) x_j of each image (b, …) and its partner j, and t (b,), by default uniform."""
    check_views(x, *[t] * (t is not None))
    if not x.ndim or (t is not None and t.shape != x.shape[:1]):
        shape = None if t is None else tuple(t.shape)
        raise ValueError(f"images have shape {tuple(x.shape)} and t {shape}: needed (b, …) and (b,)")
    t = torch.rand(len(x), device=x.device, dtype=x.dtype) if t is None else t
    share = t.view(-1, *[1] * (x.ndim - 1))
    return share * x + (1 - share) * partners(x), t


def _setting_of(part: str, name: str) -> Any:
    """A setting of one part as an attribute of the whole loss."""
    return property(
        lambda self: getattr(getattr(self, part), name), lambda self, value: setattr(getattr(self, part), name, value)
    )


class CurvSSLLoss(Loss):
    """L = L_emb + α_curv L_curv, Eq. (20): Barlow Twins plus `Curvature`."""

    lambda_emb = _setting_of("embedding", "lambda_emb")
    lambda_curv = _setting_of("curvature", "lambda_curv")

    def __init__(
        self,
        *,
        k: int = 10,
        lambda_emb: float = 1.0,
        lambda_curv: float = 1.0,
        alpha_curv: float = 1.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.embedding = BarlowTwinsLoss(lambda_emb=lambda_emb, eps=eps)
        self.curvature = Curvature(k=k, lambda_curv=lambda_curv, eps=eps)
        self.alpha_curv = alpha_curv

    def parts(self) -> tuple[tuple[float, Loss], ...]:
        return (1.0, self.embedding), (self.alpha_curv, self.curvature)


class KernelCurvSSLLoss(CurvSSLLoss):
    """CurvSSL with the curvature in a kernel's feature space, Eq. (16)."""

    def __init__(
        self,
        *,
        k: int = 10,
        kernel: AnyKernel = "rbf",
        gamma: float | str = "median",
        lambda_emb: float = 1.0,
        lambda_curv: float = 1.0,
        alpha_curv: float = 1.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(k=k, lambda_emb=lambda_emb, lambda_curv=lambda_curv, alpha_curv=alpha_curv, eps=eps)
        self.curvature = Curvature(k=k, kernel=kernel, gamma=gamma, lambda_curv=lambda_curv, eps=eps)


class VICRegLoss(Loss):
    """VICReg's three terms. As in the official code, the variance hinge is averaged over the two views."""

    names = ("invariance", "variance", "covariance")

    def __init__(self, *, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0) -> None:
        super().__init__()
        self.invariance, self.variance, self.covariance = invariance, variance, covariance

    def numbers(self, z: Tensor) -> Tensor:
        b, d = z.shape[1] * world_size(), z.shape[2]
        z0, z1 = z
        z = z - total(z.sum(1, keepdim=True)) / b
        c = total(product(z.mT, z)) / (b - 1)  # (2, d, d)
        variances = c.diagonal(dim1=1, dim2=2)
        invariance = total((z0 - z1).square().sum()) / (b * d)
        variance = torch.relu(1 - (variances + 1e-4).sqrt()).mean()
        covariance = (c.square().sum() - variances.square().sum()) / d
        return torch.stack((invariance, variance, covariance))

    def weights(self) -> dict[str, float]:
        return {"invariance": self.invariance, "variance": self.variance, "covariance": self.covariance}


def centred(z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """s, sμ, s(z − μ) and s times the population's σ over the global batch: (…, 1, d), but (…, b, d) for the third.

    s is a power of two for each feature, so that squares of large numbers do not overflow and those of small ones do
    not vanish. Over several ranks it is 1: they would have to agree on it.
    """
    b = z.shape[-2] * world_size()
    scale = torch.ones_like(z[..., :1, :]) if world_size() > 1 else rescaling(z, -2)
    z = z * scale
    mean = total(z.sum(-2, keepdim=True)) / b
    if world_size() == 1:
        # The mean of b equal numbers may be another number. Without their deviation from it they count as constant.
        with torch.no_grad():
            off = torch.where((z == z[..., :1, :]).all(-2, keepdim=True), z[..., :1, :] - mean, 0)
        mean = mean + off
    z = z - mean
    variance = total(z.square().sum(-2, keepdim=True)) / b
    constant = variance == 0  # √ has no gradient at 0
    return scale, mean, z, torch.where(constant, 0, torch.where(constant, 1, variance).sqrt())


def standardise(z: Tensor, *, eps: float) -> Tensor:
    """(z − μ) / (σ + ε) over the global batch, Eq. (12), with the population's σ, (…, b, d) → (…, b, d)."""
    scale, _, z, deviation = centred(z)
    return z / (deviation + eps * scale)


def at_least_float32(z: Tensor) -> Tensor:
    """What autocast computes in bfloat16 is float32 from here on; float64 stays."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


def check_views(*views: Any) -> None:
    """Raise ValueError if one is no dense tensor of floating-point numbers."""
    for z in views:
        if not isinstance(z, Tensor):
            raise ValueError(f"got a {type(z).__name__}: needed a tensor")
        if not z.is_floating_point() or z.layout != torch.strided:
            raise ValueError(f"got a tensor of {z.dtype}, {z.layout}: needed floating-point numbers in a dense tensor")


def checked(loss: Tensor, *views: Tensor) -> Tensor:
    """The loss; ValueError if it is not finite although the views are, on CPU in one process."""
    if world_size() == 1 and readable(loss) and not loss.isfinite() and all(bool(z.isfinite().all()) for z in views):
        largest = max(float(z.detach().abs().max()) for z in views)
        raise ValueError(
            f"the loss of embeddings up to {largest:.3g} does not fit into {loss.dtype}: scale them down or use float64"
        )
    return loss


def among_all(z: Tensor) -> tuple[Tensor, int]:
    """The points of all W ranks, (v, b, d) → (v, W·b, d), and the index of this rank's first row."""
    if world_size() == 1:
        return z, 0
    return gather(z.transpose(0, 1)).transpose(0, 1), rank() * z.shape[1]
