"""Figures: quality as in scikit-learn, panels with every point and row, the same bytes each time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from sklearn.manifold import trustworthiness
from sklearn.metrics import silhouette_score

from curvssl.data.named import load
from curvssl.evaluate.maps import COLOURS
from curvssl.paper.figures import _curves_figure, _maps_figure, _times_figure, draw_curves, draw_maps, map_record

Record = dict[str, Any]


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray, Record]:
    """Pixels and labels of the test digits, and the record of their map."""
    data = load("digits")
    pixels, labels = data.test.images.pixels.flatten(1).float().numpy(), data.test.labels.numpy()
    return pixels, labels, map_record(pixels, labels, classes=data.classes, seed=3)


def rows(*epochs: int, **values: float) -> list[dict[str, float]]:
    return [{"epoch": e, "step": 7 * e} | {key: value / e for key, value in values.items()} for e in epochs]


def looks(lines: list[Any]) -> list[tuple[Any, ...]]:
    return [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines]


def test_a_record_is_json_and_its_quality_is_scikit_learns_on_the_points_it_keeps(digits):
    pixels, labels, record = digits
    assert json.loads(json.dumps(record)) == record
    assert record["labels"] == labels.tolist()
    assert record["classes"] == list("0123456789")
    assert record["umap"] == {"n_neighbors": 15, "min_dist": 0.1, "seed": 3}
    xy = np.stack([record["x"], record["y"]], 1)
    assert (xy == xy.round(3)).all()
    quality = record["quality"]
    # Integer pixels give equal distances, whose ranks depend on the order of the points.
    assert quality["trustworthiness"] == pytest.approx(trustworthiness(pixels, xy, n_neighbors=15), abs=1e-4)
    assert quality["silhouette"] == pytest.approx(silhouette_score(xy, labels))


def test_every_record_is_a_panel_with_its_name_its_scores_and_all_its_points_in_the_colour_of_their_class(digits):
    _, labels, record = digits
    scored = record | {"quality": {"trustworthiness": 0.987, "silhouette": -0.126}}
    figure = _maps_figure({"Barlow Twins": record, "VICReg": record, "CurvSSL": scored}, title="digits")
    assert figure.get_suptitle() == "digits"
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Barlow Twins", "VICReg", "CurvSSL"]
    assert figure.axes[2].get_xlabel() == "trustworthiness 0.99\nsilhouette -0.13"
    want = sorted((x, y, COLOURS[k]) for x, y, k in zip(record["x"], record["y"], labels, strict=True))
    for axes in figure.axes:
        (points,) = axes.collections
        colours = map(to_hex, points.get_facecolors())
        assert sorted((*xy, c) for xy, c in zip(points.get_offsets().tolist(), colours, strict=True)) == want
        assert axes.get_aspect() == 1
        assert not axes.get_xticks().size
        assert not axes.get_yticks().size
        assert axes.get_legend() is None
    (legend,) = figure.legends
    entries = zip((text.get_text() for text in legend.get_texts()), legend.legend_handles, strict=True)
    assert [(name, handle.get_color()) for name, handle in entries] == list(zip("0123456789", COLOURS, strict=True))


def test_the_name_the_scores_and_the_points_stand_one_below_the_other(digits):
    figure = _maps_figure({"CurvSSL": digits[2], "VICReg": digits[2]}, title="digits")
    figure.draw_without_rendering()
    for axes, name in zip(figure.axes, ("CurvSSL", "VICReg"), strict=True):
        (title,) = axes.findobj(lambda artist, name=name: isinstance(artist, Text) and artist.get_text() == name)
        scores = axes.xaxis.label.get_window_extent()
        assert title.get_window_extent().y0 >= scores.y1
        assert scores.y0 >= axes.get_window_extent().y1


def test_more_classes_than_colours_are_told_apart_by_their_markers():
    labels = list(range(23)) * 2
    record = {"x": labels, "y": labels, "labels": labels, "classes": [f"c{k}" for k in range(23)], "quality": {}}
    figure = _maps_figure({"one": record}, title="")
    assert sum(len(points.get_offsets()) for points in figure.axes[0].collections) == 46
    shapes = {points.get_paths()[0].vertices.tobytes() for points in figure.axes[0].collections}
    assert len(shapes) == 3
    assert len(set(looks(figure.legends[0].legend_handles))) == 23


def test_maps_of_other_classes_are_refused_in_one_figure(digits):
    other = digits[2] | {"classes": [*"abcdefghij"]}
    with pytest.raises(ValueError, match="one list of classes, got 2"):
        _maps_figure({"one": digits[2], "other": other}, title="")


def test_curves_have_a_panel_for_each_key_and_pass_over_rows_that_lack_it():
    cells = {
        "a": [*rows(1, 2, loss=6.0), *rows(4, loss=6.0, knn=80.0)],
        "b": rows(1, 2, 3, 4, 5, loss=3.0, effective_rank=9.0),
    }
    figure = _curves_figure(cells, keys=("loss", "knn", "effective_rank", "rho"), title="two", style={})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "knn", "effective rank", "rho"]
    drawn = [{line.get_label(): line.get_xydata().tolist() for line in axes.lines} for axes in figure.axes]
    assert drawn == [
        {"a": [[1, 6], [2, 3], [4, 1.5]], "b": [[1, 3], [2, 1.5], [3, 1], [4, 0.75], [5, 0.6]]},
        {"a": [[4, 20]]},
        {"b": [[1, 9], [2, 4.5], [3, 3], [4, 2.25], [5, 1.8]]},
        {},
    ]
    assert {axes.get_xlabel() for axes in figure.axes} == {"epoch"}
    colour = {(line.get_label(), line.get_color()) for axes in figure.axes for line in axes.lines}
    assert colour == {("a", COLOURS[0]), ("b", COLOURS[1])}  # one per cell, the same in all panels
    assert figure.axes[1].lines[0].get_marker() == "o"  # a line with one point would be invisible
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_curves_without_epochs_stand_over_steps():
    cells = {"a": [{"step": 10, "loss": 1.0}, {"step": 20, "loss": 0.5}], "b": rows(1, 2, loss=1.0)}
    (axes,) = _curves_figure(cells, keys=["loss"], title="", style={}).axes
    assert axes.get_xlabel() == "step"
    assert [line.get_xdata().tolist() for line in axes.lines] == [[10, 20], [7, 14]]


def test_a_dozen_cells_are_told_apart_and_seeds_of_one_style_share_an_entry_of_the_legend():
    cells = {f"{method}-seed{s}": rows(1, 2, 3, 4, loss=s + 1.0) for method in "wxyz" for s in range(3)}
    plain = _curves_figure(cells, keys=["loss"], title="", style={})
    assert len(set(looks(plain.axes[0].lines))) == len(plain.legends[0].get_texts()) == 12
    style = {name: {"color": COLOURS["wxyz".index(name[0])], "label": name[0], "linewidth": 0.8} for name in cells}
    styled = _curves_figure(cells, keys=["loss"], title="", style=style)
    assert looks(styled.axes[0].lines) == [(COLOURS[i], "-", "") for i in range(4) for _ in range(3)]
    assert [text.get_text() for text in styled.legends[0].get_texts()] == [*"wxyz"]


def test_every_run_is_a_point_at_its_minutes_and_every_published_accuracy_a_line_across():
    measured = {"fast": [(3.5, 91.0), (3.6, 90.5)], "lightly": [(4.0, 80.0)]}
    (axes,) = _times_figure(measured, published={"theirs": 92.1, "others": 92.6}, title="").axes
    fast, lightly, *across = axes.lines
    assert [line.get_xydata().tolist() for line in (fast, lightly)] == [[[3.5, 91.0], [3.6, 90.5]], [[4.0, 80.0]]]
    assert {line.get_label(): set(line.get_ydata()) for line in across} == {"theirs": {92.1}, "others": {92.6}}
    assert len({*looks(axes.lines)}) == 4
    low, high = axes.get_xlim()
    assert low < 3.5 < 4.0 < high


def test_figures_are_the_same_bytes_from_their_json_in_a_process_that_has_no_umap(digits, tmp_path: Path):
    from PIL import Image

    records, cells = {"Barlow Twins": digits[2], "CurvSSL": digits[2]}, {"a": rows(1, 2, 3, 4, 5, loss=1.0)}
    files = [
        *draw_maps(records, title="digits", out=tmp_path / "new" / "maps-0.5"),
        *draw_curves(cells, keys=["loss"], title="digits", out=tmp_path / "new" / "curves"),
    ]
    assert [file.name for file in files] == ["maps-0.5.png", "maps-0.5.pdf", "curves.png", "curves.pdf"]
    (tmp_path / "study.json").write_text(json.dumps([records, cells]))
    again = """if True:
        import json, pathlib, sys
        sys.modules |= {"umap": None, "sklearn": None}  # importing them is an error
        from curvssl.paper.figures import draw_curves, draw_maps
        here = pathlib.Path(sys.argv[1])
        records, cells = json.loads((here / "study.json").read_text())
        draw_maps(records, title="digits", out=here / "maps-0.5")
        draw_curves(cells, keys=["loss"], title="digits", out=here / "curves")
    """
    subprocess.run([sys.executable, "-c", again, tmp_path], check=True)
    for file in files:
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name
    assert b"/CreationDate" not in files[1].read_bytes()
    assert b"/Subtype /Image" in files[1].read_bytes()  # the points are rasterized
    assert b"/Subtype /Image" not in files[3].read_bytes()
    with Image.open(files[0]) as image:
        assert image.size == (1120, 660)  # 5.6 × 3.3 inches at 200 dpi
