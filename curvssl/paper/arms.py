"""Losses that only the study of docs/curvature.md needs: NT-Xent, and forms of the curvature term that are no method.

A cell of a study names one as an `Arm`, and `curvssl.pretrain` gets what `Arm.make` returns as its criterion. All are
`Loss`es without parameters, so that a step compiles and captures them like our own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvssl.collectives import total, world_size
from curvssl.config import PretrainConfig
from curvssl.geometry import check_k, edge_scores, neighbors_of
from curvssl.kernels import product, unit
from curvssl.losses import GLOBAL, BarlowTwinsLoss, Curvature, Loss, Sum, among_all, standardise
from curvssl.methods import METHODS

BANK = 4096  # embeddings of each view that the bank keeps
TEMPERATURE = 0.5  # SimCLR's for CIFAR-10


@dataclass(frozen=True)
class Arm:
    """A criterion: a loss and, if α is not 0, a term of curvature with this weight, or a flow of this length."""

    loss: str  # a method, with the settings of the cell's configuration, or nt-xent
    alpha: float = 0.0
    term: str = "curvature"  # curvature, profile or bank; or flow, which is for Barlow Twins alone
    k: int = 10
    kernel: str | None = None  # none: the curvature of Eq. (6); a profile has no other
    late: bool = False  # whether α rises from 0 to its value over the second half of the run

    def make(self, config: PretrainConfig) -> Loss:
        if self.loss == "nt-xent":
            loss: Loss = NTXent()
        else:
            method = METHODS[self.loss]
            settings = {name: getattr(config, name) for name in method.settings}
            if self.term == "flow":
                return Flow(d=config.d_z, share=self.alpha, k=self.k, **settings)
            loss = method.make(**settings)
        if not self.alpha:
            return loss
        terms: dict[str, Callable[[], Loss]] = {
            "curvature": lambda: Curvature(k=self.k, kernel=self.kernel),
            "profile": lambda: Profile(k=self.k),
            "bank": lambda: Bank(d=config.d_z, k=self.k, kernel=self.kernel),
        }
        return (Late if self.late else Sum)(loss, (self.alpha, terms[self.term]()))


class Late(Sum):
    """A loss plus terms that have no weight in the first half of the run, and over the second one that rises linearly
    to its value: early on, neighbours are of other classes."""

    def __init__(self, loss: Loss, *more: tuple[float, Loss]) -> None:
        super().__init__(loss, *more)
        self.final = self.alphas
        self.schedule(0.0)

    def schedule(self, share: float) -> None:
        self.alphas = tuple(max(0.0, 2 * share - 1) * weight for weight in self.final)


class NTXent(Loss):
    """SimCLR's loss (Chen et al., 2020): which of the 2b − 1 other views is of the same image, as a cross-entropy.

    mean over the 2b views i of −log exp(s_ij) / Σ_{l≠i} exp(s_il),   s_il = cos(z_i, z_l) / τ,   j i's other view
    """

    names = ("nt_xent",)

    def __init__(self, *, temperature: float = TEMPERATURE) -> None:
        super().__init__()
        self.temperature = temperature

    def numbers(self, z: Tensor) -> Tensor:
        u = unit(z)
        everyone, first = among_all(u)  # (2, n, d)
        n, row = everyone.shape[1], torch.arange(first, first + z.shape[1], device=z.device)
        similarity = product(u.flatten(0, 1), everyone.flatten(0, 1).mT) / self.temperature  # (2b, 2n)
        itself, other = torch.cat((row, n + row)), torch.cat((n + row, row))
        similarity = similarity.scatter(1, itself[:, None], -torch.inf)
        wrong = nn.functional.cross_entropy(similarity, other, reduction="sum")
        return total(wrong.view(1)) / (2 * n)

    def weights(self) -> dict[str, float]:
        return {"nt_xent": 1.0}


class Profile(Loss):
    """L_curv of k numbers for each image instead of their sum.

        p_ia = ½ Σ_{b≠a} ⟨u_ia, u_ib⟩,   Σ_a p_ia = c_i, Eq. (6),   M = P̃ P̃'ᵀ / (b k)

    p_ia are sorted for each point, because the views of an image need not have the same neighbours, or in the same
    order. Each of the k columns is standardised over the batch, so that one column alone would be `Curvature`. The
    k(k−1)/2 cosines of all pairs would say more, and cost k times as much.
    """

    names = ("profile_alignment", "profile_decorrelation", "profile_rho")

    def __init__(self, *, k: int = 10, eps: float = 1e-5) -> None:
        super().__init__()
        self.k, self.eps = k, eps

    def over_views(self, z: Tensor, targets: Tensor | None, blended: Tensor | None, t: Tensor | None) -> Tensor:
        z = z[:GLOBAL]
        b = z.shape[1] * world_size()
        check_k(self.k, n=b)
        everyone, first = among_all(z)
        shares = edge_scores(z, everyone, neighbors=neighbors_of(z, everyone, k=self.k, first=first))
        p = standardise(shares.sort(dim=2).values, eps=self.eps)  # (2, b, k)
        m = (p[0] * p[1]).sum(1) / (b * self.k)  # M's diagonal
        rho, diagonal_squares = total(torch.stack((m.sum(), m.square().sum()))).unbind()
        grams = total(product(p.mT, p)) / (b * self.k)  # Σ_ij M_ij² is the sum of the products of their entries
        alignment = diagonal_squares - 2 * rho + b
        return torch.stack((alignment, grams.prod(0).sum() - diagonal_squares, rho.detach()))

    def weights(self) -> dict[str, float]:
        return {"profile_alignment": 1.0, "profile_decorrelation": 1.0}


class Bank(Curvature):
    """`Curvature` with neighbours in the batch and among the last embeddings of each view, which have no gradient.

    Row i of both views' banks is of one image. The ρ of the metrics is still that of neighbours in the batch.
    """

    bank: Tensor
    filled: Tensor

    def __init__(self, *, d: int, size: int = BANK, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("bank", torch.zeros(GLOBAL, size, d))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    def over_views(self, z: Tensor, targets: Tensor | None, blended: Tensor | None, t: Tensor | None) -> Tensor:
        z = z[:GLOBAL]
        everyone = among_all(z.detach())[0]
        size = self.bank.shape[1]
        # What is not filled yet is farther from all points than these are from each other, so that it is no neighbour.
        known = (torch.arange(size, device=z.device) < self.filled)[:, None]
        numbers = self.aligned(self.scores(z, torch.where(known, self.bank.to(z.dtype), 4 * everyone.abs().max())))
        self.bank.copy_(torch.cat((everyone, self.bank), 1)[:, :size])
        self.filled.add_(everyone.shape[1]).clamp_(max=size)
        return numbers


class Flow(BarlowTwinsLoss):
    """Barlow Twins with targets that flow along their mean curvature: for those of a teacher (`--teacher`).

        t_i + r H_i,   H_i = mean over a of q_a − t_i

    q_a are the k of the last `size` targets whose directions are nearest to that of t_i; all are standardised. H is the
    discrete mean-curvature vector, and points to where the targets are dense. With r = 1 the target of an image is the
    mean of its neighbours. Until the bank of targets of the first view is full, r is 0.
    """

    bank: Tensor
    filled: Tensor

    def __init__(self, *, d: int, share: float, k: int = 5, size: int = BANK, **settings: Any) -> None:
        super().__init__(**settings)
        self.share, self.k = share, k
        self.register_buffer("bank", torch.zeros(size, d))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    def over_views(self, z: Tensor, targets: Tensor | None, blended: Tensor | None, t: Tensor | None) -> Tensor:
        if targets is None:
            raise ValueError("a flow moves the targets of a teacher: train with teacher=True")
        targets = standardise(targets, eps=self.eps)
        bank, size = self.bank.to(targets.dtype), len(self.bank)
        near = product(targets.flatten(0, 1), unit(bank).mT).topk(self.k).indices
        flow = bank[near].mean(1).unflatten(0, targets.shape[:2]) - targets
        moved = targets + self.share * torch.where(self.filled == size, flow, 0)
        self.bank.copy_(torch.cat((among_all(targets)[0][0], bank))[:size])
        self.filled.add_(z.shape[1] * world_size()).clamp_(max=size)
        return super().over_views(z, moved, blended, t)
