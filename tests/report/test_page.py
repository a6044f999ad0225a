"""The page as a whole in a real browser, opened from the file system, for data of all shapes."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_page import Opened, cifar10_test, photographs, pictured, points, run, single

from curvssl.report.page import Pictured, RunData, payload, render

NASTY = "<script>window.hacked = 1</script>"
WORSE = "</script><img src=x onerror='window.hacked = 2'>"


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
