"""The page in a real browser, opened from the file system, and its data without a browser."""

import base64
import dataclasses
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from report_page import Opened, cifar10_test, photographs, pictured, points, run

from curvssl.config import UserError
from curvssl.report.page import Pictured, RunData, groups, packed, payload, render

NASTY = "<script>window.hacked = 1</script>"
WORSE = "</script><img src=x onerror='window.hacked = 2'>"


@pytest.fixture(scope="module")
def grid() -> RunData:
    """Sixty digits on a lattice, so that no two points overlap."""
    of = pictured(60)
    xy = np.stack(np.meshgrid(np.arange(10), np.arange(6)), -1).reshape(-1, 2).astype(np.float64)
    made = run("curvssl", of)
    assert made.points is not None
    return dataclasses.replace(made, points=dataclasses.replace(made.points, xy=xy))


@pytest.fixture(scope="module")
def other(grid: RunData) -> RunData:
    """The same images for another method, in another order on the lattice."""
    made = run("barlow-twins", grid.pictured, where=1)
    assert made.points is not None
    assert grid.points is not None
    order = np.random.default_rng(0).permutation(60)
    return dataclasses.replace(made, points=dataclasses.replace(made.points, xy=grid.points.xy[order]))


@pytest.fixture(scope="module")
def page(browser: Any, grid: RunData, other: RunData, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Two runs side by side; each test restores the state of the page."""
    opened = Opened(browser, render([grid, other], tmp_path_factory.mktemp("page") / "report.html"))
    yield opened
    opened.context.close()


@pytest.fixture(autouse=True)
def as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "page" in request.fixturenames:
        opened = request.getfixturevalue("page")
        opened.page.mouse.move(2, 2)
        opened.page.keyboard.press("Escape")
        opened.page.click("#tool-pan")
        opened.page.select_option("#colour", "class")
        opened.page.click("#reset")
        opened.frame()
        assert opened.complaints == []


def single(browser: Any, runs: list[RunData], folder: Path, **context: Any) -> Opened:
    return Opened(browser, render(runs, folder / "report.html"), **context)


def around(opened: Opened, corners: list[tuple[float, float]]) -> None:
    """Draw a lasso through the corners."""
    opened.page.click("#tool-lasso")
    opened.screen(0)
    opened.page.mouse.move(*corners[0])
    opened.page.mouse.down()
    for corner in corners[1:]:
        opened.page.mouse.move(*corner, steps=3)
    opened.page.mouse.up()
    opened.frame()


# ---- the page as a whole


def test_page_opens_from_the_file_system_asks_for_nothing_and_runs_no_other_script(
    browser: Any, grid: RunData, tmp_path: Path
) -> None:
    opened = single(browser, [grid], tmp_path)
    assert opened.complaints == []
    asked = [address for address in opened.requests if not address.startswith("data:")]
    assert asked == [(tmp_path / "report.html").as_uri()]
    assert opened.page.title() == "CurvSSL on digits"
    opened.page.evaluate(
        """() => { const made = document.createElement("script"); made.textContent = "window.hacked = 3";
           document.body.append(made); }"""
    )
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert not any(address.startswith("http") for address in opened.requests)
    opened.context.close()


def test_a_name_that_is_not_utf8_gives_a_page_that_is(tmp_path: Path) -> None:
    odd = "caf\udce9"  # Python's name for a file name with the byte E9
    made = dataclasses.replace(run("curvssl", pictured(40, name=odd, classes=(odd, *"123456789"))), name=odd)
    made = dataclasses.replace(made, config=made.config | {"dataset": f"folder:{odd}"})
    text = render([made], tmp_path / "report.html").read_bytes().decode("utf-8")
    data = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["splits"][0]["classes"][0] == odd


def test_names_and_labels_are_text_whatever_they_hold(browser: Any, tmp_path: Path) -> None:
    of = pictured(40, name=WORSE, classes=(NASTY, WORSE, *"23456789"))
    made = run("curvssl", of)
    config = made.config | {"method": NASTY, "dataset": WORSE}
    probes = made.probes | {NASTY: made.probes["linear"]}
    made = dataclasses.replace(made, name=WORSE, config=config, provenance={"command": NASTY}, probes=probes)
    opened = single(browser, [made], tmp_path)
    opened.point_at(1)
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.inner_text("#legend [data-class='0']") == NASTY
    assert opened.page.inner_text("#legend [data-class='1']") == WORSE
    assert opened.page.inner_text("#origins code") == NASTY
    assert NASTY in opened.page.inner_text("#title")
    assert opened.page.evaluate("document.querySelectorAll('img').length") == 0
    assert opened.complaints == []
    opened.context.close()


def test_light_and_dark_follow_the_system_the_button_turns_them_and_print_is_light(page: Opened) -> None:
    surfaces = {"light": (255, 255, 255, 255), "dark": (23, 26, 32, 255)}
    corner = "pixelOf(maps[0].points, 0, 0)"
    for scheme, turned in (("light", "dark"), ("dark", "light")):
        page.page.emulate_media(color_scheme=scheme)
        page.frame()
        assert tuple(page.page.evaluate(corner)) == surfaces[scheme]
        page.page.click("#theme")
        page.frame()
        assert tuple(page.page.evaluate(corner)) == surfaces[turned]
        page.page.evaluate("delete document.documentElement.dataset.theme")
    page.page.emulate_media(media="print", color_scheme="dark")
    page.frame()
    assert page.page.evaluate(corner) == [255, 255, 255, 255]
    assert page.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for part in (".toolbar", ".bar", ".hint", ".larger"):
        assert not page.page.is_visible(part)
    assert page.page.is_visible("#maps canvas")
    assert len(page.page.pdf()) > 20_000
    page.page.emulate_media(media="screen", color_scheme="light")
    page.frame()


# The contrast of each piece of text with what is behind it, by the formula of WCAG 2; only those below 4.5.
FAINT = """() => {
  const one = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const bytes = (colour) => {
    one.clearRect(0, 0, 1, 1); one.fillStyle = colour; one.fillRect(0, 0, 1, 1);
    return [...one.getImageData(0, 0, 1, 1).data]; };
  const light = (colour) => bytes(colour).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const host = texts.currentNode.parentElement, text = texts.currentNode.textContent.trim();
    if (!text || !host.checkVisibility() || ["SCRIPT", "STYLE"].includes(host.tagName)) continue;
    let behind = host;
    const ground = () => getComputedStyle(behind).backgroundColor;
    while (bytes(ground())[3] < 200 && behind.parentElement) behind = behind.parentElement;
    const { color, fill } = getComputedStyle(host);
    const both = [host instanceof SVGElement ? fill : color, ground()].map(light);
    const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    if (contrast < 4.5) found.push([text, contrast]);
  }
  return found; }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out_from_what_is_behind_it(
    browser: Any, grid: RunData, other: RunData, tmp_path: Path, scheme: str
) -> None:
    third = dataclasses.replace(run("vicreg", None), name="third")
    fourth = dataclasses.replace(run("kernel-curvssl", None), name="fourth")
    opened = single(browser, [grid, other, third, fourth], tmp_path, color_scheme=scheme)
    opened.point_at(7)
    assert opened.page.evaluate(FAINT) == []
    opened.context.close()


@pytest.mark.parametrize("width", [390, 768, 1440])
def test_page_is_never_wider_than_the_window(
    browser: Any, grid: RunData, other: RunData, tmp_path: Path, width: int
) -> None:
    views = ["image", "global 1", "global 2", *(f"local {i}" for i in range(1, 11))]
    seen = {name: np.zeros((2, 3, 16, 16), np.uint8) for name in views}
    runs = [dataclasses.replace(grid, seen=seen), other]
    phone = width < 700
    opened = single(browser, runs, tmp_path, viewport={"width": width, "height": 800}, has_touch=phone)
    if phone:  # a tapped dot shows its image, at once and below the map
        opened.page.touchscreen.tap(*opened.screen(7))
        opened.frame()
        for shown in ("#tip canvas", "#chosen .chosen canvas"):
            assert opened.rows_of(shown) == [7]
            assert opened.page.is_visible(shown)
    else:
        opened.point_at(7)
    box = "document.querySelector('#maps .canvas').getBoundingClientRect()"
    top, bottom = opened.page.evaluate(f"[{box}.top + scrollY, {box}.bottom + scrollY]")
    assert top < 800 - 100  # the first screen shows the map
    assert bottom <= 800 or width < 1440  # and all of it, where there is room beside it
    hidden = opened.page.evaluate("byId('summary').scrollWidth - byId('summary').clientWidth")
    assert hidden == 0  # no column of the first card is cut off
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    box = "document.querySelector('#views .scroll')"
    hidden = opened.page.evaluate(f"{box}.scrollWidth - {box}.clientWidth")
    assert (hidden > 0) == (width < 1440)  # views that do not fit are reached by scrolling inside their box
    opened.context.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_names_without_a_space_make_the_page_no_wider(browser: Any, tmp_path: Path, width: int) -> None:
    """Names as long as a file system allows, of files, folders, classes and runs."""
    of = dataclasses.replace(
        pictured(60, classes=tuple(f"{'C' * 200}{i}" for i in range(10))),
        files=tuple(f"{'f' * 200}/{'n' * 240}{i:02}.png" for i in range(60)),
    )
    runs = [run("curvssl", of), run("curvssl", of, where=1)]
    runs = [
        dataclasses.replace(made, name=f"{'r' * 200}{i}", config=made.config | {"k": i}) for i, made in enumerate(runs)
    ]
    first = {"row": 1, "name": of.files[1]}
    unreadable = [{"name": "u" * 240, "error": "e" * 240}]
    runs[0] = dataclasses.replace(
        runs[0], findings={"duplicates": [[first, first]], "outliers": [], "typical": [], "unreadable": unreadable}
    )
    opened = single(browser, runs, tmp_path, viewport={"width": width, "height": 800})
    for act in (
        "choose(mapped[0], 5); stars()",
        "listeners.selected(mapped[0], [1, 2, 30], 'in the lasso')",
        "pickRead(mapped[0], 0, 0)",
    ):
        opened.page.evaluate(act)
        opened.frame()
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, act
    opened.page.fill("#search-text", "q" * 200)
    opened.until("byId('search-answer').textContent !== ''")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.context.close()


def test_on_paper_nothing_is_cut_off_that_scrolls_on_a_screen(
    browser: Any, grid: RunData, other: RunData, tmp_path: Path
) -> None:
    rows = [{"row": row, "name": "", "score": 3.0} for row in range(40)]
    unreadable = [{"name": f"{i}.jpg", "error": "no image"} for i in range(80)]
    found = {"duplicates": [rows[i : i + 2] for i in range(0, 40, 2)], "outliers": [], "typical": []}
    runs = [dataclasses.replace(grid, findings=found | {"unreadable": unreadable}), other]
    opened = single(browser, runs, tmp_path, viewport={"width": 690, "height": 1000})  # 18 cm
    opened.page.emulate_media(media="print")
    opened.frame()
    cut = """[...document.querySelectorAll("main *")].filter((one) => getComputedStyle(one).overflow !== "visible"
      && one.checkVisibility() && (one.scrollHeight > one.clientHeight + 1 || one.scrollWidth > one.clientWidth + 1)
      && one.clientHeight).map((one) => one.className)"""
    assert opened.page.evaluate(cut) == []
    assert not opened.page.is_visible("#findings button:has-text('on the map')")
    assert not opened.page.is_visible(".corner span")  # there is no room for it beside the first class
    opened.context.close()


def test_two_runs_of_ten_thousand_images_stay_under_eight_megabytes(browser: Any, tmp_path: Path) -> None:
    of = cifar10_test(10_000) or photographs(10_000)
    made = points(dataclasses.replace(of, images=of.images[:, :1, ::8, ::8]), seed=0)
    runs = [dataclasses.replace(run(m, None), points=made, pictured=of) for m in ("curvssl", "barlow-twins")]
    assert render(runs, tmp_path / "report.html").stat().st_size < 8e6
    # Thumbnails are lossy, but still closest to their own image.
    opened = Opened(browser, tmp_path / "report.html")
    for index in (0, 4321, 9999):
        opened.search(str(index))
        shown = opened.thumbnail("#chosen .chosen canvas").transpose(2, 0, 1).astype(np.float32)
        assert np.square(of.images - shown).mean((1, 2, 3)).argmin() == index
    opened.context.close()


# ---- the map


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


# ---- other shapes of data


def test_images_without_labels_still_make_a_page(browser: Any, tmp_path: Path) -> None:
    of = dataclasses.replace(pictured(80), classes=(), labels=None)
    measured = {"measures": {"rankme": 12.5, "lidar": None}, "untrained": {"rankme": 4.25, "lidar": 3.0}}
    made = dataclasses.replace(run("curvssl", of), probes={}, quality=measured | {"verdict": "healthy: it is"})
    opened = single(browser, [made], tmp_path)
    opened.point_at(5)
    np.testing.assert_array_equal(
        opened.thumbnail("#tip canvas")[..., 0], of.images[opened.rows_of("#tip canvas")[0], 0]
    )
    names = opened.page.locator("#colour option").all_inner_texts()
    assert names == ["curvature, first view", "curvature, second view", "agreement of the views", "outlier score"]
    assert "no labels" in opened.page.inner_text("#probes")
    rows = [line.split("\t") for line in opened.page.locator("#quality tr").all_inner_texts()]
    assert rows == [["", "RankMe", "LiDAR"], ["CurvSSL", "12.5", "–"], ["before training", "4.25", "3"]]
    assert "CurvSSL: healthy: it is" in opened.page.inner_text("#quality")
    # One run: histogram and scatter plot stand side by side, and letters are not enlarged with their chart.
    left, right = (opened.page.locator(f"#{part} .card").bounding_box() for part in ("histograms", "scatters"))
    assert (left["y"], left["width"]) == (right["y"], pytest.approx(right["width"]))
    assert opened.page.locator("#histograms .axis").first.bounding_box()["height"] < 16
    assert opened.complaints == []
    opened.context.close()


def test_runs_on_different_images_do_not_link(browser: Any, grid: RunData, tmp_path: Path) -> None:
    elsewhere = run("vicreg", pictured(30, name="others", classes=tuple("abcdefghij")))
    opened = single(browser, [grid, elsewhere], tmp_path)
    opened.point_at(4)
    assert opened.page.evaluate("choices.map((choice) => choice.hover)") == [4, -1]
    opened.point_at(11, view="maps[1]")
    shown = opened.rows_of("#chosen .chosen canvas")[0]
    assert opened.page.evaluate("choices[1].hover") == shown
    assert opened.page.inner_text("#chosen h3") in "abcdefghij"
    # Each set has its own legend, whichever was used last.
    assert opened.page.locator("#legend [data-split='1']").all_inner_texts() == list("abcdefghij")
    assert opened.page.locator("#legend [data-split='0']").all_inner_texts() == list("0123456789")
    opened.page.click("#legend [data-split='1'] >> nth=0")
    assert opened.page.evaluate("choices.map((choice) => [...choice.hidden])") == [[], [0]]
    assert opened.complaints == []
    opened.context.close()


def test_runs_of_other_sizes_on_the_same_files_are_linked_and_show_the_larger_thumbnails() -> None:
    of = dataclasses.replace(pictured(30), files=tuple(f"{i}.png" for i in range(30)))
    larger = dataclasses.replace(of, images=of.images.repeat(2, 2).repeat(2, 3))
    for order in ((of, larger), (larger, of)):
        made = payload([run(method, one) for method, one in zip(("curvssl", "vicreg"), order, strict=True)])
        assert ([one["split"] for one in made["runs"]], [one["side"] for one in made["splits"]]) == ([0, 0], [16])
    renamed = dataclasses.replace(larger, files=tuple(f"{i}.jpg" for i in range(30)))
    assert len(payload([run("curvssl", of), run("vicreg", renamed)])["splits"]) == 2


def test_with_many_runs_the_reader_picks_two(browser: Any, grid: RunData, other: RunData, tmp_path: Path) -> None:
    runs = [grid, other, run("vicreg", grid.pictured), *(run("curvssl", grid.pictured, seed=s) for s in (1, 2))]
    made = payload(runs)
    assert [entry["points"] is not None for entry in made["runs"]] == [True, True, True, False, False]
    assert len(made["splits"]) == 1  # the thumbnails are stored once
    opened = single(browser, runs, tmp_path)
    opened.page.select_option("#pickers select >> nth=1", label="VICReg, seed 0")
    opened.frame()
    assert opened.page.locator("#maps figcaption > span:first-child").all_inner_texts() == [
        "CurvSSL, seed 0",
        "VICReg, seed 0",
    ]
    opened.page.select_option("#pickers select >> nth=1", label="none")
    opened.frame()
    assert opened.page.locator("#maps figure").count() == 1
    assert opened.complaints == []
    opened.context.close()


def test_a_run_that_broke_off_has_gaps_not_errors(browser: Any, tmp_path: Path) -> None:
    made = run("curvssl", None)
    rows = [row | {"loss": float("nan")} if row["epoch"] > 15 else row for row in made.metrics]
    opened = single(browser, [dataclasses.replace(made, metrics=rows, probes={}, provenance={})], tmp_path)
    assert opened.page.locator("#curves figure").count() > 5
    assert "42.6" in opened.page.inner_text("#summary")
    assert not opened.page.is_visible("#map")
    assert not opened.page.is_visible("#seen")
    assert opened.complaints == []
    opened.context.close()


def test_an_encoder_without_a_history_of_training_has_no_charts_and_no_errors(
    browser: Any, grid: RunData, tmp_path: Path
) -> None:
    opened = single(browser, [dataclasses.replace(grid, metrics=[], config=grid.config | {"d_z": 64})], tmp_path)
    assert not opened.page.is_visible("#training")
    assert opened.page.inner_text("#summary tbody").split("\t")[4:6] == ["–", "–"]  # effective rank and epochs
    opened.page.set_viewport_size({"width": 500, "height": 800})
    opened.frame()
    assert opened.complaints == []
    opened.context.close()


def test_thumbnails_of_any_shape_show_the_middle_of_the_image(browser: Any, tmp_path: Path) -> None:
    shapes = [(3, 40, 48), (1, 28, 28), (4, 16, 16), (3, 100, 70)]
    runs = []
    for shape in shapes:
        height, width = shape[1:]
        images = np.zeros((30, *shape), np.uint8)
        images[:, :, height // 2, :] = 250  # a cross through the middle
        images[:, :, :, width // 2] = 250
        images[:, :, : (height - min(height, width)) // 2 or None, 0] = 90
        of = Pictured("crosses", images, ("one",), np.zeros(30, np.int64))
        made = points(pictured(30), seed=0)
        made = dataclasses.replace(made, predicted=None, confidence=None)
        runs.append(dataclasses.replace(run("curvssl", None), name=str(shape), points=made, pictured=of))
    opened = single(browser, runs, tmp_path)
    for which, (_, height, width) in enumerate(shapes):
        if which > 1:
            opened.page.select_option("#pickers select >> nth=1", str(which))
        opened.point_at(3, view=f"maps[{min(which, 1)}]")
        shown = opened.thumbnail("#tip canvas")[..., 0].astype(int)
        side = len(shown)
        assert side == min(height, width, 64)
        assert shown[side // 2].mean() > 100
        assert shown[:, side // 2].mean() > 100
        assert np.median(shown) < 60
    opened.context.close()


# ---- without a browser


def test_packed_numbers_come_back_within_half_a_step() -> None:
    values = np.random.default_rng(0).normal(size=1000) * 40
    made = packed(values)
    steps = np.frombuffer(base64.b64decode(made["data"]), "<u2")
    back = made["low"] + steps * (made["high"] - made["low"]) / 65535
    assert np.abs(back - values).max() <= 0.5 * np.ptp(values) / 65535 * 1.0001
    constant = packed(np.full(5, 3.0))
    assert (constant["low"] <= 3.0 <= constant["high"]) is True


def test_features_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="diverged"):
        packed(np.array([1.0, np.nan]))


def test_no_run_is_refused() -> None:
    with pytest.raises(UserError, match="at least one run"):
        payload([])


def test_runs_are_grouped_by_everything_but_their_seed() -> None:
    runs = [run("curvssl", None), run("curvssl", None, seed=1), run("vicreg", None)]
    changed = dataclasses.replace(runs[0], name="k-20", config=runs[0].config | {"k": 20})
    assert groups(runs) == [{"name": "CurvSSL", "runs": [0, 1]}, {"name": "VICReg", "runs": [2]}]
    assert [group["name"] for group in groups([*runs, changed])] == ["digits-curvssl-seed0", "VICReg", "k-20"]


def test_methods_that_see_the_same_share_a_table_and_seeds_show_their_first() -> None:
    def seeing(shade: int, method: str, **settings: Any) -> RunData:
        seen = {name: np.full((2, 3, 100, 50), shade, np.uint8) for name in ("image", "global 1", "global 2")}
        return dataclasses.replace(run(method, None, **settings), seen=seen)

    runs = [seeing(10, "curvssl"), seeing(20, "curvssl", seed=1), seeing(10, "vicreg"), seeing(30, "barlow-twins")]
    made = payload([*runs, run("kernel-curvssl", None)])["seen"]
    assert [table["groups"] for table in made] == [["CurvSSL", "VICReg"], ["Barlow Twins"]]
    assert [column["size"] for column in made[0]["columns"]] == ["50×100"] * 3
    with Image.open(io.BytesIO(base64.b64decode(made[1]["columns"][1]["images"][1].split(",")[1]))) as image:
        assert image.size == (32, 64)
        assert image.getpixel((16, 32)) == (30, 30, 30)


def test_edges_agree_with_the_double_loop() -> None:
    import torch

    from curvssl.geometry import nearest_neighbors
    from curvssl.report.collect import edges_of

    h = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    near = nearest_neighbors(h, k=6)
    lengths, cosines = edges_of(h, near)
    for i in (0, 17, 49):
        edges = [h[j] - h[i] for j in near[i]]
        assert lengths[i].tolist() == pytest.approx([float(e.norm()) for e in edges])
        pairs = [
            float(edges[a] @ edges[b] / edges[a].norm() / edges[b].norm()) for a in range(6) for b in range(a + 1, 6)
        ]
        assert cosines[i].tolist() == pytest.approx(pairs)


def test_pictures_are_png_and_pdf(grid: RunData, tmp_path: Path) -> None:
    from curvssl.report.collect import pictures

    made = pictures(grid, tmp_path)
    names = ["map-by-class", "map-by-curvature", "curvature-of-views", "curves"]
    assert [path.name for path in made] == [f"{name}.{kind}" for name in names for kind in ("png", "pdf")]
    for path in made:
        if path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF")
        else:
            with Image.open(path) as image:
                assert image.size[0] >= 1000


def test_a_run_directory_becomes_a_page(browser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything from training to the page, except UMAP, which takes longer than all the rest."""
    import torch

    from curvssl.config import demo
    from curvssl.data.named import load
    from curvssl.data.order import permutation
    from curvssl.data.views import Augment
    from curvssl.evaluate import maps
    from curvssl.evaluate.runs import probe
    from curvssl.geometry import kernel_curvature
    from curvssl.report.collect import collect, report
    from curvssl.report.seen import first_step
    from curvssl.train.loop import pretrain

    views: Any = {"local_views": 3, "local_size": 8, "alpha_chord": 1.0, "holdout": 0.5}
    config = dataclasses.replace(demo(), method="kernel-curvssl", epochs=1, warmup_epochs=0, **views)
    made = pretrain(config, out=tmp_path / "run", progress=False)
    probe(made, seeds=(0,), floors=False)
    maps.save(torch.rand(360, 2, generator=torch.Generator().manual_seed(0)), made, "map-h-test.npz")
    page = report([made.path, made.path / ".." / "run"], tmp_path / "report.html")
    assert "1 were given twice, and are shown once" in capsys.readouterr().err
    kept = {path: path.stat().st_mtime_ns for path in made.path.iterdir()}
    found = collect(made)
    assert {path: path.stat().st_mtime_ns for path in made.path.iterdir()} == kept  # nothing is computed twice

    data = load("digits")
    assert found.points is not None
    # ρ is that of the training chart: the curvature of the run's own loss, among the images of a random batch.
    config, net, generator = made.config, made.load_net(), torch.Generator().manual_seed(0)
    augment = Augment(size=config.image_size, mean=data.mean, std=data.std, **vars(config.augment))
    order, size = permutation(360, seed=0, number=0), config.batch_size
    assert 360 % size
    expected = np.zeros((2, 360))
    for start in range(0, 360, size):
        rows = order[start : start + size] if start + size <= 360 else order[-size:]
        u = torch.rand(2, size, augment.draws, generator=generator)
        for view in range(2):
            with torch.inference_mode():
                z = net.projector(net.encoder(augment(data.test.images.pixels[rows], u[view])))
            expected[view, rows] = kernel_curvature(z, k=config.k, kernel=config.kernel, gamma=config.gamma)
    np.testing.assert_allclose(found.points.curvature, expected, atol=1e-3)
    assert found.points.kind == "Eq. (10), rbf kernel, k = 10"
    predicted = found.points.predicted
    assert predicted is not None
    assert data.test.labels is not None
    accuracy = 100 * float((predicted == data.test.labels.numpy()).mean())
    assert accuracy == pytest.approx(found.probes["linear"]["accuracy"][0])

    opened = Opened(browser, page)
    rho = f"{np.corrcoef(found.points.curvature)[0, 1]:.3f}"
    assert opened.page.inner_text("#summary tbody").split("\t")[3] == rho
    assert opened.page.inner_text("#scatters h4") == f"ρ = {rho}"
    assert found.points.kind in opened.page.inner_text("#scatters")
    opened.point_at(100)
    shown = opened.rows_of("#chosen .chosen canvas")[0]
    np.testing.assert_array_equal(opened.thumbnail("#tip canvas")[..., 0], data.test.images.pixels[shown, 0].numpy())
    heads = opened.page.locator("#views th").all_inner_texts()
    local = [f"local {i}\n8×8" for i in (1, 2, 3)]
    assert heads == ["image\n8×8", "global 1\n16×16", "global 2\n16×16", *local, "blend\n16×16"]
    seen = first_step(config, data)
    table = opened.images("#views tbody")
    assert len(table) == 8
    for row, pictures in enumerate(table):
        for picture, column in zip(pictures, seen.values(), strict=True):
            np.testing.assert_array_equal(picture, column[row].transpose(1, 2, 0).repeat(3, 2))
    texts = opened.page.locator("#views img").evaluate_all("(images) => images.map((image) => image.alt)")
    assert texts[:2] == ["row 1, image", "row 1, global 1"]
    assert len(set(texts)) == 8 * 7
    assert "A blend mixes" in opened.page.inner_text("#views")
    assert opened.complaints == []
    opened.context.close()


def test_a_folder_with_a_broken_file_becomes_a_page_of_the_others(browser: Any, tmp_path: Path) -> None:
    import torch

    from curvssl.config import demo
    from curvssl.data.folders import FolderImages
    from curvssl.data.named import load
    from curvssl.evaluate import maps
    from curvssl.report.collect import collect
    from curvssl.train.loop import pretrain

    (tmp_path / "images" / "a" / "b").mkdir(parents=True)
    for i, pixels in enumerate(pictured(200).images[:, 0]):
        folder = "a/b" if i % 2 else "."
        Image.fromarray(pixels).resize((40, 30)).save(tmp_path / "images" / folder / f"{i:03}.png")
    settings: Any = {"dataset": f"folder:{tmp_path / 'images'}", "batch_size": 32, "k": 5}
    config = dataclasses.replace(demo(), epochs=1, warmup_epochs=0, **settings)
    held = load(config.dataset, size=config.image_size).test.images
    assert isinstance(held, FolderImages)
    broken = int(held.rows[3])
    Path(held.path(broken)).write_bytes(b"no image")
    made = pretrain(config, out=tmp_path / "run", progress=False)
    kept = torch.tensor([i for i in range(200) if i != broken])  # of the whole folder, not of the held-out tenth alone
    xy = torch.rand(len(kept), 2, generator=torch.Generator().manual_seed(0))
    maps.save(xy, made, "map-h-all.npz", index=kept)

    found = collect(made)
    assert found.pictured is not None
    assert found.pictured.index is not None
    assert found.pictured.index.tolist() == kept.tolist()
    assert list(found.pictured.files) == [held.files[i] for i in kept]
    assert found.findings is not None
    assert found.findings["unreadable"] == [{"name": held.files[broken]}]
    named = {row: {"row": -1, "name": held.files[row]} for row in range(200)}
    inspected = {
        "near_duplicates": {"groups": [[named[0], named[1], named[2]], [named[broken], named[5]]]},
        "outliers": {"fence": 2.5, "beyond": 1, "ranked": [named[150] | {"score": 4.5}, named[9] | {"score": 2.1}]},
        "typical": [named[199] | {"stands_for": 120}, named[7] | {"stands_for": 79}],
        "unreadable": [{"name": held.files[broken], "error": "no image"}],
    }
    made.keep_json("inspect.json", inspected, by="curvssl inspect RUN")
    opened = single(browser, [collect(made)], tmp_path)
    name = held.files[150]
    opened.search(name)
    assert len(opened.selected()) == 1
    shown = opened.thumbnail("#chosen .chosen canvas")[..., 0].astype(float)
    with Image.open(held.path(150)) as image:
        source = np.asarray(image.crop((5, 0, 35, 30)).resize(shown.shape), dtype=float)
    assert np.corrcoef(shown.ravel(), source.ravel())[0, 1] > 0.97

    # What `curvssl inspect` found; the group whose second image cannot be read is no group.
    numbers = [found.pictured.index[row] for row in opened.rows_of("#findings canvas")]
    assert numbers == [0, 1, 2, 150, 9, 199, 7]
    text = opened.page.inner_text("#findings")
    for part in (
        "1 group of",
        f"4.50\n{Path(name).name}",
        "begin at 2.50",
        "120\n",
        f"{held.files[broken]} no image",
    ):
        assert part in text
    opened.page.click("#findings button >> text=Show all 3")
    assert opened.page.inner_text("#selection h3") == "3 images selected"
    opened.page.click("#findings button >> text=Show all 1 ")  # of the two in the list, one is beyond the fence
    assert found.pictured.index[opened.selected()].tolist() == [150]
    assert opened.page.inner_text("h1") == "CurvSSL on images"  # the folder's name, not its path
    assert "no labels" in opened.page.inner_text("#probes")
    opened.context.close()


def test_the_line_of_a_run_that_did_not_learn_says_so(browser: Any, grid: RunData, tmp_path: Path) -> None:
    """With the stored curves of two published runs: one in the trap, one that learned."""
    results = Path(__file__).parents[2] / "results"
    runs = []
    for study in ("literal", "faithful"):
        cell = json.loads((results / study / "cifar10-barlow-twins-seed0.json").read_text())
        runs.append(dataclasses.replace(grid, name=study, config=cell["config"], metrics=cell["curves"]))
    opened = single(browser, runs, tmp_path)
    lines = opened.page.locator("#summary tbody tr").all_inner_texts()
    assert [line.split("\t")[0] for line in (lines[0], lines[2])] == ["literal", "faithful"]
    assert "Does not learn: the two views of an image hardly agree" in lines[1]
    assert "try a longer --warmup-epochs" in lines[1]
    assert not any("Does not learn" in line for line in (lines[0], *lines[2:]))
    for width in (390, 1280):  # all of it can be read without scrolling
        opened.page.set_viewport_size({"width": width, "height": 800})
        opened.frame()
        assert opened.page.evaluate("byId('summary').scrollWidth - byId('summary').clientWidth") == 0
        assert opened.page.locator("#summary").bounding_box()["height"] < 300
    opened.context.close()


def test_the_line_of_a_run_that_collapsed_says_so(browser: Any, grid: RunData, tmp_path: Path) -> None:
    rows = [row | {"z_std": 3e-5} if row["epoch"] > 18 else row for row in grid.metrics]
    narrow = [row | {"effective_rank": 1.04} for row in grid.metrics]
    again = [row | {"effective_rank": 1.04} if row["epoch"] < 10 else row for row in grid.metrics]
    runs = [
        dataclasses.replace(grid, name=name, metrics=found, config=grid.config | {"d_z": 64, "k": i})
        for i, (name, found) in enumerate({"one": rows, "line": narrow, "recovered": again}.items())
    ]
    opened = single(browser, runs, tmp_path)
    lines = opened.page.locator("#summary tbody tr").all_inner_texts()
    assert [line.split("\t")[0] for line in lines[::2][:2]] == ["one", "line"]
    assert "Does not learn: all images get nearly the same embedding (standard deviation 3.0e-05): try" in lines[1]
    assert "Does not learn: the embeddings use 1.0 of 64 dimensions: try" in lines[3]
    assert not any("Does not learn" in line for line in lines[4:])
    opened.context.close()


def test_of_a_labelled_folder_only_held_out_images_are_judged(tmp_path: Path) -> None:
    import torch

    from curvssl.config import demo
    from curvssl.data.folders import array
    from curvssl.evaluate.features import Features, save
    from curvssl.evaluate.runs import features_of, images_of
    from curvssl.report.collect import judged
    from curvssl.rundir import Run

    of = pictured(40)
    np.savez(tmp_path / "own.npz", images=of.images, labels=of.labels)
    data = array(str(tmp_path / "own.npz"), size=8)
    made = Run.create(tmp_path / "run", dataclasses.replace(demo(), dataset=data.name))
    index = torch.tensor([0, 1, 3])  # the third test image has no features
    for split, rows in (("train", data.train.images.rows), ("test", data.test.images.rows[index])):
        kept = Features(h=rows[:, None].float(), y=getattr(data, split).labels[: len(rows)])
        save(dataclasses.replace(kept, index=index if split == "test" else None), made, f"features-{split}.npz")
    features = features_of(made, data, "all")
    assert features.index is not None
    assert len(features.index) == 39
    assert features.h[:, 0].tolist() == features.index.tolist() == sorted(features.index.tolist())
    np.testing.assert_array_equal(next(images_of(data, "all").split(40)).numpy(), of.images)

    answers = {"linear_predictions": np.array([5, 6, 7]), "linear_confidence": np.array([0.5, 0.6, 0.7])}
    made_of = judged(made, data, "all", features.index, answers)
    for row, number in enumerate(features.index.tolist()):
        place = data.test.images.rows[index].tolist()
        expected = (5 + place.index(number), 0.5 + 0.1 * place.index(number)) if number in place else (-1, 0)
        assert (made_of["predicted"][row], pytest.approx(made_of["confidence"][row])) == expected


def test_images_that_were_not_judged_are_in_no_count(browser: Any, grid: RunData, tmp_path: Path) -> None:
    from sklearn.metrics import confusion_matrix

    assert grid.points is not None
    assert grid.pictured is not None
    assert grid.pictured.labels is not None
    predicted = np.where(np.arange(60) < 30, grid.points.predicted, -1)
    made = dataclasses.replace(grid, points=dataclasses.replace(grid.points, predicted=predicted))
    opened = single(browser, [made], tmp_path)
    cells = opened.page.locator("#confusions td").all_inner_texts()
    expected = confusion_matrix(grid.pictured.labels[:30], predicted[:30], labels=range(10))
    np.testing.assert_array_equal(np.array([int(cell or 0) for cell in cells]).reshape(10, 10), expected)
    opened.page.select_option("#colour", "predicted")
    opened.frame()
    assert opened.colour(45)[:3] == (184, 188, 196)
    opened.point_at(45)
    assert "not asked" in opened.page.inner_text("#chosen .facts")
    assert max(opened.rows_of("#mistakes canvas"), default=0) < 30
    assert opened.complaints == []
    opened.context.close()
