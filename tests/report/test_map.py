"""The map in a real browser: what is pointed at, selected, found and zoomed."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_page import Opened, around, pictured, run, single

from curvssl.report.page import RunData

NASTY = "<script>window.hacked = 1</script>"


@pytest.mark.parametrize("row", [0, 9, 31, 59])
def test_point_under_the_cursor_shows_its_own_image(page: Opened, grid: RunData, row: int) -> None:
    assert grid.pictured is not None
    assert grid.pictured.labels is not None
    page.point_at(row)
    for shown in ("#chosen .chosen canvas", "#tip canvas"):
        np.testing.assert_array_equal(page.thumbnail(shown)[..., 0], grid.pictured.images[row, 0])
    assert page.page.inner_text("#chosen h3") == grid.pictured.classes[grid.pictured.labels[row]]
    assert f"image {row}" in page.page.inner_text("#chosen .note")


def test_hovering_shows_the_curvature_of_both_views(page: Opened, grid: RunData) -> None:
    assert grid.points is not None
    page.point_at(17)
    facts = page.page.inner_text("#chosen .facts").replace("−", "-")
    for view in grid.points.curvature:
        assert f"{view[17]:.{1 if abs(view[17]) >= 10 else 2}f}" in facts


def test_neighbours_are_lit_and_shown(page: Opened, grid: RunData, other: RunData) -> None:
    assert grid.points is not None
    assert other.points is not None
    page.point_at(22)
    galleries = page.rows_of("#chosen .gallery canvas")
    assert galleries == [*grid.points.neighbors[22], *other.points.neighbors[22]]
    lit = {row for row in range(60) if page.colour(row, canvas="over", dx=6)[3] > 128}
    assert set(grid.points.neighbors[22]) <= lit


def test_the_same_image_lights_up_in_both_maps(page: Opened, other: RunData) -> None:
    assert page.colour(40, view="maps[1]", canvas="over", dx=10)[3] == 0
    page.point_at(40, view="maps[0]")
    assert page.colour(40, view="maps[1]", canvas="over", dx=10)[3] > 128
    assert page.colour(40, view="scatters[1]", canvas="over", dx=10)[3] > 128


def test_colouring_by_class_prediction_and_values(page: Opened, grid: RunData) -> None:
    from matplotlib import colormaps

    from curvssl.evaluate.maps import COLOURS

    assert grid.points is not None
    assert grid.pictured is not None
    assert grid.pictured.labels is not None
    assert grid.points.predicted is not None
    rgb = [tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in COLOURS]
    wrong = int(np.flatnonzero(grid.points.predicted != grid.pictured.labels)[0])
    assert page.colour(wrong)[:3] == rgb[grid.pictured.labels[wrong]]
    page.page.select_option("#colour", "predicted")
    page.frame()
    assert page.colour(wrong)[:3] == rgb[grid.points.predicted[wrong]]

    a, b = grid.points.curvature
    standard = [(view - view.mean()) / view.std() for view in (a, b)]
    expected = {"curvature0": a, "curvature1": b, "outlier": grid.points.outlier}
    expected["agreement"] = 1 - (standard[0] - standard[1]) ** 2 / 2
    for name, values in expected.items():
        page.page.select_option("#colour", name)
        page.frame()
        low, high = page.page.evaluate("quantiles(state.shown.map(COLOURINGS[state.colouring].values), 0.01, 0.99)")
        for row in (3, 25, 48):
            share = np.clip((values[row] - low) / (high - low), 0, 1)
            oracle = np.array(colormaps["viridis"](float(share))[:3]) * 255
            # The page interpolates viridis from 9 of its 256 colours.
            assert np.abs(np.array(page.colour(row)[:3]) - oracle).max() < 20, (name, row)


def test_legend_hides_a_class_and_shows_it_again(page: Opened, grid: RunData) -> None:
    assert grid.pictured is not None
    assert grid.pictured.labels is not None
    row = int(np.flatnonzero(grid.pictured.labels == 3)[0])
    before = page.colour(row)
    page.page.click("#legend [data-class='3']")
    page.frame()
    assert page.colour(row) == (255, 255, 255, 255)
    page.point_at(row)
    assert page.page.evaluate("choices[0].hover") == -1
    assert page.page.get_attribute("#legend [data-class='3']", "aria-pressed") == "false"
    page.page.click("#legend [data-class='3']")
    page.frame()
    assert page.colour(row) == before


def test_lasso_lists_and_exports_what_is_inside(page: Opened, grid: RunData, tmp_path: Path) -> None:
    from matplotlib.path import Path as Outline

    assert grid.pictured is not None
    assert grid.pictured.labels is not None
    where = np.array([page.screen(row) for row in range(60)])
    low, high = where.min(0), where.max(0)
    share = [(0.1, 0.1), (0.75, 0.25), (0.55, 0.6), (0.9, 0.95), (0.2, 0.7)]  # a shape with a notch
    corners = [tuple(low + (high - low) * np.array(s)) for s in share]
    around(page, corners)
    inside = np.flatnonzero(Outline(corners).contains_points(where))
    assert 5 < len(inside) < 50
    assert page.selected() == list(inside)
    assert page.page.inner_text("#selection h3") == f"{len(inside)} images selected"
    assert page.rows_of("#selection .gallery canvas") == list(inside)
    with page.page.expect_download() as waiting:
        page.page.click("#export")
    waiting.value.save_as(tmp_path / "selection.csv")
    lines = (tmp_path / "selection.csv").read_text().splitlines()
    assert lines[0] == "index,image,label"
    labels = grid.pictured.labels
    assert lines[1:] == [f'{row},"image {row}","{labels[row]}"' for row in inside]
    outside = next(row for row in range(60) if row not in inside)
    for view in ("maps[0]", "maps[1]"):  # linked: selected points are bright in both maps, the others dim in both
        brightness = {row: min(page.colour(row, view=view)[:3]) for row in (int(inside[0]), outside)}
        assert brightness[outside] > 180 > brightness[int(inside[0])]
    page.page.click("#zoom-selection")  # in both maps
    page.frame()
    for view in ("maps[0]", "maps[1]"):
        x, y = np.array([page.page.evaluate(f"{view}.screen({row})") for row in inside.tolist()]).T
        width, height = page.page.evaluate(f"[{view}.width, {view}.height]")
        assert (x.min() > 0, y.min() > 0, x.max() < width, y.max() < height) == (True,) * 4
        assert max(np.ptp(x) / width, np.ptp(y) / height) > 0.6


@pytest.mark.parametrize("width", [390, 1280])
def test_selected_images_are_in_view_even_if_one_was_kept_before(
    browser: Any, grid: RunData, other: RunData, tmp_path: Path, width: int
) -> None:
    size = {"width": width, "height": 800}
    opened = single(browser, [grid, other], tmp_path, viewport=size, reduced_motion="reduce")  # it jumps, not glides
    opened.page.mouse.click(*opened.screen(7))
    opened.frame()
    x, y = opened.screen(7)
    around(opened, [(x - 90, y - 90), (x + 90, y - 90), (x + 90, y + 90), (x - 90, y + 90)])
    in_view = """(() => { const box = document.querySelector('#selection h3').getBoundingClientRect(), side =
      document.querySelector('.inspector').getBoundingClientRect();
      return box.top > 60 && box.bottom < Math.min(innerHeight, side.bottom); })()"""
    opened.until(in_view)
    assert opened.page.inner_text("#selection h3") == f"{len(opened.selected())} images selected"
    opened.page.locator("#confusions td").first.click()
    opened.until(in_view)
    assert opened.page.inner_text("#selection p.note").startswith("0 that CurvSSL reads as 0")
    opened.context.close()


def test_escape_lets_go_of_a_lasso_that_is_being_drawn(page: Opened) -> None:
    page.page.click("#tool-lasso")
    x, y = page.screen(25)
    page.page.mouse.move(x - 60, y - 60)
    page.page.mouse.down()
    for corner in ((x + 60, y - 60), (x + 60, y + 60)):
        page.page.mouse.move(*corner)
        page.frame()
    at = page.page.evaluate("maps[0].x")
    page.page.keyboard.press("Escape")
    page.page.mouse.move(x - 60, y + 60)
    page.frame()
    page.page.mouse.up()
    page.frame()
    assert page.selected() == []
    assert page.page.evaluate("maps[0].x") == at  # what is left of the drag does not move the map


def test_shift_adds_to_the_selection(page: Opened) -> None:
    x, y = page.screen(0)
    box = [(x - 9, y - 9), (x + 9, y - 9), (x + 9, y + 9), (x - 9, y + 9)]
    around(page, box)
    assert page.selected() == [0]
    x, y = page.screen(9)
    page.page.keyboard.down("Shift")
    around(page, [(x - 9, y - 9), (x + 9, y - 9), (x + 9, y + 9), (x - 9, y + 9)])
    page.page.keyboard.up("Shift")
    assert page.selected() == [0, 9]


def test_search_finds_images_by_their_number_or_class(browser: Any, grid: RunData, tmp_path: Path) -> None:
    assert grid.pictured is not None
    assert grid.pictured.labels is not None
    part = dataclasses.replace(
        grid.pictured, index=np.arange(60) * 1000 + 7, classes=tuple(f"No. {i}" for i in range(10))
    )
    opened = single(browser, [dataclasses.replace(grid, pictured=part)], tmp_path)
    opened.search("42007")
    np.testing.assert_array_equal(opened.thumbnail("#chosen .chosen canvas")[..., 0], part.images[42, 0])
    assert "image 42007 · kept" in opened.page.inner_text("#chosen")
    opened.search("no. 3")
    assert opened.selected() == list(np.flatnonzero(grid.pictured.labels == 3))
    for text in ("42", "-1", "many"):
        opened.search(text)
        assert opened.page.inner_text("#search-answer") == "no image"
        assert opened.selected() == []
    opened.context.close()


def test_search_finds_images_by_words_of_their_file_names(browser: Any, grid: RunData, tmp_path: Path) -> None:
    assert grid.pictured is not None
    names = [f"{'Été' if i % 2 else 'winter'}/IMG {i:03}{NASTY if i == 9 else ''}.jpg" for i in range(60)]
    names[11] = names[11].replace("Été", "E\u0301te\u0301")  # as macOS writes it
    names[14] = "=1+1.jpg"  # which a spreadsheet would compute
    part = dataclasses.replace(grid.pictured, files=tuple(names))
    opened = single(browser, [dataclasses.replace(grid, pictured=part)], tmp_path)
    opened.page.fill("#search-text", "ÉTÉ img")  # found while one types
    opened.until("choices[0].selected.size > 0")
    assert opened.selected() == list(range(1, 60, 2))
    assert opened.page.inner_text("#search-answer") == "30 images"
    for row in (1, 3, 5):  # Enter goes from one to the next
        opened.page.press("#search-text", "Enter")
        opened.frame()
        assert opened.rows_of("#chosen .chosen canvas") == [row]
        assert names[row] in opened.page.inner_text("#chosen .path")
    opened.search("009<script>")
    assert opened.selected() == [9]
    assert opened.page.inner_text("#selection figcaption") == f"IMG 009{NASTY}.jpg".split("/")[-1]
    opened.point_at(11)
    assert "IMG 011.jpg" in opened.page.inner_text("#tip")
    assert opened.page.evaluate("csvOf([14])").splitlines()[1].split(",")[1] == '"./=1+1.jpg"'
    assert opened.page.evaluate("window.hacked") is None
    opened.context.close()


def test_search_finds_images_of_either_map_and_says_of_which(browser: Any, grid: RunData, tmp_path: Path) -> None:
    of = pictured(30, name="photos")
    of = dataclasses.replace(of, files=tuple(f"IMG {i:03}.jpg" for i in range(30)), classes=(), labels=None)
    elsewhere = run("vicreg", of, where=1)
    elsewhere = dataclasses.replace(elsewhere, config=elsewhere.config | {"dataset": "folder:photos"})
    opened = single(browser, [grid, elsewhere], tmp_path)
    for text, split, name, rows in (
        ("img 017", 1, "photos", [17]),
        ("23", 0, "digits test", [23]),
        ("img 0", 1, "photos", [*range(30)]),
    ):
        opened.search(text)
        assert opened.page.evaluate("state.split") == split
        assert opened.page.evaluate("choices.map((choice) => choice.selected.size)")[1 - split] == 0
        assert opened.selected() == rows
        assert opened.page.inner_text("#search-answer") == f"{len(rows)} image{'s' * (len(rows) > 1)} of {name}"
        opened.page.keyboard.press("Escape")
        opened.page.evaluate("use(0)")
    opened.search("nothing of it")
    assert opened.page.inner_text("#search-answer") == "no image"
    assert "digits test" in opened.page.inner_text("#legend")  # whose classes these are
    opened.page.set_viewport_size({"width": 390, "height": 844})
    opened.frame()
    assert opened.page.evaluate("byId('summary').scrollWidth - byId('summary').clientWidth") == 0
    assert opened.complaints == []
    opened.context.close()


def test_wheel_zooms_only_a_map_that_has_been_clicked(page: Opened) -> None:
    before = page.page.evaluate("maps[0].scale")
    page.point_at(30)
    page.page.mouse.wheel(0, -60)
    page.frame()
    assert page.page.evaluate("maps[0].scale") == before
    at = page.screen(30)
    page.page.mouse.click(*at)
    page.page.mouse.wheel(0, -300)
    page.frame()
    assert page.page.evaluate("maps[0].scale") > 1.3 * before
    np.testing.assert_allclose(page.screen(30), at, atol=1.5)  # the point under the cursor stays there


def test_dragging_moves_the_map(page: Opened) -> None:
    x, y = page.screen(33)
    page.page.mouse.move(x + 14, y + 20)
    page.page.mouse.down()
    page.page.mouse.move(x + 44, y + 60, steps=4)
    page.page.mouse.up()
    page.frame()
    np.testing.assert_allclose(page.screen(33), (x + 30, y + 40), atol=0.5)


def test_zoomed_in_far_enough_the_dots_become_the_images(page: Opened, grid: RunData) -> None:
    assert grid.pictured is not None
    page.page.mouse.click(*page.screen(35))
    for _ in range(3):
        page.page.keyboard.press("+")
    page.page.mouse.move(2, 2)
    page.page.keyboard.press("Escape")
    page.frame()
    half = 30 / 16  # an image of 8 × 8 is drawn with 30 × 30 pixels
    shown = [page.colour(35, dx=half * (2 * i - 7))[0] for i in range(8)]
    rows = grid.pictured.images[35, 0].astype(int)
    assert min(np.abs(rows[i] - shown).max() for i in (3, 4)) == 0  # rounding selects one of the two middle rows


def test_sixty_thousand_points_answer_to_cursor_zoom_and_lasso(browser: Any, tmp_path: Path) -> None:
    of = pictured(60_000)
    opened = single(browser, [run("curvssl", of)], tmp_path)
    assert opened.page.evaluate("maps[0].run.split.count") == 60_000
    opened.page.evaluate(
        """() => { window.drawn = 0; const draw = Cloud.prototype.draw;
           Cloud.prototype.draw = function () { window.drawn += this === maps[0]; draw.call(this); }; }"""
    )
    x, y = opened.screen(0)
    for i in range(20):
        opened.page.mouse.move(x + i, y)
    opened.frame()
    assert opened.page.evaluate("window.drawn") == 0  # hovering redraws the layer above the points, never the points
    shown = opened.rows_of("#chosen .chosen canvas")
    assert len(shown) == 1
    np.testing.assert_array_equal(opened.thumbnail("#chosen .chosen canvas")[..., 0], of.images[shown[0], 0])
    opened.page.evaluate("for (let i = 0; i < 50; i++) maps[0].zoom(1.001, 100, 100)")
    opened.frame()
    assert opened.page.evaluate("window.drawn") == 1  # fifty requests within a frame give one redraw
    box = opened.page.locator("#maps .over").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    around(opened, [(x - 100, y - 100), (x + 100, y - 100), (x + 100, y + 100), (x - 100, y + 100)])
    assert len(opened.selected()) > 100
    assert len(opened.rows_of("#selection canvas")) == 48  # the others when asked for
    opened.page.click("#selection > button")
    assert len(opened.rows_of("#selection canvas")) == min(240, len(opened.selected()))
    assert opened.complaints == []
    opened.context.close()


def test_keyboard_walks_keeps_zooms_and_lets_go(page: Opened, grid: RunData) -> None:
    page.page.focus("#maps .over")
    page.page.mouse.move(2, 2)
    page.page.keyboard.press("ArrowRight")  # without a selection, the image nearest to the middle
    page.frame()
    start = page.page.evaluate("choices[0].hover")
    row, column = divmod(start, 10)
    assert (row in (2, 3), column in (4, 5)) == (True, True)
    for key, by in (("ArrowRight", 1), ("ArrowLeft", -1), ("ArrowUp", 10), ("ArrowDown", -10)):
        before = page.page.evaluate("choices[0].hover")
        page.page.keyboard.press(key)
        assert page.page.evaluate("choices[0].hover") == before + by
    page.page.keyboard.press("Enter")
    page.frame()
    assert "kept" in page.page.inner_text("#chosen")
    assert f"image {start}" in page.page.inner_text("#announce")
    scale = page.page.evaluate("maps[0].scale")
    page.page.keyboard.press("+")
    assert page.page.evaluate("maps[0].scale") > scale
    page.page.keyboard.press("0")
    assert page.page.evaluate("maps[0].scale") == scale
    page.page.keyboard.press("Escape")
    page.frame()
    assert page.page.evaluate("choices[0].pinned") == -1


def test_every_control_is_reached_with_the_tab_key(page: Opened) -> None:
    page.page.focus(".skip")
    reached = []
    for _ in range(60):
        page.page.keyboard.press("Tab")
        reached.append(page.page.evaluate("document.activeElement.id || document.activeElement.className"))
    wanted = ["theme", "colour", "tool-pan", "tool-lasso", "search-text", "reset", "over"]
    assert [name for name in reached if name in wanted][: len(wanted)] == wanted
    nameless = page.page.evaluate(
        """[...document.querySelectorAll("button, select, input, textarea, [tabindex]")]
           .filter((one) => !one.getAttribute("aria-label") && !one.textContent.trim())
           .filter((one) => !one.closest("label") && !one.querySelector("[aria-label]"))
           .map((one) => one.outerHTML)"""
    )
    assert nameless == []
