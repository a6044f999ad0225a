"""Metrics during training: spread and rank of embeddings, ρ, a kNN on held-out images and measures without labels.

Also the warnings, the progress bar, TensorBoard and Weights & Biases.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvssl import ranks
from curvssl.collectives import gather
from curvssl.config import UserError
from curvssl.data.images import Images
from curvssl.data.named import Dataset
from curvssl.data.order import Rows
from curvssl.data.views import Augment
from curvssl.evaluate.features import Features, extract_over_ranks, extract_views
from curvssl.evaluate.probes import knn
from curvssl.evaluate.quality import ADVICE, LIDAR_VIEWS, collapses, gram_of, measured, not_learning, rank_from
from curvssl.files import say
from curvssl.losses import Curvature, Loss, standardise
from curvssl.models import Net
from curvssl.train.step import Step, means

MONITOR_IMAGES = 5_000  # the monitor uses at most this many known and this many held-out images
MEASURED_IMAGES = 2_000  # for the measures without labels; LiDAR has as many views, of a tenth of these images


class Measured:
    """The measurements at the end of an epoch, copied to the host without waiting; only `row` waits for them."""

    def __init__(self, step: Step, *, k: int) -> None:
        tensors = {"sums": step.sums, "grad_norm": step.gradient_norm()}
        tensors |= geometry_of(*step.z.chunk(2), criterion=step.criterion, k=k)
        self._names, self._count = step.names, step.count
        self._found = {name: value.clone().to("cpu", non_blocking=True) for name, value in tensors.items()}
        self._there = torch.cuda.Event() if step.device.type == "cuda" else None
        if self._there is not None:
            self._there.record()

    def row(self) -> dict[str, Any]:
        """The measured part of a row of metrics."""
        if self._there is not None:
            self._there.synchronize()
        tensors = self._found
        row = means(tensors["sums"], self._count, names=self._names)
        row |= {name: float(tensors[name]) for name in ("rho", "z_std")}
        return row | {"effective_rank": rank_from(tensors["gram"]), "grad_norm": float(tensors["grad_norm"])}


@torch.no_grad()
def geometry_of(z0: Tensor, z1: Tensor, *, criterion: Any, k: int) -> dict[str, Tensor]:
    """For the embeddings of one global batch: ρ of the two views' curvature scores, the mean standard deviation, and
    the Gram matrix that `rank_from` reads. It does not wait for the device.

    The curvature is the criterion's own if it has one, else Eq. (6). All ranks must call it; all get the same result.
    """
    z = torch.stack((z0.float(), z1.float()))
    c = gather(standardise(own_curvature(criterion, k=k).scores(z).mT, eps=1e-12))  # (b, 2)
    everyone = gather(z[0])
    return {"rho": c.prod(1).mean(), "z_std": everyone.std(0).mean(), "gram": gram_of(everyone)}


def own_curvature(criterion: Any, *, k: int) -> Curvature:
    """The curvature that a criterion aligns, or that of Eq. (6) if it aligns none."""
    parts = [part for _, part in criterion.parts()] if isinstance(criterion, Loss) else []
    return next((part for part in parts if isinstance(part, Curvature)), Curvature(k=k))


def judge(
    net: Net,
    images: Images,
    labels: Tensor | None,
    *,
    known: Tensor,
    held: Tensor,
    size: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    classes: int,
    augment: Augment,
    device: torch.device,
) -> dict[str, float]:
    """The measures without labels of the features of the images `known`, and of views that `augment` makes. With labels
    also knn, the accuracy in percent of a kNN that knows those of `known` and predicts those of `held`.

    All ranks must call it: each extracts its share of the features.
    """

    def features(rows: Tensor) -> Features:
        y = None if labels is None else labels[rows]
        return extract_over_ranks(net.encoder, images[rows], labels=y, size=size, mean=mean, std=std)

    bank = features(known[:MONITOR_IMAGES])
    row: dict[str, float] = {}
    if bank.y is not None:
        asked = features(held[:MONITOR_IMAGES])
        assert asked.y is not None
        row["knn"] = knn(bank.h, bank.y, asked.h, asked.y, classes=classes, device=device).accuracy[0]
    views = extract_views(net.encoder, images[known[: MEASURED_IMAGES // LIDAR_VIEWS]], augment, views=LIDAR_VIEWS)
    return row | measured(bank.h[:MEASURED_IMAGES].to(device), views.to(device))


def monitor(
    net: Any, data: Dataset, images: Images, rows: Rows, *, size: int, augment: Augment, device: torch.device
) -> dict[str, float]:
    """What `judge` finds with the held-out rows; `images` are those of pretraining, on any device."""
    data.train.images.exchange_bad()
    good = data.train.images.places()  # the image that replaces an unreadable one has another label
    known, held = (subset[torch.isin(subset, good)] for subset in (rows.known, rows.held))
    return judge(
        net,
        images,
        data.train.labels,
        known=known,
        held=held,
        size=size,
        mean=data.mean,
        std=data.std,
        classes=len(data.classes),
        augment=augment,
        device=device,
    )


def alarm(
    row: dict[str, Any],
    *,
    d_z: int,
    batch_size: int,
    warned: set[str],
    before: Sequence[dict[str, Any]] = (),
    broken_since: Callable[[], int] = lambda: 0,
) -> None:
    """Stop if the loss is not a number; warn of collapsed embeddings and of a run that does not learn, each once.

    `before` are the rows of the epochs before. `broken_since` tells the step in which the loss broke.
    """
    if not math.isfinite(row["loss"]):
        names = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        raise broken(names, step=broken_since(), epoch=row["epoch"])
    signs = collapses(row, d_z=d_z, batch_size=batch_size)
    if why := not_learning([*before, row], d_z=d_z):
        signs["no learning"] = f"{why}: {ADVICE}"
    for name, advice in signs.items():
        if name not in warned:
            warned.add(name)
            if ranks.is_main():
                print(f"\n{name} in epoch {row['epoch']}: {advice}", file=sys.stderr)


def broken(names: Sequence[str], *, step: int, epoch: int) -> UserError:
    """The error about a loss that is not finite."""
    return UserError(
        f"the loss is not a number in step {step:,}, epoch {epoch} ({', '.join(names)}): the last checkpoint is from "
        "before it; try a lower --lr, a longer --warmup-epochs or --precision fp32, in another --out"
    )


@contextmanager
def progress_bar(last: int, done: int, *, hidden: bool, title: str) -> Iterator[Any]:
    """Yields a function that updates the bar: steps done, the loss, and how many views there were since when."""
    from tqdm import tqdm

    form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=last, initial=done, desc=title, disable=hidden, bar_format=form, mininterval=0) as bar:

        def show(done: int, loss: float, views: int, since: float) -> None:
            bar.set_postfix_str(f"loss {loss:.4g}, {views / (time.monotonic() - since):,.0f} views/s", refresh=False)
            bar.update(done - bar.n)

        yield show


@contextmanager
def charts(folder: Path, *, done: int, config: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that charts a row of metrics, in TensorBoard and in Weights & Biases."""
    with tensorboard(folder, done=done) as one, weights_and_biases(folder, config=config) as other:

        def chart(row: dict[str, Any]) -> None:
            one(row)
            other(row)

        yield chart


@contextmanager
def tensorboard(folder: Path, *, done: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that charts a row of metrics in TensorBoard, or does nothing if that is not installed."""
    usable = is_utf8(folder)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        usable = False
    if not usable:
        yield lambda row: None
        return
    # Steps after the checkpoint are taken again: purge_step hides what an interrupted process charted for them.
    with SummaryWriter(str(folder), purge_step=done + 1) as writer:

        def chart(row: dict[str, Any]) -> None:
            for name, value in row.items():
                writer.add_scalar(name, value, row["step"])
            writer.flush()

        yield chart


@contextmanager
def weights_and_biases(folder: Path, *, config: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that gives a row of metrics to Weights & Biases, if its own variable WANDB_MODE asks for that.

    With WANDB_MODE=offline nothing is sent: the files are in the run directory, and `wandb sync` uploads them. A run
    that goes on has the same id there.
    """
    asked = os.environ.get("WANDB_MODE", "disabled") != "disabled"
    if asked and (find_spec("wandb") is None or not is_utf8(folder)):
        say("WANDB_MODE is set, but Weights & Biases needs pip install 'curvssl[wandb]' and an --out in UTF-8")
        asked = False
    if not asked:
        yield lambda row: None
        return
    import wandb

    before = sorted(folder.glob("wandb/*run-*-*"))  # the time, then the id
    quiet = wandb.Settings(console="off", silent=True, save_code=False, disable_git=True)
    try:
        run = wandb.init(
            dir=str(folder),
            project=os.environ.get("WANDB_PROJECT", "curvssl"),
            name=folder.resolve().name,
            id=before[-1].name.rsplit("-", 1)[1] if before else None,
            resume="allow" if before else None,
            config=config,
            reinit="create_new",  # a run that the caller has open is not ours to end
            settings=quiet,
        )
    except wandb.Error as error:
        raise UserError(f"Weights & Biases: {str(error).rstrip('.')}; WANDB_MODE=offline needs no account") from None
    with run:
        yield lambda row: run.log(row, step=row["step"])


def is_utf8(path: Path) -> bool:
    """Whether a path can be given to TensorBoard and Weights & Biases, which write every path as UTF-8."""
    return os.fsencode(path) == str(path).encode(errors="replace")
