"""The paper's objectives: terms, which are functions of two views' embeddings, and losses, weighted sums of terms.

A loss takes the embeddings of two views, (b, d) each, where row i of both comes from image i, and returns a scalar.
`terms(z0, z1)` returns its named terms without their weights. Inside, z (2, b, d) holds both views.

With torch.distributed initialised, every statistic and the gradient are those of the global batch (collectives.py).
To add a loss: one class here, and one line in methods.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvssl.collectives import gather, rank, total, world_size
from curvssl.geometry import check_k, kernel_neighbors, kernel_scores, neighbors_of, scores
from curvssl.kernels import AnyKernel, check_gamma, kernel_width, product, resolve


class Loss(nn.Module):
    """Σ_t w_t · term_t over `parts()`; a single term is a sum whose only part is itself.

    A term has `names`, `numbers` and `weights`. The weights are read at every call, so they may change during training.
    It computes in at least float32, whatever the settings of autocast and TF32 are.
    """

    names: tuple[str, ...] = ()

    def numbers(self, z: Tensor) -> Tensor:
        """One number for each name, from both views (2, b, d)."""
        raise NotImplementedError

    def weights(self) -> dict[str, float]:
        """The weights of the numbers in this term; a number without a weight is only logged."""
        raise NotImplementedError

    def parts(self) -> tuple[tuple[float, "Loss"], ...]:
        """The terms with their weights; terms are independent, so a training step may compute them in parallel."""
        return ((1.0, self),)

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        return self.weigh(self.terms(z0, z1))

    def terms(self, z0: Tensor, z1: Tensor) -> dict[str, Tensor]:
        """The named numbers of the loss, without their weights, and those that are only logged."""
        if z0.ndim != 2 or z0.shape != z1.shape:
            raise ValueError(
                f"expected two views of one shape (b, d), got {tuple(z0.shape)} and {tuple(z1.shape)}: "
                "row i of both must come from image i"
            )
        with torch.autocast(z0.device.type, enabled=False):
            z = torch.stack((z0, z1))
        return {
            name: number for _, part in self.parts() for name, number in zip(part.names, part.exactly(z), strict=True)
        }

    def exactly(self, z: Tensor) -> Tensor:
        """`numbers` in at least float32."""
        if z.shape[1] * world_size() < 2:
            raise ValueError("a batch of 1 has no statistics: use 2 or more images")
        with torch.autocast(z.device.type, enabled=False):
            return self.numbers(z.to(torch.promote_types(z.dtype, torch.float32)))

    def weigh(self, terms: Mapping[str, Any]) -> Any:
        """The loss from its named numbers."""
        return sum(
            weight * sum(own * terms[name] for name, own in part.weights().items()) for weight, part in self.parts()
        )


class BarlowTwinsLoss(Loss):
    """L_emb = Σ_u (C_uu − 1)² + λ_emb Σ_{u≠v} C_uv², Eq. (14),   C = z̃ᵀ z̃' / b, Eq. (13)."""

    names = ("invariance", "redundancy")

    def __init__(self, *, lambda_emb: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.lambda_emb, self.eps = lambda_emb, eps

    def numbers(self, z: Tensor) -> Tensor:
        b = z.shape[1] * world_size()
        z0, z1 = standardise(z, eps=self.eps)
        c = total(product(z0.mT, z1)) / b
        diagonal = c.diagonal()
        invariance = (diagonal - 1).square().sum()
        redundancy = c.square().sum() - diagonal.square().sum()
        return torch.stack((invariance, redundancy))

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

    def numbers(self, z: Tensor) -> Tensor:
        b = z.shape[1] * world_size()
        check_k(self.k, n=b)
        c = standardise(self.scores(z).mT, eps=self.eps)  # (b, 2): c̃ and c̃', Eq. (17)
        m = c[:, 0] * c[:, 1] / b  # M has rank one: L_curv needs only its diagonal m and three sums
        sums = total(torch.stack((m.sum(), m.square().sum(), *c.square().sum(0))))
        rho, diagonal_squares, squares0, squares1 = sums.unbind()  # ρ is the trace of M
        alignment = diagonal_squares - 2 * rho + b
        decorrelation = squares0 * squares1 / b**2 - diagonal_squares
        return torch.stack((alignment, decorrelation, rho.detach()))

    def weights(self) -> dict[str, float]:
        return {"curvature_alignment": 1.0, "curvature_decorrelation": self.lambda_curv}

    def scores(self, z: Tensor) -> Tensor:
        """Eq. (15) or (16): scores of v views, with neighbours in the global batch, (v, b, d) → (v, b)."""
        everyone, first = among_all(z)
        if self.kernel is None:
            return scores(z, everyone, neighbors=neighbors_of(z, everyone, k=self.k, first=first))
        width = kernel_width(everyone, kernel=self.kernel, gamma=self.gamma)
        neighbors = kernel_neighbors(z, everyone, k=self.k, kernel=self.kernel, width=width, first=first)
        return kernel_scores(z, everyone, kernel=self.kernel, width=width, neighbors=neighbors)


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


def standardise(z: Tensor, *, eps: float) -> Tensor:
    """(z − μ) / (σ + ε) over the global batch, Eq. (12), with the population's σ, (…, b, d) → (…, b, d)."""
    b = z.shape[-2] * world_size()
    z = z - total(z.sum(-2, keepdim=True)) / b
    variance = total(z.square().sum(-2, keepdim=True)) / b
    constant = variance == 0  # √ has no gradient at 0
    deviation = torch.where(constant, 0, torch.where(constant, 1, variance).sqrt())
    return z / (deviation + eps)


def among_all(z: Tensor) -> tuple[Tensor, int]:
    """The points of all W ranks, (v, b, d) → (v, W·b, d), and the index of this rank's first row."""
    if world_size() == 1:
        return z, 0
    return gather(z.transpose(0, 1)).transpose(0, 1), rank() * z.shape[1]
