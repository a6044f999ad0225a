"""The order of the data: which rows are held out, and the batches of each epoch; both depend on seeds alone."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

LIMITED = -(2**62)  # the number of this order; -1 is for what is held out, -2 and below are for epochs


class Rows(NamedTuple):
    """Rows of a training set, each int64 (·,)."""

    fit: Tensor  # for pretraining
    held: Tensor  # for evaluation: their labels are predicted
    known: Tensor  # their labels are given to the probe: all rows but the held ones


def hold_out(n: int, *, share: float, seed: int, unlabelled: int = 0, limit: int = 0) -> Rows:
    """Hold out a share of n rows. With a share of 0 all rows are used for pretraining, and a tenth of them is still
    used for evaluation: their labels are unseen, their images are not. The unlabelled rows after the n are for
    pretraining alone. With a limit at most so many are drawn for pretraining, a larger limit's among them."""
    order = permutation(n, seed=seed, number=-1)
    held = int(n * share)
    asked = held or n // 10
    fit = torch.cat((order[held:], torch.arange(n, n + unlabelled)))
    if limit:
        fit = fit[permutation(len(fit), seed=seed, number=LIMITED)[:limit]]
    return Rows(fit, order[:asked], order[asked:])


def test_split(n: int) -> tuple[Tensor, Tensor]:
    """Rows of the train and the test split of the user's images, sorted. They depend on n, not on a run's seed."""
    order, held = permutation(n, seed=0, number=-1), max(1, n // 10)
    return order[held:].sort().values, order[:held].sort().values


def batches(n: int, *, size: int, seed: int, first: int, last: int, device: torch.device) -> Iterator[Tensor]:
    """Row numbers of the global batches of steps first … last − 1. Each epoch has a new order. Rows after its last full
    batch are left out; they are different rows in each epoch."""
    per_epoch = n // size
    order = torch.empty(0)
    for s in range(first, last):
        epoch, i = divmod(s, per_epoch)
        if s == first or i == 0:
            order = permutation(n, seed=seed, number=-2 - epoch)
            if device.type == "cuda":  # from pinned memory the copy is asynchronous
                order = order.pin_memory().to(device, non_blocking=True)
        yield order[i * size : (i + 1) * size]


def permutation(n: int, *, seed: int, number: int) -> Tensor:
    """A random order of 0 … n − 1 for each pair of seed and number."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(mix(seed, number)))


def mix(seed: int, number: int) -> int:
    """A 63-bit seed from two numbers; similar numbers give unrelated seeds (the finaliser of splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) % 2**64
    return (x ^ (x >> 31)) % 2**63
