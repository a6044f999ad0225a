"""How fast the report's map redraws in a real browser, and how large a page of 10,000 images is.

    python benchmarks/page.py [--out results/page.json]

Needs Chromium (or CURVSSL_CHROMIUM) and, for the size, CIFAR-10 in the cache (`curvssl data cifar10`).
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from playwright.sync_api import sync_playwright
from report_page import cifar10_test, pictured, run

from curvssl.report.page import render
from curvssl.rundir import provenance

REDRAW = """() => { const times = [];
  for (let i = 0; i < 40; i++) {
    maps[0].pan(i % 2 ? 3 : -3, 0);
    const t = performance.now(); maps[0].draw(); times.push(performance.now() - t);
  }
  times.sort((a, b) => a - b); return { median_ms: times[20], worst_ms: times[39] }; }"""
FRAMES = """() => new Promise((done) => { let n = 0; const from = performance.now();
  const next = () => { maps[0].pan(n % 2 ? 3 : -3, 0); n++; const t = performance.now() - from;
    if (t < 3000) requestAnimationFrame(next); else done(1000 * n / t); };
  requestAnimationFrame(next); })"""


def measured(browser: Any, n: int, ratio: int, folder: Path) -> dict[str, Any]:
    """One map of n points, on a screen with one or two device pixels per CSS pixel."""
    file = render([run("curvssl", pictured(n))], folder / f"{n}.html")
    page = browser.new_context(viewport={"width": 1280, "height": 900}, device_scale_factor=ratio).new_page()
    page.goto(file.resolve().as_uri())
    page.wait_for_function("maps.length > 0 && maps[0].image")
    page.wait_for_timeout(500)
    return {"points": n, "pixel_ratio": ratio} | page.evaluate(REDRAW) | {"frames_per_s": page.evaluate(FRAMES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/page.json"))
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        program = os.environ.get("CURVSSL_CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        found["maps"] = [measured(browser, n, ratio, folder) for n in (10_000, 100_000) for ratio in (1, 2)]
        found["browser"] = browser.version
        browser.close()
        if images := cifar10_test(10_000):
            runs = [run("curvssl", images), run("barlow-twins", images, seed=1)]
            found["MB_of_10000_cifar10_images_in_two_runs"] = render(runs, folder / "two.html").stat().st_size / 1e6
    found["provenance"] = provenance(device="CPU, headless")
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: found[key] for key in found if key != "provenance"}, indent=1))


if __name__ == "__main__":
    main()
