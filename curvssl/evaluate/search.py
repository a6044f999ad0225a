"""Find images like a given one: those whose features h have the greatest cosine similarity.

A collection is the run's own data, or any other folder or array. Its features are computed once and kept in the run.
"""

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvssl import ranks
from curvssl.collectives import world_size
from curvssl.config import UserError
from curvssl.data.arrays import ArrayImages
from curvssl.data.decode import decode, is_image
from curvssl.data.folders import FolderImages, canvas_of, states
from curvssl.data.images import DecodedImages, Images, TensorImages, Unreadable, why
from curvssl.data.named import PREFIXES
from curvssl.evaluate import features
from curvssl.evaluate.features import Features
from curvssl.evaluate.runs import (
    SPLITS,
    Changed,
    best_device,
    dataset_of,
    described,
    features_of,
    here,
    images_in,
    make_features,
)
from curvssl.files import say
from curvssl.models import full_precision
from curvssl.rundir import Run

QUERIES, ROWS = 1024, 16_384  # compared at a time: 64 MB of similarities, however large the collection is
# Comparisons up to which the search is exact. A query among a million images is far below; each of 100,000 images with
# every other is just that, and takes minutes on a CPU. Beyond, an index pays for the time it takes to build.
EXACT = 10**10
PROBED = 64  # lists of the index that are searched for each query


# ---- the nearest


def nearest(queries: Tensor, rows: Tensor, *, k: int, others: bool = False) -> tuple[Tensor, Tensor]:
    """The k rows of (n, d) with the greatest cosine similarity to each query (q, d): similarities and rows, (q, k).

    With `others` the queries are the rows themselves, and none is its own neighbour. Exact up to EXACT comparisons;
    beyond that faiss finds nearly all of them on a CPU, if it is installed.
    """
    if by_index(len(queries), len(rows)):
        return approximate(queries, rows, k=k, others=others)
    return exact(queries, rows, k=k, others=others)


def by_index(queries: int, rows: int) -> bool:
    """Whether so many comparisons are left to an index."""
    return queries * rows > EXACT and not torch.cuda.is_available() and find_spec("faiss") is not None


@torch.no_grad()
def exact(queries: Tensor, rows: Tensor, *, k: int, others: bool = False) -> tuple[Tensor, Tensor]:
    """`nearest` by comparing everything, a block at a time: no matrix (q, n) is made."""
    k = min(k, len(rows) - others)
    similarities, places = [], []
    with full_precision():
        for first in range(0, len(queries), QUERIES):
            query = F.normalize(queries[first : first + QUERIES].to(here()), dim=1)
            best, where = query.new_empty(len(query), 0), torch.empty(len(query), 0, dtype=torch.int64).to(here())
            for start in range(0, len(rows), ROWS):
                s = query @ F.normalize(rows[start : start + ROWS].to(here()), dim=1).T
                if others:
                    own = torch.arange(first, first + len(query))
                    mine = (own >= start) & (own < start + s.shape[1])
                    s[mine.nonzero()[:, 0], own[mine] - start] = -math.inf
                s, place = s.topk(min(k, s.shape[1]), dim=1)
                best, order = torch.cat((best, s), dim=1).sort(dim=1, descending=True, stable=True)
                where = torch.cat((where, place + start), dim=1).gather(1, order)[:, :k]
                best = best[:, :k]
            similarities.append(best.cpu())
            places.append(where.cpu())
    return torch.cat(similarities).clamp(-1, 1), torch.cat(places)


def approximate(queries: Tensor, rows: Tensor, *, k: int, others: bool = False) -> tuple[Tensor, Tensor]:
    """`nearest` with faiss: the rows lie in 4√n lists around centres, and a query looks into the nearest PROBED lists.

    Of a place for which no row was found, the similarity is −1.
    """
    import faiss

    k, lists = min(k, len(rows) - others), min(round(4 * math.sqrt(len(rows))), -(-len(rows) // 40))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(rows.shape[1]), rows.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.spherical, index.nprobe = True, min(PROBED, lists)
    sample = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: 64 * lists]
    index.train(F.normalize(rows[sample], dim=1).numpy())
    for part in rows.split(ROWS):
        index.add(F.normalize(part, dim=1).numpy())
    similarities, places = [], []
    for first in range(0, len(queries), QUERIES):
        asked = F.normalize(queries[first : first + QUERIES], dim=1)
        s, place = map(torch.from_numpy, index.search(asked.numpy(), k + others))
        if others:  # the row itself goes to the end, and is cut off
            own = place == torch.arange(first, first + len(place))[:, None]
            order = own.int().sort(dim=1, stable=True).indices
            s, place = (found.gather(1, order)[:, :k] for found in (s, place))
        similarities.append(torch.where(place < 0, -1.0, s))
        places.append(place.clamp_min(0))
    return torch.cat(similarities).clamp(-1, 1), torch.cat(places)


# ---- a collection of images


@dataclass(frozen=True)
class Collection:
    """Images and their features, row by row. Unreadable images have no row."""

    name: str  # of a data set, or the path of a folder or an array
    h: Tensor  # (n, d)
    parts: tuple[tuple[str, Images], ...]  # what their row numbers begin with, and the images
    unreadable: dict[str, str]  # name → the error

    def __post_init__(self) -> None:
        if not self.h.isfinite().all():
            raise UserError(f"the features of {self.name} hold NaN or infinity: the encoder diverged")

    def __len__(self) -> int:
        return len(self.h)

    def names(self, rows: Sequence[int]) -> list[str]:
        """Paths below the folder, or else row numbers in the array or in the split."""
        names = [""] * len(rows)
        for places, prefix, images, mine in self._parts_of(rows):
            known = images[mine].names or [f"{prefix}{row}" for row in images.rows[mine].tolist()]
            for place, name in zip(places.tolist(), known, strict=True):
                names[place] = name
        return names

    def pixels(self, rows: Sequence[int], *, side: int | None = None) -> Tensor:
        """uint8 (b, C, H, W), as the encoder got them; with `side`, files are decoded to so many pixels."""
        pixels: list[Tensor] = []
        order: list[Tensor] = []
        for places, _, images, mine in self._parts_of(rows):
            if side is not None and isinstance(images, DecodedImages):
                images = dataclasses.replace(images, canvas=side)
            pixels += images[mine].split(512)
            order.append(places)
        return torch.cat(pixels)[torch.cat(order).argsort()]

    def _parts_of(self, rows: Sequence[int]) -> Iterator[tuple[Tensor, str, Images, Tensor]]:
        """For each part that has any of the rows: their places among these, the part, and their places in it."""
        asked, first = torch.tensor(rows, dtype=torch.int64), 0
        for prefix, images in self.parts:
            places = ((asked >= first) & (asked < first + len(images))).nonzero()[:, 0]
            if len(places):
                yield places, prefix, images, asked[places] - first
            first += len(images)


def collection_of(run: Run, where: Path | None = None, *, source: str = "auto") -> Collection:
    """The images of a run's own data, training and test split, or those of another folder or array."""
    with ranks.ranks(best_device()):
        if where is not None:
            return _other(run, where)
        try:
            return _own(run, source=source)
        except (Changed, Unreadable) as reason:
            kind, _, path = run.config.dataset.partition(":")
            # Only rank 0 lists a folder, so that only it would know that too many files of it are unreadable.
            if kind not in PREFIXES or (isinstance(reason, Unreadable) and world_size() > 1):
                raise
            say(f"{run.config.dataset} has changed since {run.path} was trained: taking it as it is now")
            return _other(run, Path(path).expanduser())


def _own(run: Run, *, source: str) -> Collection:
    data = dataset_of(run, source=source)
    h, parts, unreadable = [], [], dict[str, str]()
    for split in SPLITS:
        made, images = features_of(run, data, split), getattr(data, split).images
        h.append(made.h)
        parts.append((f"{split} ", _readable(images, made)))
        unreadable |= _unreadable(images, made)
    if data.name.partition(":")[0] not in PREFIXES:
        return Collection(data.name, torch.cat(h), tuple(parts), unreadable)
    # Both splits are rows of one source: put them back in its order.
    rows = torch.cat([images.rows for _, images in parts])
    order = rows.argsort()
    images = dataclasses.replace(parts[0][1], rows=rows[order])
    return Collection(data.name, torch.cat(h)[order], (("row ", images),), unreadable)


def _other(run: Run, where: Path) -> Collection:
    # Which files are unreadable is part of the answer, however many there are.
    images = dataclasses.replace(images_in(run, where), bearable=1.0)
    place = hashlib.sha256(os.fsencode(where.resolve())).hexdigest()[:12]
    name = f"features-in-{place}-{_state(images)[:12]}.npz"
    made = ranks.from_main(features.load(run, name) if ranks.is_main() else None)
    if made is None:
        made = dataclasses.replace(make_features(run, images), z=None)
        if ranks.is_main():
            old = [*run.path.glob(f"features-in-{place}-*.npz")] if run.writable else []
            for file in old:
                file.unlink()
            if old:
                run.manifest.forget(*(file.name for file in old))
            features.save(made, run, name, by="curvssl search RUN IMAGE --in FOLDER")
    parts = (("row ", _readable(images, made)),)
    return Collection(str(where), made.h, parts, _unreadable(images, made))


def _state(images: Images) -> str:
    """A digest that changes with any of the files: names, sizes and dates."""
    if isinstance(images, FolderImages):
        found = [images.files.sha256(), *states(images).values()]
    else:
        assert isinstance(images, ArrayImages)
        state = os.stat(images.path)
        found = [str(state.st_size), str(state.st_mtime_ns)]
    return hashlib.sha256(" ".join(found).encode()).hexdigest()


def _readable(images: Images, made: Features) -> Images:
    return images if made.index is None else images[made.index]


def _unreadable(images: Images, made: Features) -> dict[str, str]:
    """The names of the images without features, and why they have none: they are read once more to know."""
    if made.index is None:
        return {}
    left = torch.ones(len(images), dtype=torch.bool)
    left[made.index] = False
    rest = dataclasses.replace(images[left], bad={})
    names = rest.names or [str(row) for row in rest.rows.tolist()]
    _, bad = rest.read(list(range(len(rest))), stand_ins=False)
    errors = (bad.get(row, "it can be read now") for row in rest.rows.tolist())
    return {name: error.removeprefix(f"{name}: ") for name, error in zip(names, errors, strict=True)}


# ---- the search


def search(
    run: Run, images: Sequence[Path], *, where: Path | None = None, k: int = 10, source: str = "auto"
) -> tuple[dict[str, Any], Collection]:
    """The k images of a collection that are most like each of these files, as plain data; also the collection, to
    whose rows the numbers point.

    `same` marks an image that has the very pixels of the query: the file itself, or a copy.
    """
    pixels = query_pixels(run, images)
    collection = collection_of(run, where, source=source)
    if len(collection) == 0:
        first = next(iter(collection.unreadable.items()))
        raise UserError(f"no image of {collection.name} can be read ({': '.join(first)}): give another folder as --in")
    h = make_features(run, TensorImages.of(pixels)).h
    similarities, rows = nearest(h, collection.h, k=k)
    queries = []
    for image, mine, s, found in zip(images, pixels, similarities.tolist(), rows.tolist(), strict=True):
        seen = collection.pixels(found)
        same = [bool(seen.shape[1:] == mine.shape and (one == mine).all()) for one in seen]
        columns = zip(found, collection.names(found), s, same, strict=True)
        entries = [dict(zip(("row", "name", "similarity", "same"), entry, strict=True)) for entry in columns]
        queries.append({"image": str(image), "found": entries})
    result = {"run": str(run.path), "collection": collection.name, "images": len(collection), "queries": queries}
    return result, collection


def query_pixels(run: Run, images: Sequence[Path], *, side: int | None = None) -> Tensor:
    """The files, decoded as those of the run's folder or to so many pixels, uint8 (q, C, S, S)."""
    known = described(run)
    channels, canvas = known["channels"], side or canvas_of(known, size=run.config.image_size)
    if channels not in (1, 3):
        raise UserError(f"{run.path} was trained on {channels} channels, and an image file has 1 or 3")
    pixels = []
    for image in images:
        if not image.exists():
            raise UserError(f"{image} does not exist: give an image to look for")
        if image.is_dir() or not is_image(image.name):
            raise UserError(f"{image} is no image file: give images to look for, and the folder to search as --in")
        try:
            pixels.append(torch.from_numpy(decode(str(image), canvas=canvas, channels=channels).copy()))
        except Exception as error:  # a damaged file can raise almost any error
            raise UserError(f"{image} cannot be read ({why(error)}): give another image") from None
    return torch.stack(pixels)
