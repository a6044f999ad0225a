"""The four objectives, as the paper writes them. Each takes the two views' embeddings, (b, d) each, and gives a scalar.

`terms(z0, z1)` gives the named, unweighted parts, `weigh(terms)` their weighted sum; `forward` is one after the other.
Inside, z (2, b, d) are the two views' embeddings.
With torch.distributed initialised every statistic is that of the global batch (the gradient: see distributed.py).
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from curvssl import distributed
from curvssl.distributed import gather, total, world_size
from curvssl.geometry import check_k, kernel_neighbors, kernel_scores, neighbors_of, scores
from curvssl.kernels import Kernel, kernel_width, resolve

if torch.cuda.is_available() and find_spec("triton"):
    from curvssl import fused
else:
    fused = None  # type: ignore[assignment]

Terms = dict[str, Tensor]


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
        return {name: value for part in self.parts() for name, value in self.terms_of(z, part).items()}

    def terms_of(self, z: Tensor, part: Callable[[Tensor], Terms]) -> Terms:
        """The terms of one part, from both views in one tensor (2, b, d)."""
        if z.shape[1] * world_size() < 2:
            raise ValueError("a batch of 1 has no statistics: use 2 or more images")
        with torch.autocast(z.device.type, enabled=False):
            return part(z.to(torch.promote_types(z.dtype, torch.float32)))

    def parts(self) -> tuple[Callable[[Tensor], Terms], ...]:
        """What makes the terms; no part needs another's, so a training step may take them side by side."""
        return (self.embedding,)

    def embedding(self, z: Tensor) -> Terms:
        raise NotImplementedError

    def weigh(self, terms: Terms) -> Tensor:
        raise NotImplementedError


class BarlowTwinsLoss(Loss):
    """L_emb = Σ_u (C_uu − 1)² + λ_emb Σ_{u≠v} C_uv²,   C = z̃ᵀ z̃' / b."""

    def __init__(self, *, lambda_emb: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.lambda_emb, self.eps = lambda_emb, eps

    def embedding(self, z: Tensor) -> Terms:
        b = z.shape[1] * world_size()
        z0, z1 = standardise(z, eps=self.eps)
        c = total(z0.mT @ z1) / b
        diagonal = c.diagonal()
        return {
            "invariance": (diagonal - 1).square().sum(),
            "redundancy": c.square().sum() - diagonal.square().sum(),
        }

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

    def scores(self, z: Tensor) -> Tensor:
        """Curvature of v views' embeddings among the global batch, (v, b, d) → (v, b)."""
        if self.in_one_kernel(z):
            return fused.curvature(z, k=self.k)
        everyone, first = among_all(z)
        return scores(z, everyone, neighbors=neighbors_of(z, everyone, k=self.k, first=first))

    def in_one_kernel(self, z: Tensor) -> bool:
        """Whether the hand-written kernels take this batch; what they compute is the same."""
        return fused is not None and world_size() == 1 and fused.fits(z, k=self.k)

    def parts(self) -> tuple[Callable[[Tensor], Terms], ...]:
        return (self.embedding, self.curvature)

    def curvature(self, z: Tensor) -> Terms:
        b = z.shape[1] * world_size()
        check_k(self.k, n=b)
        curvature = self.scores(z)  # (2, b)
        if self.in_one_kernel(z):
            alignment, decorrelation, rho = fused.alignment(curvature, eps=self.eps)
        else:
            c = standardise(curvature.mT, eps=self.eps)  # (b, 2): c̃ and c̃'
            m = c[:, 0] * c[:, 1] / b  # M is rank one: its diagonal m and three sums are all that L_curv needs
            sums = total(torch.stack((m.sum(), m.square().sum(), *c.square().sum(0))))
            rho, diagonal_squares, squares0, squares1 = sums.unbind()
            alignment = diagonal_squares - 2 * rho + b
            decorrelation = squares0 * squares1 / b**2 - diagonal_squares
        return {
            "curvature_alignment": alignment,
            "curvature_decorrelation": decorrelation,
            "rho": rho.detach(),  # the trace of M
        }

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
        in_one_kernel = self.kernel == "rbf" and self.in_one_kernel(z)
        if in_one_kernel and self.gamma == "median":
            return fused.rbf_curvature(z, k=self.k, width=None)
        width = kernel_width(everyone, kernel=self.kernel, gamma=self.gamma)
        if in_one_kernel:
            return fused.rbf_curvature(z, k=self.k, width=width)
        neighbors = kernel_neighbors(z, everyone, k=self.k, kernel=self.kernel, width=width, first=first)
        return kernel_scores(z, everyone, kernel=self.kernel, width=width, neighbors=neighbors)


class VICRegLoss(Loss):
    """VICReg's three terms, with the official halves: the variance hinge is averaged over the two views."""

    def __init__(self, *, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0) -> None:
        super().__init__()
        self.invariance, self.variance, self.covariance = invariance, variance, covariance

    def embedding(self, z: Tensor) -> Terms:
        b, d = z.shape[1] * world_size(), z.shape[2]
        z0, z1 = z
        z = z - total(z.sum(1, keepdim=True)) / b
        c = total(z.mT @ z) / (b - 1)  # (2, d, d)
        variances = c.diagonal(dim1=1, dim2=2)
        return {
            "invariance": total((z0 - z1).square().sum()) / (b * d),
            "variance": torch.relu(1 - (variances + 1e-4).sqrt()).mean(),
            "covariance": (c.square().sum() - variances.square().sum()) / d,
        }

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
    return gather(z.transpose(0, 1)).transpose(0, 1), distributed.rank() * z.shape[1]
