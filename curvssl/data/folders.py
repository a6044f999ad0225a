"""The user's own images: a folder of files, or one uint8 array; as a `Dataset` whose pixels stay on disk until needed.

Labels are used by probes alone. A folder has labels if every image lies in ROOT/CLASS/, in two classes or more; any
other layout has none. A tenth of the images, drawn once and for all, is the test split and is never pretrained on.
"""

import dataclasses
import hashlib
import os
import random
from array import array as packed
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvssl.config import UserError
from curvssl.data.arrays import ArrayImages, open_array
from curvssl.data.decode import SUFFIXES, decode, header, is_image, why
from curvssl.data.named import Dataset, Split
from curvssl.data.stream import Bad, blank, check_share, in_batches, own_cores, stream
from curvssl.files import say, write_bytes

CANVAS = 1.15  # times the image size: the side of the squares that files are decoded to
SAMPLE = 1000  # images that decide the canvas, the channels, mean and standard deviation
TEST_SHARE = 10  # one in so many
ATTEMPTS = 100  # files tried in place of one that cannot be read


# ---- a folder


@dataclass(frozen=True)
class Names:
    """File names in one block of bytes. A million take about 60 MB, and forked workers share them, where the reference
    counts of a million strings would copy them to every worker."""

    block: bytes
    ends: np.ndarray  # int64 (n,)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        return os.fsdecode(self.block[self.ends[i - 1] if i else 0 : self.ends[i]])

    def sha256(self) -> str:
        return hashlib.sha256(self.block + self.ends.tobytes()).hexdigest()


@dataclass(frozen=True)
class FolderImages:
    """Files that are decoded when they are read; see `Source`."""

    root: str
    names: Names  # of all files, relative to the root
    rows: Tensor  # int64 (N,): which of them these are
    channels: int
    canvas: int
    bad: Bad = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.rows), self.channels, self.canvas, self.canvas

    @property
    def files(self) -> int:
        return len(self.names)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Tensor | slice) -> "FolderImages":
        return dataclasses.replace(self, rows=self.rows[rows])

    def read(self, rows: list[int], *, stand_ins: bool) -> tuple[Tensor, Bad]:
        read = blank((len(rows), *self.shape[1:]))
        pixels = read.numpy()
        bad: Bad = {}
        for i, row in enumerate(rows):
            first = int(self.rows[row])
            for file in self._in_place_of(first) if stand_ins else (first,):
                if file in bad or file in self.bad:
                    continue
                try:
                    pixels[i] = decode(self.path(file), canvas=self.canvas, channels=self.channels)
                    break
                except Exception as error:  # a damaged file can raise nearly anything
                    bad[file] = f"{self.names[file]}: {why(error)}"
        return read, bad

    def split(self, size: int) -> Iterator[Tensor]:
        return in_batches(self, size)

    def places(self) -> Tensor:
        return (~torch.isin(self.rows, torch.tensor(sorted(self.bad), dtype=torch.int64))).nonzero()[:, 0]

    def here(self) -> str:
        sample = _spread(len(self.names)).tolist()
        return f"{sum(os.path.exists(self.path(file)) for file in sample):,} of {len(sample):,} files looked for"

    def path(self, file: int) -> str:
        return os.path.join(self.root, self.names[file])

    def _in_place_of(self, file: int) -> Iterator[int]:
        """The file, then others of this part at random; the same ones on every rank and in every epoch."""
        yield file
        drawn = random.Random(file)
        for _ in range(ATTEMPTS):
            yield int(self.rows[drawn.randrange(len(self.rows))])


def folder(path: str, *, size: int) -> Dataset:
    """The images below a folder, for views of `size` pixels."""
    root = Path(path).expanduser()
    names = list_images(root)
    if len(names) < 2:
        raise UserError(f"{root} holds one image: pretraining compares images, so give it a folder of many")
    images = framed(root, names, size=size)
    classes, labels = classes_of(names)
    return _dataset(f"folder:{path}", images, labels, classes, {"listing": names.sha256()})


def list_images(root: Path) -> Names:
    """The image files below `root` in order of their names; hidden files and folders are left out."""
    if not root.is_dir():
        what = "is a file: use array: for .npy and .npz" if root.exists() else "does not exist"
        raise UserError(f"the folder {root} {what}")
    block, ends = bytearray(), packed("q")
    for name in _walk(str(root), "", ()):
        block += os.fsencode(name)
        ends.append(len(block))
    if not ends:
        raise UserError(f"{root} holds no image; files count by their suffix: {' '.join(SUFFIXES)}")
    return Names(bytes(block), np.array(ends, dtype=np.int64))


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    try:
        there = os.stat(folder)
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"cannot list {folder} ({error.strerror}): mend its permissions") from error
    if (there.st_dev, there.st_ino) in above:
        return  # a link back to a folder that we are in
    for entry in found:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry.path, f"{prefix}{entry.name}/", (*above, (there.st_dev, there.st_ino)))
        elif is_image(entry.name):
            yield prefix + entry.name


def classes_of(names: Names) -> tuple[tuple[str, ...], Tensor | None]:
    """The class names and labels (n,) of ROOT/CLASS/IMAGE, or nothing for any other layout."""
    found: dict[str, int] = {}
    labels = packed("q")
    for i in range(len(names)):
        parts = names[i].split("/")
        if len(parts) != 2:
            return (), None
        labels.append(found.setdefault(parts[0], len(found)))
    return (tuple(found), torch.tensor(labels)) if len(found) > 1 else ((), None)


def framed(root: Path, names: Names, *, size: int) -> FolderImages:
    """All files, with the channels and the canvas that a sample of them asks for.

    One channel if all are grey. The canvas is a little larger than the views, but no larger than the median image:
    small images are left as they are.
    """
    images = FolderImages(str(root), names, torch.arange(len(names)), channels=3, canvas=round(CANVAS * size))
    sides, greys = [], []
    sample = _spread(len(names)).tolist()
    for file in sample:
        try:
            side, grey = header(images.path(file))
            sides.append(side)
            greys.append(grey)
        except Exception as error:  # a damaged file can raise nearly anything
            images.bad[file] = f"{names[file]}: {why(error)}"
    if images.bad:
        check_share(len(images.bad), len(sample), example=next(iter(images.bad.values())))
    return dataclasses.replace(
        images, channels=1 if all(greys) else 3, canvas=min(images.canvas, int(np.median(sides)))
    )


def array(path: str, *, size: int) -> Dataset:
    """The images of a .npy or .npz file, whatever the size of the views."""
    file = Path(path).expanduser()
    pixels, labels, classes = open_array(file)
    if len(pixels) < 2:
        raise UserError(f"{path} holds {len(pixels)} images: pretraining compares images, so give it many")
    images = ArrayImages(file, pixels, torch.arange(len(pixels)))
    return _dataset(f"array:{path}", images, labels, classes, {})


# ---- what both share


def canvas_of(known: dict[str, Any], *, size: int) -> int:
    """The canvas of a run's own folder (`data.describe`), or of any other folder for a run on other data."""
    return known["height"] if known["name"].startswith("folder:") else round(CANVAS * size)


def write_bad_images(path: Path, bad: Bad) -> None:
    """One line a file: its name and what is wrong with it. No file if there is nothing to say."""
    if bad:
        write_bytes(path, "".join(f"{bad[file]}\n" for file in sorted(bad)).encode(errors="surrogateescape"))


def open_images(path: Path, *, canvas: int, channels: int) -> FolderImages | ArrayImages:
    """All images of a folder or an array file, in order; files are decoded to this canvas and 1 or 3 channels."""
    if path.is_dir():
        names = list_images(path)
        return FolderImages(str(path), names, torch.arange(len(names)), 1 if channels == 1 else 3, canvas)
    pixels, _, _ = open_array(path)
    return ArrayImages(path, pixels, torch.arange(len(pixels)))


def _dataset(
    name: str,
    images: FolderImages | ArrayImages,
    labels: Tensor | None,
    classes: tuple[str, ...],
    sha256: dict[str, str],
) -> Dataset:
    fit, held = held_out(len(images))
    train, test = (Split(images[rows], None if labels is None else labels[rows]) for rows in (fit, held))
    mean, std, digest = statistics(images[fit])
    known = f"{len(classes)} classes" if classes else "no labels, so the kNN monitor and the probes are skipped"
    size = "×".join(map(str, images.shape[1:]))
    say(f"{name}: {len(fit):,} images of {size} to pretrain on, {len(held):,} held out as its test split; {known}")
    return Dataset(name, train, test, classes, mean, std, sha256 | {"sample": digest})


def held_out(n: int) -> tuple[Tensor, Tensor]:
    """Row numbers of the train and the test split; the same for the same n, whatever the seed of a run."""
    order = torch.from_numpy(np.random.RandomState(0).permutation(n))
    held = max(1, n // TEST_SHARE)
    return order[held:].sort().values, order[:held].sort().values


def statistics(images: FolderImages | ArrayImages) -> tuple[tuple[float, ...], tuple[float, ...], str]:
    """Mean and standard deviation per channel of a sample, on the scale 0..1, and the SHA-256 of its pixels."""
    sample = _spread(len(images))
    counts = torch.zeros(images.shape[1], 256, dtype=torch.float64)
    digest = hashlib.sha256(str(images.shape).encode())
    for batch in stream(images, sample.split(32), workers=min(own_cores(), len(sample) // 128)):
        counts += torch.stack([torch.bincount(c.reshape(-1), minlength=256) for c in batch.unbind(1)])
        digest.update(batch.numpy().tobytes())
    if images.bad:
        check_share(len(images.bad), len(sample), example=next(iter(images.bad.values())))
    share, values = counts / counts.sum(1, keepdim=True), torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    std = (share * (values - mean[:, None]).square()).sum(1).sqrt()
    # A channel that never changes would otherwise be divided by zero.
    return tuple(mean.tolist()), tuple(std.clamp_min(1 / 255).tolist()), digest.hexdigest()


def _spread(n: int) -> Tensor:
    """At most SAMPLE of 0 … n − 1, evenly spaced."""
    return torch.arange(n) if n <= SAMPLE else torch.arange(SAMPLE) * n // SAMPLE
