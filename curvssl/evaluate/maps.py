"""Maps of features in two dimensions: compute UMAP, measure its quality, and draw it."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from curvssl.config import UserError
from curvssl.files import printable, say, write_atomic
from curvssl.rundir import Run

N_NEIGHBORS = 15  # the paper's
MIN_DIST = 0.1  # the paper's
MANY = 30_000  # images, above which a line says that a map takes time
DPI = 200
LETTERS = 32  # of a class's name in a legend
# Matthew Petroff's ten colours: distinct in the common forms of colour blindness, and equally visible on white.
COLOURS = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
MARKERS = "o^sDvP*X<>"  # the eleventh class has the first colour and the second marker, and so on
INK, FAINT = "#24292f", "#6e7781"


def umap(features: Tensor, *, seed: int = 0) -> Tensor:
    """UMAP of (N, d) to (N, 2) float32, bit-identical for one seed; n_neighbors 15, or N − 1 if less, min_dist 0.1.

    With a seed, UMAP uses only one thread.
    """
    n = len(features)
    if n < 4:
        raise UserError(f"a map needs at least 4 images, got {n}")
    if not features.isfinite().all():
        raise UserError("the features hold NaN or infinity, so there is no map of them: the encoder diverged")
    if n > MANY:
        say(f"drawing a map of {n:,} images, which takes minutes")
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        # UMAP warns on import that TensorFlow is missing, which is not used here. With few points it warns that it
        # solves a dense eigenproblem instead of a sparse one.
        warnings.filterwarnings("ignore", message="Tensorflow not installed", category=ImportWarning)
        warnings.filterwarnings("ignore", message="k >= N for N", category=RuntimeWarning)
        from umap import UMAP

        reducer = UMAP(n_neighbors=min(N_NEIGHBORS, n - 1), min_dist=MIN_DIST, random_state=seed, n_jobs=1)
        xy = reducer.fit_transform(features.float().numpy()).astype(np.float32)
    torch.set_num_threads(threads)  # the compiler that UMAP uses gives OpenMP, and so torch, all cores
    return torch.from_numpy(xy)


def save(xy: Tensor, run: Run, name: str, *, index: Tensor | None = None) -> None:
    """Keep an npz with xy (N, 2) and index (N,), the images' positions in their split (by default 0 … N − 1)."""
    places = np.arange(len(xy)) if index is None else index.numpy()
    run.keep_arrays(name, by="curvssl map RUN", xy=xy.numpy(), index=places)


def map_quality(
    features: Tensor, xy: Tensor, *, labels: Tensor | None = None, points: int = 2000, seed: int = 0
) -> dict[str, float]:
    """Two quality measures of a map, from a random sample of at most `points` points (both need all distances).

    trustworthiness: 1 if the nearest neighbours on the map are also neighbours in feature space; 0.5 is chance.
    silhouette: of the labels on the map, −1 … 1; 1 if every class is a tight cluster. Needs two or more labels.
    """
    from sklearn.manifold import trustworthiness
    from sklearn.metrics import silhouette_score

    n = len(features)
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:points]
    x, flat = features[drawn].float().numpy(), xy[drawn].numpy()
    near = min(N_NEIGHBORS, max(1, (len(drawn) - 1) // 2))  # scikit-learn requires fewer than half of the points
    quality = {"trustworthiness": float(trustworthiness(x, flat, n_neighbors=near))}
    if labels is not None and 1 < len(labels[drawn].unique()) < len(drawn):
        quality["silhouette"] = float(silhouette_score(flat, labels[drawn].numpy()))
    return quality


def draw(
    xy: Tensor,
    *,
    title: str,
    out: Path,
    labels: Tensor | NDArray[Any] | None = None,
    classes: Sequence[str] = (),
    values: Tensor | NDArray[Any] | None = None,
    values_name: str = "",
) -> tuple[Path, Path]:
    """Write the map as PNG (200 dpi) and PDF, and return both paths: `out` with its suffix replaced.

    Coloured by `labels` (N,) with a legend of `classes`, or by `values` (N,) with a colour bar, or in one colour.
    """
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    if labels is not None and values is not None:
        raise ValueError("a map is coloured by labels or by values: give one of them")
    figure = Figure(figsize=(6.4, 5.2), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    # Drawn in random order, so that the last class does not cover the others.
    order = torch.randperm(len(xy), generator=torch.Generator().manual_seed(0)).numpy()
    x, y = xy.numpy()[order].T
    style: dict[str, Any] = {
        "s": min(16.0, max(2.0, 16000 / len(xy))),
        "linewidths": 0,
        "alpha": 0.8,
        "rasterized": True,
    }
    if labels is not None:
        _by_class(axes, x, y, np.asarray(labels)[order], classes, style)
    elif values is not None:
        colours = axes.scatter(x, y, c=np.asarray(values)[order], cmap="viridis", **style)
        bar = figure.colorbar(colours, ax=axes, shrink=0.7, pad=0.02)
        bar.set_label(values_name, color=INK)
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=FAINT, labelcolor=INK)
    else:
        axes.scatter(x, y, c=COLOURS[0], **style)
    _finish(axes, title=title, note=f"UMAP, {len(xy):,} images")
    return write_figure(figure, out.with_suffix(""))


def write_figure(figure: Any, out: Path) -> tuple[Path, Path]:
    """Write OUT.png and OUT.pdf."""
    png, pdf = out.with_name(out.name + ".png"), out.with_name(out.name + ".pdf")
    for path in (png, pdf):
        write_picture(figure, path)
    return png, pdf


def write_picture(figure: Any, path: Path) -> None:
    """Write a .png or .pdf; the same figure gives the same bytes, so a PDF has no date."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # a class or a folder may have any name: "$" starts no formula
        text.set(text=text.get_text().encode(errors="replace").decode(), parse_math=False)
    kind = path.suffix.removeprefix(".").lower()
    settings: dict[str, Any] = {"metadata": {"CreationDate": None}} if kind == "pdf" else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from font")  # a box is drawn instead
        write_atomic(path, lambda file: figure.savefig(file, format=kind, dpi=DPI, **settings))


def _by_class(
    axes: Any, x: NDArray[Any], y: NDArray[Any], labels: NDArray[Any], classes: Sequence[str], style: dict[str, Any]
) -> None:
    """Ten colours; from the eleventh class on, another marker. The legend lists the classes that occur."""
    from matplotlib.lines import Line2D

    colours = np.array(COLOURS)[labels % len(COLOURS)]
    for turn in np.unique(labels // len(COLOURS)):
        mine = labels // len(COLOURS) == turn
        axes.scatter(x[mine], y[mine], c=colours[mine], marker=MARKERS[turn % len(MARKERS)], **style)
    handles = [
        Line2D(
            [],
            [],
            linestyle="",
            marker=MARKERS[label // len(COLOURS) % len(MARKERS)],
            color=COLOURS[label % len(COLOURS)],
            markersize=7,
            label=_called(label, classes),
        )
        for label in np.unique(labels)
    ]
    axes.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        ncols=math.ceil(len(handles) / 20),
        frameon=False,
        labelcolor=INK,
        handletextpad=0.2,
    )


def _called(label: int, classes: Sequence[str]) -> str:
    """A class's name, cut where it would take the room of the map."""
    name = printable(classes[label]) if label < len(classes) else str(label)
    return name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…"


def _finish(axes: Any, *, title: str, note: str) -> None:
    """Equal scales, no ticks, a thin frame: the axes of a map have no meaning."""
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold")
    axes.set_xlabel(note, loc="left", color=FAINT, fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.03)
    for spine in axes.spines.values():
        spine.set_color("#d0d7de")
        spine.set_linewidth(0.8)
