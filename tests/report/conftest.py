"""The page that most of these tests look at, and its two runs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from report_page import Opened, pictured, run

from curvssl.report.page import RunData, render


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
