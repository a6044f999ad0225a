"""Shared by all tests: repeatable property tests, the order of the files, and tests that not every machine can run.

The latter are skipped, and one line at the end says how many, what is missing, and what to do about it.
"""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("stable", derandomize=True, deadline=None, database=None, max_examples=25)
settings.load_profile("stable")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# What a machine may lack, which tests need it, and how to get it.
WANTING = {
    "Chromium": ("of the page", "install chromium or set CURVSSL_CHROMIUM"),
    "npm": ("of the download with npm", "install npm"),
    "a GPU": ("of the device", "run them where torch sees a CUDA device"),
}

# Long files start first, so that no worker is still busy with one when the other has nothing left to do.
LONG = (
    "test_readme.py",
    "test_faults.py",
    "test_ranks.py",
    "test_steps.py",
    "test_system.py",
    "test_loop.py",
    "test_collect.py",
)
# UMAP compiles for ten seconds or more in each process that draws a map, and for half a minute in the first of a new
# installation, so one worker draws all maps.
MAPS = (
    "test_readme.py",
    "test_maps.py",
    "test_runs.py",
    "test_figures.py",
    "test_reproduce.py",
    "and_maps_show_curvature",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium, for the tests of the page. With CURVSSL_REQUIRE_BROWSER=1 it is an error if there is none."""
    path = os.environ.get("CURVSSL_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None and os.environ.get("CURVSSL_REQUIRE_BROWSER") == "1":
        pytest.fail("the page is tested in Chromium, and there is none: install chromium or set CURVSSL_CHROMIUM")
    if path is None:
        pytest.skip("for want of Chromium")
    from playwright.sync_api import sync_playwright

    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    with sync_playwright() as player:
        chromium = player.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu", *quiet])
        yield chromium
        chromium.close()


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Send this process a real SIGINT just before step s of every run from now on; −1: no longer."""
    from curvssl.train import loop

    learning_rate = loop.learning_rate

    def arrange(at: int) -> None:
        def rate(s: int, *args: Any, **settings: Any) -> float:
            if s == at:
                signal.raise_signal(signal.SIGINT)
            return learning_rate(s, *args, **settings)

        monkeypatch.setattr(loop, "learning_rate", rate)

    return arrange


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`: a file goes to one worker, as its tests share fixtures, and files start in our order."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "maps" if any(name in nodeid for name in MAPS) else super()._split_scope(nodeid)

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    waiting = [item for item in items if item.get_closest_marker("gpu")]
    if not waiting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in waiting:
            item.add_marker(pytest.mark.skip(reason="for want of a GPU"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Print at the very end what was not tested. The reports of all workers arrive here."""
    yield
    skipped = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    said = []
    for what, (tests, remedy) in WANTING.items():
        if n := skipped[f"Skipped: for want of {what}"]:
            said.append(f"{n} {'test' if n == 1 else 'tests'} {tests}, for want of {what}: {remedy}")
    if said:
        terminalreporter.write_line(f"not tested: {'; '.join(said)}")
