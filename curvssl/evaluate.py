"""The second stage, on run directories: features, probes with their floors, maps, comparisons; results go there too."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from curvssl import features
from curvssl.config import UserError
from curvssl.data import Dataset, load
from curvssl.features import Features, extract, raw_pixels
from curvssl.probes import PROBES, summary
from curvssl.rundir import Run, write_atomic, write_json

SPLITS = ("train", "test")
NAMES = {
    "barlow-twins": "Barlow Twins",
    "vicreg": "VICReg",
    "curvssl": "CurvSSL",
    "kernel-curvssl": "kernel CurvSSL",
}


def features_of(run: Run, data: Dataset, split: str) -> Features:
    """h, z and labels of one split, made once and kept in the run."""
    path = run.path / f"features-{split}.npz"
    if not path.exists():
        net = run.load_net()
        part = getattr(data, split)
        found = extract(
            net.encoder,
            part.images,
            size=run.config.image_size,
            mean=data.mean,
            std=data.std,
            projector=net.projector,
            labels=part.labels,
            device=best_device(),
            precision="auto",
        )
        features.save(found, path)
    return features.load(path)


def probe(run: Run, *, source: str = "auto", seeds: Sequence[int] = (0, 1, 2), floors: bool = True) -> dict[str, Any]:
    """Accuracy of every probe, and of the same probes on raw pixels and on this run's encoder untrained."""
    data = load(run.config.dataset, source=source)
    if data.train.labels is None or data.test.labels is None:
        raise UserError(f"{run.config.dataset} has no labels, so there is nothing to probe: try curvssl map {run.path}")
    train, test = (features_of(run, data, split) for split in SPLITS)
    results = probe_features(train, test, seeds=seeds, classes=len(data.classes), predictions=run.path)
    if floors:
        results |= floors_of(run, data, seeds=seeds)
    write_json(run.path / "probes.json", results)
    return results


def floors_of(run: Run, data: Dataset, *, seeds: Sequence[int]) -> dict[str, Any]:
    """What the probes reach without learning: on pixels, and on the features of random weights."""
    pixels = (Features(h=raw_pixels(part.images), y=part.labels) for part in (data.train, data.test))
    encoder = run.make_net(channels=max(3, data.train.images.shape[1])).encoder
    shape = {"size": run.config.image_size, "mean": data.mean, "std": data.std, "device": best_device()}
    random = (extract(encoder, part.images, labels=part.labels, **shape) for part in (data.train, data.test))
    return {
        "raw pixels": probe_features(*pixels, seeds=seeds, classes=len(data.classes)),
        "random encoder": probe_features(*random, seeds=seeds, classes=len(data.classes)),
    }


def probe_features(
    train: Features, test: Features, *, seeds: Sequence[int], classes: int, predictions: Path | None = None
) -> dict[str, Any]:
    """{probe: summary}; with a folder, what each probe predicts for each test image goes there too."""
    assert train.y is not None
    assert test.y is not None
    found = {
        name: function(train.h, train.y, test.h, test.y, classes=classes, seeds=tuple(seeds))
        for name, function in PROBES.items()
    }
    if predictions is not None:
        arrays = {
            f"{name}_{what}": getattr(r, what).numpy()
            for name, r in found.items()
            for what in ("predictions", "confidence")
        }
        write_atomic(predictions / "predictions-test.npz", lambda file: np.savez(file, **arrays))
    return {name: summary(result) for name, result in found.items()}


def draw_map(run: Run, *, of: str = "h", split: str = "test", source: str = "auto", seed: int = 0) -> Path:
    """UMAP of one split's h or z as npz, PNG and PDF in the run directory; the PNG's path."""
    from curvssl import maps

    data = load(run.config.dataset, source=source)
    found = features_of(run, data, split)
    values = found.h if of == "h" else found.z
    assert values is not None
    stem = run.path / f"map-{of}-{split}"
    xy = maps.umap(values, seed=seed)
    write_atomic(stem.with_suffix(".npz"), lambda file: np.savez(file, xy=xy))
    title = f"{NAMES[run.config.method]} on {data.name}, {of} of the {split} images"
    if found.y is None:
        from curvssl.geometry import curvature

        maps.draw(xy, values=curvature(values).numpy(), title=f"{title}, by curvature", out=stem.with_suffix(".png"))
    else:
        maps.draw(xy, labels=found.y.numpy(), classes=data.classes, title=title, out=stem.with_suffix(".png"))
    return stem.with_suffix(".png")


def embed(run: Run, images: Path, *, out: Path) -> Features:
    """Features of any folder of images or uint8 array, as npz."""
    from curvssl.folders import read_images

    net = run.load_net()
    pixels = read_images(images, size=run.config.image_size)
    data = load(run.config.dataset)
    found = extract(
        net.encoder,
        pixels,
        size=run.config.image_size,
        mean=data.mean,
        std=data.std,
        projector=net.projector,
        device=best_device(),
    )
    features.save(found, out)
    return found


def compare(runs: Iterable[Run]) -> list[list[str]]:
    """One row for each group of runs that differ in their seed alone: mean ± standard deviation of every probe."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = run.config.to_dict() | {"seed": None}
        groups.setdefault(str(same), []).append(run)
    rows = []
    for members in groups.values():
        config = members[0].config
        found = [run.read_json("probes.json") for run in members]
        missing = [str(run.path) for run, probes in zip(members, found, strict=True) if not probes]
        if missing:
            raise UserError(f"not probed yet: {', '.join(missing)}; run curvssl probe on them first")
        cells = [spread([probes[name]["mean"] for probes in found]) for name in PROBES]
        rows.append([config.dataset, NAMES[config.method], str(len(members)), *cells])
    return rows


def spread(values: Sequence[float]) -> str:
    """mean ± standard deviation (n − 1), or the value alone."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def probe_rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Rows of a table from {name: {probe: summary}}."""
    return [[name, *(spread(probes[probe]["accuracy"]) for probe in PROBES)] for name, probes in results.items()]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text, the first column to the left and the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return "\n".join([text[0], "─" * len(text[0]), *text[1:]])


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
