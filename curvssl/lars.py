"""LARS, a step of SGD whose length is fitted to each layer; as one can capture it in a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ETA = 0.02  # how far a layer may move in one step, as a share of its norm; solo-learn's for 32×32 images
EPS = 1e-8


class Lars(torch.optim.Optimizer):
    """You et al. (2017), with the local rate η ‖w‖ / (‖g‖ + β ‖w‖) as an upper bound of the rate, as in LARC:

        v ← μ v + min(1, η ‖w‖ / ((‖g‖ + β ‖w‖) lr)) (g + β w),   w ← w − lr v

    Gains and biases have neither weight decay β nor a local rate. `lr` may be a tensor, so that a captured step can
    follow a schedule; timm's LARS takes it as a number.
    """

    def __init__(self, net: nn.Module, *, lr: float | Tensor, momentum: float, weight_decay: float) -> None:
        layers = [p for p in net.parameters() if p.ndim >= 2]
        plain = [p for p in net.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": layers, "adapt": True}, {"params": plain, "adapt": False}]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            grads, lr = [p.grad for p in weights], group["lr"]
            if group["adapt"]:
                grads = self._fitted(weights, grads, lr=lr, decay=group["weight_decay"])
            for p in weights:
                self.state[p].setdefault("velocity", torch.zeros_like(p))
            velocities = [self.state[p]["velocity"] for p in weights]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, grads)
            torch._foreach_sub_(weights, torch._foreach_mul(velocities, lr))

    @staticmethod
    def _fitted(weights: list[Tensor], grads: list[Tensor], *, lr: float | Tensor, decay: float) -> list[Tensor]:
        """Gradients with weight decay, scaled layer by layer."""
        w, g = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, grads))
        share = ETA * w / (g + decay * w + EPS) / lr
        share = torch.where((w > 0) & (g > 0), share, 1).clamp(max=1)
        grads = list(torch._foreach_add(grads, weights, alpha=decay))
        torch._foreach_mul_(grads, list(share.unbind()))
        return grads
