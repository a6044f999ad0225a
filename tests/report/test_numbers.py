"""The page's numbers, charts, words and provenance, in a real browser."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_page import Opened, pictured, run, single

from curvssl.report.page import RunData

# ---- the numbers


def test_confusion_matrix_and_class_accuracy_agree_with_scikit_learn(page: Opened, grid: RunData) -> None:
    from sklearn.metrics import confusion_matrix

    assert grid.points is not None
    assert grid.pictured is not None
    expected = confusion_matrix(grid.pictured.labels, grid.points.predicted, labels=range(10))
    cells = page.page.locator("#confusions .card").first.locator("td").all_inner_texts()
    np.testing.assert_array_equal(np.array([int(cell or 0) for cell in cells]).reshape(10, 10), expected)
    bars = page.page.locator("#per-class .class").all_inner_texts()
    for name, bar in enumerate(bars):
        assert f"{100 * expected[name, name] / expected[name].sum():.1f}" == bar.split()[1]


def test_cell_of_the_confusion_matrix_selects_its_images_by_keyboard(page: Opened, grid: RunData) -> None:
    assert grid.points is not None
    assert grid.pictured is not None
    first = page.page.locator("#confusions td").first
    first.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "Enter"):
        page.page.keyboard.press(key)
    page.frame()
    expected = np.flatnonzero((grid.pictured.labels == 2) & (grid.points.predicted == 2))
    assert page.selected() == list(expected)
    assert f"{len(expected)} images selected" in page.page.inner_text("#selection")
    assert "2 that CurvSSL reads as 2" in page.page.inner_text("#selection")
    page.until("byId('selection').getBoundingClientRect().top < innerHeight - 100")  # it scrolls to the map


def test_with_hundreds_of_classes_the_commonest_mix_ups_are_listed(browser: Any, tmp_path: Path) -> None:
    of = pictured(900)
    labels = np.arange(900) % 300
    of = dataclasses.replace(of, labels=labels, classes=tuple(f"class {i}" for i in range(300)))
    made = run("curvssl", of)
    assert made.points is not None
    predicted = np.where(labels == 7, 290, labels)
    made = dataclasses.replace(made, points=dataclasses.replace(made.points, predicted=predicted))
    opened = single(browser, [made], tmp_path)
    assert opened.page.locator("#confusions button").all_inner_texts() == ["class 7 → class 290 3"]
    opened.page.click("#confusions button")
    assert opened.selected() == [7, 307, 607]
    assert opened.page.locator("#per-class .class").first.inner_text().split("\n")[0] == "class 7"
    assert opened.complaints == []
    opened.context.close()


def test_most_confident_mistakes_come_first(page: Opened, grid: RunData) -> None:
    assert grid.points is not None
    assert grid.pictured is not None
    assert grid.points.confidence is not None
    wrong = np.flatnonzero(grid.points.predicted != grid.pictured.labels)
    shown = page.rows_of("#mistakes .card:first-child canvas")
    assert set(shown) == set(wrong)
    assert (np.diff(grid.points.confidence[shown]) <= 1 / 255).all()


def test_probes_stand_beside_their_floors(page: Opened) -> None:
    lines = [line.split("\t") for line in page.page.inner_text("#probes tbody").splitlines()]
    assert [line[0] for line in lines] == ["CurvSSL", "Barlow Twins", "raw pixels", "random encoder"]
    assert lines[0][1] == "97.8 ± 0.2"
    assert lines[2][3] == "95.1"
    assert lines[0][4:] == ["90.0", "60.5"]  # retrieval
    assert lines[3][4:] == ["95.2", "50.0"]
    first = [line.split("\t") for line in page.page.locator("#summary tbody tr").all_inner_texts()]
    assert [line[0] for line in first] == ["CurvSSL", "Barlow Twins", "raw pixels", "random encoder"]
    assert first[2][1:] == ["96.1 ± 0.2", "95.1"]


def test_seeds_of_a_method_become_a_mean_with_a_band(browser: Any, grid: RunData, tmp_path: Path) -> None:
    runs = [grid, *(run("curvssl", None, seed=seed) for seed in (1, 2)), run("vicreg", None)]
    opened = single(browser, runs, tmp_path)
    loss = opened.page.locator("#curves figure").first
    ends = [made.metrics[-1]["loss"] for made in runs]
    label = loss.locator("svg").get_attribute("aria-label")
    assert label == f"loss; at the end: CurvSSL {np.mean(ends[:3]):.2f}, VICReg {ends[3]:.2f}"
    assert loss.locator(".band").count() == 1  # one seed has no band
    series = opened.page.evaluate("seriesOf([0, 1, 2].map((id) => payload.runs[id].metrics), 'loss', '', '')")
    table = np.array([[row["loss"] for row in made.metrics] for made in runs[:3]])
    np.testing.assert_allclose(series["mean"], table.mean(0))
    np.testing.assert_allclose(np.subtract(series["high"], series["mean"]), table.std(0, ddof=1))
    titles = opened.page.locator("#curves figcaption > span:first-child").all_inner_texts()
    for title in (
        "loss",
        "invariance",
        "curvature",
        "effective rank of z",
        "RankMe of h",
        "learning rate",
        "wall time of an epoch",
    ):
        assert title in titles
    opened.context.close()


def test_a_chart_has_a_log_axis_where_a_linear_one_would_flatten_a_curve(page: Opened, grid: RunData) -> None:
    axes = {
        "[[1000, 990, 960, 900], [40, 20, 12, 10]]": "own",  # two scales
        "[[600, 300, 150, 100], [40, 20, 12, 10]]": "log",
        "[[900, 40, 30, 25, 22, 20, 19, 18.5, 18, 17.8, 17.6, 17.5]]": "log",  # one bad start
        "[[40, 30, 20, 10], [38, 25, 15, 9]]": "linear",
        "[[2, 1.9, 1.5, 1, 0.5, 0.1, 0.001]]": "linear",  # a learning rate
        "[[-5, 1000], [0, 1]]": "linear",
    }
    for lines, expected in axes.items():
        assert page.page.evaluate(f"fitting({lines})") == expected, lines
    loss = page.page.locator("#curves figure").first
    assert "log" not in loss.locator("svg").text_content()
    page.page.select_option("#axis", "log")
    assert "loss, log axis" in loss.locator("svg").text_content()
    path = loss.locator(".curve").first.get_attribute("points")
    height = np.array([float(point.split(",")[1]) for point in path.split()])
    logs = np.log([row["loss"] for row in grid.metrics])
    np.testing.assert_allclose(height, np.polyval(np.polyfit(logs, height, 1), logs), atol=0.1)
    page.page.select_option("#axis", "fitting")


def test_losses_that_no_common_axis_shows_have_one_each(
    browser: Any, grid: RunData, other: RunData, tmp_path: Path
) -> None:
    """As in the demo: one falls from 146 to 131, which is flat even on a log axis, another from 24 to 4."""
    falls = np.exp(-np.arange(20) / 5)
    runs = [
        dataclasses.replace(made, metrics=[row | {"loss": low + drop * falls[i]} for i, row in enumerate(made.metrics)])
        for made, low, drop in ((grid, 131, 15), (other, 3.6, 20))
    ]
    opened = single(browser, runs, tmp_path)
    loss = opened.page.locator("#curves figure").first
    assert "loss, each on its own axis" in loss.locator("svg").text_content()
    assert loss.locator("[text-anchor=end]").count() == 0  # no numbers, as they would be true of no curve
    for path in loss.locator(".curve").evaluate_all("(lines) => lines.map((line) => line.getAttribute('points'))"):
        height = np.array([float(point.split(",")[1]) for point in path.split()])
        assert np.ptp(height) > 120  # of 156
        assert abs(np.corrcoef(height, falls)[0, 1]) > 0.9999
    readout = loss.locator(".readout b").all_inner_texts()
    assert readout == ["131", f"{runs[1].metrics[-1]['loss']:.2f}"]  # their values stand above, as in every chart
    opened.page.select_option("#axis", "log")
    assert "loss, log axis" in loss.locator("svg").text_content()
    opened.context.close()


def test_the_title_of_an_axis_touches_no_number(page: Opened) -> None:
    gap = """(high) => { const { drawing } = frame([0, 9], [0, high], SMALL, { x: "epoch", y: "redundancy" });
      document.body.append(drawing);
      const boxes = (what) => [...drawing.querySelectorAll(what)].map((each) => each.getBoundingClientRect());
      const [titles, marks] = [boxes(".axis"), boxes("[text-anchor=end]")];
      drawing.remove();
      return Math.min(...marks.map(({ left }) => left)) - Math.min(...titles.map(({ right }) => right)); }"""
    assert all(page.page.evaluate(gap, high) > 0 for high in (1, 9000, 132424, 9876543))


def test_curves_are_smoothed_over_epochs_and_never_drawn_beyond_what_they_can_be(page: Opened) -> None:
    noisy = "{x: [1, 2, 3, 4, 9], mean: [1, 5, 3, 7, 100]}"
    assert page.page.evaluate(f"smoothed({noisy}, 3)") == [3, 3, 5, 5, 100]
    page.page.select_option("#smooth", "3")
    assert page.page.locator("#curves figure").first.locator(".faint").count() == 2  # what was measured stays in sight
    page.page.select_option("#smooth", "1")
    low, high = page.page.evaluate("rangeOf('rho', 0.97, 0.98)")
    assert (low, high) == (pytest.approx(0.875, abs=0.01), 1)
    assert page.page.evaluate("rangeOf('knn', 99, 99.5)")[1] == 100
    low, high = page.page.evaluate("rangeOf('loss', 5, 5)")
    assert low < 4 < 6 < high


def test_a_drag_across_a_chart_zooms_all_of_them_and_a_click_enlarges_one(page: Opened) -> None:
    chart = page.page.locator("#curves figure").first.locator("svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    at = [box["x"] + box["width"] * share for share in (0.4, 0.8)]
    page.page.mouse.move(at[0], box["y"] + 60)
    page.page.mouse.down()
    page.page.mouse.move(at[1], box["y"] + 60, steps=3)
    page.page.mouse.up()
    first, last = (int(page.page.input_value(f"#{end}-epoch")) for end in ("from", "to"))
    assert 1 < first < last < 20
    for key in ("loss", "lr"):
        path = page.page.locator(f"[data-key={key}] .curve").first.get_attribute("points")
        assert len(path.split()) == last - first + 1
    page.page.fill("#to-epoch", str(first + 1))
    page.page.press("#to-epoch", "Enter")
    path = page.page.locator("[data-key=lr] .curve").first.get_attribute("points")
    assert len(path.split()) == 2
    page.page.click("#all-epochs")
    assert page.page.input_value("#to-epoch") == "20"
    page.page.click("[data-key=rho] svg")
    assert all(name in page.page.inner_text("dialog .readout") for name in ("CurvSSL", "Barlow Twins"))
    assert page.page.locator("dialog[open] [data-key=rho] svg").bounding_box()["width"] > 2 * box["width"]
    page.page.keyboard.press("Escape")
    assert not page.page.is_visible("dialog")
    page.page.focus("[data-key=rho] .larger")
    page.page.keyboard.press("Enter")
    assert page.page.is_visible("dialog [data-key=rho]")
    page.page.click("#enlarged-close")
    assert not page.page.is_visible("dialog")
    assert page.page.evaluate("document.activeElement.ariaLabel") == "Enlarge ρ of the two views' curvature"


def test_on_a_phone_an_enlarged_chart_names_all_runs_without_scrolling(
    browser: Any, grid: RunData, tmp_path: Path
) -> None:
    methods = ("barlow-twins", "vicreg", "kernel-curvssl")
    opened = single(browser, [grid, *(run(m, None) for m in methods)], tmp_path, viewport={"width": 390, "height": 844})
    opened.page.click("[data-key=loss] .larger")
    text = opened.page.inner_text("dialog .readout")
    assert all(name in text for name in ("CurvSSL", "Barlow Twins", "VICReg", "kernel CurvSSL"))
    assert opened.page.evaluate("byId('enlarged').scrollWidth - byId('enlarged').clientWidth") == 0
    opened.context.close()


# ---- the words


def test_every_term_is_explained_by_pointing_focus_and_to_screen_readers(page: Opened) -> None:
    page.point_at(17)
    words = page.page.evaluate(
        """[...document.querySelectorAll(".term")].map((one) =>
           [one.dataset.term, document.getElementById(one.getAttribute("aria-describedby"))?.textContent ?? ""])"""
    )
    assert {"rho", "effective_rank", "agreement", "outlier", "curvature", "knn", "loss"} <= {name for name, _ in words}
    assert all(len(text) > 30 for _, text in words)
    assert not page.page.is_visible("#explain")
    for act in ("hover", "focus"):
        getattr(page.page, act)("#summary [data-term=rho]")
        assert page.page.inner_text("#explain") == dict(words)["rho"]
        page.page.mouse.move(2, 400)
        page.page.keyboard.press("Escape")
        assert not page.page.is_visible("#explain")


# ---- the geometry and the provenance


def test_rho_is_the_correlation_of_the_views(page: Opened, grid: RunData, other: RunData) -> None:
    titles = page.page.locator("#scatters h4").all_inner_texts()
    for title, made in zip(titles, (grid, other), strict=True):
        assert made.points is not None
        assert title == f"ρ = {np.corrcoef(made.points.curvature)[0, 1]:.3f}"


def test_rho_says_of_which_curvature_it_is(browser: Any, grid: RunData, other: RunData, tmp_path: Path) -> None:
    assert other.points is not None
    kernel = dataclasses.replace(other.points, kind="Eq. (10), rbf kernel, k = 10")
    kernel_run = dataclasses.replace(run("kernel-curvssl", other.pictured), points=kernel)
    opened = single(browser, [grid, other, kernel_run], tmp_path)
    for place in ("#summary", "#curves"):
        opened.page.focus(f"{place} [data-term=rho]")
        text = opened.page.inner_text("#explain")
        assert "of CurvSSL, Barlow Twins: Eq. (6), k = 10; of kernel CurvSSL: Eq. (10), rbf kernel, k = 10." in text
    opened.context.close()


def test_numbers_have_one_way_of_writing(page: Opened) -> None:
    shown = [page.page.evaluate(f"short({value})") for value in (1702.4, 12345.6, -3, -1702.4, 0.5, -0.25)]
    assert shown == ["1,702", "12,346", "−3", "−1,702", "0.500", "−0.250"]
    marks = "ticks({}).map(([, text]) => text)"
    assert page.page.evaluate(marks.format("0, 3000, 3")) == ["0", "1,000", "2,000", "3,000"]
    assert page.page.evaluate(marks.format("-1, 1, 4")) == ["−1.0", "−0.5", "0.0", "0.5", "1.0"]


def test_most_and_least_curved_images_are_shown(page: Opened, grid: RunData) -> None:
    assert grid.points is not None
    order = np.argsort(grid.points.curvature.mean(0))
    shown = page.rows_of("#extremes .card:first-child canvas")
    assert shown[0] == order[-1]
    assert shown[16] == order[0]
    assert set(shown[:16]) == set(order[-16:])


def test_edges_of_a_chosen_point_keep_their_cosines(page: Opened, grid: RunData) -> None:
    assert grid.points is not None
    page.page.mouse.click(*page.screen(12))
    page.until("document.querySelector('#stars h4').textContent === 'Edges of image 12'")  # when the cursor stops
    cells = page.page.locator("#stars .card").first.locator(".cosines td").all_inner_texts()
    table = np.array([float(cell.replace("−", "-") or 1) for cell in cells]).reshape(6, 6)
    expected = np.ones((6, 6))
    upper = np.triu_indices(6, 1)
    expected[upper] = grid.points.cosines[12]
    expected.T[upper] = grid.points.cosines[12]
    np.testing.assert_allclose(table, expected, atol=0.01)
    # The drawing uses the best plane: its share is that of the two largest eigenvalues of the Gram matrix.
    gram = expected * np.outer(grid.points.distances[12], grid.points.distances[12])
    held = page.page.evaluate("edgePlane(mapped[0], 12).held")
    assert held == pytest.approx(np.linalg.eigvalsh(gram)[-2:].sum() / np.trace(gram), abs=0.01)


def test_provenance_names_command_versions_device_and_checksums(page: Opened) -> None:
    text = page.page.inner_text("#provenance")
    for part in ("curvssl pretrain --method curvssl --seed 0", "2.15", "cpu", "9442cbc5" * 8, "0123456789ab"):
        assert part in text
    page.page.click("#origins details:last-child summary")
    differing = page.page.locator("#origins details:last-child .differs th").all_inner_texts()
    assert differing == ["method"]
    assert "augment.crop_scale" in page.page.inner_text("#origins")
    page.page.click("#origins details:last-child summary")
