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
from curvssl.data.order import permutation
from curvssl.data.views import Augment
from curvssl.evaluate import maps
from curvssl.evaluate.inspect import outlier_scores
from curvssl.evaluate.runs import (
    PREDICTIONS,
    best_device,
    dataset_of,
    features_of,
    images_of,
    probe,
    sampled,
    shown_split,
)
from curvssl.files import say
from curvssl.geometry import nearest_neighbors
from curvssl.kernels import unit
from curvssl.losses import Curvature
from curvssl.methods import OWN
from curvssl.report.page import (
    LIMIT,
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
from curvssl.train.loop import make_criterion
from curvssl.train.watch import own_curvature


def report(runs: Sequence[Path], out: Path, *, source: str = "auto", print_to: Path | None = None) -> Path:
    """Write the page about finished runs to `out`; everything computed for it is stored in their directories.

    With `print_to`, the figures of every run that has a map are written there, one folder per run.
    """
    different = {path.resolve(): path for path in runs}
    if len(different) < len(runs):
        say(f"of {len(runs)} runs {len(runs) - len(different)} were given twice, and are shown once")
    opened = [Run.read(path) for path in different.values()]
    configs = [RunData(str(run.path), run.config.to_dict(), {}, [], {}) for run in opened]
    mapped = range(len(opened)) if len(opened) <= MAPS else [group["runs"][0] for group in groups(configs)]
    collected = [collect(run, source=source, points=i in mapped) for i, run in enumerate(opened)]
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
        say(f"{run.path} has not been probed yet: doing it now, as curvssl probe does")
        probes = probe(run, source=source)
        judgements = run.stored_arrays(PREDICTIONS)
    numbers: dict[str, Any] = {
        "name": run.path.resolve().name,
        "config": run.config.to_dict(),
        "provenance": run.read_json("provenance.json"),
        "metrics": run.metrics(),
        "probes": probes,
        "quality": run.read_json("quality.json"),
    }
    if not points:
        return RunData(**numbers)
    split = shown_split(data)
    features, everything = features_of(run, data, split), images_of(data, split)
    # Unreadable images have no features.
    place = torch.arange(len(features.h)) if features.index is None else features.index
    rows = sampled(len(place), LIMIT)
    images = everything[place[rows]]
    pictured = Pictured(
        name=data.name if split == "all" else f"{data.name} {split}",
        images=small(images),
        classes=data.classes if features.y is not None else (),
        labels=None if features.y is None else features.y[rows].numpy(),
        index=place[rows].numpy() if len(rows) < len(everything) else None,
        files=tuple(images.names or ()),
        total=len(place),
    )
    h = features.h[rows]
    neighbors = nearest_neighbors(h.to(best_device()), k=min(NEIGHBORS, len(h) - 1)).cpu()
    distances, cosines = edges_of(h, neighbors)
    measure = curvature_measure(run, n=len(rows))
    made = Points(
        xy=map_of(run, h, place[rows], split=split).numpy(),
        curvature=curvature_of_views(run, data, images, place[rows], measure=measure).numpy(),
        outlier=outlier_scores(h)[0],
        neighbors=neighbors.numpy(),
        distances=distances.numpy(),
        cosines=cosines.numpy(),
        kind=kind_of(measure, kernel=run.config.kernel) + ", of h" * run.exported,
        **({} if judgements is None else judged(run, data, split, place[rows], judgements)),
    )
    left = torch.ones(len(everything), dtype=torch.bool).index_fill(0, place, False).nonzero()[:, 0]
    found = findings(
        run.read_json("inspect.json"), names_of(images, split), unreadable=names_of(everything[left], split)
    )
    return RunData(**numbers, points=made, pictured=pictured, seen=first_step(run.config, data), findings=found)


def names_of(images: Images, split: str) -> list[str]:
    """What `curvssl inspect` calls the images: by their paths, or by their numbers in the array or in the split."""
    return images.names or [f"{'row' if split == 'all' else split} {row}" for row in images.rows.tolist()]


def findings(inspected: dict[str, Any], names: Sequence[str], *, unreadable: Sequence[str]) -> dict[str, Any]:
    """What inspect.json has about the images with these names, in rows of the page.

    Images that are not on the page are left out, and groups of which less than two are left.
    """
    rows = {name: row for row, name in enumerate(names)}

    def kept(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [entry | {"row": rows[entry["name"]]} for entry in entries if entry["name"] in rows]

    if not inspected:
        return {"duplicates": [], "outliers": [], "typical": [], "unreadable": [{"name": name} for name in unreadable]}
    groups = [kept(group) for group in inspected["near_duplicates"]["groups"]]
    return {
        "duplicates": [group for group in groups if len(group) > 1],
        "outliers": kept(inspected["outliers"]["ranked"]),
        "fence": inspected["outliers"]["fence"],
        "beyond": inspected["outliers"]["beyond"],
        "typical": kept(inspected["typical"]),
        "unreadable": inspected["unreadable"],
    }


def judged(
    run: Run, data: Dataset, split: str, place: Tensor, judgements: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What the linear probe predicts for the images at these places of a split. Only test images are judged: the probe
    was trained on the others, which have the prediction −1."""
    tested = features_of(run, data, "test").index
    tested = torch.arange(len(data.test.images)) if tested is None else tested
    tested = data.test.images.rows[tested] if split == "all" else tested
    known = {number: row for row, number in enumerate(tested.tolist())}
    rows = np.array([known.get(number, -1) for number in place.tolist()])
    return {
        "predicted": np.where(rows < 0, -1, judgements["linear_predictions"][rows]),
        "confidence": np.where(rows < 0, 0, judgements["linear_confidence"][rows]),
    }


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


def map_of(run: Run, h: Tensor, index: Tensor, *, split: str) -> Tensor:
    """UMAP of h, (N, 2): taken from the run directory if the stored one has the same images."""
    name = f"map-h-{split}.npz"
    stored = run.stored_arrays(name)
    if stored is not None and np.array_equal(stored["index"], index):
        return torch.from_numpy(stored["xy"])
    xy = maps.umap(h)
    maps.save(xy, run, name, index=index)
    return xy


def curvature_measure(run: Run, *, n: int) -> Curvature:
    """The curvature whose ρ the run's training charts: the one that its loss aligns, else Eq. (6)."""
    config = run.config
    k = min(config.k, config.batch_size - 1, n - 1)
    measure = own_curvature(None if config.method == OWN else make_criterion(config), k=k)
    measure.k = k
    return measure


def kind_of(measure: Curvature, *, kernel: str) -> str:
    """Which curvature, in words."""
    equation = "Eq. (6)" if measure.kernel is None else f"Eq. (10), {kernel} kernel"
    return f"{equation}, k = {measure.k}"


@torch.inference_mode()
def curvature_of_views(run: Run, data: Dataset, images: Images, index: Tensor, *, measure: Curvature) -> Tensor:
    """Curvature of the embeddings z of two augmented views of each image, (2, N), as training measures it: by the run's
    own definition, among the images of a random batch of the run's size. An exported encoder has no z: of h.

    Batches and views have a fixed seed; the scores are stored in the run directory.
    """
    name = "views.npz"
    stored = run.stored_arrays(name)
    if stored is not None and np.array_equal(stored["index"], index):
        return torch.from_numpy(stored["curvature"])
    device = best_device()
    parts = [part.to(device) for part in run.load_parts() if part is not None]
    embed = torch.nn.Sequential(*parts)
    config = run.config
    shape: dict[str, Any] = {"size": config.view_size, "mean": data.mean, "std": data.std}
    augments = [Augment(**shape, **vars(kind)).to(device) for kind in (config.augment, config.second_augment())]
    generator = torch.Generator().manual_seed(0)
    order = permutation(len(index), seed=0, number=0)
    size = min(config.batch_size, len(order))
    starts = [min(start, len(order) - size) for start in range(0, len(order), size)]  # the last batch is full too
    batches = [order[start : start + size] for start in starts]
    scores = torch.empty(2, len(order))
    for rows, batch in zip(batches, images.batches(batches, stand_ins=False), strict=True):
        u = [torch.rand(len(batch), augment.draws, generator=generator).to(device) for augment in augments]
        views = [augment(batch.to(device), numbers) for augment, numbers in zip(augments, u, strict=True)]
        scores[:, rows] = measure.scores(torch.stack([embed(x).float() for x in views])).cpu()
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
        bent, what = views.mean(0), f"curvature, {run.points.kind}, mean of two views"
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
