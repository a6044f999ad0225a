"""Write RunData as one self-contained HTML page, from page.html, page.css and the *.js files in this folder."""

import base64
import hashlib
import html
import io
import json
import math
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from curvssl.config import UserError, all_but_the_seed
from curvssl.evaluate.quality import warning
from curvssl.files import write_atomic
from curvssl.methods import title_of

HERE = Path(__file__).parent
SCRIPTS = ("data", "terms", "charts", "curves", "map", "hands", "sections", "main", "beside", "page")
NEIGHBORS = 6  # shown around an image, by distance in feature space
MAPS = 4  # up to this many runs all get a map; of more, only each method's first seed, to keep the page small for mail
SEEN = 64  # pixels at most of a view on the page
SHEET = 100  # thumbnails per side of a sprite sheet: browsers decode 3,200 × 3,200 pixels without problems
LIMIT = 100_000  # images on a page; of more, a random sample with a fixed seed
# Up to how many images a thumbnail has how many pixels a side. A pixel takes about a quarter of a byte in the file, and
# four bytes in a browser.
SIDES = {2_500: 64, 25_000: 32, LIMIT: 24}
LOSSLESS = 16, 10_000_000  # pixels a side and in all, up to which thumbnails are exact
# "image", "global 1", "global 2", "local 1", …, "blend": uint8 (n, 1 or 3, height, width) each
Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Points:
    """Data about each of N images in one run."""

    xy: np.ndarray  # (N, 2) the map
    curvature: np.ndarray  # (2, N) of the embeddings z of two augmented views
    outlier: np.ndarray  # (N,) score of the features h of the image itself: 1 for a typical one, high for outliers
    neighbors: np.ndarray  # (N, 6) rows, nearest in h first
    distances: np.ndarray  # (N, 6) to them
    cosines: np.ndarray  # (N, 15) between the edges to them, pairs a < b in order
    predicted: np.ndarray | None = None  # (N,) by the linear probe; −1 for an image that it was trained on
    confidence: np.ndarray | None = None  # (N,) in [0, 1]
    kind: str = "Eq. (6), k = 10"  # which curvature: values of another kind cannot be compared


@dataclass(frozen=True)
class Pictured:
    """The images behind the points. Runs with the same images share thumbnails, and their maps are linked."""

    name: str
    images: np.ndarray  # uint8 (N, C, H, W)
    classes: tuple[str, ...] = ()
    labels: np.ndarray | None = None  # (N,)
    index: np.ndarray | None = None  # (N,) position in the split, if not all of its images are shown
    files: tuple[str, ...] = ()  # N file names
    total: int = 0  # images in the split, if more than N

    def key(self) -> str:
        """The same for the same images. Runs of other sizes read the same files to other canvases."""
        parts = [None if self.files else self.images, self.labels, self.index]
        digest = hashlib.sha256(json.dumps([self.name, self.classes, self.files]).encode())
        for part in parts:
            digest.update(b"-" if part is None else np.ascontiguousarray(part).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class RunData:
    name: str
    config: dict[str, Any]
    provenance: dict[str, Any]
    metrics: list[dict[str, Any]]  # the rows of metrics.jsonl
    probes: dict[str, Any]  # probes.json
    points: Points | None = None
    pictured: Pictured | None = None
    quality: dict[str, Any] | None = None  # quality.json
    seen: Columns | None = None  # some images and all views of them
    findings: dict[str, Any] | None = None  # what `curvssl inspect` found, in rows of `pictured`


# ---- arrays as text


def packed(
    values: np.ndarray, *, low: float | None = None, high: float | None = None, bits: int = 16
) -> dict[str, Any]:
    """Numbers as 8- or 16-bit integers between low and high; with 16 bits the rounding error is less than a pixel."""
    values = np.asarray(values, dtype=np.float64)
    if not np.isfinite(values).all():
        raise UserError("the run's features hold NaN or infinity, so there is nothing to map: the encoder diverged")
    low = float(values.min(initial=0)) if low is None else low
    high = float(values.max(initial=low)) if high is None else high
    top = 2**bits - 1
    steps = np.rint((values - low) * (top / (high - low or 1))).clip(0, top)
    return {"type": f"u{bits}", "low": low, "high": high, "data": _base64(steps.astype(f"<u{bits // 8}"))}


def packed_integers(values: np.ndarray) -> dict[str, Any]:
    """Non-negative integers in the smallest type that holds the largest."""
    top = int(values.max(initial=0))
    bits = 8 if top < 2**8 else 16 if top < 2**16 else 32
    return {"type": f"u{bits}", "data": _base64(values.astype(f"<u{bits // 8}"))}


def _base64(data: np.ndarray | bytes) -> str:
    return base64.b64encode(data.tobytes() if isinstance(data, np.ndarray) else data).decode()


def thumbnail_side(n: int, height: int, width: int) -> int:
    """As SIDES says, to keep the page small, but never larger than the images."""
    return min(height, width, next(side for most, side in SIDES.items() if n <= most))


def squares(images: np.ndarray, side: int) -> np.ndarray:
    """uint8 (b, C, H, W) → (b, 1 or 3, side, side): the central square, as in the evaluation transform."""
    from PIL import Image

    height, width = images.shape[2:]
    whole = min(height, width)
    top, left = (height - whole) // 2, (width - whole) // 2
    images = images[:, :, top : top + whole, left : left + whole]
    if images.shape[1] not in (1, 3):
        images = images.mean(1, keepdims=True).astype(np.uint8)
    if whole == side:
        return images
    planes = images.reshape(-1, whole, whole)
    shrunk = [np.asarray(Image.fromarray(plane).resize((side, side), Image.Resampling.BOX)) for plane in planes]
    return np.stack(shrunk).reshape(*images.shape[:2], side, side)


def fitted(pixels: np.ndarray, *, side: int, enlarge: bool) -> Any:
    """(1 or 3, height, width) as a PIL image whose longer side is `side`; enlarged pixels are squares."""
    from PIL import Image

    image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    longer = max(image.size)
    if longer == side or (longer < side and not enlarge):
        return image
    width, height = (max(1, round(n * side / longer)) for n in image.size)
    return image.resize((width, height), Image.Resampling.NEAREST if longer < side else Image.Resampling.BOX)


def size_of(column: np.ndarray) -> str:
    """Width × height of the images in a column."""
    return f"{column.shape[3]}×{column.shape[2]}"


def thumbnails(images: np.ndarray) -> dict[str, Any]:
    """Sprite sheets as data URLs: WebP, lossless if small."""
    from PIL import Image

    n, _, height, width = images.shape
    side = thumbnail_side(n, height, width)
    columns = min(SHEET, math.ceil(math.sqrt(n)))
    lossless = side <= LOSSLESS[0] and n * side**2 <= LOSSLESS[1]
    sheets = []
    for start in range(0, n, columns * SHEET):
        part = squares(images[start : start + columns * SHEET], side)
        rows = math.ceil(len(part) / columns)
        part = np.concatenate([part, np.zeros((rows * columns - len(part), *part.shape[1:]), np.uint8)])
        grid = part.reshape(rows, columns, -1, side, side).transpose(0, 3, 1, 4, 2)
        grid = grid.reshape(rows * side, columns * side, -1)
        sheets.append(_webp(Image.fromarray(grid.squeeze(2) if grid.shape[2] == 1 else grid), lossless=lossless))
    return {"side": side, "exact": lossless, "columns": columns, "perSheet": columns * SHEET, "sheets": sheets}


def _tile(pixels: np.ndarray) -> str:
    """One view as a data URL; there are few, so that 32 pixels a side can still be lossless."""
    image = fitted(pixels, side=SEEN, enlarge=False)
    return _webp(image, lossless=max(image.size) <= 32)


def _webp(image: Any, *, lossless: bool) -> str:
    file = io.BytesIO()
    image.save(file, "WEBP", lossless=lossless, quality=40 if lossless else 80, method=4)
    return f"data:image/webp;base64,{_base64(file.getvalue())}"


# ---- the page


def render(runs: Sequence[RunData], out: Path) -> Path:
    """Write the page about these runs to `out`; it needs no other file and no network."""
    data = json.dumps(payload(runs), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    style = (HERE / "page.css").read_text("utf-8")
    script = "\n".join((HERE / f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    # Only this script may run, whatever a label or a file name contains, and nothing may be downloaded.
    policy = (
        f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )
    page = string.Template((HERE / "page.html").read_text("utf-8")).substitute(
        policy=policy,
        title=html.escape(title(runs)),
        style=style,
        # "<" starts tags and comments even inside a script element; JSON allows an escape instead.
        data=data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
        script=script,
    )
    write_atomic(out, lambda file: file.write(page.encode(errors="backslashreplace")))
    return out


def _digest(text: str) -> str:
    return f"sha256-{_base64(hashlib.sha256(text.encode()).digest())}"


def title(runs: Sequence[RunData]) -> str:
    names = [group["name"] for group in groups(runs)]
    data = ", ".join(dict.fromkeys(set_name(str(run.config.get("dataset", ""))) for run in runs))
    shown = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{shown if len(names) < 5 else f'{len(names)} settings'} on {data}"


def set_name(dataset: str) -> str:
    """What a heading calls a data set: of folder:PATH and array:PATH the last part, for whom the page is sent to."""
    kind, _, path = dataset.partition(":")
    return Path(path).name or dataset if kind in ("folder", "array") else dataset


def called(runs: Sequence[RunData]) -> list[str]:
    """The shortest distinct names of the runs: by method, by method and seed, or by directory."""
    methods = [method_of(run) for run in runs]
    seeded = [f"{method}, seed {run.config.get('seed')}" for method, run in zip(methods, runs, strict=True)]
    if len(set(methods)) == len(runs):
        return methods
    return seeded if len(set(seeded)) == len(runs) else [run.name for run in runs]


def method_of(run: RunData) -> str:
    return title_of(str(run.config["method"])) if "method" in run.config else run.name


def payload(runs: Sequence[RunData]) -> dict[str, Any]:
    """Everything the page's script reads; its types are at the top of data.js."""
    from curvssl import __version__

    if not runs:
        raise UserError("a report needs at least one run: give its directory")
    grouped, names = groups(runs), called(runs)
    mapped = range(len(runs)) if len(runs) <= MAPS else [group["runs"][0] for group in grouped]
    splits: dict[str, dict[str, Any]] = {}
    entries = []
    for i, run in enumerate(runs):
        entry: dict[str, Any] = {
            "name": names[i],
            "group": next(g for g, group in enumerate(grouped) if i in group["runs"]),
            "config": run.config,
            "provenance": {"run": run.name} | run.provenance,
            "probes": run.probes,
            "metrics": columns(run.metrics),
            "warning": warning(run.metrics, d_z=run.config.get("d_z", 1), batch_size=run.config.get("batch_size", 1)),
            "split": 0,
            "points": None,
            "findings": run.findings,
            "quality": run.quality or None,
        }
        if i in mapped and run.points is not None and run.pictured is not None:
            key = run.pictured.key()
            n, _, height, width = run.pictured.images.shape
            if key not in splits or splits[key]["side"] < thumbnail_side(n, height, width):
                splits[key] = _split(run.pictured)
            entry |= {"split": list(splits).index(key), "points": _points(run.points, run.pictured)}
        entries.append(finite(entry))
    return {
        "title": title(runs),
        "created": time.strftime("%Y-%m-%d"),
        "version": __version__,
        "groups": grouped,
        "splits": list(splits.values()),
        "runs": entries,
        "seen": _seen(runs, grouped),
    }


def _seen(runs: Sequence[RunData], grouped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the first run of each group sees; groups that see the same share one table."""
    tables: dict[str, dict[str, Any]] = {}
    for group in grouped:
        if (shown := runs[group["runs"][0]].seen) is not None:
            columns = [
                {"name": n, "size": size_of(c), "images": [_tile(pixels) for pixels in c]} for n, c in shown.items()
            ]
            tables.setdefault(json.dumps(columns), {"groups": [], "columns": columns})["groups"].append(group["name"])
    return list(tables.values())


def _split(pictured: Pictured) -> dict[str, Any]:
    return {
        "name": set_name(pictured.name),
        "classes": list(pictured.classes),
        "count": len(pictured.images),
        "total": max(pictured.total, len(pictured.images)),
        "files": list(pictured.files),
        "index": None if pictured.index is None else packed_integers(pictured.index),
        "label": None if pictured.labels is None else packed_integers(pictured.labels),
        **thumbnails(pictured.images),
    }


def _points(points: Points, pictured: Pictured) -> dict[str, Any]:
    unjudged, predicted = len(pictured.classes), None  # the page's integers have no sign
    if points.predicted is not None:
        predicted = packed_integers(np.where(points.predicted < 0, unjudged, points.predicted))
    low, extent = points.xy.min(0), float(np.ptp(points.xy, axis=0).max()) or 1.0  # same scale for x and y
    low_c, high_c = float(points.curvature.min()), float(points.curvature.max())
    return {
        "xy": packed((points.xy - low) / extent, low=0, high=1),
        "curvature": [packed(view, low=low_c, high=high_c) for view in points.curvature],
        "outlier": packed(points.outlier),
        "neighbors": packed_integers(points.neighbors),
        "distances": packed(points.distances),
        "cosines": packed(points.cosines, low=-1, high=1, bits=8),
        "kind": points.kind,
        "predicted": predicted,
        "confidence": None if points.confidence is None else packed(points.confidence, low=0, high=1, bits=8),
    }


def groups(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Groups of runs that differ only in their seed, in order of appearance: [{name, runs}]."""
    by_config: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        by_config.setdefault(all_but_the_seed(run.config), []).append(i)
    methods = [method_of(runs[members[0]]) for members in by_config.values()]
    return [
        # Groups with the same method but other settings are called by a run's name.
        {"name": method if methods.count(method) == 1 else runs[members[0]].name, "runs": members}
        for method, members in zip(methods, by_config.values(), strict=True)
    ]


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows of metrics as columns, with the wall time of each epoch from the differences of `seconds`."""
    names = dict.fromkeys(name for row in rows for name in row)
    table = {name: [row.get(name) for row in rows] for name in names}
    clock = [float(value) for value in table.get("seconds", []) if value is not None]
    if clock and len(clock) == len(rows):
        table["epoch_seconds"] = [after - before for before, after in zip([0.0, *clock], clock, strict=False)]
    return table


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, dict):
        return {str(name): finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
