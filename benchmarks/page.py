"""How large the page of 10,000 and of 100,000 images is, how soon a browser shows it, and how fast its map redraws.

    python benchmarks/page.py [--out results/page.json]

Needs Chromium (or CURVSSL_CHROMIUM), and CIFAR-10 in the cache (`curvssl data cifar10`): its 60,000 images and 40,000
of them mirrored. Each has a file name. The map and the neighbours are made up.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from playwright.sync_api import sync_playwright
from report_page import run

from curvssl.data.named import OBJECTS, load
from curvssl.report.page import Pictured, render, squares, thumbnail_side
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


def objects(n: int) -> Pictured:
    """The first n of CIFAR-10's images and of those mirrored, as small as the page has them."""
    data = load("cifar10")
    parts = [(part.images.pixels, part.labels) for part in (data.test, data.train)]
    pixels, labels = (np.concatenate([part[i].numpy() for part in parts]) for i in range(2))
    pixels, labels = np.concatenate((pixels, pixels[..., ::-1]))[:n], np.concatenate((labels, labels))[:n]
    names = tuple(f"{OBJECTS[label]}/{i:06}.png" for i, label in enumerate(labels))
    return Pictured(
        "objects", squares(pixels, thumbnail_side(n, 32, 32)), OBJECTS, labels.astype(np.int64), files=names
    )


def measured(browser: Any, file: Path, n: int, ratio: int) -> dict[str, Any]:
    """One map of n points, on a screen with one or two device pixels per CSS pixel."""
    screen = {"viewport": {"width": 1280, "height": 900}, "device_scale_factor": ratio}
    page = browser.new_context(**screen, bypass_csp=True).new_page()  # the page's policy forbids to evaluate our text
    start = time.perf_counter()
    page.goto(file.resolve().as_uri())
    page.wait_for_function("maps.length > 0 && maps[0].image && splits[0].ready", timeout=120_000)
    opened = {"MB": file.stat().st_size / 1e6, "opened_s": time.perf_counter() - start}
    page.wait_for_timeout(500)
    drawn = page.evaluate(REDRAW) | {"frames_per_s": page.evaluate(FRAMES)}
    page.context.close()
    return {"points": n, "pixel_ratio": ratio} | opened | drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/page.json"))
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        program = os.environ.get("CURVSSL_CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        found["maps"] = []
        for n in (10_000, 100_000):
            file = render([run("curvssl", objects(n))], folder / f"{n}.html")
            found["maps"] += [measured(browser, file, n, ratio) for ratio in (1, 2)]
        found["browser"] = browser.version
        browser.close()
        runs = [run(method, objects(10_000)) for method in ("curvssl", "barlow-twins")]
        found["MB_of_10000_cifar10_images_in_two_runs"] = render(runs, folder / "two.html").stat().st_size / 1e6
    found["provenance"] = provenance(device="CPU, headless")
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: found[key] for key in found if key != "provenance"}, indent=1))


if __name__ == "__main__":
    main()
