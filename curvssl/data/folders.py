"""The user's own images, a folder of files or one uint8 array, as a `Dataset` whose pixels stay on disk until needed.

Only probes use the labels. A folder has labels if every image lies in ROOT/CLASS/ and there are two or more classes;
any other layout has none. A tenth of the images, always the same, is the test split and is never pretrained on.
"""

import dataclasses
import hashlib
import os
from array import array as packed
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvssl.config import UserError
from curvssl.data.arrays import ArrayImages, Names, open_array
from curvssl.data.decode import SUFFIXES, decode, header, is_image
from curvssl.data.images import Bad, DecodedImages, Images, check_share, own_cores, why
from curvssl.data.named import TIMES, Dataset, Split, moments
from curvssl.data.order import test_split
from curvssl.files import printable, say, write_bytes

# Times the image size: the side of the squares that files are decoded to. Less cost accuracy, more brought nothing
# (docs/scaling.md).
CANVAS = 1.6
LARGEST = {"cuda": 224, "cpu": 64}  # views that nobody chose a size for: the usual one, or a twelfth of its pixels
FORMS = "give a folder of images, one image, or an array (.npy, .npz)"
SAMPLE = 1000  # images from which canvas, channels, mean and standard deviation are computed


# ---- a folder


@dataclass(frozen=True)
class FolderImages(DecodedImages):
    """Files that are decoded when they are read."""

    root: str
    files: Names  # of all files, relative to the root

    @property
    def source_size(self) -> int:
        return len(self.files)

    @property
    def names(self) -> list[str]:
        return [self.files[file] for file in self.rows.tolist()]

    def name(self, image: int) -> str:
        return self.files[image]

    def decode(self, image: int) -> np.ndarray:
        return decode(self.path(image), canvas=self.canvas, channels=self.channels)

    def here(self) -> str:
        sample = spread(len(self.files)).tolist()
        return f"{sum(os.path.exists(self.path(file)) for file in sample):,} of {len(sample):,} files looked for"

    def path(self, file: int) -> str:
        return os.path.join(self.root, self.files[file])


def folder(path: str, *, size: int) -> Dataset:
    """The images in a folder and its subfolders, for views of `size` pixels."""
    root = Path(path).expanduser()
    names = list_images(root)
    if len(names) < 2:
        raise UserError(f"{root} holds one image: pretraining compares images, so give it a folder of many")
    images = framed(root, names, size=size)
    classes, labels = classes_of(names)
    return _dataset(f"folder:{path}", images, labels, classes, {"listing": names.sha256(), **states(images)})


def states(images: FolderImages) -> dict[str, str]:
    """Digests of the sizes of all files, and of when they were last written to: a look at each, without reading it."""
    found = np.full((2, len(images.files)), -1, dtype=np.int64)
    for i in range(len(images.files)):
        with suppress(OSError):  # it will be listed as unreadable
            state = os.stat(images.path(i))
            found[:, i] = state.st_size, state.st_mtime_ns
    return {name: hashlib.sha256(row.tobytes()).hexdigest() for name, row in zip(("sizes", TIMES), found, strict=True)}


def list_images(root: Path) -> Names:
    """The image files under `root`, sorted by name; hidden files and folders are left out."""
    if not root.is_dir():
        what = "is a file: use array: for .npy and .npz" if root.exists() else "does not exist"
        raise UserError(f"the folder {root} {what}")
    block, ends = bytearray(), packed("q")
    for name in _walk(str(root)):
        block += os.fsencode(name)
        ends.append(len(block))
    if not ends:
        raise UserError(f"{root} holds no image; files count by their suffix: {' '.join(SUFFIXES)}")
    return Names(bytes(block), np.array(ends, dtype=np.int64))


def _walk(root: str) -> Iterator[str]:
    """Names of the image files below the root; in each folder, files and folders are in the order of their names.

    Every folder is listed once, however folders are linked to each other: a link to a folder below the root is left
    out, because that folder is listed where it lies, and of several links to another folder the first is followed.
    """
    top = os.path.realpath(root)
    seen = {top}
    levels = [("", top, _entries(root))]  # no recursion: folders may be nested deeper than Python's calls
    while levels:
        prefix, real, entries = levels[-1]
        entry = next(entries, None)
        if entry is None:
            levels.pop()
        elif entry.name.startswith("."):
            continue
        elif _is_folder(entry):
            there = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real, entry.name)
            if there not in seen and not (entry.is_symlink() and _is_listed(there, top)):
                seen.add(there)
                levels.append((f"{prefix}{entry.name}/", there, _entries(entry.path)))
        elif is_image(entry.name):
            yield prefix + entry.name


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return iter(sorted(entries, key=lambda entry: entry.name))
    except OSError as error:
        raise UserError(f"cannot list {folder} ({error.strerror}): mend or remove it") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder that may not be entered
        return False


def _is_listed(folder: str, top: str) -> bool:
    """Whether a folder lies below the top, and not in a hidden folder."""
    below = os.path.join(top, "")
    return folder.startswith(below) and "/." not in folder[len(below) - 1 :]


def classes_of(names: Names) -> tuple[tuple[str, ...], Tensor | None]:
    """Class names and labels (n,) of the layout ROOT/CLASS/IMAGE, or ((), None) for any other layout."""
    class_ids: dict[str, int] = {}
    labels = packed("q")
    for i in range(len(names)):
        parts = names[i].split("/")
        if len(parts) != 2:
            return (), None
        labels.append(class_ids.setdefault(parts[0], len(class_ids)))
    return (tuple(class_ids), torch.tensor(labels)) if len(class_ids) > 1 else ((), None)


def framed(root: Path, names: Names, *, size: int) -> FolderImages:
    """All files, with the number of channels and the canvas chosen from a sample.

    One channel if all are grey. The canvas is larger than the views, but no larger than the median image:
    small images are not enlarged.
    """
    images = FolderImages(torch.arange(len(names)), 3, round(CANVAS * size), str(root), names)
    sides, greys = [], []
    sample = spread(len(names)).tolist()
    for file in sample:
        try:
            side, grey = header(images.path(file))
            sides.append(side)
            greys.append(grey)
        except Exception as error:  # a damaged file can raise almost any error
            images.bad[file] = f"{names[file]}: {why(error)}"
    if images.bad:
        check_share(len(images.bad), len(sample), example=next(iter(images.bad.values())))
    return dataclasses.replace(
        images, channels=1 if all(greys) else 3, canvas=min(images.canvas, int(np.median(sides)))
    )


def array(path: str, *, size: int) -> Dataset:
    """The images of a .npy or .npz file; `size` is ignored."""
    file = Path(path).expanduser()
    opened = open_array(file)
    if len(opened.pixels) < 2:
        raise UserError(f"{path} holds {len(opened.pixels)} images: pretraining compares images, so give it many")
    return _dataset(f"array:{path}", ArrayImages.of(opened), opened.labels, opened.classes, opened.described())


# ---- for folders and arrays


def suiting_size(side: int, *, device: str) -> int:
    """The size of views of images with this side, if nobody chose one: the nearest multiple of 32, by which networks
    divide it, but at most LARGEST."""
    return min(LARGEST[device], 32 * max(1, round(side / 32)))


def canvas_of(known: dict[str, Any], *, size: int) -> int:
    """The canvas from a run's data.json (`describe`), if it was trained on a folder; otherwise one from `size`."""
    return known["height"] if known["name"].startswith("folder:") else round(CANVAS * size)


def write_bad_images(path: Path, bad: Bad) -> None:
    """Write one line per bad file: its name, in its own bytes, and the error. If there is none, there is no file."""
    if bad:
        write_bytes(path, bad_lines(bad))
    else:
        path.unlink(missing_ok=True)


def bad_lines(bad: Bad) -> bytes:
    return "".join(f"{printable(bad[file])}\n" for file in sorted(bad)).encode(errors="surrogateescape")


def one_name(name: str) -> Names:
    block = os.fsencode(name)
    return Names(block, np.array([len(block)], dtype=np.int64))


def open_images(path: Path, *, canvas: int, channels: int) -> Images:
    """All images of a folder or an array file, in order, or one image file. Files are decoded to this canvas and to 1
    or 3 channels."""
    if not path.exists():
        raise UserError(f"{path} does not exist: {FORMS}")
    if path.is_dir() or is_image(path.name):
        folder, names = (path, list_images(path)) if path.is_dir() else (path.parent, one_name(path.name))
        return FolderImages(torch.arange(len(names)), 1 if channels == 1 else 3, canvas, str(folder), names)
    if path.suffix.lower() not in (".npy", ".npz"):
        raise UserError(f"{path} is no image and no array: {FORMS}")
    return ArrayImages.of(open_array(path))


def _dataset(
    name: str, images: Images, labels: Tensor | None, classes: tuple[str, ...], sha256: dict[str, str]
) -> Dataset:
    fit, held = test_split(len(images))
    train, test = (Split(images[rows], None if labels is None else labels[rows]) for rows in (fit, held))
    mean, std, digest = statistics(images[fit])
    known = f"{len(classes)} classes" if classes else "no labels"
    size = "×".join(map(str, images.shape[1:]))
    say(f"{name}: {len(fit):,} images of {size} to pretrain on, {len(held):,} held out as its test split; {known}")
    return Dataset(name, train, test, classes, mean, std, sha256 | {"sample": digest})


def statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...], str]:
    """Mean and standard deviation per channel of a sample, for pixels in 0..1, and the SHA-256 of its pixels."""
    sample = spread(len(images))
    counts = torch.zeros(images.shape[1], 256, dtype=torch.float64)
    digest = hashlib.sha256(str(images.shape).encode())
    for batch in images.batches(sample.split(32), workers=min(own_cores(), len(sample) // 128)):
        counts += torch.stack([torch.bincount(c.reshape(-1), minlength=256) for c in batch.unbind(1)])
        digest.update(batch.numpy().tobytes())
    if images.bad:
        check_share(len(images.bad), len(sample), example=next(iter(images.bad.values())))
    mean, std = moments(counts)
    # A constant channel would otherwise be divided by zero.
    return mean, tuple(max(value, 1 / 255) for value in std), digest.hexdigest()


def spread(n: int) -> Tensor:
    """At most SAMPLE of 0 … n − 1, evenly spaced."""
    return torch.arange(n) if n <= SAMPLE else torch.arange(SAMPLE) * n // SAMPLE
