"""Classifiers on fixed features, many trained in parallel: a linear layer, or one hidden layer.

Each parameter has a leading axis of heads, (H, ·, ·), so one batched product computes all of them. Heads share only the
kernel launches, so a seed's result does not depend on the other seeds.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPOCHS = 50  # the paper's
BATCH_SIZE = 256
MOMENTUM = 0.9
MLP_HIDDEN = 512  # the paper gives no width; this is the width of ResNet-18's features

Params = list[Tensor]  # one tensor (H, ·, ·) per parameter


class Head(NamedTuple):
    """A classifier: the initial parameters of one head, and the logits (H, n, classes) for x (H, n, d)."""

    initial: Callable[[int, int, torch.Generator], Params]  # (d, classes, generator) → each (·, ·)
    logits: Callable[[Params, Tensor, Tensor | None], Tensor]  # third: Cov(x) (d, d) when evaluating, None in training


def _dense(d_in: int, d_out: int, generator: torch.Generator) -> Tensor:
    """Weights (d_in, d_out) uniform in ±1/√d_in, as in torch.nn.Linear."""
    return (2 * torch.rand(d_in, d_out, generator=generator) - 1) / math.sqrt(d_in)


def _linear_initial(d: int, classes: int, generator: torch.Generator) -> Params:
    return [_dense(d, classes, generator), torch.zeros(1, classes)]


def _linear_logits(params: Params, x: Tensor, covariance: Tensor | None) -> Tensor:
    weight, bias = params
    return torch.baddbmm(bias, x, weight)


def _mlp_initial(d: int, classes: int, generator: torch.Generator) -> Params:
    """No bias in the first layer: BatchNorm would remove it."""
    first, last = _dense(d, MLP_HIDDEN, generator), _dense(MLP_HIDDEN, classes, generator)
    return [first, torch.ones(1, MLP_HIDDEN), torch.zeros(1, MLP_HIDDEN), last, torch.zeros(1, classes)]


def _mlp_logits(params: Params, x: Tensor, covariance: Tensor | None) -> Tensor:
    """BatchNorm uses the batch's statistics in training, and the exact statistics of the training set in evaluation:

    a = x W has mean 0, because x is standardised, and variance diag(Wᵀ Cov(x) W); no running average is needed.
    """
    weight, scale, shift, last, bias = params
    # (1, H · hidden, n): for batch_norm every unit of every head is a channel.
    a = (weight.mT @ x.mT).flatten(0, 1)[None]
    scale, shift = scale.flatten(), shift.flatten()
    if covariance is None:
        a = F.batch_norm(a, None, None, scale, shift, training=True)
    else:
        var = ((covariance @ weight) * weight).sum(1).flatten()
        a = F.batch_norm(a, torch.zeros_like(var), var, scale, shift)
    hidden = a.relu().view(len(x), -1, x.shape[1])  # (H, hidden, n)
    return torch.baddbmm(bias.mT, last.mT, hidden).mT


LINEAR = Head(_linear_initial, _linear_logits)
MLP = Head(_mlp_initial, _mlp_logits)


# --- training many at once --------------------------------------------------------------------------------------------


def train_heads(
    head: Head,
    x: Tensor,
    y: Tensor,
    *,
    rows: Tensor,
    heads: Sequence[tuple[int, float]],
    classes: int,
    weight_decay: float,
    epochs: int = EPOCHS,
) -> Params:
    """Parameters (H, ·, ·) of one head per (seed, lr), head i trained on the rows rows[i] of x (n, d), y (n,).

        v ← 0.9 v + ∂L/∂w + weight_decay · w,   w ← w − lr_t v,   lr_t = lr (1 + cos(π t/T)) / 2

    The permutations of all epochs are concatenated and divided into T batches of equal size. Every row is seen `epochs`
    times, except for a remainder at the end that does not fill a batch.
    """
    m, batch = rows.shape[1], min(BATCH_SIZE, rows.shape[1])
    steps = epochs * m // batch
    drawn = {seed: _draw(head, seed, d=x.shape[1], classes=classes, n=m, epochs=epochs) for seed, _ in heads}
    order = torch.stack([drawn[seed][1][: steps * batch].view(steps, batch) for seed, _ in heads], dim=1).to(x.device)
    params = [torch.stack(p).to(x.device) for p in zip(*(drawn[seed][0] for seed, _ in heads), strict=True)]
    params = [p.requires_grad_() for p in params]
    velocity = [torch.zeros_like(p) for p in params]
    lr = torch.tensor([lr for _, lr in heads]).view(-1, 1, 1).to(x.device)
    decline = ((1 + (math.pi * torch.arange(steps) / steps).cos()) / 2).to(x.device)
    t = torch.zeros(1, dtype=torch.int64, device=x.device)  # on the device, where a captured step can read it

    def step() -> None:
        batch_rows = rows.gather(1, order.index_select(0, t)[0])  # (H, batch)
        logits = head.logits(params, x[batch_rows], None)
        # The sum over heads of each head's mean loss, so each head gets the gradient of its own loss.
        loss = F.cross_entropy(logits.flatten(0, 1), y[batch_rows].flatten(), reduction="sum") / batch
        gradients = torch.autograd.grad(loss, params)
        with torch.no_grad():
            rate = lr * decline.index_select(0, t)
            for w, v, g in zip(params, velocity, gradients, strict=True):
                v.mul_(MOMENTUM).add_(g).add_(w, alpha=weight_decay)
                w.addcmul_(v, rate, value=-1)
            t.add_(1)

    _repeat(step, steps, device=x.device)
    return [p.detach() for p in params]


def _draw(head: Head, seed: int, *, d: int, classes: int, n: int, epochs: int) -> tuple[Params, Tensor]:
    """A seed's initial parameters and its concatenated permutations of n rows (epochs · n,); drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    params = head.initial(d, classes, generator)
    return params, torch.cat([torch.randperm(n, generator=generator) for _ in range(epochs)])


def _repeat(step: Callable[[], None], times: int, *, device: torch.device) -> None:
    """Call `step` so many times; on CUDA it is recorded once and replayed, because kernel launches take most time."""
    if device.type != "cuda":
        for _ in range(times):
            step()
        return
    with torch.cuda.device(device):
        warm_up = min(3, times)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm_up):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # only records
            step()
        for _ in range(times - warm_up):
            graph.replay()


@torch.no_grad()
def predict(head: Head, params: Params, x: Tensor, *, rows: Tensor, covariance: Tensor) -> Tensor:
    """Class probabilities (H, m, classes): those of head i for the rows rows[i] of x."""
    return torch.cat([head.logits(params, x[part], covariance).softmax(-1) for part in rows.split(1024, dim=1)], dim=1)
