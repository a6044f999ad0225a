"""Does an image's curvature find what a person would want found? Planted faults among the test images of a run.

    python benchmarks/planted.py RUN… [--out results/planted.json]

RUN is a run directory or an exported encoder of a labelled, named data set. Each fault is planted in one image of
twenty, in three draws; features are the encoder's h, standardised. Every score sees the mixture, with the faults in.

    wrong label      the images of one given class, some of which belong to another; each class in turn
    wrong class      the images of all classes but one, and some of that one; each class in turn
    corrupted        noise, blur, a black half, inverted colours, shuffled tiles or a coarse JPEG; each in turn
    near-duplicate   images that are there twice, the second time shifted by a pixel, brighter, with a little noise

The detectors are those of benchmarks/outliers.py and know no labels. "confidence" does: it is what a linear
classifier, fitted to the other four fifths, thinks of the given label or, where no label is wrong, of its own first
choice. There an image of a wrong class has one of the other labels, at random. Near-duplicates lie densely, so there
the scores change their sign; the distance to the nearest neighbour is added.
"""

import argparse
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from outliers import DETECTORS, Array, Detector, neighbor_distance
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from curvssl.data.images import TensorImages
from curvssl.evaluate.features import extract
from curvssl.evaluate.runs import dataset_of
from curvssl.files import write_json
from curvssl.rundir import Run, provenance

IMAGES = 5_000  # of the test split, in a fixed order
SHARE, DRAWS = 0.05, 3
TILES = 4  # in a row and in a column
CONFIDENCE = "confidence of a linear classifier (knows labels)"
Places = NDArray[np.int64]


# ---- what a camera, a disk or a person may do to an image: uint8 (b, C, H, W) → the same


def noise(x: Tensor, draw: torch.Generator, *, sigma: float = 40.0) -> Tensor:
    return (x.float() + sigma * torch.randn(x.shape, generator=draw)).round().clamp(0, 255).byte()


def blur(x: Tensor, draw: torch.Generator) -> Tensor:
    small = F.interpolate(x.float(), scale_factor=0.25, mode="area")
    return F.interpolate(small, size=x.shape[2:], mode="bilinear").round().byte()


def black_half(x: Tensor, draw: torch.Generator) -> Tensor:
    x = x.clone()
    x[..., x.shape[-1] // 2 :] = 0
    return x


def inverted(x: Tensor, draw: torch.Generator) -> Tensor:
    return 255 - x


def shuffled(x: Tensor, draw: torch.Generator) -> Tensor:
    side = x.shape[-1] // TILES
    tiles = x.unflatten(3, (TILES, side)).unflatten(2, (TILES, side)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = torch.stack([torch.randperm(TILES**2, generator=draw) for _ in x])
    tiles = tiles[torch.arange(len(x))[:, None], order].unflatten(1, (TILES, TILES))
    return tiles.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def coarse_jpeg(x: Tensor, draw: torch.Generator, *, quality: int = 5) -> Tensor:
    def through_a_file(image: Tensor) -> Tensor:
        file, pixels = io.BytesIO(), image.permute(1, 2, 0).squeeze(2).numpy()
        Image.fromarray(pixels).save(file, "JPEG", quality=quality)
        return torch.from_numpy(np.array(Image.open(file))).view(*image.shape[1:], -1).permute(2, 0, 1)

    return torch.stack([through_a_file(image) for image in x])


CORRUPTIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "noise": noise,
    "blur": blur,
    "black half": black_half,
    "inverted": inverted,
    "shuffled tiles": shuffled,
    "coarse JPEG": coarse_jpeg,
}


def near_copy(x: Tensor, draw: torch.Generator) -> Tensor:
    brighter = (1.05 * x.roll(1, dims=3).float()).clamp(0, 255).byte()
    return noise(brighter, draw, sigma=3.0)


# ---- the faults: (kind, features of the mixture, 1 for what was planted, what the classifier thinks or None)

Planted = tuple[str, Array, Places, Array | None]


def some(n: int, draw: np.random.Generator) -> Places:
    return draw.permutation(n)[: max(1, round(SHARE * n))]


def wrong_labels(h: Array, y: Places, draw: np.random.Generator) -> Iterator[Planted]:
    given, moved = y.copy(), some(len(y), draw)
    classes = len(np.unique(y))
    given[moved] = (y[moved] + draw.integers(1, classes, len(moved))) % classes
    doubt = 1 - probabilities(h, given)[np.arange(len(y)), given]
    for label in range(classes):
        rows = given == label
        yield f"class {label}", h[rows], (y != given)[rows].astype(np.int64), doubt[rows]


def wrong_classes(h: Array, y: Places, draw: np.random.Generator) -> Iterator[Planted]:
    for label in np.unique(y):
        inside = np.flatnonzero(y != label)
        outside = draw.permutation(np.flatnonzero(y == label))[: max(1, round(SHARE * len(inside)))]
        rows = np.concatenate((inside, outside))
        given = np.concatenate((y[inside], draw.choice(y[inside], len(outside))))
        planted = np.repeat((0, 1), (len(inside), len(outside)))
        yield f"class {label}", h[rows], planted, 1 - probabilities(h[rows], given).max(1)


def corrupted(
    h: Array, y: Places, pixels: Tensor, features: Callable[[Tensor], Array], draw: np.random.Generator
) -> Iterator[Planted]:
    for name, corrupt in CORRUPTIONS.items():
        rows = some(len(h), draw)
        mixed, planted = h.copy(), np.zeros(len(h), np.int64)
        mixed[rows] = features(corrupt(pixels[rows], torch.Generator().manual_seed(int(draw.integers(2**31)))))
        planted[rows] = 1
        yield name, mixed, planted, 1 - probabilities(mixed, y).max(1)


def near_duplicates(
    h: Array, pixels: Tensor, features: Callable[[Tensor], Array], draw: np.random.Generator
) -> Iterator[Planted]:
    rows = some(len(h), draw)
    copies = features(near_copy(pixels[rows], torch.Generator().manual_seed(int(draw.integers(2**31)))))
    planted = np.zeros(len(h) + len(rows), np.int64)
    planted[rows] = planted[len(h) :] = 1
    yield "near copies", np.concatenate((h, copies)), planted, None


def probabilities(h: Array, y: Places) -> Array:
    """Of each class, (n, classes), by a classifier that was fitted to the other four fifths of the rows."""
    model = LogisticRegression(C=0.01, max_iter=200)
    return cross_val_predict(model, StandardScaler().fit_transform(h), y, cv=5, method="predict_proba")


# ---- the measurement


def found_in(kinds: Iterator[Planted], detectors: dict[str, Detector], *, seed: int, sign: int) -> dict[str, Any]:
    """{kind: {score: AUROC in percent}}."""
    result: dict[str, Any] = {}
    for kind, h, planted, doubt in kinds:
        if not 0 < planted.sum() < len(planted):
            continue
        rows = StandardScaler().fit_transform(h)
        scores = {name: sign * detector(rows, rows, seed) for name, detector in detectors.items()}
        scores |= {} if doubt is None else {CONFIDENCE: doubt}
        result[kind] = {name: 100 * float(roc_auc_score(planted, score)) for name, score in scores.items()}
    return result


def measured(run: Run) -> dict[str, Any]:
    data = dataset_of(run)
    draw = np.random.default_rng(0)
    rows = torch.from_numpy(draw.permutation(len(data.test.images))[:IMAGES])
    pixels = torch.cat([*data.test.images[rows].split(512)])
    assert data.test.labels is not None
    y = data.test.labels[rows].numpy()
    encoder: nn.Module = run.load_parts()[0]
    settings: dict[str, Any] = {"size": run.config.image_size, "mean": data.mean, "std": data.std}

    def features(x: Tensor) -> Array:
        return extract(encoder, TensorImages.of(x), **settings).h.double().numpy()

    h = features(pixels)
    nearest = {"kNN distance, k = 1": neighbor_distance(1)} | DETECTORS
    problems: dict[str, dict[str, Any]] = {}
    for seed in range(DRAWS):
        draw = np.random.default_rng(seed)
        kinds: dict[str, tuple[Iterator[Planted], dict[str, Detector], int]] = {
            "wrong label": (wrong_labels(h, y, draw), DETECTORS, 1),
            "wrong class": (wrong_classes(h, y, draw), DETECTORS, 1),
            "corrupted": (corrupted(h, y, pixels, features, draw), DETECTORS, 1),
            "near-duplicate": (near_duplicates(h, pixels, features, draw), nearest, -1),
        }
        for problem, (planted, detectors, sign) in kinds.items():
            found = found_in(planted, detectors, seed=seed, sign=sign)
            named = {f"{kind}, draw {seed}": scores for kind, scores in found.items()}
            problems.setdefault(problem, {}).update(named)
            print(f"{run.path} {problem}, draw {seed}", flush=True)
    return problems


def means(kinds: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """{score: its mean over kinds and draws, and half of the 95 % interval}."""
    names = next(iter(kinds.values()))
    grid = {name: np.array([of[name] for of in kinds.values()]) for name in names}
    return {
        name: {"auroc": float(row.mean()), "within": float(1.96 * row.std(ddof=1) / np.sqrt(len(row)))}
        for name, row in grid.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories, or exported encoders")
    parser.add_argument("--out", type=Path, default=Path("results/planted.json"))
    arguments = parser.parse_args()
    result: dict[str, Any] = {"settings": {"images": IMAGES, "share": SHARE, "draws": DRAWS}, "runs": {}}
    for path in arguments.runs:
        run = Run.read(path)
        problems = measured(run)
        summary = {problem: means(kinds) for problem, kinds in problems.items()}
        result["runs"][path.name] = {"config": run.config.to_dict(), "means": summary, "auroc": problems}
        for problem, scores in summary.items():
            print(f"\n{path.name}, {problem}: AUROC")
            for name, score in sorted(scores.items(), key=lambda item: -item[1]["auroc"]):
                print(f"{name:50} {score['auroc']:5.1f} ± {score['within']:.1f}")
        write_json(arguments.out, result | {"provenance": provenance(device="CPU")})


if __name__ == "__main__":
    main()
