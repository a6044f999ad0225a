"""The four objectives, as the paper writes them. Each takes the two views' embeddings, (b, d) each, and gives a scalar.

`terms(z0, z1)` gives the named, unweighted terms, `weigh(terms)` their weighted sum; `forward` is one after the other.
Inside, z (2, b, d) are the two views' embeddings.
With torch.distributed initialised every statistic is that of the global batch (the gradient: see collectives.py).
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn

from curvssl.collectives import gather, rank, total, world_size
from curvssl.geometry import check_k, kernel_neighbors, kernel_scores, neighbors_of, scores
from curvssl.kernels import Kernel, kernel_width, resolve

if torch.cuda.is_available() and find_spec("triton"):
    from curvssl.gpu import fused
else:
    fused = None  # type: ignore[assignment]

Terms = dict[str, Tensor]


class Part(NamedTuple):
    """Some terms of a loss, made from both views in one tensor; no part needs another's, so a training step may take
    them side by side."""

    names: tuple[str, ...]
    terms: Callable[[Tensor], Tensor]  # (2, b, d) → one number a name
    by_hand: Callable[[Tensor], bool] = lambda z: False  # whether it is a few launches already, for such embeddings


class Loss(nn.Module):
    """Checks the two views, and computes in at least float32 whatever autocast says."""

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        """The weighted sum of the terms."""
        return self.weigh(self.terms(z0, z1))

    def terms(self, z0: Tensor, z1: Tensor) -> Terms:
        """The named, unweighted terms of the loss, and what else there is to watch."""
        if z0.ndim != 2 or z0.shape != z1.shape:
            raise ValueError(
                f"expected two views of one shape (b, d), got {tuple(z0.shape)} and {tuple(z1.shape)}: "
                "row i of both must come from image i"
            )
        with torch.autocast(z0.device.type, enabled=False):
            z = torch.stack((z0, z1))
        found = [(part.names, self.terms_of(z, part)) for part in self.parts()]
        return {name: term for names, terms in found for name, term in zip(names, terms, strict=True)}

    def terms_of(self, z: Tensor, part: Part) -> Tensor:
        """The terms of one part, from both views in one tensor (2, b, d)."""
        if z.shape[1] * world_size() < 2:
            raise ValueError("a batch of 1 has no statistics: use 2 or more images")
        with torch.autocast(z.device.type, enabled=False):
            return part.terms(z.to(torch.promote_types(z.dtype, torch.float32)))

    def parts(self) -> tuple[Part, ...]:
        raise NotImplementedError

    def weigh(self, terms: Terms) -> Tensor:
        raise NotImplementedError


class BarlowTwinsLoss(Loss):
    """L_emb = Σ_u (C_uu − 1)² + λ_emb Σ_{u≠v} C_uv²,   C = z̃ᵀ z̃' / b."""

    def __init__(self, *, lambda_emb: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.lambda_emb, self.eps = lambda_emb, eps

    def parts(self) -> tuple[Part, ...]:
        return (Part(("invariance", "redundancy"), self.embedding),)

    def embedding(self, z: Tensor) -> Tensor:
        b = z.shape[1] * world_size()
        z0, z1 = standardise(z, eps=self.eps)
        c = total(z0.mT @ z1) / b
        diagonal = c.diagonal()
        invariance = (diagonal - 1).square().sum()
        redundancy = c.square().sum() - diagonal.square().sum()
        return torch.stack((invariance, redundancy))

    def weigh(self, terms: Terms) -> Tensor:
        return terms["invariance"] + self.lambda_emb * terms["redundancy"]


class CurvSSLLoss(BarlowTwinsLoss):
    """L = L_emb + α_curv L_curv,   L_curv = Σ_i (M_ii − 1)² + λ_curv Σ_{i≠j} M_ij²,   M = c̃ c̃'ᵀ / b.

    With λ_curv = 1 and ε → 0, L_curv = b + 1 − 2ρ, ρ the correlation of the two views' curvature scores
    (docs/mathematics.md); `terms` reports ρ as "rho".
    """

    def __init__(
        self,
        *,
        k: int = 10,
        lambda_emb: float = 1.0,
        lambda_curv: float = 1.0,
        alpha_curv: float = 1.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(lambda_emb=lambda_emb, eps=eps)
        check_k(k, n=k + 1)
        self.k, self.lambda_curv, self.alpha_curv = k, lambda_curv, alpha_curv

    def parts(self) -> tuple[Part, ...]:
        names = ("curvature_alignment", "curvature_decorrelation", "rho")
        return (*super().parts(), Part(names, self.curvature, self.in_few_kernels))

    def curvature(self, z: Tensor) -> Tensor:
        b = z.shape[1] * world_size()
        check_k(self.k, n=b)
        if self.in_few_kernels(z):
            return self.terms_in_few_kernels(z)
        c = standardise(self.scores(z).mT, eps=self.eps)  # (b, 2): c̃ and c̃'
        m = c[:, 0] * c[:, 1] / b  # M is rank one: its diagonal m and three sums are all that L_curv needs
        sums = total(torch.stack((m.sum(), m.square().sum(), *c.square().sum(0))))
        rho, diagonal_squares, squares0, squares1 = sums.unbind()  # ρ is the trace of M
        alignment = diagonal_squares - 2 * rho + b
        decorrelation = squares0 * squares1 / b**2 - diagonal_squares
        return torch.stack((alignment, decorrelation, rho.detach()))

    def scores(self, z: Tensor) -> Tensor:
        """Curvature of v views' embeddings among the global batch, (v, b, d) → (v, b)."""
        everyone, first = among_all(z)
        return scores(z, everyone, neighbors=neighbors_of(z, everyone, k=self.k, first=first))

    def in_few_kernels(self, z: Tensor) -> bool:
        """Whether the hand-written kernels take this batch; what they compute is the same."""
        return fused is not None and world_size() == 1 and fused.fits(z, k=self.k)

    def terms_in_few_kernels(self, z: Tensor) -> Tensor:
        return fused.terms(z, k=self.k, eps=self.eps)

    def weigh(self, terms: Terms) -> Tensor:
        curvature = terms["curvature_alignment"] + self.lambda_curv * terms["curvature_decorrelation"]
        return super().weigh(terms) + self.alpha_curv * curvature


class KernelCurvSSLLoss(CurvSSLLoss):
    """CurvSSL with the curvature taken in a kernel's space; each view has its own γ, of the global batch."""

    def __init__(
        self,
        *,
        k: int = 10,
        kernel: str | Kernel = "rbf",
        gamma: float | str = "median",
        lambda_emb: float = 1.0,
        lambda_curv: float = 1.0,
        alpha_curv: float = 1.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(k=k, lambda_emb=lambda_emb, lambda_curv=lambda_curv, alpha_curv=alpha_curv, eps=eps)
        resolve(kernel)
        kernel_width(torch.zeros(1, 2, 1), kernel=kernel, gamma=gamma)
        self.kernel, self.gamma = kernel, gamma

    def scores(self, z: Tensor) -> Tensor:
        everyone, first = among_all(z)
        width = kernel_width(everyone, kernel=self.kernel, gamma=self.gamma)
        neighbors = kernel_neighbors(z, everyone, k=self.k, kernel=self.kernel, width=width, first=first)
        return kernel_scores(z, everyone, kernel=self.kernel, width=width, neighbors=neighbors)

    def in_few_kernels(self, z: Tensor) -> bool:
        return self.kernel == "rbf" and super().in_few_kernels(z)

    def terms_in_few_kernels(self, z: Tensor) -> Tensor:
        median = self.gamma == "median"  # which the kernels find themselves
        width = None if median else kernel_width(z, kernel=self.kernel, gamma=self.gamma).flatten()
        return fused.rbf_terms(z, k=self.k, eps=self.eps, width=width)


class VICRegLoss(Loss):
    """VICReg's three terms, with the official halves: the variance hinge is averaged over the two views."""

    def __init__(self, *, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0) -> None:
        super().__init__()
        self.invariance, self.variance, self.covariance = invariance, variance, covariance

    def parts(self) -> tuple[Part, ...]:
        return (Part(("invariance", "variance", "covariance"), self.embedding),)

    def embedding(self, z: Tensor) -> Tensor:
        b, d = z.shape[1] * world_size(), z.shape[2]
        z0, z1 = z
        z = z - total(z.sum(1, keepdim=True)) / b
        c = total(z.mT @ z) / (b - 1)  # (2, d, d)
        variances = c.diagonal(dim1=1, dim2=2)
        invariance = total((z0 - z1).square().sum()) / (b * d)
        variance = torch.relu(1 - (variances + 1e-4).sqrt()).mean()
        covariance = (c.square().sum() - variances.square().sum()) / d
        return torch.stack((invariance, variance, covariance))

    def weigh(self, terms: Terms) -> Tensor:
        return (
            self.invariance * terms["invariance"]
            + self.variance * terms["variance"]
            + self.covariance * terms["covariance"]
        )


def standardise(z: Tensor, *, eps: float) -> Tensor:
    """(z − μ) / (σ + ε) over the global batch, σ the population's standard deviation, (…, b, d) → (…, b, d)."""
    b = z.shape[-2] * world_size()
    z = z - total(z.sum(-2, keepdim=True)) / b
    variance = total(z.square().sum(-2, keepdim=True)) / b
    constant = variance == 0  # √ has no gradient at 0
    deviation = torch.where(constant, 0, torch.where(constant, 1, variance).sqrt())
    return z / (deviation + eps)


def among_all(z: Tensor) -> tuple[Tensor, int]:
    """The points of all ranks, (v, b, d) → (v, W·b, d), and the row at which ours begin."""
    if world_size() == 1:
        return z, 0
    return gather(z.transpose(0, 1)).transpose(0, 1), rank() * z.shape[1]
