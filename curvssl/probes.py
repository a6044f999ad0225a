"""How much of the labels a frozen encoder's features hold: a linear layer, a hidden layer, nearest neighbours; PROBES.

Every probe is (train_h, train_y, test_h, test_y) → ProbeResult. The test labels are read once, to count the correct
predictions; whatever is chosen is chosen on a part of the training features.

Trained probes fit H heads side by side: each parameter has a leading axis of heads, (H, ·, ·), and one batched product
serves them all. Heads meet nowhere but in the launch of a kernel, so a seed's result does not depend on its company.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from curvssl.config import UserError

EPOCHS = 50  # the paper's
BATCH_SIZE = 256
MOMENTUM = 0.9
HELD_OUT = 0.1  # share of the training features on which a learning rate is judged
CUTS = 3  # times that share is drawn

LINEAR_LRS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
LINEAR_DECAY = 1e-5

MLP_HIDDEN = 512  # the paper gives no width; ResNet-18's own
MLP_LRS = (0.03,)
MLP_DECAY = 3e-3  # the best of four on held-out training images of CIFAR-10 (docs/reproduction.md)

KNN_K = 20
KNN_TEMPERATURE = 0.07

Params = list[Tensor]  # one tensor (H, ·, ·) a parameter


@dataclass(frozen=True)
class ProbeResult:
    accuracy: tuple[float, ...]  # percent of the test images, one a seed; one alone where nothing is random
    predictions: Tensor  # (N_test,) int64, the first seed's
    confidence: Tensor  # (N_test,) float32, the probability or share of votes of the predicted class
    settings: dict[str, Any]


class Head(NamedTuple):
    """A classifier: its first parameters for one head, and its logits (H, n, classes) for x (H, n, d)."""

    initial: Callable[[int, int, torch.Generator], Params]  # (d, classes, generator) → each (·, ·)
    logits: Callable[[Params, Tensor, Tensor | None], Tensor]  # third: Cov(x) (d, d) when evaluating, None in training


# --- the three probes -------------------------------------------------------------------------------------------------


def linear(
    train_h: Tensor,
    train_y: Tensor,
    test_h: Tensor,
    test_y: Tensor,
    *,
    classes: int,
    seeds: tuple[int, ...] = (0, 1, 2),
    device: torch.device | str | None = None,
) -> ProbeResult:
    """One linear layer and cross-entropy, on features standardised by the training features' mean and deviation.

    SGD with momentum 0.9, cosine to 0, batches of 256, 50 epochs. The learning rate is chosen among six by accuracy
    on held-out tenths of the training features; the layer is then trained on all of them. A seed decides the first
    weights and the order of the data.
    """
    data = (train_h, train_y, test_h, test_y)
    return _trained(LINEAR, data, classes, seeds, device, lrs=LINEAR_LRS, weight_decay=LINEAR_DECAY)


def mlp(
    train_h: Tensor,
    train_y: Tensor,
    test_h: Tensor,
    test_y: Tensor,
    *,
    classes: int,
    seeds: tuple[int, ...] = (0, 1, 2),
    device: torch.device | str | None = None,
) -> ProbeResult:
    """The paper's probe: Linear(d, 512) – BatchNorm – ReLU – Linear(512, classes) and cross-entropy.

    Trained as `linear` is, except that the learning rate is fixed in advance: BatchNorm makes the hidden layer
    indifferent to its scale.
    """
    data = (train_h, train_y, test_h, test_y)
    result = _trained(MLP, data, classes, seeds, device, lrs=MLP_LRS, weight_decay=MLP_DECAY)
    return replace(result, settings=result.settings | {"hidden": MLP_HIDDEN})


@torch.no_grad()
def knn(
    train_h: Tensor,
    train_y: Tensor,
    test_h: Tensor,
    test_y: Tensor,
    *,
    classes: int,
    seeds: tuple[int, ...] = (0,),
    device: torch.device | str | None = None,
) -> ProbeResult:
    """The vote of the 20 training images with the greatest cosine similarity s, each with weight exp(s / 0.07).

    k and the temperature are fixed in advance. Nothing is random, so there is one accuracy, whatever the seeds.
    """
    _check(train_h, train_y, test_h, test_y, classes=classes)
    place = _device(device)
    bank = F.normalize(train_h.to(place, torch.float32), dim=1)  # (n, d)
    voters = F.one_hot(train_y.to(place), classes).float()
    k = min(KNN_K, len(bank))
    shares = []
    for query in test_h.split(1024):
        similarity, nearest = (F.normalize(query.to(place, torch.float32), dim=1) @ bank.T).topk(k, dim=1)
        weight = (similarity / KNN_TEMPERATURE).softmax(dim=1)  # the shares of the vote; they sum to one
        shares.append((weight[:, None] @ voters[nearest]).squeeze(1))
    settings = {"k": k, "similarity": "cosine", "temperature": KNN_TEMPERATURE}
    return _result(torch.cat(shares)[None], test_y, settings)


PROBES: dict[str, Callable[..., ProbeResult]] = {"linear": linear, "mlp": mlp, "knn": knn}


# --- heads ------------------------------------------------------------------------------------------------------------


def _dense(d_in: int, d_out: int, generator: torch.Generator) -> Tensor:
    """Weights (d_in, d_out) uniform in ±1/√d_in, as torch.nn.Linear has them."""
    return (2 * torch.rand(d_in, d_out, generator=generator) - 1) / math.sqrt(d_in)


def _linear_initial(d: int, classes: int, generator: torch.Generator) -> Params:
    return [_dense(d, classes, generator), torch.zeros(1, classes)]


def _linear_logits(params: Params, x: Tensor, covariance: Tensor | None) -> Tensor:
    weight, bias = params
    return torch.baddbmm(bias, x, weight)


def _mlp_initial(d: int, classes: int, generator: torch.Generator) -> Params:
    """No bias in the first layer: BatchNorm would take it away again."""
    first, last = _dense(d, MLP_HIDDEN, generator), _dense(MLP_HIDDEN, classes, generator)
    return [first, torch.ones(1, MLP_HIDDEN), torch.zeros(1, MLP_HIDDEN), last, torch.zeros(1, classes)]


def _mlp_logits(params: Params, x: Tensor, covariance: Tensor | None) -> Tensor:
    """BatchNorm's statistics are the batch's in training. In evaluation they are the training set's, exactly:

    a = x W has mean 0, because x is standardised, and variance diag(Wᵀ Cov(x) W); no running average is needed.
    """
    weight, scale, shift, last, bias = params
    # (1, H · hidden, n): to batch_norm every unit of every head is a channel.
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


# --- training many heads at once --------------------------------------------------------------------------------------


def _trained(
    head: Head,
    data: tuple[Tensor, Tensor, Tensor, Tensor],
    classes: int,
    seeds: Sequence[int],
    device: torch.device | str | None,
    *,
    lrs: Sequence[float],
    weight_decay: float,
) -> ProbeResult:
    """Choose a learning rate if there is a choice, train on all training features, predict the test features."""
    _check(*data, classes=classes)
    train_h, train_y, test_h, test_y = data
    place = _device(device)
    x, x_test = standardised(train_h.to(place, torch.float32), test_h.to(place, torch.float32))
    y = train_y.to(place)
    covariance = x.T @ x / len(x)
    lr = lrs[0] if len(lrs) == 1 else _choose_lr(head, x, y, covariance, classes, lrs=lrs, weight_decay=weight_decay)
    rows = torch.arange(len(x), device=place).expand(len(seeds), -1)
    heads = [(seed, lr) for seed in seeds]
    params = train_heads(head, x, y, rows=rows, heads=heads, classes=classes, weight_decay=weight_decay)
    rows = torch.arange(len(x_test), device=place).expand(len(seeds), -1)
    settings = {
        "seeds": list(seeds),
        "epochs": EPOCHS,
        "batch_size": min(BATCH_SIZE, len(x)),
        "optimizer": f"SGD, momentum {MOMENTUM}, cosine",
        "lr": lr,
        "lr_choices": list(lrs),
        "weight_decay": weight_decay,
    }
    return _result(predict(head, params, x_test, rows=rows, covariance=covariance), test_y, settings)


def standardised(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Both (n, d), less the mean and over the standard deviation of train's columns.

    A column that hardly moves beside the liveliest one is a dead feature: its deviation is rounding, and dividing by
    it would make noise as loud as a signal.
    """
    std, mean = torch.std_mean(train, dim=0, correction=0)
    std = std.clamp_min(1e-5 * std.max()).clamp_min(torch.finfo(std.dtype).tiny)
    return (train - mean) / std, (test - mean) / std


def _choose_lr(
    head: Head, x: Tensor, y: Tensor, covariance: Tensor, classes: int, *, lrs: Sequence[float], weight_decay: float
) -> float:
    """The rate with the best mean accuracy on held-out tenths of the training features; of equals the smallest.

    Three cuts, always the same three, so the choice does not depend on which seeds are asked for.
    """
    n, held = len(x), max(1, round(HELD_OUT * len(x)))
    cuts = [torch.randperm(n, generator=torch.Generator().manual_seed(cut)) for cut in range(CUTS)]
    order = torch.stack(cuts).repeat_interleave(len(lrs), dim=0).to(x.device)  # (H, n): a head for each cut and rate
    heads = [(cut, lr) for cut in range(CUTS) for lr in lrs]
    params = train_heads(head, x, y, rows=order[:, held:], heads=heads, classes=classes, weight_decay=weight_decay)
    rows = order[:, :held]
    right = predict(head, params, x, rows=rows, covariance=covariance).argmax(-1) == y[rows]
    return lrs[int(right.view(CUTS, len(lrs), held).sum((0, 2)).argmax())]


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

    The data are the epochs' permutations end to end, cut into T batches of one size: none is short, and every row is
    seen `epochs` times, but for the end of the last.
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
    t = torch.zeros(1, dtype=torch.int64, device=x.device)  # counted on the device, where a captured step can read it

    def step() -> None:
        batch_rows = rows.gather(1, order.index_select(0, t)[0])  # (H, batch)
        logits = head.logits(params, x[batch_rows], None)
        # The sum over heads of each head's mean: a head's gradient is that of its own loss.
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
    """A seed's first parameters and its permutations of n rows, end to end (epochs · n,); drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    params = head.initial(d, classes, generator)
    return params, torch.cat([torch.randperm(n, generator=generator) for _ in range(epochs)])


def _repeat(step: Callable[[], None], times: int, *, device: torch.device) -> None:
    """Call step so many times; on CUDA it is recorded once and replayed, because launching its kernels is the cost."""
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
        with torch.cuda.graph(graph):  # records, runs nothing
            step()
        for _ in range(times - warm_up):
            graph.replay()


@torch.no_grad()
def predict(head: Head, params: Params, x: Tensor, *, rows: Tensor, covariance: Tensor) -> Tensor:
    """Class probabilities (H, m, classes): head i's, of the rows rows[i] of x."""
    return torch.cat([head.logits(params, x[part], covariance).softmax(-1) for part in rows.split(1024, dim=1)], dim=1)


# --- results ----------------------------------------------------------------------------------------------------------


def _result(probability: Tensor, test_y: Tensor, settings: dict[str, Any]) -> ProbeResult:
    """From class probabilities (H, N_test, classes); the only place where test labels are read."""
    confidence, predictions = probability.max(-1)
    predictions = predictions.cpu()
    accuracy = 100 * (predictions == test_y.cpu()).double().mean(1)
    return ProbeResult(tuple(accuracy.tolist()), predictions[0], confidence[0].cpu(), settings)


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _check(train_h: Tensor, train_y: Tensor, test_h: Tensor, test_y: Tensor, *, classes: int) -> None:
    for name, h, y in (("training", train_h, train_y), ("test", test_h, test_y)):
        if len(h) != len(y):
            raise UserError(f"{len(h)} {name} features but {len(y)} labels: give one label an image")
        if not h.isfinite().all():
            raise UserError(
                f"the {name} features hold NaN or infinity, so no probe can be trained: the encoder diverged"
            )
    if train_h.shape[1] != test_h.shape[1]:
        raise UserError(f"training features have {train_h.shape[1]} columns, test {test_h.shape[1]}: use one encoder")
    if len(train_h) < 2 or len(test_h) < 1:
        raise UserError(f"a probe needs 2 training images and 1 of test, got {len(train_h)} and {len(test_h)}")
    if train_y.min() < 0 or train_y.max() >= classes:
        raise UserError(
            f"labels run from {train_y.min()} to {train_y.max()}: with {classes} classes, 0 … {classes - 1}"
        )


def summary(result: ProbeResult) -> dict[str, Any]:
    """What probes.json says of one probe; std is the sample's (n − 1), and 0 for a single value."""
    values = list(result.accuracy)
    std = stdev(values) if len(values) > 1 else 0.0
    return {"accuracy": values, "mean": fmean(values), "std": std, "settings": result.settings}
