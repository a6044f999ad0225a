"""Shared by the tests of a training step: a small network, a step of any mode, and a function that takes steps."""

import dataclasses
from typing import Any

import torch

from curvssl.config import demo
from curvssl.data.named import load
from curvssl.models import Net, make_net
from curvssl.train import loop
from curvssl.train.step import Average, Step, make_optimizer

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
    local: int = 0,
    alpha_chord: float = 0.0,
    alpha_path: float = 0.0,
    average: float = 0.0,
    teacher: bool = False,
) -> Step:
    net = (net or small_net()).to(device)
    data = load("digits")
    settings = {"lr": 1e-3, "weight_decay": 1e-4, "momentum": 0.9, "device": device, "mode": mode}
    alphas = {"alpha_chord": alpha_chord, "alpha_path": alpha_path}
    config = dataclasses.replace(demo(), method=method, d_z=16, local_views=local, local_size=8, **alphas)
    return loop.make_step(
        mode,
        net=net,
        criterion=criterion or loop.make_criterion(config),
        views=loop.make_views(config, data).to(device),
        optimizer=make_optimizer(net, name=optimizer, **settings),
        images=data.train.images.pixels.to(device),
        device=device,
        bf16=bf16,
        average=Average(net, decay=average, teacher=teacher) if average else None,
    )


def take(step: Step, steps: int, *, lr: float = 1e-3) -> None:
    """Some steps, each with its own images, random numbers and learning rate."""
    for s in range(steps):
        numbers = torch.Generator().manual_seed(s)
        rows = torch.randperm(1437, generator=numbers)[:BATCH].to(step.device)
        step(rows, draw(step, BATCH, numbers), lr * (s + 1) / steps)


def draw(step: Step, n: int, numbers: torch.Generator | None = None) -> list[torch.Tensor]:
    """The uniform numbers of a step with n images, the same on every device."""
    return [u.to(step.device) for u in step.views.draw(n, generator=numbers or torch.Generator().manual_seed(0))]
