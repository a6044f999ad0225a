"""The training loop of pretraining.

Step s of a run depends only on the seed and s: the order of the images comes from (seed, epoch), the uniform numbers of
the views from (seed, s). So a run resumed from a checkpoint sees the same images as one that was never interrupted, and
W ranks, each with its W-th part of every batch, together see the same images as one process.
"""

import copy
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvssl import ranks
from curvssl.collectives import rank, world_size
from curvssl.config import AugmentConfig, PretrainConfig, UserError
from curvssl.data import memory
from curvssl.data.folders import LARGEST, bad_lines, suiting_size
from curvssl.data.images import TensorImages
from curvssl.data.named import Dataset, changed_since, check_on_ranks, describe, load_on_ranks
from curvssl.data.order import Rows, batches, hold_out, mix
from curvssl.data.own import own_images
from curvssl.data.viewed import POSSIBLE, viewed
from curvssl.data.views import Augment, Views
from curvssl.files import lock
from curvssl.losses import Chord, Loss, Sum, ViewPath
from curvssl.methods import METHODS, OWN
from curvssl.models import Net, full_precision
from curvssl.rundir import AGAIN, Run, provenance
from curvssl.train import watch
from curvssl.train.own import keep_own
from curvssl.train.step import Average, Batch, NotFinite, Step, make_optimizer

LAG = 60  # steps given to a CUDA device after an epoch before the host reads the epoch's metrics: so it never idles


class Stopped(KeyboardInterrupt):
    """A signal asked training to stop; a checkpoint has been written."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def pretrain(
    config: PretrainConfig,
    *,
    out: str | Path | None = None,
    source: str = "auto",
    progress: bool = True,
    criterion: nn.Module | None = None,
    encoder: nn.Module | None = None,
    images: Any = None,
) -> Run:
    """Train until the run is finished, from its last checkpoint if it has one; the run directory holds the result.

    Objects given here replace what the configuration names. They are not changed: the run trains copies.

    criterion: any module (z0, z1) → scalar; its parameters are trained, its buffers are part of every checkpoint. If it
        has a method `schedule`, that is told before each step which share of the run is done, from 0 to 1.
    encoder: any module (b, 3, H, W) → (b, d_h); see `curvssl.load_encoder` for how to get it back.
    images: uint8 tensor or array (N, C, H, W), or a map-style torch Dataset of images.
    """
    given = {"method": criterion, "encoder": encoder, "dataset": images}
    own: dict[str, Any] = {name: OWN for name, part in given.items() if part is not None}
    config = dataclasses.replace(config, **own)
    for name, part in given.items():
        if getattr(config, name) == OWN and part is None:
            what = {"method": "criterion", "encoder": "encoder", "dataset": "images"}[name]
            raise UserError(f"{name} own is what was given in Python: call curvssl.pretrain(config, {what}=…)")
    if config.teacher and criterion is not None and not isinstance(criterion, Loss):
        raise UserError("a teacher's targets are for the losses of curvssl: your criterion (z0, z1) would not see them")
    path = Path(out or default_out(config))
    # Only rank 0 writes, and only rank 0 needs to see the run directory.
    with ranks.ranks(pick_device(config.device)) as device:
        main = ranks.is_main()
        data = None
        if not ranks.from_main(main and Run(path, config).begun):  # images first: a mistyped name leaves no trace
            data, config = load_suiting(config, images, source=source, device=device.type)
        elif config.left_open:  # what was chosen is kept, whatever has happened to the images
            kept = ranks.from_main(Run.read(path).config if main else None)
            config = dataclasses.replace(config, **{name: getattr(kept, name) for name in config.left_open})
        with lock(path) if main else nullcontext():
            run = Run.create(path, config) if main else Run(path, config)
            if not ranks.from_main(run.finished):
                data = data or _load(config, images, source=source)
                parts = copy.deepcopy(criterion), copy.deepcopy(encoder)
                _train(run, data, *parts, device=device, progress=progress and main)
    return run


def _load(config: PretrainConfig, images: Any, *, source: str) -> Dataset:
    if images is None:
        return load_on_ranks(config.dataset, source=source, size=config.image_size)
    data = own_images(images, size=config.image_size)
    check_on_ranks(data)
    return data


def load_suiting(
    config: PretrainConfig, images: Any = None, *, source: str, device: str
) -> tuple[Dataset, PretrainConfig]:
    """The data, and the configuration with all that was left open chosen for them."""
    if not config.left_open:
        return _load(config, images, source=source), config
    largest = config.image_size or LARGEST[device]
    data = _load(dataclasses.replace(config, image_size=largest), images, source=source)
    size = suiting_size(min(data.train.images.shape[2:]), device=device)
    return data, config.suited(images=len(chosen(config, data).fit), image_size=size, device=device)


def chosen(config: PretrainConfig, data: Dataset) -> Rows:
    """Which images are trained on, and which are held out."""
    labelled = len(data.train.images)
    unlabelled = len(data.pretraining) - labelled
    return hold_out(labelled, share=config.holdout, seed=config.seed, unlabelled=unlabelled, limit=config.limit)


def default_out(config: PretrainConfig) -> Path:
    name = "".join(c if c.isalnum() or c in "-._" else "-" for c in config.dataset)
    return Path("runs") / f"{name}-{config.method}-seed{config.seed}"


def _train(
    run: Run,
    data: Dataset,
    criterion: nn.Module | None,
    encoder: nn.Module | None,
    *,
    device: torch.device,
    progress: bool,
) -> None:
    config, main, world = run.config, ranks.is_main(), world_size()
    mode = pick_mode(config.step, device=device)
    given = {"criterion": criterion, "encoder": encoder}
    if config.alpha_chord and config.batch_size % (2 * world):
        raise UserError(
            f"--batch-size {config.batch_size} over {world} ranks leaves no pairs to blend for --alpha-chord: use a "
            f"multiple of {2 * world}"
        )
    if config.batch_size % world:
        raise UserError(
            f"--batch-size {config.batch_size} is the global batch, and {world} ranks cannot share it evenly: use "
            f"{config.batch_size // world * world or world} or {(config.batch_size // world + 1) * world}"
        )
    pool, rows_of = data.pretraining, chosen(config, data)
    fit = rows_of.fit
    steps_per_epoch = len(fit) // config.batch_size
    if steps_per_epoch == 0:
        raise UserError(
            f"{len(fit)} training images do not fill one batch of {config.batch_size}: lower --batch-size"
            + f" to {len(fit)} or less"
            + f", and --k below that, {config.k} now" * (config.k >= len(fit))
            + ", or raise --limit" * bool(config.limit)
        )
    last = steps_per_epoch * config.epochs
    everyone = pool
    if config.limit:  # the others are not read, but for the monitor
        pool, fit = pool[fit], torch.arange(len(fit))

    channels = max(3, data.train.images.shape[1])  # the augmentation makes grey images RGB
    net = run.make_net(channels=channels, encoder=encoder).to(device)
    net = net.to(memory_format=torch.channels_last)  # faster convolutions, on CPU too
    if world > 1:
        ranks.synchronise(net, device=device)
    criterion = (criterion or make_criterion(config)).to(device)
    optimizer = make_optimizer(
        nn.ModuleList([net, criterion]),
        name=config.optimizer,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        device=device,
        mode=mode,
    )
    views = make_views(config, data).to(device)
    average = make_average(config, net)
    kept = net if average is None else average.net  # the network that the run is for
    seen_per_step = config.batch_size * sum(views.passes)
    fits = not ranks.any_rank(not memory.fits(pool, device=device))
    images = memory.resident(pool, device=device) if fits else None
    step = make_step(
        mode,
        net=net,
        criterion=criterion,
        views=views,
        optimizer=optimizer,
        images=images,
        device=device,
        bf16=config.precision == "bf16" or (config.precision == "auto" and device.type == "cuda"),
        average=average,
    )

    done, seconds = 0, 0.0
    state = ranks.from_main(run.load_checkpoint() if main else None)
    if main:
        keep_description(run, data, new=state is None)
        keep_own(run, given, new=state is None)
    if state is not None:
        done, seconds = state["step"], state["seconds"]
        net.load_state_dict(state["net"])
        if average is not None:
            kept.load_state_dict(state["average"])
        groups = optimizer.state_dict()["param_groups"]  # this process's own: its device may differ
        optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        criterion.load_state_dict(state["criterion"])
        step.sums, step.count = state["sums"].to(device), state["count"]
    facts = provenance(device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    facts |= {"data_sha256": data.sha256, "images": len(fit), "images_per_epoch": steps_per_epoch * config.batch_size}
    facts |= {"ranks": world, "images_in_memory": images is not None}
    if main:
        run.rewind_metrics(done, rows=None if state is None else state.get("metrics"))
        run.keep_json("provenance.json", facts, of=(), by="")

    def save(seconds: float) -> None:
        state = (*net.parameters(), *net.buffers(), *criterion.parameters())
        if not all(bool(t.isfinite().all()) for t in (step.sums, *state)):
            return  # a run resumed from it would have the same broken loss
        run.save_checkpoint(
            {
                "step": done,
                "seconds": seconds,
                "net": net.state_dict(),
                "average": None if average is None else kept.state_dict(),
                "optimizer": optimizer.state_dict()["state"],
                "criterion": criterion.state_dict(),
                "sums": step.sums,
                "count": step.count,
                "metrics": written,
            }
        )

    net.train()
    row: dict[str, Any] = {}  # of the last epoch; `measured` is what was measured at its end and is not in the row yet
    measured: watch.Measured | None = None
    lag = steps_behind(device)
    numbers = torch.Generator(device=device)
    warned: set[str] = set()
    written = run.metrics() if main else []
    started = saved = shown = epoch_started = time.monotonic()
    epoch_first = done
    mine = ranks.shares(config.batch_size)[rank()]
    place = torch.device("cpu") if images is None else device
    fit_rows = fit.to(place)
    order = batches(len(fit), size=config.batch_size, seed=config.seed, first=done, last=last, device=place)
    rows = (fit_rows[batch[mine]] for batch in order)

    def drawn(s: int) -> list[Tensor]:
        numbers.manual_seed(mix(config.seed, s))
        return [part[:, mine] for part in views.draw(config.batch_size, generator=numbers)]

    read = pool if images is None else TensorImages.of(images)
    watched = everyone if config.limit else read
    inputs: Iterator[Batch] = rows
    if device.type == "cpu" and mode == "eager" and views.are_large(pool.shape) and POSSIBLE:
        steps = ((batch, drawn(s)) for s, batch in enumerate(rows, done))
        inputs = viewed(read, views, steps, b=config.batch_size // world)
    elif images is None:
        inputs = pool.batches(rows, device=device)
    bar = watch.progress_bar(last, done, hidden=not progress, title=run.path.name)
    charts = watch.charts(run.path, done=done, config=config.to_dict()) if main else nullcontext(lambda row: None)

    def write_row(*, monitored: bool = False) -> None:
        """Complete the row of the epoch that was measured last, check it and write it."""
        nonlocal row, measured, epoch_started, epoch_first
        assert measured is not None
        row |= measured.row()
        row["views_per_s"] = seen_per_step * (row["step"] - epoch_first) / (time.monotonic() - epoch_started)
        watch.alarm(
            row,
            d_z=config.d_z,
            batch_size=config.batch_size,
            warned=warned,
            before=written,
            broken_since=lambda: done - step.broken_for() + 1,
        )
        if monitored:
            row |= watch.monitor(
                kept, data, watched, rows_of, size=config.image_size, augment=views.makers[0], device=device
            )
        row["seconds"] = seconds + time.monotonic() - started
        unreadable = pool.exchange_bad()
        if main:
            if unreadable:  # a resumed run may not have come to them again yet
                run.keep("bad-images.txt", lambda file: file.write(bad_lines(unreadable)), of=(), by="")
            run.append_metrics(row)
            written.append(row)
            chart(row)
        measured, epoch_started, epoch_first = None, time.monotonic(), row["step"]

    schedule = getattr(criterion, "schedule", lambda share: None)
    exact = full_precision() if config.precision == "fp32" else nullcontext()
    with stopping() as signals, bar as show, charts as chart, exact:
        for s, batch in enumerate(inputs, done):
            u = drawn(s)
            lr = learning_rate(s, config, steps_per_epoch=steps_per_epoch)
            schedule(s / last)
            try:
                step(batch, u, lr)
            except NotFinite as error:
                if main:
                    save(seconds + time.monotonic() - started)  # the weights before this step
                raise watch.broken(error.names, step=s + 1, epoch=s // steps_per_epoch + 1) from error
            done = s + 1
            if main and (time.monotonic() - shown >= 1 or done == last):
                show(done, step.means()["loss"], seen_per_step * (done - epoch_first), epoch_started)
                shown = time.monotonic()
            monitored = False
            if done % steps_per_epoch == 0:
                if measured:
                    write_row()
                epoch = done // steps_per_epoch
                row, measured = {"epoch": epoch, "step": done, "lr": lr}, watch.Measured(step, k=config.k)
                monitored = bool(config.monitor_every) and (epoch % config.monitor_every == 0 or done == last)
                step.reset()
            stop = ranks.any_rank(bool(signals))  # all ranks stop after the same step
            keep = main and (time.monotonic() - saved >= config.checkpoint_seconds or stop)
            if measured and (done - row["step"] >= lag or monitored or keep or done == last):
                write_row(monitored=monitored)
            if keep:
                save(seconds + time.monotonic() - started)
                saved = time.monotonic()
            if stop:
                raise Stopped((signals or [signal.SIGTERM])[0])
    if main:
        facts["seconds"] = seconds + time.monotonic() - started
        run.keep_json("provenance.json", facts, of=(), by="")
        run.save_net(kept, channels=channels)


# ---- helpers of the loop ----


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for, and there is no CUDA device here: use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def pick_mode(name: str, *, device: torch.device) -> str:
    """How a step runs; `auto` takes the fastest that works."""
    if name == "captured" and device.type != "cuda":
        raise UserError("step captured needs a CUDA device: use --step eager or compiled")
    if world_size() > 1 and device.type == "cuda" and name in ("auto", "captured"):
        if name == "captured":
            raise UserError("step captured is for one device: with several use --step eager or compiled")
        return "compiled"
    if not find_spec("curvssl.gpu"):  # an installation without the folder that exists only for speed
        if name not in ("auto", "eager"):
            raise UserError(f"step {name} needs the folder curvssl/gpu, which is missing here: use --step eager")
        return "eager"
    if name in ("auto", "captured") and device.type == "cuda":
        return "captured"
    return "eager" if name == "auto" else name


def steps_behind(device: torch.device) -> int:
    """How many steps after the end of an epoch its metrics are read."""
    return LAG if device.type == "cuda" and world_size() == 1 else 0


def make_criterion(config: PretrainConfig) -> nn.Module:
    """The loss of the configured method, with its settings, and the terms that are added to it."""
    loss: Loss = METHODS[config.method].make(**config.loss_settings())
    added: list[tuple[float, Loss]] = [(config.alpha_chord, Chord()), (config.alpha_path, ViewPath())]
    added = [(weight, term) for weight, term in added if weight]
    return Sum(loss, *added) if added else loss


def make_average(config: PretrainConfig, net: Net) -> Average | None:
    return Average(net, decay=config.average, teacher=config.teacher) if config.average else None


def make_views(config: PretrainConfig, data: Dataset) -> Views:
    """The views of the configuration."""

    def made(size: int, settings: AugmentConfig) -> Augment:
        return Augment(size=size, mean=data.mean, std=data.std, **vars(settings))

    second, local = config.second_augment(), config.local_augment()
    return Views(
        made(config.view_size, config.augment),
        second=made(config.view_size, second) if second != config.augment else None,
        local=made(config.local_size, local) if config.local_views else None,
        n=config.local_views,
        blends=config.alpha_chord > 0,
        middle=config.alpha_path > 0,
    )


def make_step(mode: str, *, net: nn.Module, device: torch.device, **parts: Any) -> Step:
    """One training step: plain, compiled or captured. Over several ranks gradients are averaged."""
    if world_size() > 1:
        if mode == "compiled":
            from curvssl import gpu

            gpu.compile_parts(net, parts["views"])
        return Step(net=ranks.averaged(net, device=device), device=device, **parts)
    step = Step(net=net, device=device, **parts)
    if mode != "eager":
        from curvssl import gpu

        gpu.speed_up(step, mode)
    return step


def keep_description(run: Run, data: Dataset, *, new: bool) -> None:
    """Write data.json: what users of the encoder need to know about the data. A run is not resumed with other data."""
    if new:
        run.keep_json("data.json", describe(data), of=(), by=AGAIN)
    elif why := changed_since(run.settled("data.json", describe(data)), data):
        raise UserError(f"{data.name} has changed since {run.path} began ({why}): restore it, or use another --out")


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
    """Collect signals that ask to stop; the loop answers them after the current step, with a checkpoint."""
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
