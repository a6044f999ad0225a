"""What each rank of test_ranks.py does, and what one process does for comparison.

    RANK=… WORLD_SIZE=… python ranks.py FOLDER

All of it in double precision: a sum over two ranks rounds differently from a sum in one process, and the difference
must be too small to flip a ReLU or the choice of a neighbour.
"""

import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from curvssl import losses
from curvssl import ranks as distributed
from curvssl.config import AugmentConfig, PretrainConfig, UserError, demo
from curvssl.data import memory, views
from curvssl.evaluate.runs import embed, probe
from curvssl.models import Net
from curvssl.rundir import Run
from curvssl.train import loop as train

METHODS = ("barlow-twins", "vicreg", "curvssl", "kernel-curvssl")
STEPS = 20
MANY: dict[str, Any] = {"local_views": 2, "local_size": 6, "alpha_chord": 3.0}
MANY |= {"average": 0.9, "teacher": True, "limit": 25}  # of the 27 images
STOP_AT = 8


def prepare(folder: Path) -> None:
    """An array of 30 images in two classes: 27 to pretrain on, in one batch of 24 an epoch."""
    numbers = np.random.default_rng(0)
    labels = numbers.integers(0, 2, 30)
    pixels = numbers.normal(100 + 40 * labels[:, None, None, None], 40, (30, 3, 10, 10)).clip(0, 255)
    np.savez(folder / "images.npz", images=pixels.astype(np.uint8), labels=labels)
    np.save(folder / "seven.npy", pixels[:7].astype(np.uint8))


def config(folder: Path, **changes: Any) -> PretrainConfig:
    small = {"image_size": 8, "epochs": STEPS, "batch_size": 24, "k": 14, "d_z": 8, "projector_width": 16}
    fixed = {"warmup_epochs": 0, "monitor_every": STEPS, "holdout": 0.0, "augment": AugmentConfig()}
    data = {"dataset": f"array:{folder / 'images.npz'}"}
    return dataclasses.replace(demo(), **(data | small | fixed | changes))


@contextmanager
def double_precision() -> Iterator[None]:
    make_net = Run.make_net

    def double(*args: Any, **settings: Any) -> Net:
        net = make_net(*args, **settings).double()
        net.encoder.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
        return net

    Run.make_net = double  # type: ignore[method-assign]
    try:
        yield
    finally:
        Run.make_net = make_net  # type: ignore[method-assign]


@contextmanager
def stopped_at(step: int) -> Iterator[None]:
    """Send this process a real SIGTERM just before a step."""
    rate = train.learning_rate

    def signalling(s: int, *args: Any, **settings: Any) -> float:
        if s == step:
            signal.raise_signal(signal.SIGTERM)
        return rate(s, *args, **settings)

    train.learning_rate = signalling
    try:
        yield
    finally:
        train.learning_rate = rate


def interrupted(settings: PretrainConfig, out: Path, *, here: bool) -> str:
    """Train until the signal, which may be sent to one rank only; return how it ended."""
    try:
        with stopped_at(STOP_AT if here else -1):
            train.pretrain(settings, out=out, progress=False)
    except train.Stopped as stopped:
        return str(stopped)
    return "finished"


def answer(settings: PretrainConfig, out: Path) -> str:
    try:
        train.pretrain(settings, out=out, progress=False)
    except UserError as error:
        return str(error)
    return "finished"


def counted(loss: losses.Loss, *, images: int, d: int) -> list[int]:
    """How many numbers a loss and its gradient gather and sum over the ranks."""
    real, numbers = (dist.all_gather_into_tensor, dist.all_reduce), [0, 0]

    def gathering(out: Tensor, *args: Any) -> None:
        numbers[0] += out.numel()
        real[0](out, *args)

    def summing(x: Tensor) -> None:
        numbers[1] += x.numel()
        real[1](x)

    dist.all_gather_into_tensor, dist.all_reduce = gathering, summing
    z = torch.randn(2, images, d, generator=torch.Generator().manual_seed(distributed.rank())).requires_grad_()
    loss(*z).backward()
    dist.all_gather_into_tensor, dist.all_reduce = real
    return numbers


def everything(folder: Path) -> dict[str, Any]:
    """On every rank: the results that the tests compare with one process."""
    rank, result = distributed.rank(), {}
    criteria = {method: train.make_criterion(config(folder, method=method)) for method in METHODS}
    result["exchanged"] = {method: counted(loss, images=12, d=8) for method, loss in criteria.items()}
    for method in METHODS:
        train.pretrain(config(folder, method=method), out=folder / f"two-{method}", progress=False)
    fits, memory.fits = memory.fits, lambda *_, **__: False
    train.pretrain(config(folder, epochs=3, **MANY), out=folder / "two-streamed", progress=False)
    large, views.LARGE = views.LARGE, 1  # so that workers make the views
    train.pretrain(config(folder, epochs=3, **MANY), out=folder / "two-viewed", progress=False)
    memory.fits, views.LARGE = fits, large
    result["stopped"] = interrupted(config(folder), folder / "two-then-one", here=rank == 1)
    train.pretrain(config(folder), out=folder / "one-then-two", progress=False)

    run = Run.read(folder / "two-curvssl")
    embed(run, folder / "seven.npy", out=folder / "two-seven.npz")
    embed(run, folder / "one.npy", out=folder / "two-one.npz")  # one image for two ranks
    result["probes"] = probe(run, seeds=(0,))

    result["odd batch"] = answer(config(folder, batch_size=25), folder / "odd")
    result["odd pairs"] = answer(config(folder, batch_size=22, **MANY), folder / "odd")
    os.chdir(folder / f"machine-{rank}")  # as on a cluster where one machine has a part of the images
    result["less data"] = answer(config(folder, dataset="folder:pictures", batch_size=20), folder / "less")
    return result


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def parameters(path: Path) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": t
        for name in ("encoder", "projector")
        for key, t in load_file(path / f"{name}.safetensors").items()
    }


def assert_same_run(one: Path, two: Path) -> None:
    torch.testing.assert_close(loss_curve(two), loss_curve(one), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parameters(two), parameters(one), rtol=1e-7, atol=1e-7)


def loss_curve(path: Path) -> Tensor:
    return torch.tensor([row["loss"] for row in Run.read(path).metrics()], dtype=torch.float64)


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    with double_precision(), distributed.ranks(torch.device("cpu")):
        results = everything(place)
        (place / f"rank-{distributed.rank()}.json").write_text(json.dumps(results))
