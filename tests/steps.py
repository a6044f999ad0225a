"""Shared by the tests of a training step: a small network, a step of any mode, and a function that takes steps."""

import dataclasses
from typing import Any

import torch

from curvssl.config import demo
from curvssl.data.named import load
from curvssl.data.views import Augment
from curvssl.models import Net, make_net
from curvssl.train import loop
from curvssl.train.step import Step, make_optimizer

BATCH = 64


def small_net(encoder: str = "resnet-mini") -> Net:
    shape = {"channels": 3, "size": 16, "width": 32, "depth": 2, "d_z": 16, "norm": True, "seed": 0}
    return make_net(encoder=encoder, stem="small", **shape)


def make_step(
    method: str,
    mode: str,
    device: torch.device,
    *,
    optimizer: str = "adam",
    bf16: bool = False,
    net: Any = None,
    criterion: Any = None,
) -> Step:
    net = (net or small_net()).to(device)
    data = load("digits")
    settings = {"lr": 1e-3, "weight_decay": 1e-4, "momentum": 0.9, "device": device, "mode": mode}
    config = dataclasses.replace(demo(), method=method, d_z=16)
    return loop.make_step(
        mode,
        net=net,
        criterion=criterion or loop.make_criterion(config),
        augment=Augment(size=16, mean=data.mean, std=data.std, **vars(demo().augment)).to(device),
        optimizer=make_optimizer(net, name=optimizer, **settings),
        images=data.train.images.pixels.to(device),
        device=device,
        bf16=bf16,
    )


def take(step: Step, steps: int, *, lr: float = 1e-3) -> None:
    """Some steps, each with its own images, random numbers and learning rate."""
    for s in range(steps):
        numbers = torch.Generator().manual_seed(s)
        rows = torch.randperm(1437, generator=numbers)[:BATCH].to(step.device)
        u = torch.rand(2, BATCH, step.augment.draws, generator=numbers).to(step.device)
        step(rows, u, lr * (s + 1) / steps)
