"""Draw figures from the JSON of results alone: maps, training curves, accuracy over time. The same JSON gives the same
bytes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from curvssl.evaluate import maps
from curvssl.evaluate.maps import COLOURS, FAINT, INK, MARKERS

Rows = Sequence[Mapping[str, Any]]  # rows of metrics.jsonl, as stored in a cell's "curves"

DASHES = ("-", "--", ":", "-.")  # the eleventh line has the first colour and the second dash, and so on
FRAME = "#d0d7de"
LEGEND: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": 9}


def map_record(
    h: Tensor | NDArray[Any], labels: Tensor | NDArray[Any], *, classes: Sequence[str], seed: int = 0
) -> dict[str, Any]:
    """UMAP of features (n, d) with labels (n,) as a value for JSON: all that `draw_maps` needs for one method.

    The quality is computed from the rounded points, because these are stored.
    """
    features, y = torch.as_tensor(h), torch.as_tensor(labels)
    xy = maps.umap(features, seed=seed).double().round(decimals=3)
    return {
        "x": xy[:, 0].tolist(),
        "y": xy[:, 1].tolist(),
        "labels": y.tolist(),
        "classes": list(classes),
        "quality": maps.map_quality(features, xy, labels=y),
        "umap": {"n_neighbors": min(maps.N_NEIGHBORS, len(xy) - 1), "min_dist": maps.MIN_DIST, "seed": seed},
    }


def draw_maps(records: Mapping[str, Mapping[str, Any]], *, title: str, out: Path) -> tuple[Path, Path]:
    """Write OUT.png and OUT.pdf with one panel per entry of {name: map_record(…)}, and return both paths."""
    return maps.write_figure(_maps_figure(records, title=title), out)


def draw_curves(
    cells: Mapping[str, Rows],
    *,
    keys: Sequence[str],
    title: str,
    out: Path,
    style: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Path, Path]:
    """Write OUT.png and OUT.pdf with one panel per key and one line per cell, and return both paths.

    A row without the key is skipped. `style` has matplotlib's line properties for each cell: cells with the same color
    and label, such as the seeds of one method, share one entry of the legend.
    """
    return maps.write_figure(_curves_figure(cells, keys=keys, title=title, style=style or {}), out)


def draw_times(
    measured: Mapping[str, Sequence[tuple[float, float]]],
    *,
    published: Mapping[str, float],
    title: str,
    out: Path,
) -> tuple[Path, Path]:
    """Write OUT.png and OUT.pdf with a point (minutes, accuracy) for each run of {name: runs}, and return both paths.

    A published accuracy has no minutes that compare with ours: it is a line across.
    """
    return maps.write_figure(_times_figure(measured, published=published, title=title), out)


def _times_figure(
    measured: Mapping[str, Sequence[tuple[float, float]]], *, published: Mapping[str, float], title: str
) -> Any:
    from matplotlib.ticker import LogLocator, NullLocator

    figure = _figure(6.6, 3.6, title=title)
    axes = figure.add_subplot()
    for i, (name, runs) in enumerate(measured.items()):
        axes.plot(*zip(*runs, strict=True), "o", color=COLOURS[i % len(COLOURS)], label=name, markersize=5)
    minutes = [x for runs in measured.values() for x, _ in runs]
    axes.set_xscale("log")
    axes.set_xlim(min(minutes) / 2, max(minutes) * 2)  # one point alone has no range
    for i, (name, accuracy) in enumerate(published.items(), 1):
        axes.axhline(accuracy, color=FAINT, linewidth=1, linestyle=DASHES[i % len(DASHES)], label=name, zorder=0)
    axes.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator(), major_formatter="{x:g}")
    axes.set_xlabel("minutes on one GPU", color=FAINT, fontsize=9)
    axes.set_ylabel("linear probe, %", color=FAINT, fontsize=9)
    axes.tick_params(colors=FAINT, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FRAME)
    figure.legend(loc="outside lower left", ncols=2, **LEGEND)
    return figure


def _maps_figure(records: Mapping[str, Mapping[str, Any]], *, title: str) -> Any:
    from matplotlib.lines import Line2D

    lists = {tuple(record["classes"]) for record in records.values()}
    if len(lists) != 1:
        raise ValueError(f"maps with one legend need one list of classes, got {len(lists)}: draw a figure for each")
    (classes,) = lists
    figure = _figure(2.3 * len(records) + 1, 3.3, title=title)
    for i, (name, record) in enumerate(records.items(), 1):
        axes = figure.add_subplot(1, len(records), i)
        _points(axes, record)
        scores = (f"{what} {value:.2f}" for what, value in record["quality"].items())
        axes.set_title(name, loc="left", color=INK, fontsize=11)
        axes.set_xlabel("\n".join(scores), loc="left", color=FAINT, fontsize=9)
        axes.xaxis.set_label_position("top")  # between the title and the points
        axes.set(xticks=[], yticks=[])
        axes.set_aspect("equal", adjustable="datalim")
        axes.spines[:].set_color(FRAME)
    handles = []
    for label in sorted({label for record in records.values() for label in record["labels"]}):
        turn, colour = divmod(label, len(COLOURS))
        look = {"marker": MARKERS[turn % len(MARKERS)], "color": COLOURS[colour], "label": classes[label]}
        handles.append(Line2D([], [], linestyle="", **look))
    columns = math.ceil(len(handles) / 14)
    figure.legend(handles=handles, loc="outside right center", ncols=columns, handletextpad=0.2, **LEGEND)
    return figure


def _points(axes: Any, record: Mapping[str, Any]) -> None:
    """Draw points in random order, so that the last class does not cover the others."""
    order = torch.randperm(len(record["x"]), generator=torch.Generator().manual_seed(0)).numpy()
    x, y, labels = (np.asarray(record[key])[order] for key in ("x", "y", "labels"))
    turns, colours = labels // len(COLOURS), np.array(COLOURS)[labels % len(COLOURS)]
    size = min(6.0, max(0.8, 4000 / len(x)))
    for turn in np.unique(turns):
        mine, marker = turns == turn, MARKERS[turn % len(MARKERS)]
        # Rasterized also in the PDF: ten thousand vector markers per panel would make it large and slow to open.
        axes.scatter(x[mine], y[mine], s=size, c=colours[mine], marker=marker, linewidths=0, rasterized=True)


def _curves_figure(
    cells: Mapping[str, Rows], *, keys: Sequence[str], title: str, style: Mapping[str, Mapping[str, Any]]
) -> Any:
    across = min(3, len(keys))
    down = math.ceil(len(keys) / across)
    x = "epoch" if all("epoch" in row for rows in cells.values() for row in rows) else "step"
    figure = _figure(3.3 * across, 2.2 * down + 0.8, title=title)
    legend: dict[str, Any] = {}
    for i, key in enumerate(keys, 1):
        axes = figure.add_subplot(down, across, i)
        for j, (name, rows) in enumerate(cells.items()):
            turn, colour = divmod(j, len(COLOURS))
            points = [(row[x], row[key]) for row in rows if key in row]
            look: dict[str, Any] = {"color": COLOURS[colour], "linewidth": 1.5, "label": name, "markersize": 3}
            look["marker"] = "o" if len(points) < 4 else ""  # a line with one point would be invisible
            look |= style.get(name, {"linestyle": DASHES[turn % len(DASHES)]})
            if points:
                (line,) = axes.plot(*zip(*points, strict=True), **look)
                legend.setdefault(line.get_label(), line)
        axes.set_title(key.replace("_", " "), loc="left", color=INK, fontsize=10)
        axes.set_xlabel(x, color=FAINT, fontsize=9)
        axes.tick_params(colors=FAINT, labelsize=9)
        axes.locator_params("x", integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FRAME)
    figure.legend(handles=list(legend.values()), loc="outside lower left", ncols=across, **LEGEND)
    return figure


def _figure(width: float, height: float, *, title: str) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    return figure
