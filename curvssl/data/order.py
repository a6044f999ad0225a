"""Which images, in which order: rows that are held out, and the batches of each epoch, decided by seeds alone."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Rows of a training set, each int64 (·,)."""

    fit: Tensor  # to pretrain on
    held: Tensor  # whose labels are asked for
    known: Tensor  # whose labels are told: all but the held ones


def hold_out(n: int, *, share: float, seed: int) -> Rows:
    """A share of n rows held out. With a share of 0 every row is pretrained on, and a tenth of them is asked for all
    the same: their labels stay unseen, their images do not."""
    order = permutation(n, seed=seed, number=-1)
    held = int(n * share)
    asked = held or n // 10
    return Rows(order[held:], order[:asked], order[asked:])


def test_split(n: int) -> tuple[Tensor, Tensor]:
    """Rows of the train and the test split of own images, in order; the same for the same n, whatever a run's seed."""
    order, held = permutation(n, seed=0, number=-1), max(1, n // 10)
    return order[held:].sort().values, order[:held].sort().values


def batches(n: int, *, size: int, seed: int, first: int, last: int, device: torch.device) -> Iterator[Tensor]:
    """Row numbers of the global batches of steps first … last − 1. An epoch is a new order; what is left over of it
    after the last full batch is left out, and is another part in the next."""
    per_epoch = n // size
    order = torch.empty(0)
    for s in range(first, last):
        epoch, i = divmod(s, per_epoch)
        if s == first or i == 0:
            order = permutation(n, seed=seed, number=-2 - epoch)
            if device.type == "cuda":  # from pinned memory the copy waits for nothing
                order = order.pin_memory().to(device, non_blocking=True)
        yield order[i * size : (i + 1) * size]


def permutation(n: int, *, seed: int, number: int) -> Tensor:
    """0 … n − 1 in an order of the seed's; each number is another one."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(mix(seed, number)))


def mix(seed: int, number: int) -> int:
    """A 63-bit seed from two numbers; near ones give unrelated ones (the finaliser of splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) % 2**64
    return (x ^ (x >> 31)) % 2**63
