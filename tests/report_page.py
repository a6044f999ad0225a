"""Made-up runs on real images (digits, CIFAR-10, photographs) for the report's tests: a PCA as the map, no training."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from curvssl.geometry import curvature, nearest_neighbors
from curvssl.report.page import NEIGHBORS, Pictured, Points, RunData, render


def pictured(n: int, *, name: str = "digits test", classes: tuple[str, ...] | None = None) -> Pictured:
    """n digits of 8×8, repeated if need be; every repetition is a little brighter, so that no two images are equal."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    rows = np.arange(n) % len(bunch.images)
    images = (bunch.images[rows] * 14 + (np.arange(n) // len(bunch.images))[:, None, None] % 16).astype(np.uint8)[
        :, None
    ]
    return Pictured(name, images, classes or tuple("0123456789"), bunch.target[rows].astype(np.int64))


def points(of: Pictured, *, seed: int) -> Points:
    """PCA of the pixels, rotated by the seed. For many images the neighbours are random."""
    generator = np.random.default_rng(seed)
    n = len(of.images)
    flat = of.images.reshape(n, -1).astype(np.float64)
    flat -= flat.mean(0)
    _, _, axes = np.linalg.svd(flat[:2000], full_matrices=False)
    angle = seed + 0.3
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    xy = flat @ axes[:2].T @ turn + generator.normal(scale=1.5, size=(n, 2))
    if n <= 3000:
        h = torch.tensor(flat @ axes[:16].T)
        neighbors = nearest_neighbors(h, k=NEIGHBORS)
        edges = h[neighbors] - h[:, None]
        distances = edges.norm(dim=-1)
        unit = edges / distances.clamp_min(1e-12)[..., None]
        a, b = torch.triu_indices(NEIGHBORS, NEIGHBORS, 1)
        cosines = (unit @ unit.mT)[:, a, b].numpy()
        bent = curvature(h).numpy()
        near, far = neighbors.numpy(), distances.numpy()
    else:
        near, far = generator.integers(0, n, (n, NEIGHBORS)), generator.random((n, NEIGHBORS))
        cosines, bent = generator.uniform(-1, 1, (n, 15)), generator.normal(size=n)
    views = np.stack([bent + generator.normal(scale=0.4 + seed, size=n) for _ in range(2)])
    predicted, confidence = None, None
    if of.labels is not None:
        wrong = generator.random(n) < 0.06
        predicted = np.where(wrong, generator.integers(0, len(of.classes), n), of.labels)
        confidence = generator.beta(8, 1.5, n)
    return Points(xy, views, bent, near, far, cosines, predicted, confidence)


def metrics(*, seed: int, curved: bool, epochs: int = 20) -> list[dict[str, float]]:
    generator = np.random.default_rng(seed)
    rows = []
    for epoch in range(1, epochs + 1):
        fall = math.exp(-epoch / 6)
        noise = float(generator.normal(scale=0.02))
        row = {
            "epoch": epoch,
            "step": 11 * epoch,
            "loss": 40 * fall + 8 + noise * 20,
            "invariance": 30 * fall + 5,
            "redundancy": 10 * fall + 3 + noise * 9,
            "rho": (0.9 if curved else 0.6) * (1 - fall) + noise,
            "z_std": 0.9 + noise,
            "effective_rank": 40 * (1 - fall) + 4,
            "grad_norm": 3 * fall + 1,
            "lr": 2e-3 * (1 + math.cos((epoch - 1) / epochs * math.pi)) / 2,
            "views_per_s": 1800 + 400 * noise,
            "seconds": 1.7 * epoch + noise,
        }
        if curved:
            row["curvature"] = 129 - 2 * row["rho"]
        if epoch % 5 == 0:
            row["knn"] = 96 - 20 * fall
            row["rankme"] = 30 * (1 - fall) + 5
        rows.append(row)
    return rows


def scores(linear: float) -> dict[str, dict[str, object]]:
    """What probes.json holds for one set of features."""
    values = {"linear": [linear - 0.2, linear, linear + 0.2], "mlp": [linear, linear + 0.3], "knn": [linear - 1]}
    summaries: dict[str, dict[str, object]] = {
        name: {"accuracy": v, "mean": float(np.mean(v)), "std": float(np.std(v)), "settings": {}}
        for name, v in values.items()
    }
    return summaries | {"retrieval": {"recall@1": linear, "recall@5": 99.0, "recall@10": 100.0, "mAP": 50.0}}


def run(method: str, of: Pictured | None, *, seed: int = 0, where: int = 0) -> RunData:
    """A whole run. `where` rotates the map, so that two methods put the same image in two places."""
    probes: dict[str, Any] = scores(97.8 - 0.3 * seed - where)
    probes |= {"retrieval": {"recall@1": 90.0, "mAP": 60.5}, "raw pixels": scores(96.1), "random encoder": scores(95.2)}
    return RunData(
        name=f"digits-{method}-seed{seed}",
        config={"dataset": "digits", "method": method, "seed": seed, "k": 10, "augment": {"crop_scale": [0.6, 1.0]}},
        provenance={
            "command": f"curvssl pretrain --method {method} --seed {seed}",
            "commit": "0123456789ab",
            "versions": {"python": "3.11", "torch": "2.15"},
            "device": "cpu",
            "data_sha256": {"test-images": "9442cbc5" * 8},
            "seconds": 34.5,
        },
        metrics=metrics(seed=seed, curved=method == "curvssl"),
        probes=probes,
        points=None if of is None else points(of, seed=where),
        pictured=of,
    )


def cifar10_test(n: int) -> Pictured | None:
    """CIFAR-10's test images, if they are in the cache."""
    folder = Path("~/.cache/curvssl/cifar10").expanduser()
    if not (folder / "test-images.npy").exists():
        return None
    from curvssl.data.named import OBJECTS

    images, labels = np.load(folder / "test-images.npy")[:n], np.load(folder / "test-labels.npy")[:n]
    return Pictured("cifar10 test", images, OBJECTS, labels.astype(np.int64))


def photographs(n: int) -> Pictured:
    """The n pieces of 32×32 pixels with the most contrast, from the two photographs that come with scikit-learn."""
    from sklearn.datasets import load_sample_images

    photos = np.stack(load_sample_images().images)[:, ::2, ::2].transpose(0, 3, 1, 2)  # (2, 3, 214, 320)
    pieces = np.lib.stride_tricks.sliding_window_view(photos, (32, 32), axis=(2, 3))[:, :, ::2, ::2]
    pieces = pieces.transpose(0, 2, 3, 1, 4, 5).reshape(-1, 3, 32, 32)
    rows = np.sort(np.argsort(pieces.std((1, 2, 3)))[-n:])
    return Pictured("photographs", pieces[rows], ("a temple", "a flower"), 2 * rows // len(pieces))


# Reads from a copy: Chromium warns on the console about a canvas that is read repeatedly.
READ = """() => { window.pixelOf = (canvas, x, y) => {
  const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, -Math.floor(x), -Math.floor(y));
  return [...copy.getImageData(0, 0, 1, 1).data];
}; }"""


class Opened:
    """A page in a real browser, with all its console messages and requests."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.context = browser.new_context(**({"viewport": {"width": 1440, "height": 1000}} | context))
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.evaluate(READ)
        self.until("splits.every((split) => split.ready)")
        self.frame()

    def until(self, condition: str) -> None:
        """Polls, because the page's security policy forbids what playwright's own waiting does in the page."""
        for _ in range(400):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(25)
        raise AssertionError(f"never true: {condition}; the page said {self.complaints}")

    def frame(self) -> None:
        """Wait until everything has been drawn."""
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def screen(self, row: int, *, view: str = "maps[0]") -> tuple[float, float]:
        """Where a point is in the window, after its canvas has been scrolled into view."""
        scrolled = f"""(() => {{ const from = scrollY;
            {view}.over.scrollIntoView({{ block: 'center', behavior: 'instant' }}); return scrollY !== from; }})()"""
        if self.page.evaluate(scrolled):
            self.frame()
        x, y = self.page.evaluate(
            f"""(() => {{ const box = {view}.over.getBoundingClientRect(), [x, y] = {view}.screen({row});
                return [box.left + x, box.top + y]; }})()"""
        )
        return x, y

    def point_at(self, row: int, *, view: str = "maps[0]") -> None:
        self.page.mouse.move(*self.screen(row, view=view))
        self.frame()

    def colour(self, row: int, *, view: str = "maps[0]", canvas: str = "points", dx: float = 0) -> tuple[int, ...]:
        """RGBA of a canvas at a point, or dx beside it."""
        place = f"const [x, y] = {view}.screen({row}), r = {view}.ratio;"
        return tuple(
            self.page.evaluate(f"(() => {{ {place} return pixelOf({view}.{canvas}, (x + {dx}) * r, y * r); }})()")
        )

    def thumbnail(self, selector: str) -> np.ndarray:
        """The pixels (side, side, 3) of a shown thumbnail."""
        side, data = self.page.evaluate(
            """(selector) => { const one = document.querySelector(selector);
               return [one.width, [...one.getContext("2d").getImageData(0, 0, one.width, one.height).data]]; }""",
            selector,
        )
        return np.array(data, dtype=np.uint8).reshape(side, side, 4)[..., :3]

    def images(self, selector: str) -> list[list[np.ndarray]]:
        """The pixels (height, width, 3) of the images in each row of a table."""
        rows = self.page.evaluate(
            """(selector) => Promise.all([...document.querySelectorAll(selector + " tr")].map((row) =>
               Promise.all([...row.querySelectorAll("img")].map(async (image) => {
                 await image.decode();
                 const [width, height] = [image.naturalWidth, image.naturalHeight];
                 const copy = new OffscreenCanvas(width, height).getContext("2d");
                 copy.drawImage(image, 0, 0);
                 return [height, width, [...copy.getImageData(0, 0, width, height).data]]; }))))""",
            selector,
        )
        return [[np.array(data, np.uint8).reshape(h, w, 4)[..., :3] for h, w, data in row] for row in rows]

    def selected(self) -> list[int]:
        """The rows of the selected images, in order."""
        return self.page.evaluate("[...choices[state.split].selected].sort((a, b) => a - b)")

    def search(self, text: str) -> None:
        """Type a text and go to the first image that is found."""
        self.page.fill("#search-text", text)
        self.page.press("#search-text", "Enter")
        self.frame()

    def rows_of(self, selector: str) -> list[int]:
        """The rows of the images in a gallery."""
        return self.page.evaluate(
            "(selector) => [...document.querySelectorAll(selector)].map((one) => Number(one.dataset.row))", selector
        )


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
