"""Make a page from run directories, and figures for print.

`collect` reads a run directory and computes what is missing there. `report` writes the page about several runs, with
the layout of page.py. `pictures` draws one run with matplotlib.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvssl.data.images import Images
from curvssl.data.named import Dataset
from curvssl.data.views import Augment
from curvssl.evaluate import maps
from curvssl.evaluate.inspect import outlier_scores
from curvssl.evaluate.runs import PREDICTIONS, best_device, dataset_of, features_of, probe
from curvssl.geometry import curvature, nearest_neighbors
from curvssl.kernels import unit
from curvssl.report.page import (
    MAPS,
    NEIGHBORS,
    Pictured,
    Points,
    RunData,
    columns,
    groups,
    method_of,
    render,
    squares,
    thumbnail_side,
)
from curvssl.report.seen import first_step
from curvssl.rundir import Run

JUDGED = {"predicted": "predictions", "confidence": "confidence"}  # what the page calls them, and the linear probe
LIMIT = 60_000  # images on a map; a larger split is sampled at random, with a fixed seed


def report(runs: Sequence[Path], out: Path, *, source: str = "auto", print_to: Path | None = None) -> Path:
    """Write the page about finished runs to `out`; everything computed for it is stored in their directories.

    With `print_to`, the figures of every run that has a map are written there, one folder per run.
    """
    opened = [Run.read(path) for path in runs]
    for run in opened:
        run.need_projector()
    plain = [collect(run, source=source, points=False) for run in opened]
    mapped = range(len(plain)) if len(plain) <= MAPS else [group["runs"][0] for group in groups(plain)]
    collected = [collect(run, source=source) if i in mapped else plain[i] for i, run in enumerate(opened)]
    if print_to is not None:
        for i in mapped:
            pictures(collected[i], print_to / collected[i].name)
    return render(collected, out)


def collect(run: Run, *, source: str = "auto", points: bool = True) -> RunData:
    """All data of a run that the page shows; without `points`, only its numbers."""
    data = dataset_of(run, source=source)
    labelled = data.train.labels is not None and data.test.labels is not None
    probes, judgements = run.stored_json("probes.json"), run.stored_arrays(PREDICTIONS) if labelled else None
    if labelled and not (probes and judgements):
        probes = probe(run, source=source)
        judgements = run.stored_arrays(PREDICTIONS)
    numbers: dict[str, Any] = {
        "name": run.path.resolve().name,
        "config": run.config.to_dict(),
        "provenance": run.read_json("provenance.json"),
        "metrics": run.metrics(),
        "probes": probes,
    }
    if not points:
        return RunData(**numbers)
    features = features_of(run, data, "test")
    # Unreadable images have no features.
    place = torch.arange(len(features.h)) if features.index is None else features.index
    rows = chosen(len(place))
    images = data.test.images[place[rows]]
    pictured = Pictured(
        name=f"{data.name} test",
        images=small(images),
        classes=data.classes if features.y is not None else (),
        labels=None if features.y is None else features.y[rows].numpy(),
        index=place[rows].numpy() if len(rows) < len(data.test.images) else None,
    )
    h = features.h[rows]
    neighbors = nearest_neighbors(h, k=min(NEIGHBORS, len(h) - 1))
    distances, cosines = edges_of(h, neighbors)
    judged: dict[str, np.ndarray] = {}
    if judgements is not None:
        judged = {key: judgements[f"linear_{what}"][rows] for key, what in JUDGED.items()}
    made = Points(
        xy=map_of(run, h, place[rows]).numpy(),
        curvature=curvature_of_views(run, data, images, place[rows]).numpy(),
        outlier=outlier_scores(h)[0],
        neighbors=neighbors.numpy(),
        distances=distances.numpy(),
        cosines=cosines.numpy(),
        **judged,
    )
    return RunData(**numbers, points=made, pictured=pictured, seen=first_step(run.config, data))


def chosen(n: int) -> Tensor:
    """The rows on the map, in order: all, or a sample of LIMIT."""
    if n <= LIMIT:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))[:LIMIT].sort().values


def small(images: Images) -> np.ndarray:
    """Thumbnails (N, 1 or 3, side, side), made in batches because the images may not fit into memory."""
    n, _, height, width = images.shape
    side = thumbnail_side(n, height, width)
    return np.concatenate([squares(batch.numpy(), side) for batch in images.split(512)])


def edges_of(h: Tensor, neighbors: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths (N, k) of the edges to the neighbours (N, k), and the cosines (N, k(k−1)/2) of their pairs a < b."""
    k = neighbors.shape[1]
    a, b = torch.triu_indices(k, k, 1)
    lengths, cosines = [], []
    for rows in torch.arange(len(h)).split(4096):  # all edges at once would take k times the memory of the features
        edges = h[neighbors[rows]] - h[rows, None]  # (rows, k, d)
        u = unit(edges)
        lengths.append(edges.norm(dim=-1))
        cosines.append((u @ u.mT)[:, a, b])
    return torch.cat(lengths), torch.cat(cosines)


def map_of(run: Run, h: Tensor, index: Tensor) -> Tensor:
    """UMAP of h, (N, 2): taken from the run directory if the stored one has the same images."""
    name = "map-h-test.npz"
    stored = run.stored_arrays(name)
    if stored is not None and np.array_equal(stored["index"], index):
        return torch.from_numpy(stored["xy"])
    xy = maps.umap(h)
    maps.save(xy, run, name, index=index)
    return xy


@torch.inference_mode()
def curvature_of_views(run: Run, data: Dataset, images: Images, index: Tensor) -> Tensor:
    """Eq. (6) of the embeddings z of two augmented views of each image, (2, N), with the run's k.

    So that runs can be compared, neighbours are sought among all N images, not in a batch, and no method uses a kernel.
    The views have a fixed seed; the scores are stored in the run directory.
    """
    name = "views-test.npz"
    stored = run.stored_arrays(name)
    if stored is not None and np.array_equal(stored["index"], index):
        return torch.from_numpy(stored["curvature"])
    device = best_device()
    net = run.load_net().to(device)
    config = run.config
    augment = Augment(size=config.image_size, mean=data.mean, std=data.std, **vars(config.augment)).to(device)
    generator = torch.Generator().manual_seed(0)
    views: list[list[Tensor]] = [[], []]
    for batch in images.split(512):
        for view in views:
            u = torch.rand(len(batch), augment.draws, generator=generator)
            view.append(net.projector(net.encoder(augment(batch.to(device), u.to(device)))).float())
    k = min(config.k, len(index) - 1)
    scores = torch.stack([curvature(torch.cat(view), k=k) for view in views]).cpu()
    run.keep_arrays(name, by="curvssl report RUN", index=index.numpy(), curvature=scores.numpy())
    return scores


# ---- figures for print


def pictures(run: RunData, folder: Path) -> list[Path]:
    """Write PNG and PDF to `folder`: map by class, map by curvature, the two views' curvature, training curves."""
    name = f"{method_of(run)} on {run.config.get('dataset')}"
    made: list[Path] = []
    if run.points is not None and run.pictured is not None:
        xy, views = torch.from_numpy(run.points.xy).float(), torch.from_numpy(run.points.curvature).float()
        if run.pictured.labels is not None:
            labels, classes = torch.from_numpy(run.pictured.labels), run.pictured.classes
            made += maps.draw(xy, labels=labels, classes=classes, title=name, out=folder / "map-by-class")
        bent, what = views.mean(0), "curvature, mean of two views"
        made += maps.draw(xy, values=bent, values_name=what, title=name, out=folder / "map-by-curvature")
        made += maps.write_figure(_scatter(views, title=name), folder / "curvature-of-views")
    if run.metrics:
        made += maps.write_figure(_curves(run, title=name), folder / "curves")
    return made


def _scatter(views: Tensor, *, title: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 5.2), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    low, high = float(views.min()), float(views.max())
    axes.plot([low, high], [low, high], color=maps.FAINT, linewidth=0.8, linestyle=(0, (4, 4)))
    size = min(30.0, max(2.0, 24000 / views.shape[1]))
    axes.scatter(
        views[0].numpy(), views[1].numpy(), s=size, c=maps.COLOURS[0], alpha=0.5, linewidths=0, rasterized=True
    )
    rho = float(torch.corrcoef(views.double())[0, 1])
    _frame(axes, title=f"{title}: ρ = {rho:.3f}", x="curvature, first view", y="curvature, second view")
    axes.title.set(fontsize=12, fontweight="bold")
    axes.set_aspect("equal")
    return figure


def _curves(run: RunData, *, title: str) -> Any:
    """A figure with one small panel per metric."""
    from matplotlib.figure import Figure

    table = columns(run.metrics)
    names = [name for name in table if name not in ("epoch", "step", "seconds")]
    across = 3
    down = -(-len(names) // across)
    figure = Figure(figsize=(3.1 * across, 2.1 * down), layout="constrained", facecolor="white")
    figure.suptitle(title, color=maps.INK, fontsize=12, fontweight="bold")
    for i, name in enumerate(names):
        pairs = [(x, y) for x, y in zip(table["epoch"], table[name], strict=True) if y is not None]
        axes = figure.add_subplot(down, across, i + 1)
        few = "o" if len(pairs) < 4 else ""
        axes.plot(*zip(*pairs, strict=True), color=maps.COLOURS[0], linewidth=1.6, marker=few, markersize=3)
        axes.locator_params("x", integer=True)
        _frame(axes, title=name.replace("_", " "), x="epoch", y="")
    return figure


def _frame(axes: Any, *, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", color=maps.INK, fontsize=10)
    axes.set_xlabel(x, color=maps.FAINT, fontsize=8)
    axes.set_ylabel(y, color=maps.FAINT, fontsize=8)
    axes.tick_params(colors=maps.FAINT, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#d0d7de")
