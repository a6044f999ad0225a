"""Pretraining: the loop, in plain sight.

Step s of a run is decided by the seed and s alone: the order of the images comes from (seed, epoch), the uniform
numbers of the views from (seed, s). So a run that goes on from a checkpoint sees what it would have seen anyway, and
W ranks, each with its W-th part of every batch, see together what one process would.
"""

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvssl import losses, ranks
from curvssl.collectives import rank, world_size
from curvssl.config import PretrainConfig, UserError
from curvssl.data import stream
from curvssl.data.folders import write_bad_images
from curvssl.data.named import Dataset, describe, load_on_ranks
from curvssl.data.views import Augment
from curvssl.files import lock, write_json
from curvssl.models import seek_fastest_convolutions
from curvssl.rundir import Run, provenance
from curvssl.train import watch
from curvssl.train.step import Step, keep_compile_cache, make_optimizer


class Stopped(KeyboardInterrupt):
    """A signal asked training to stop; a checkpoint has been written."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def pretrain(
    config: PretrainConfig, *, out: str | Path | None = None, source: str = "auto", progress: bool = True
) -> Run:
    """Train until the run is finished, from its last checkpoint if it has one; the run directory holds the result."""
    path = Path(out or default_out(config))
    # Only rank 0 writes, and only rank 0 needs to see the run directory.
    with ranks.ranks(pick_device(config.device)) as device:
        main = ranks.is_main()
        with lock(path) if main else nullcontext():
            run = Run.create(path, config) if main else Run(path, config)
            if not ranks.from_main(run.finished):
                data = load_on_ranks(config.dataset, source=source, size=config.image_size)
                _train(run, data, device=device, progress=progress and main)
    return run


def default_out(config: PretrainConfig) -> Path:
    name = "".join(c if c.isalnum() or c in "-._" else "-" for c in config.dataset)
    return Path("runs") / f"{name}-{config.method}-seed{config.seed}"


def _train(run: Run, data: Dataset, *, device: torch.device, progress: bool) -> None:
    config, main, world = run.config, ranks.is_main(), world_size()
    mode = pick_mode(config.step, device=device, optimizer=config.optimizer)
    if config.batch_size % world:
        raise UserError(
            f"--batch-size {config.batch_size} is the global batch, and {world} ranks cannot share it evenly: use "
            f"{config.batch_size // world * world or world} or {(config.batch_size // world + 1) * world}"
        )
    fit, held = hold_out(len(data.train.images), share=config.holdout, seed=config.seed)
    steps_per_epoch = len(fit) // config.batch_size
    if steps_per_epoch == 0:
        raise UserError(
            f"{len(fit)} training images do not fill one batch of {config.batch_size}: lower --batch-size (and --k)"
        )
    last = steps_per_epoch * config.epochs

    channels = max(3, data.train.images.shape[1])  # the augmentation makes grey images RGB
    net = run.make_net(channels=channels).to(device)
    net = net.to(memory_format=torch.channels_last)  # faster convolutions, on CPU too
    if device.type == "cuda":
        seek_fastest_convolutions()
    if world > 1:
        ranks.synchronise(net, device=device)
    optimizer = make_optimizer(
        net,
        name=config.optimizer,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        device=device,
        mode=mode,
    )
    criterion = make_criterion(config)
    augment = Augment(size=config.image_size, mean=data.mean, std=data.std, **vars(config.augment)).to(device)
    fits = not ranks.any_rank(not stream.fits(data.train.images, device=device))
    images = stream.resident(data.train.images, device=device) if fits else None
    if world > 1 and mode == "compiled":
        keep_compile_cache()
        # The loss waits for the other ranks in its middle, so the step is compiled in two parts.
        net.compile(dynamic=False)
        augment.compile(dynamic=False)
    step = Step(
        net=net if world == 1 else ranks.averaged(net, device=device),
        criterion=criterion,
        augment=augment,
        optimizer=optimizer,
        images=images,
        device=device,
        bf16=config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda"),
        mode=mode if world == 1 else "eager",
    )

    done, seconds = 0, 0.0
    if state := ranks.from_main(run.load_checkpoint() if main else None):
        done, seconds = state["step"], state["seconds"]
        net.load_state_dict(state["net"])
        groups = optimizer.state_dict()["param_groups"]  # this process's: the device may be another
        optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        step.sums, step.count = state["sums"].to(device), state["count"]
    facts = provenance(device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    facts |= {"data_sha256": data.sha256, "images": len(fit), "images_per_epoch": steps_per_epoch * config.batch_size}
    facts |= {"ranks": world, "images_in_memory": images is not None}
    if main:
        keep_description(run, data, new=done == 0)
        run.rewind_metrics(done)
        write_json(run.path / "provenance.json", facts)

    def save(seconds: float) -> None:
        if not all(bool(t.isfinite().all()) for t in (step.sums, *net.parameters())):
            return  # a checkpoint with a broken loss would only be broken again
        run.save_checkpoint(
            {
                "step": done,
                "seconds": seconds,
                "net": net.state_dict(),
                "optimizer": optimizer.state_dict()["state"],
                "sums": step.sums,
                "count": step.count,
            }
        )

    net.train()
    numbers = torch.Generator(device=device)
    warned: set[str] = set()
    started = saved = shown = epoch_started = time.monotonic()
    epoch_first = done
    mine = ranks.shares(config.batch_size)[rank()]
    place = torch.device("cpu") if images is None else device
    fit_there = fit.to(place)
    rows = (fit_there[batch[mine]] for batch in batches(len(fit), config, first=done, last=last, device=place))
    inputs = stream.stream(data.train.images, rows, device=device) if images is None else rows
    bar = watch.progress_bar(last, done, hidden=not progress, title=run.path.name)
    charts = watch.tensorboard(run.path, done=done) if main else nullcontext(lambda row: None)
    with stopping() as signals, bar as show, charts as chart:
        for s, batch in enumerate(inputs, done):
            numbers.manual_seed(mix(config.seed, s))
            u = torch.rand(2, config.batch_size, augment.draws, generator=numbers, device=device)[:, mine]
            lr = learning_rate(s, config, steps_per_epoch=steps_per_epoch)
            step(batch, u, lr)
            done = s + 1
            if main and (time.monotonic() - shown >= 1 or done == last):
                show(done, step.means()["loss"], 2 * config.batch_size * (done - epoch_first), epoch_started)
                shown = time.monotonic()
            if done % steps_per_epoch == 0:
                row: dict[str, Any] = {"epoch": done // steps_per_epoch, "step": done} | step.means()
                views, took = 2 * config.batch_size * (done - epoch_first), time.monotonic() - epoch_started
                row |= watch.geometry_of(*step.z.chunk(2), criterion=criterion, k=config.k)
                row |= {"grad_norm": step.gradient_norm(), "lr": lr, "views_per_s": views / took}
                watch.alarm(row, d_z=config.d_z, batch_size=config.batch_size, warned=warned)
                if config.monitor_every and (row["epoch"] % config.monitor_every == 0 or done == last):
                    row |= watch.monitor(net, data, images, fit, held, size=config.image_size, device=device)
                row["seconds"] = seconds + time.monotonic() - started
                unreadable = unreadable_images(data)
                if main:
                    write_bad_images(run.path / "bad-images.txt", unreadable)
                    run.append_metrics(row)
                    chart(row)
                step.reset()
                epoch_started, epoch_first = time.monotonic(), done
            stop = ranks.any_rank(bool(signals))  # all ranks stop after the same step
            if main and (time.monotonic() - saved >= config.checkpoint_seconds or stop):
                save(seconds + time.monotonic() - started)
                saved = time.monotonic()
            if stop:
                raise Stopped((signals or [signal.SIGTERM])[0])
    if main:
        run.save_net(net, channels=channels)
        write_json(run.path / "provenance.json", facts | {"seconds": seconds + time.monotonic() - started})


# ---- what the loop needs ----


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for, and there is no CUDA device here: use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def pick_mode(name: str, *, device: torch.device, optimizer: str) -> str:
    """How a step runs; `auto` takes the fastest that works."""
    if name == "captured" and device.type != "cuda":
        raise UserError("step captured needs a CUDA device: use --step eager or compiled")
    if world_size() > 1 and device.type == "cuda" and name in ("auto", "captured"):
        if name == "captured":
            raise UserError("step captured is for one device: with several use --step eager or compiled")
        return "compiled"
    if name in ("auto", "captured") and device.type == "cuda":
        if optimizer == "lars":  # its learning rate is a number inside the kernels
            print("lars cannot be captured in a CUDA graph: the step is compiled", file=sys.stderr)
            return "compiled"
        return "captured"
    return "eager" if name == "auto" else name


def keep_description(run: Run, data: Dataset, *, new: bool) -> None:
    """data.json: what the encoder's users need to know of the data. A run goes on with the data it began with."""
    known, now = run.read_json("data.json"), describe(data)
    if not new and known and known["sha256"] != now["sha256"]:
        raise UserError(
            f"{data.name} has changed since {run.path} began ({known['images']:,} training images then, "
            f"{now['images']:,} now): restore it, or use another --out"
        )
    write_json(run.path / "data.json", now)


def unreadable_images(data: Dataset) -> stream.Bad:
    """What any rank could not read so far; they all know it then."""
    images = data.train.images
    if isinstance(images, Tensor):
        return {}
    for bad in ranks.from_all(dict(images.bad)):
        images.bad.update(bad)
    return images.bad


def make_criterion(config: PretrainConfig) -> losses.Loss:
    c = config
    embedding: dict[str, Any] = {"lambda_emb": c.lambda_emb, "eps": c.eps}
    curved = embedding | {"k": c.k, "lambda_curv": c.lambda_curv, "alpha_curv": c.alpha_curv}
    if c.method == "vicreg":
        return losses.VICRegLoss(invariance=c.invariance, variance=c.variance, covariance=c.covariance)
    if c.method == "barlow-twins":
        return losses.BarlowTwinsLoss(**embedding)
    if c.method == "curvssl":
        return losses.CurvSSLLoss(**curved)
    return losses.KernelCurvSSLLoss(kernel=c.kernel, gamma=c.gamma, **curved)


def hold_out(n: int, *, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to pretrain on and rows to hold out. With a share of 0 every row is pretrained on, and a tenth are both:
    their labels stay unseen, their images do not."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(mix(seed, -1)))
    held = int(n * share)
    return (order[held:], order[:held]) if held else (order, order[: n // 10])


def batches(n: int, config: PretrainConfig, *, first: int, last: int, device: torch.device) -> Iterator[Tensor]:
    """Row numbers of the global batches of steps first … last − 1. An epoch is a new order; what is left over of it
    after the last full batch is left out, and is another part in the next."""
    per_epoch = n // config.batch_size
    order = torch.empty(0)
    for s in range(first, last):
        epoch, i = divmod(s, per_epoch)
        if s == first or i == 0:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(mix(config.seed, -2 - epoch))).to(device)
        yield order[i * config.batch_size : (i + 1) * config.batch_size]


def mix(seed: int, number: int) -> int:
    """A 63-bit seed from two numbers; near ones give unrelated ones (the finaliser of splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) % 2**64
    return (x ^ (x >> 31)) % 2**63


def learning_rate(s: int, config: PretrainConfig, *, steps_per_epoch: int) -> float:
    """The rate of step s: a linear rise over the warm-up, then constant or a half cosine down to 0."""
    warm, whole = config.warmup_epochs * steps_per_epoch, config.epochs * steps_per_epoch
    if s + 1 <= warm:
        return config.lr * (s + 1) / warm
    if config.schedule == "constant" or whole <= warm:
        return config.lr
    return config.lr * (1 + math.cos(math.pi * max(0.0, s - warm) / (whole - warm))) / 2


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Signals that ask to stop are noted here and answered at the next step, with a checkpoint."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {n: signal.signal(n, lambda number, _: seen.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
