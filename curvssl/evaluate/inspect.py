"""Look through a collection of images: near-duplicates, outliers, typical examples, unreadable files."""

import csv
import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from curvssl import ranks
from curvssl.config import UserError
from curvssl.evaluate.runs import best_device
from curvssl.evaluate.search import Collection, collection_of, nearest
from curvssl.files import count, printable, say, write_bytes
from curvssl.rundir import Run

NEIGHBORS = 20  # of each image, among which its near-duplicates are sought
# Two images are near-duplicates if their features are nearer than this share of the usual distance to the nearest other
# image, and their pixels agree. Features alone would not do: where images fill D dimensions evenly, 1 − 2^(−share^D) of
# them have a neighbour so near by chance, which is 2 % for D = 5. Pixels alone would not do either: all skies agree.
SHARE = 1 / 2
AGREE = 0.9  # correlation of the pixels
PIXELS = 16  # a side, of the images that are correlated: a slightly cropped copy is the same at this size
NOISE = 4  # grey levels that count as equal, so that two blank pages agree
ROUNDING = 1e-3  # the distance of equal directions in float32
EXAMPLES = 12  # typical images
PRINTED = 5  # of each kind, on the console
MANY = 20_000  # images, above which a line says that it takes time
LISTED = 100  # outliers in the result; the CSV file has all images
REFERENCE = 5_000  # outliers of a larger set are sought among every second, third, … row: time grows as N · REFERENCE
QUIET = 0.01  # of the typical deviation of a feature: one that varies less is almost constant
RISKY = tuple("=+-@\t\r")  # a spreadsheet takes a cell that begins so for a formula


def inspect(
    run: Run, *, where: Path | None = None, source: str = "auto"
) -> tuple[dict[str, Any], Collection, np.ndarray]:
    """What there is to see in the run's own images, or in those of another folder or array, as plain data; also the
    collection, to whose rows the numbers point, and the outlier score of each row.

    Of the run's own images it is stored in the run as inspect.json, if that can be written to.
    """
    with ranks.ranks(best_device()):
        collection = collection_of(run, where, source=source)
        if len(collection) < 3:
            readable = count(len(collection), "readable image")
            raise UserError(f"{collection.name} has {readable}: inspect needs 3 to compare")
        if len(collection) > MANY and not torch.cuda.is_available() and ranks.is_main():
            say(f"comparing {len(collection):,} images with each other, which takes minutes on a CPU")
        result, scores = inspected(collection)
        if where is None and ranks.is_main() and run.writable:
            run.keep_json("inspect.json", result, by="curvssl inspect RUN")
        return result, collection, scores


def inspected(collection: Collection) -> tuple[dict[str, Any], np.ndarray]:
    """What there is to see in a collection, and the outlier score of each row."""
    similarity, neighbors = nearest(collection.h, collection.h, k=NEIGHBORS, others=True)
    threshold = duplicate_threshold(similarity)
    groups = groups_of(near_duplicates(collection, similarity, neighbors, threshold=threshold), n=len(collection))
    scores, fence = outlier_scores(collection.h)
    ranked = np.argsort(-scores, kind="stable")
    firsts = torch.ones(len(collection), dtype=torch.bool)  # of each group one image counts as typical of others
    for group in groups:
        firsts[group[1:]] = False
    examples = typical(collection.h, among=firsts.nonzero()[:, 0])
    ends = ranked[:LISTED].tolist()
    shown = sorted({*examples, *ends, *(row for group in groups for row in group)})
    name = dict(zip(shown, collection.names(shown), strict=True))
    result = {
        "collection": collection.name,
        "images": len(collection),
        "near_duplicates": {
            "threshold": threshold,
            "groups": [
                [
                    {"row": row, "name": name[row], "similarity": s}
                    for row, s in zip(group, to_first(collection.h[group]), strict=True)
                ]
                for group in groups
            ],
        },
        "outliers": {
            "fence": fence,
            "beyond": int((scores > fence).sum()),
            "ranked": [{"row": row, "name": name[row], "score": float(scores[row])} for row in ends],
        },
        "typical": [{"row": row, "name": name[row], "stands_for": count} for row, count in examples.items()],
        "unreadable": [{"name": name, "error": error} for name, error in collection.unreadable.items()],
    }
    return result, scores


# ---- near-duplicates


def duplicate_threshold(similarity: Tensor) -> float:
    """The cosine similarity from which two images may be near-duplicates, from those of each image's neighbours (n, k).

    The distance of two directions is √(2 − 2s). The threshold is SHARE of the median, over all images, of the distance
    to the nearest image that is no near-duplicate. Which these are depends on the threshold, so it is found by
    repetition, beginning with a large one. So it does not matter if most images have copies, as long as none has k.
    """
    distance = (2 - 2 * similarity.double()).clamp_min(0).sqrt()
    limit = SHARE * float(distance[:, -1].median())
    for _ in range(10):
        others = torch.where(distance >= limit, distance, math.inf).amin(1)
        usual = float(others[others.isfinite()].median()) if others.isfinite().any() else 0.0
        limit = max(SHARE * usual, ROUNDING)
    return 1 - limit**2 / 2


def near_duplicates(collection: Collection, similarity: Tensor, neighbors: Tensor, *, threshold: float) -> Tensor:
    """The pairs of rows, (m, 2), that are neighbours at least so similar and whose pixels agree."""
    a, place = (similarity >= threshold).nonzero(as_tuple=True)
    pairs = torch.stack((a, neighbors[a, place]), dim=1).sort(dim=1).values.unique(dim=0)
    rows, at = pairs.unique(return_inverse=True)
    if len(pairs) == 0:
        return pairs
    small = torch.cat([shrunk(collection.pixels(part.tolist())) for part in rows.split(1024)])
    return pairs[torch.cat([correlation(*small[part].unbind(1)) >= AGREE for part in at.split(4096)])]


def shrunk(pixels: Tensor) -> Tensor:
    """uint8 (b, C, H, W) → (b, C · PIXELS²), each channel with mean 0."""
    small = F.interpolate(pixels.float(), size=(PIXELS, PIXELS), mode="bilinear", antialias=True).flatten(2)
    return (small - small.mean(2, keepdim=True)).flatten(1)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Of each row of a with that of b, (m,): 1 for equal ones; differences below NOISE hardly count."""
    noise = NOISE**2 * a.shape[1]
    aa, bb, ab = ((x * y).sum(1) + noise for x, y in ((a, a), (b, b), (a, b)))
    return ab / (aa * bb).sqrt()


def groups_of(pairs: Tensor, *, n: int) -> list[list[int]]:
    """The groups of two or more of n rows that pairs (m, 2) connect; the largest come first."""
    a, b = pairs.unbind(1)
    label = torch.arange(n)  # in the end the least row of its group
    while True:
        lower = label.scatter_reduce(0, a, label[b], "amin").scatter_reduce(0, b, label[a], "amin")
        lower = lower[lower]
        if lower.equal(label):
            break
        label = lower
    order, sizes = label.argsort(stable=True), label.unique(return_counts=True)[1]
    groups = (group.tolist() for group in order.split(sizes.tolist()) if len(group) > 1)
    return sorted(groups, key=lambda group: (-len(group), group))


def to_first(h: Tensor) -> list[float]:
    """The cosine similarity of each row to the first."""
    u = F.normalize(h, dim=1)
    return (u @ u[0]).clamp(-1, 1).tolist()


# ---- outliers and typical images


def outlier_scores(h: Tensor) -> tuple[np.ndarray, float]:
    """How far out each row of h lies, (N,), and from which score on it is an outlier.

    It is the default score of the detector, among at most REFERENCE rows: 1 for the median image, high for outliers.
    Features are standardised first, as the detector asks: the few with the largest spread would decide alone.
    """
    from curvssl.outliers import CurvatureOutlierDetector  # with scikit-learn, which takes long to import

    x = standardised(h).numpy()
    detector = CurvatureOutlierDetector().fit(x[:: -(-len(x) // REFERENCE)])
    return -detector.score_samples(x), -float(detector.offset_)


def standardised(h: Tensor) -> Tensor:
    """Each feature with mean 0 and deviation 1, (n, d) in float64; one that hardly varies is not blown up."""
    x = h.double() - h.double().mean(0)
    spread = x.square().mean(0).sqrt()
    return x / spread.clamp_min(QUIET * spread.square().mean().sqrt()).clamp_min(1e-300)


def typical(h: Tensor, *, among: Tensor) -> dict[int, int]:
    """At most EXAMPLES rows that are each the most central of many images, and how many these are; most first.

    The directions of h are divided by k-means, and the row next to each centre is taken.
    """
    from sklearn.cluster import KMeans

    u = F.normalize(h[among], dim=1).numpy()
    k = min(EXAMPLES, len(np.unique(u, axis=0)))
    fitted = KMeans(k, n_init=1, random_state=0).fit(u)
    found = {}
    for centre in range(k):
        members = np.flatnonzero(fitted.labels_ == centre)
        middle = members[np.argmax(u[members] @ fitted.cluster_centers_[centre])]
        found[int(among[middle])] = len(members)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# ---- as text and as tables


def summary(result: dict[str, Any]) -> str:
    """What was found, in a few lines."""
    groups, outliers = result["near_duplicates"]["groups"], result["outliers"]
    found = f"{count(len(groups), 'group')} with {count(sum(map(len, groups)), 'image')}"
    first, odd, bad = groups[:PRINTED], count(outliers["beyond"], "image"), result["unreadable"]
    parts = [
        f"{count(result['images'], 'image')} of {result['collection']}",
        f"\nnear-duplicates: {found}",
        *(f"  {' = '.join([one['name'] for one in group[:3]] + ['…'] * (len(group) > 3))}" for group in first),
        f"\noutliers: {odd} with a score above {outliers['fence']:.2f}; the median image has about 1",
        *(f"  {one['score']:5.2f}  {one['name']}" for one in outliers["ranked"][:PRINTED]),
        "\ntypical: each the most central of so many images",
        *(f"  {one['stands_for']:5,}  {one['name']}" for one in result["typical"][:PRINTED]),
        *([f"\nunreadable: {count(len(bad), 'file')}"] if bad else []),
        *(f"  {one['name']}: {one['error']}" for one in bad[:PRINTED]),
    ]
    # The blank lines are ours, and every other sign in a name is made visible.
    return "\n".join("\n" * part.startswith("\n") + printable(part.removeprefix("\n")) for part in parts)


def folder_for(run: Run, where: Path | None) -> Path:
    """Where tables go by default: RUN/inspect or, of another place, RUN/inspect-NAME. Those of a second place of this
    name go to inspect-NAME-2, and so on: they replace nothing."""
    if where is None:
        return run.path / "inspect"
    names = (f"inspect-{where.resolve().name}" + f"-{n}" * (n > 1) for n in itertools.count(1))
    return next(folder for name in names if _is_of(folder := run.path / name, where))


def _is_of(folder: Path, where: Path) -> bool:
    """Whether the tables in a folder are of this place, or it has none."""
    try:
        return Path(json.loads((folder / "inspect.json").read_bytes())["collection"]).resolve() == where.resolve()
    except FileNotFoundError:
        return True
    except (ValueError, KeyError, TypeError):  # somebody else's
        return False


def write_tables(result: dict[str, Any], collection: Collection, scores: np.ndarray, folder: Path) -> list[Path]:
    """near-duplicates.csv, outliers.csv with all images, typical.csv and unreadable.csv."""
    ranked = np.argsort(-scores, kind="stable")
    names = collection.names(ranked.tolist())
    fence = result["outliers"]["fence"]
    tables: dict[str, tuple[tuple[str, ...], list[tuple[Any, ...]]]] = {
        "near-duplicates": (
            ("group", "file", "similarity to the first"),
            [
                (number, one["name"], f"{one['similarity']:.6f}")
                for number, group in enumerate(result["near_duplicates"]["groups"], 1)
                for one in group
            ],
        ),
        "outliers": (
            ("rank", "file", "score", "outlier"),
            [
                (rank, name, f"{scores[row]:.6f}", "yes" if scores[row] > fence else "no")
                for rank, (row, name) in enumerate(zip(ranked, names, strict=True), 1)
            ],
        ),
        "typical": (("file", "stands for"), [(one["name"], one["stands_for"]) for one in result["typical"]]),
        "unreadable": (("file", "error"), [(one["name"], one["error"]) for one in result["unreadable"]]),
    }
    return [write_csv(folder / f"{name}.csv", header, rows) for name, (header, rows) in tables.items()]


def write_csv(path: Path, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Path:
    """A CSV file in UTF-8. A file name that is not UTF-8 has \\udc.. in place of such bytes, as in our JSON."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    # ./=1.jpg is the file =1.jpg, and no formula
    writer.writerows([f"./{cell}" if str(cell).startswith(RISKY) else cell for cell in row] for row in rows)
    write_bytes(path, text.getvalue().encode(errors="backslashreplace"))
    return path
