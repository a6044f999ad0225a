"""One training step: views, forward, loss, backward, optimiser. This is the reference, on any device.

The inputs of a step are tensors (which images, which uniform numbers, which learning rate), so that gpu/ can replace
`take` by the same arithmetic, compiled or captured in a CUDA graph.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvssl.collectives import total, world_size
from curvssl.config import UserError
from curvssl.data.views import Views
from curvssl.lars import Lars
from curvssl.losses import GLOBAL, Loss, at_least_float32, over_pairs, pairs
from curvssl.models import Net, per_view

Batch = Tensor | tuple[Tensor, ...]
HISTORY = 2**16  # steps: of so many the device remembers the sums, to tell in which of them the loss broke


class NotFinite(ArithmeticError):
    """Some terms of the loss, or its gradient, are not finite. The network is as it was before the step."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class Average:
    """The mean of a network's weights over its steps so far, where each counts `decay` times as much as the next one.

    If it is a `teacher`, it also embeds the global views of each batch, which moves the running statistics of its own
    BatchNorms. Otherwise these are averages, too.
    """

    def __init__(self, net: Net, *, decay: float, teacher: bool = False) -> None:
        self.net = copy.deepcopy(net).requires_grad_(False)
        per_view(self.net)
        self.decay, self.teacher = decay, teacher

    @torch.no_grad()
    def follow(self, net: nn.Module) -> None:
        """After a step of `net`: w̄ ← w̄ + (1 − decay) (w − w̄)."""
        own, other = (
            [*part.parameters(), *(() if self.teacher else (b for b in part.buffers() if b.is_floating_point()))]
            for part in (self.net, net)
        )
        torch._foreach_lerp_(own, other, 1 - self.decay)


class Step:
    """Call with (batch, u, lr); read `means()` and `z` at any time.

    `batch` holds row numbers (b,) of `images` if these are on the device, else uint8 images (b, C, H, W), or their
    views, if these have been made. `u` are the uniform numbers of the views (`Views.draw`). `criterion` is any module
    (z0, z1) → scalar; if it is a `Loss`, every term is logged. `z` (2b, d) are the embeddings of the two global views.

    `average` is a second network, which follows the first one step by step (`Average`). If it teaches, its embeddings
    of the global views are those that all views are compared with.

    On CPU a loss that is not finite raises `NotFinite`, and nothing has changed. Another device is not waited for:
    `broken_for` says how long ago it happened.
    """

    def __init__(
        self,
        *,
        net: nn.Module,
        criterion: nn.Module,
        views: Views,
        optimizer: torch.optim.Optimizer,
        images: Tensor | None,
        device: torch.device,
        bf16: bool,
        average: Average | None = None,
    ) -> None:
        # All views of a size go through in one batch, but BatchNorm uses one view at a time, as in the paper.
        per_view(net, passes=views.passes)
        self.net, self.criterion, self.views, self.optimizer = net, criterion, views, optimizer
        self.images, self.device, self.bf16, self.average = images, device, bf16, average
        self.teacher = average.net if average is not None and average.teacher else None
        self.mode = "eager"
        self.take: Callable[[Any, Sequence[Tensor]], None] = self.plainly
        # The terms of the loss, or the loss alone, and their weights, which are read at every step.
        self.names = tuple(name for _, part in self.parts() for name in part.names) or ("loss",)
        self.weights = torch.ones(len(self.names), device=device)
        self._weights = [1.0] * len(self.names)  # a copy on the host
        self._ones = torch.ones_like(self.weights)
        self.sums = torch.zeros(2, len(self.names), device=device)  # of the terms, and of the weighted terms
        self.count = 0
        self.history = torch.zeros(HISTORY, len(self.names), device=device)
        self.taken = 0  # steps by this process
        self.z = torch.zeros(0, device=device)

    def __call__(self, batch: Batch, u: Sequence[Tensor], lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        weights = [w * part.weights().get(name, 0.0) for w, part in self.parts() for name in part.names]
        if weights and weights != self._weights:
            self._weights = weights
            new = torch.tensor(weights)
            if self.device.type == "cuda":  # from pinned memory the copy is asynchronous
                new = new.pin_memory()
            self.weights.copy_(new, non_blocking=True)
        parts = [self.net, self.criterion, *([] if self.teacher is None else [self.teacher])]
        buffers = [buffer for part in parts for buffer in part.buffers()] if self.device.type == "cpu" else []
        before = [buffer.clone() for buffer in buffers]
        try:
            self.take(batch, u)
        except NotFinite:  # the forward pass has updated the running statistics
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)
            raise
        self.history[self.taken % HISTORY].copy_(self.sums[1])
        self.taken += 1
        self.count += 1

    def parts(self) -> tuple[tuple[float, Loss], ...]:
        """The weighted terms of the criterion, if it is a sum of terms."""
        return self.criterion.parts() if isinstance(self.criterion, Loss) else ()

    def plainly(self, batch: Batch, u: Sequence[Tensor]) -> None:
        """The step in plain torch."""
        self.optimizer.zero_grad()
        z, targets = self.embed(batch, u)
        loss, terms = self.judge(z, targets=targets, t=self.views.t(u))
        loss.backward()
        self.finish([terms], [self.weights], z)

    def judge(self, z: Tensor, *, targets: Tensor | None, t: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss to differentiate, and its terms to log, from the embeddings, the teacher's, and t of the blends."""
        z = self.by_view(z)
        if isinstance(self.criterion, Loss):
            terms = self.criterion.terms_of(z, targets=targets, t=t)
            return self.criterion.weigh(terms), torch.stack(tuple(terms.values())).detach()
        loss = over_pairs(torch.stack([self._own(z[g], z[v]) for g, v in pairs(len(z))])[None])
        return loss.squeeze(0), loss.detach()

    def by_view(self, z: Tensor) -> Tensor:
        """(V · b, d) → (V, b, d)."""
        return z.unflatten(0, (sum(self.views.passes), -1))

    def _own(self, z0: Tensor, z1: Tensor) -> Tensor:
        """The user's own criterion."""
        loss = self.criterion(z0, z1)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"the criterion returned {came}: needed one number, the loss of the batch")
        return loss.squeeze()

    def finish(self, terms: Sequence[Tensor], weights: Sequence[Tensor], z: Tensor) -> None:
        """After the backward pass: update the weights, and add up the terms."""
        if world_size() > 1:  # the network's gradients are averaged by DistributedDataParallel
            for p in self.criterion.parameters():
                if p.grad is not None:
                    p.grad = total(p.grad) / world_size()
        if self.device.type == "cpu":
            self.check(torch.cat([*terms]), torch.cat([*weights]))
        self.optimizer.step()
        self.keep(terms, weights, z)

    def check(self, terms: Tensor, weights: Tensor) -> None:
        """Raise NotFinite if a term that has a weight, or the gradient, is not finite."""
        broken = (~terms.isfinite() & (weights != 0)).tolist()
        names = [name for name, bad in zip(self.names, broken, strict=True) if bad]
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not names and not torch.nn.utils.get_total_norm(grads, torch.inf).isfinite():
            names = ["gradient"]
        if names:
            raise NotFinite(names)

    def keep(self, terms: Sequence[Tensor], weights: Sequence[Tensor], z: Tensor) -> None:
        """After the update: the average follows, and the terms, in one or more pieces, are added to the sums."""
        if self.average is not None:
            self.average.follow(self.net)
        self.z = z.detach()[: GLOBAL * len(z) // sum(self.views.passes)]
        if self.sums.dtype != terms[0].dtype:  # float64, in tests
            self.sums, weights = self.sums.to(terms[0].dtype), [weight.to(terms[0].dtype) for weight in weights]
        sizes = [len(term) for term in terms]
        ones = self._ones.to(self.sums.dtype).split(sizes)
        places = [place for row in self.sums for place in row.split(sizes)]
        torch._foreach_addcmul_(places, [*terms, *terms], [*ones, *weights])

    def embed(self, batch: Batch, u: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The embeddings of all views, one below the other: (V · b, d), at least in float32. The first two are global,
        then come local ones, then blends. With a teacher, also its embeddings of the global views, (2, b, d)."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            views = self.see(batch, u)
            return at_least_float32(self.net(*views)), self.targets(views[0])

    @torch.no_grad()
    def targets(self, views: Tensor) -> Tensor | None:
        """The teacher's embeddings of the global views, which come first in their batch; None without a teacher."""
        if self.teacher is None:
            return None
        return at_least_float32(self.teacher(self.global_of(views))).unflatten(0, (GLOBAL, -1))

    def global_of(self, views: Tensor) -> Tensor:
        """The global views of the batch that holds them, which may hold a blend as well."""
        return views[: GLOBAL * len(views) // self.views.passes[0]]

    def see(self, batch: Batch, u: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The views of a batch of images, one tensor for each size."""
        return batch if isinstance(batch, tuple) else self.views(self.pixels(batch), u)

    def pixels(self, batch: Tensor) -> Tensor:
        """The images of a batch, uint8 (b, C, H, W)."""
        return batch if self.images is None else self.images.index_select(0, batch)

    def means(self) -> dict[str, float]:
        """Mean of the loss and of each term over the steps since the last reset; waits for the device."""
        return means(self.sums, self.count, names=self.names)

    def broken_for(self) -> int:
        """For how many steps, to the last, the sums were not finite, as far as the history goes; waits for the device.

        A step whose loss is not finite breaks the weights, and so the sums of all steps after it.
        """
        first = max(0, self.taken - HISTORY)
        bad = ~self.history.isfinite().all(1).cpu()[[i % HISTORY for i in range(first, self.taken)]]
        return int(bad.int().flip(0).cumprod(0).sum())

    def reset(self) -> None:
        self.sums.zero_()
        self.count = 0

    def gradient_norm(self) -> Tensor:
        """Norm of the last step's gradient, on the device."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.net.parameters() if p.grad is not None])


def means(sums: Tensor, count: int, *, names: Sequence[str]) -> dict[str, float]:
    """The mean loss and terms from the sums of a `Step` over `count` steps."""
    plain, weighted = (sums.double() / max(1, count)).tolist()
    return {"loss": sum(weighted)} | dict(zip(names, plain, strict=True))


def make_optimizer(
    net: nn.Module, *, name: str, lr: float, weight_decay: float, momentum: float, device: torch.device, mode: str
) -> torch.optim.Optimizer:
    """adam and sgd are torch's, fused on CUDA; lars is lars.py's. A captured step reads `lr` from a tensor."""
    captured = mode == "captured"
    rate = torch.tensor(lr, device=device) if captured else lr
    fused = True if device.type == "cuda" else None
    if name == "adam":
        return torch.optim.Adam(net.parameters(), lr=rate, weight_decay=weight_decay, fused=fused, capturable=captured)
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), lr=rate, weight_decay=weight_decay, momentum=momentum, fused=fused)
    return Lars(net, lr=rate, momentum=momentum, weight_decay=weight_decay)
