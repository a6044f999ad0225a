"""Probes of a frozen encoder's features: a linear layer, a hidden layer, nearest neighbours; listed in PROBES.

Every probe is (train_h, train_y, test_h, test_y) → ProbeResult. The test labels are read only once, to count the
correct predictions. Settings are chosen on a part of the training features. Beside the probes stands `retrieval`, how
well images of the same class are found.

Trained probes fit heads (heads.py) in parallel: one per seed, and others to choose the learning rate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvssl.config import UserError
from curvssl.evaluate.heads import BATCH_SIZE, EPOCHS, LINEAR, MLP, MLP_HIDDEN, MOMENTUM, Head, predict, train_heads

HELD_OUT = 0.1  # share of the training features on which a learning rate is evaluated
CUTS = 3  # how many times that share is drawn

LINEAR_LRS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
LINEAR_DECAY = 1e-5

MLP_LRS = (0.03,)
MLP_DECAY = 3e-3  # the best of four on held-out training images of CIFAR-10 (docs/reproduction.md)

KNN_K = 20
KNN_TEMPERATURE = 0.07

RECALL_AT = (1, 5, 10)
RETRIEVAL = (*(f"recall@{k}" for k in RECALL_AT), "mAP")


@dataclass(frozen=True)
class ProbeResult:
    accuracy: tuple[float, ...]  # percent of the test images, one per seed; a single one where nothing is random
    predictions: Tensor  # (N_test,) int64, the first seed's
    confidence: Tensor  # (N_test,) float32, the probability or share of votes of the predicted class
    settings: dict[str, Any]


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
    unlabelled: Tensor | None = None,
    epochs: int = EPOCHS,
) -> ProbeResult:
    """One linear layer and cross-entropy, on features standardised by the training features' mean and deviation.

    If `unlabelled` features (m, d) are given, by theirs: over a few labelled images a feature may be constant.

    SGD with momentum 0.9, cosine schedule to 0, batches of 256, 50 epochs. The learning rate is the best of six by
    accuracy on held-out tenths of the training features; then the layer is trained on all of them. A seed sets the
    initial weights and the order of the data.
    """
    data = (train_h, train_y, test_h, test_y)
    settings: dict[str, Any] = {"lrs": LINEAR_LRS, "weight_decay": LINEAR_DECAY, "epochs": epochs}
    return _trained(LINEAR, data, classes, seeds, device, **settings, unlabelled=unlabelled)


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

    Trained like `linear`, except that the learning rate is fixed: with BatchNorm the scale of the hidden layer's
    weights does not matter.
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

    k and the temperature are fixed. Nothing is random, so there is one accuracy, whatever the seeds are.
    """
    _check(train_h, train_y, test_h, test_y, classes=classes)
    place = _device(device)
    bank = F.normalize(train_h.to(place, torch.float32), dim=1)  # (n, d)
    voters = F.one_hot(train_y.to(place), classes).float()
    k = min(KNN_K, len(bank))
    shares = []
    for query in test_h.split(1024):
        similarity, nearest = (F.normalize(query.to(place, torch.float32), dim=1) @ bank.T).topk(k, dim=1)
        weight = (similarity / KNN_TEMPERATURE).softmax(dim=1)  # shares of the vote, which sum to one
        shares.append((weight[:, None] @ voters[nearest]).squeeze(1))
    settings = {"k": k, "similarity": "cosine", "temperature": KNN_TEMPERATURE}
    return _result(torch.cat(shares)[None], test_y, settings)


PROBES: dict[str, Callable[..., ProbeResult]] = {"linear": linear, "mlp": mlp, "knn": knn}


# --- retrieval --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def retrieval(
    train_h: Tensor,
    train_y: Tensor,
    test_h: Tensor,
    test_y: Tensor,
    *,
    classes: int,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """How well a test image finds the training images of its class by cosine similarity, in percent; see RETRIEVAL.

    recall@k: the share of the test images with one of their class among the k most similar.
    mAP: the mean over test images of the average precision, (1/R) Σ_r precision at the place of the r-th of the R
    training images of its class, in the order of all of them. Without any (R = 0) it is 0.
    """
    _check(train_h, train_y, test_h, test_y, classes=classes)
    place = _device(device)
    bank, y = F.normalize(train_h.to(place, torch.float32), dim=1), train_y.to(place)
    ranks = torch.arange(1, len(bank) + 1, device=place)
    first, precision = [], []
    for query, label in zip(test_h.split(256), test_y.to(place).split(256), strict=True):
        order = (F.normalize(query.to(place, torch.float32), dim=1) @ bank.T).argsort(dim=1, descending=True)
        hit = y[order] == label[:, None]  # (b, n)
        first.append(torch.where(hit, ranks, len(bank) + max(RECALL_AT)).amin(1))
        precision.append((hit * hit.cumsum(1) / ranks).sum(1) / hit.sum(1).clamp_min(1))
    found = torch.cat(first)
    recall = {f"recall@{k}": 100 * float((found <= k).double().mean()) for k in RECALL_AT}
    return recall | {"mAP": 100 * float(torch.cat(precision).double().mean())}


# --- probes that train ------------------------------------------------------------------------------------------------


def _trained(
    head: Head,
    data: tuple[Tensor, Tensor, Tensor, Tensor],
    classes: int,
    seeds: Sequence[int],
    device: torch.device | str | None,
    *,
    lrs: Sequence[float],
    weight_decay: float,
    epochs: int = EPOCHS,
    unlabelled: Tensor | None = None,
) -> ProbeResult:
    """Choose a learning rate if there are several, train on all training features, predict the test features."""
    _check(*data, classes=classes)
    train_h, train_y, test_h, test_y = data
    place = _device(device)
    like = train_h if unlabelled is None else unlabelled
    x, x_test = (standardised(like.to(place, torch.float32), h.to(place, torch.float32))[1] for h in (train_h, test_h))
    y = train_y.to(place)
    covariance = x.T @ x / len(x)
    trained: dict[str, Any] = {"classes": classes, "weight_decay": weight_decay, "epochs": epochs}
    lr = lrs[0] if len(lrs) == 1 else _choose_lr(head, x, y, covariance, lrs=lrs, **trained)
    rows = torch.arange(len(x), device=place).expand(len(seeds), -1)
    heads = [(seed, lr) for seed in seeds]
    params = train_heads(head, x, y, rows=rows, heads=heads, **trained)
    rows = torch.arange(len(x_test), device=place).expand(len(seeds), -1)
    settings = {
        "seeds": list(seeds),
        "epochs": epochs,
        "batch_size": min(BATCH_SIZE, len(x)),
        "optimizer": f"SGD, momentum {MOMENTUM}, cosine",
        "lr": lr,
        "lr_choices": list(lrs),
        "weight_decay": weight_decay,
    }
    return _result(predict(head, params, x_test, rows=rows, covariance=covariance), test_y, settings)


def standardised(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Both (n, d), minus the mean and divided by the standard deviation of the columns of `train`.

    A column that is almost constant compared with the most variable one is a dead feature: its deviation is rounding
    error, and a division by it would scale noise up to the size of a signal.
    """
    std, mean = torch.std_mean(train, dim=0, correction=0)
    std = std.clamp_min(1e-5 * std.max()).clamp_min(torch.finfo(std.dtype).tiny)
    return (train - mean) / std, (test - mean) / std


def _choose_lr(head: Head, x: Tensor, y: Tensor, covariance: Tensor, *, lrs: Sequence[float], **trained: Any) -> float:
    """The rate with the best mean accuracy on held-out tenths of the training features; the smallest in case of a tie.

    It uses three random cuts, always the same, so the choice does not depend on the probe's seeds.
    """
    n, held = len(x), max(1, round(HELD_OUT * len(x)))
    cuts = [torch.randperm(n, generator=torch.Generator().manual_seed(cut)) for cut in range(CUTS)]
    order = torch.stack(cuts).repeat_interleave(len(lrs), dim=0).to(x.device)  # (H, n): one head per cut and rate
    heads = [(cut, lr) for cut in range(CUTS) for lr in lrs]
    params = train_heads(head, x, y, rows=order[:, held:], heads=heads, **trained)
    rows = order[:, :held]
    right = predict(head, params, x, rows=rows, covariance=covariance).argmax(-1) == y[rows]
    return lrs[int(right.view(CUTS, len(lrs), held).sum((0, 2)).argmax())]


# --- results ----------------------------------------------------------------------------------------------------------


def _result(probability: Tensor, test_y: Tensor, settings: dict[str, Any]) -> ProbeResult:
    """The result from class probabilities (H, N_test, classes); the only place where test labels are read."""
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
    """One probe's entry in probes.json; std is the sample deviation (n − 1), and 0 for a single value."""
    values = list(result.accuracy)
    std = stdev(values) if len(values) > 1 else 0.0
    return {"accuracy": values, "mean": fmean(values), "std": std, "settings": result.settings}
