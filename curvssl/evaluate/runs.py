"""Evaluate run directories: features, probes and their baselines, measures, maps. Results are stored in the run."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvssl import ranks
from curvssl.collectives import rank, world_size
from curvssl.config import UserError, all_but_the_seed
from curvssl.data.folders import canvas_of, open_images, write_bad_images
from curvssl.data.images import Images
from curvssl.data.named import PREFIXES, Dataset, Split, changed_since, describe, load_on_ranks
from curvssl.data.views import Augment, resize
from curvssl.evaluate import features
from curvssl.evaluate.features import Features, extract_over_ranks, extract_views, raw_pixels
from curvssl.evaluate.probes import PROBES, RETRIEVAL, retrieval, summary
from curvssl.evaluate.quality import LIDAR_VIEWS, MEASURES, WINDOW_EPOCHS, agreement, measured, verdict
from curvssl.files import say, write_atomic
from curvssl.geometry import curvature
from curvssl.methods import title_of
from curvssl.rundir import ROOTS, Run

SPLITS = ("train", "test")  # and "all", both of the user's own images in the order of their files
PREDICTIONS = "predictions-test.npz"
COLUMNS = (*PROBES, *RETRIEVAL)  # of a table of probed features
PIXELS = 32
QUALITY_IMAGES = 25_600  # as RankMe was published; a larger training split is sampled at random, with a fixed seed
LIDAR_IMAGES = 1_000  # of those, for LiDAR


class Changed(UserError):
    """The data of a run are not those that it was trained on."""


def dataset_of(run: Run, *, source: str = "auto") -> Dataset:
    """The data of a run, with the mean and standard deviation that its training used."""
    kind, _, path = run.config.dataset.partition(":")
    if kind in PREFIXES and not Path(path).expanduser().exists():
        seen = "" if Path(path).expanduser().is_absolute() else f" below {Path.cwd()}"
        raise UserError(
            f"{run.path} was trained on {path}, which is not there{seen}: put it back, or, for search and inspect, "
            "give its place as --in"
        )
    data = load_on_ranks(run.config.dataset, source=source, size=run.config.image_size)
    if not run.knows("data.json"):
        return data  # not trained yet
    known = run.settled("data.json", describe(data))
    if why := changed_since(known, data):
        raise Changed(f"{data.name} has changed since {run.path} was trained ({why}): restore it, or pretrain again")
    return dataclasses.replace(data, mean=tuple(known["mean"]), std=tuple(known["std"]))


def features_of(run: Run, data: Dataset, split: str) -> Features:
    """h, z and labels of one split, computed once and stored in the run; each rank computes a share.

    Of "all", the index is the images' numbers in their folder or array.
    """
    if split == "all":
        return _merged([(getattr(data, name).images.rows, features_of(run, data, name)) for name in SPLITS])
    name = f"features-{split}.npz"
    stored = ranks.from_main(features.load(run, name) if ranks.is_main() else None)
    if stored is None:
        encoder, projector = run.load_parts()
        part = getattr(data, split)
        made = extract_over_ranks(
            encoder,
            part.images,
            size=run.config.image_size,
            mean=data.mean,
            std=data.std,
            projector=projector,
            labels=part.labels,
            device=here(),
        )
        if ranks.is_main():
            features.save(made, run, name)
        return made
    return stored


def _merged(parts: Sequence[tuple[Tensor, Features]]) -> Features:
    """Features of several splits, with the numbers of their images in the source, as one, sorted by those numbers."""
    rows = torch.cat([rows if part.index is None else rows[part.index] for rows, part in parts])
    order = rows.argsort()

    def joined(name: str) -> Tensor | None:
        arrays = [getattr(part, name) for _, part in parts]
        return None if any(array is None for array in arrays) else torch.cat(arrays)[order]

    h = joined("h")
    assert h is not None
    return Features(h, joined("z"), joined("y"), rows[order])


def shown_split(data: Dataset) -> str:
    """The images to map and to show: all of the user's own; of a named set its test split, which nothing was fitted
    to."""
    return "all" if data.name.startswith(("folder:", "array:")) else "test"


def images_of(data: Dataset, split: str) -> Images:
    """The images of a split, or all of the user's own, in the order of their files."""
    if split != "all":
        return getattr(data, split).images
    rows = torch.cat([getattr(data, name).images.rows for name in SPLITS])
    return dataclasses.replace(data.train.images, rows=rows.sort().values)


def probe(run: Run, *, source: str = "auto", seeds: Sequence[int] = (0, 1, 2), floors: bool = True) -> dict[str, Any]:
    """Accuracy of every probe and figures of retrieval, and the same for raw pixels and for this run's encoder before
    training."""
    with ranks.ranks(best_device()):
        data = dataset_of(run, source=source)
        if data.train.labels is None or data.test.labels is None:
            raise UserError(
                f"{data.name} has no labels, so that the {', '.join(PROBES)} probes are skipped; "
                f"curvssl map {quote(str(run.path))} needs none: it colours by curvature"
            )
        train, test = (features_of(run, data, split) for split in SPLITS)
        results = probe_features(train, test, seeds=seeds, classes=len(data.classes), keep_in=run)
        if floors:
            results |= floors_of(run, data, seeds=seeds)
        if ranks.is_main():
            run.keep_json("probes.json", results, of=(*ROOTS, PREDICTIONS), by="curvssl probe RUN")
        return results


def floors_of(run: Run, data: Dataset, *, seeds: Sequence[int]) -> dict[str, Any]:
    """The probes' accuracy without pretraining: on raw pixels, and on the features of a random encoder."""
    pixels = (pixels_of(part) for part in (data.train, data.test))
    encoder = run.make_net(channels=max(3, data.train.images.shape[1])).encoder
    shape = {"size": run.config.image_size, "mean": data.mean, "std": data.std, "device": here()}
    random = (extract_over_ranks(encoder, part.images, labels=part.labels, **shape) for part in (data.train, data.test))
    return {
        "raw pixels": probe_features(*pixels, seeds=seeds, classes=len(data.classes)),
        "random encoder": probe_features(*random, seeds=seeds, classes=len(data.classes)),
    }


def pixels_of(part: Split) -> Features:
    """Raw pixels. Images on disk are resized to at most 32×32, because a photograph has 150,000 numbers."""
    if part.images.pixels is not None:
        return Features(h=raw_pixels(part.images.pixels), y=part.labels)
    size = min(PIXELS, *part.images.shape[2:])
    h = torch.cat([resize(batch.float() / 255, size=size).flatten(1) for batch in part.images.split(512)])
    index = part.images.places()
    return Features(h=h[index], y=None if part.labels is None else part.labels[index])


def probe_features(
    train: Features, test: Features, *, seeds: Sequence[int], classes: int, keep_in: Run | None = None
) -> dict[str, Any]:
    """{probe: summary} and {"retrieval": figures}; each rank computes some of them. Predictions for the test images are
    kept in a run, if given."""
    assert train.y is not None
    assert test.y is not None
    data = (train.h, train.y, test.h, test.y)
    jobs: dict[str, Callable[[], Any]] = {
        name: partial(probe, *data, classes=classes, seeds=tuple(seeds)) for name, probe in PROBES.items()
    }
    jobs["retrieval"] = partial(retrieval, *data, classes=classes)
    mine = list(jobs)[rank() :: world_size()]
    results = ranks.from_all({name: jobs[name]() for name in mine})
    merged = {name: part[name] for name in jobs for part in results if name in part}
    figures = merged.pop("retrieval")
    if keep_in is not None and ranks.is_main():
        arrays = {
            f"{name}_{what}": getattr(r, what).numpy()
            for name, r in merged.items()
            for what in ("predictions", "confidence")
        }
        keep_in.keep_arrays(PREDICTIONS, by="curvssl probe RUN", **arrays)
    return {name: summary(result) for name, result in merged.items()} | {"retrieval": figures}


def draw_map(run: Run, *, of: str = "h", split: str = "", source: str = "auto", seed: int = 0) -> Path:
    """Write UMAP of one split's h or z as npz, PNG and PDF to the run directory; returns the PNG's path.

    Without a split: of the images that the page shows. Coloured by label, or by curvature if there are no labels.
    """
    from curvssl.evaluate import maps

    if of == "z":
        run.need_projector()
    data = dataset_of(run, source=source)
    split = split or shown_split(data)
    made = features_of(run, data, split)
    values = made.h if of == "h" else made.z
    assert values is not None
    stem = run.path / f"map-{of}-{split}"
    xy = maps.umap(values, seed=seed)
    maps.save(xy, run, f"{stem.name}.npz", index=made.index)
    which = "all" if split == "all" else f"the {split}"
    title = f"{title_of(run.config.method)} on {data.name}, {of} of {which} images"
    if made.y is None:
        say(f"{data.name} has no labels: the map is coloured by curvature")
        scores = curvature(values, k=min(run.config.k, len(values) - 1))
        png, pdf = maps.draw(xy, values=scores, values_name="curvature, Eq. (6)", title=title, out=stem)
    else:
        png, pdf = maps.draw(xy, labels=made.y, classes=data.classes, title=title, out=stem)
    run.manifest.record([png.name, pdf.name], of=ROOTS, by="curvssl map RUN")
    return png


def quality(run: Run, *, source: str = "auto") -> dict[str, Any]:
    """Every measure without labels of h of the training images, the same before training, and a verdict in words.

    Stored in the run as quality.json.
    """
    data = dataset_of(run, source=source)
    h, views = quality_features(run.load_parts()[0], run, data)
    found = measured(h.to(here()), views.to(here()))
    random = run.make_net(channels=max(3, data.train.images.shape[1])).encoder.eval()
    untrained = measured(*(x.to(here()) for x in quality_features(random, run, data)))
    ends = [agreement(row, d_z=run.config.d_z) for row in run.metrics()[-WINDOW_EPOCHS:]]
    results = {
        "images": len(h),
        "dimensions": h.shape[1],
        "images_and_views": list(views.shape[:2]),
        "measures": {name: value if math.isfinite(value) else None for name, value in found.items()},  # JSON has no NaN
        "untrained": {name: value if math.isfinite(value) else None for name, value in untrained.items()},
        "verdict": verdict(found, untrained, h=h, agreed=statistics.fmean(ends) if ends else math.nan),
    }
    run.keep_json("quality.json", results, by="curvssl quality RUN")
    return results


def quality_features(encoder: nn.Module, run: Run, data: Dataset) -> tuple[Tensor, Tensor]:
    """h of at most QUALITY_IMAGES training images, and of LIDAR_VIEWS augmented views of some: (n, d) and (m, v, d)."""
    images, config = data.train.images, run.config
    shape: dict[str, Any] = {"size": config.image_size, "mean": data.mean, "std": data.std}
    h = extract_over_ranks(encoder, images[sampled(len(images), QUALITY_IMAGES)], device=here(), **shape).h
    augment = Augment(**shape | {"size": config.view_size}, **vars(config.augment)).to(here())
    return h, extract_views(encoder, images[sampled(len(images), LIDAR_IMAGES)], augment, views=LIDAR_VIEWS)


def sampled(n: int, limit: int) -> Tensor:
    """Sorted rows of n: all, or `limit` at random, with a fixed seed."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))[:limit].sort().values


def quality_rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Rows of a table from {name: what `quality` returns}."""
    return [
        [
            row,
            *("–" if (value := result[key][m]) is None else f"{value:.3g}" for m in MEASURES),
            str(result["dimensions"]),
        ]
        for name, result in results.items()
        for row, key in ((name, "measures"), ("  before training", "untrained"))
    ]


def embed(run: Run, images: Path, *, out: Path) -> Features:
    """Write h and z of any folder of images or uint8 array to an npz; for a folder, also the files' paths.

    Each rank computes a share. Files that cannot be read are left out and listed in OUT.bad-images.txt.
    """
    with ranks.ranks(best_device()):
        pixels = images_in(run, images)
        made = make_features(run, pixels)
        if ranks.is_main():
            arrays: dict[str, Any] = {"h": made.h.numpy()} | ({} if made.z is None else {"z": made.z.numpy()})
            if pixels.names is not None:
                arrays["path"] = np.array(pixels[pixels.places()].names)
            write_bad_images(out.with_name(out.name + ".bad-images.txt"), pixels.bad)
            write_atomic(out, lambda file: np.savez(file, **arrays))
        return made


def images_in(run: Run, path: Path) -> Images:
    """All images of a folder or an array, or one image, decoded as those that the run was trained on."""
    known = described(run)
    channels = known["channels"]
    images = open_images(path, canvas=canvas_of(known, size=run.config.image_size), channels=channels)
    if max(3, images.shape[1]) != max(3, channels):
        raise UserError(f"{path} has {images.shape[1]} channels, and {run.path} was trained on {channels}")
    return images


def make_features(run: Run, images: Images) -> Features:
    """h and z of any images by a run's networks; each rank computes a share."""
    (encoder, projector), known = run.load_parts(), described(run)
    shape = {"size": run.config.image_size, "mean": known["mean"], "std": known["std"]}
    return extract_over_ranks(encoder, images, projector=projector, device=here(), **shape)


def described(run: Run) -> dict[str, Any]:
    """What a run recorded of its data; the data are needed only for a run that recorded nothing."""
    return run.read_json("data.json") or describe(dataset_of(run))


def compare(runs: Iterable[Run]) -> list[list[str]]:
    """One row per group of runs that differ only in their seed: mean ± standard deviation of every probe and of every
    figure of retrieval."""
    groups: dict[str, dict[int, Run]] = {}
    for run in runs:
        first = groups.setdefault(all_but_the_seed(run.config.to_dict()), {}).setdefault(run.config.seed, run)
        if first is not run:  # the same run, a copy of it, or its exported encoder
            say(f"{run.path} has the settings and the seed of {first.path}, and does not count again")
    rows = []
    for members in (list(by_seed.values()) for by_seed in groups.values()):
        config = members[0].config
        probed = [run.read_json("probes.json") for run in members]
        missing = [str(run.path) for run, probes in zip(members, probed, strict=True) if not probes]
        if missing:
            raise UserError(f"not probed yet: {', '.join(missing)}; run curvssl probe on them first")
        measured = ([values_of(probes, column) for probes in probed] for column in COLUMNS)
        cells = [spread([statistics.fmean(values) for values in each if values]) for each in measured]
        rows.append([config.dataset, title_of(config.method), str(len(members)), *cells])
    return rows


def spread(values: Sequence[float]) -> str:
    """mean ± standard deviation (n − 1); for one value, that value; for none, a dash."""
    if not values:
        return "–"  # probed before this probe existed
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def probe_rows(results: dict[str, dict[str, Any]], *, columns: Sequence[str] = COLUMNS) -> list[list[str]]:
    """Rows of a table from {name: what `probe_features` returns}."""
    return [[name, *(spread(values_of(probes, column)) for column in columns)] for name, probes in results.items()]


def values_of(probes: dict[str, Any], column: str) -> list[float]:
    """A probe's accuracy for each seed, or one figure of retrieval; none if it was not measured yet."""
    if column in PROBES:
        return probes.get(column, {}).get("accuracy", [])
    return [probes["retrieval"][column]] if "retrieval" in probes else []


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain-text table, the first column aligned left and the others right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return "\n".join([text[0], "─" * len(text[0]), *text[1:]])


def here() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
