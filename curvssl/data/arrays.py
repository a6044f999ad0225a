"""Read one uint8 array on disk, .npy or .npz, as images (N, C, H, W) and labels."""

import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from curvssl.config import UserError
from curvssl.data.images import Bad, Images, blank, why
from curvssl.data.memory import free_memory
from curvssl.files import check_regular
from curvssl.manifest import Manifest

SAVE = "give a file of numpy.save or savez"
PACKING = "curvssl pack FOLDER RUN"  # RUN is the pack
PACK_AGAIN = "pack the folder again, with curvssl pack"
WHOLE = 2**30  # a plain array up to this size is read in full to know it again: about a second
CLASSES = 1_000_000  # labels without names may be below this


@dataclass(frozen=True)
class Names:
    """File names in one block of bytes. A million take about 60 MB, and forked workers share them. A list of strings
    would be copied to every worker, because reading a string changes its reference count."""

    block: bytes
    ends: np.ndarray  # int64 (n,)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        return os.fsdecode(self.block[self.ends[i - 1] if i else 0 : self.ends[i]])

    def sha256(self) -> str:
        return hashlib.sha256(self.block + self.ends.tobytes()).hexdigest()


@dataclass(frozen=True)
class Opened:
    """One array file. A pack also knows the files' names and a checksum of each image."""

    path: Path
    pixels: np.ndarray  # uint8 (n, C, H, W), a view of the file
    labels: Tensor | None  # int64 (n,)
    classes: tuple[str, ...]
    files: Names | None = None
    crc32: np.ndarray | None = None  # uint32 (n,), of the bytes of each image
    sha256: str = ""  # of what lies next to a pack: labels, names, checksums

    def described(self) -> dict[str, str]:
        """Digests that tell whether this is still the same array. Of a plain one with more than WHOLE bytes not all
        pixels are read, but when the file was last written to."""
        if self.sha256:
            return {"pack": self.sha256}
        labels = b"" if self.labels is None else self.labels.numpy().tobytes()
        found = {"labels": hashlib.sha256(repr(self.classes).encode() + labels).hexdigest()}
        if self.pixels.nbytes <= WHOLE:
            return found | {"pixels": hashlib.sha256(np.ascontiguousarray(self.pixels).data).hexdigest()}
        state = self.path.stat()
        return found | {"bytes": str(state.st_size), "times": str(state.st_mtime_ns)}


@dataclass(frozen=True)
class ArrayImages(Images):
    """Rows of one array, which may be memory-mapped."""

    path: Path
    array: np.ndarray  # uint8 (n, C, H, W), a view of the file
    files: Names | None = None
    crc32: np.ndarray | None = None

    @classmethod
    def of(cls, opened: Opened) -> Self:
        return cls(torch.arange(len(opened.pixels)), opened.path, opened.pixels, opened.files, opened.crc32)

    @property
    def names(self) -> list[str] | None:
        return None if self.files is None else [self.files[row] for row in self.rows.tolist()]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (len(self.rows), *self.array.shape[1:])

    @property
    def source_size(self) -> int:
        return len(self.array)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.path, self.rows)  # other processes get the path, not the pixels

    def read(self, rows: list[int], *, stand_ins: bool) -> tuple[Tensor, Bad]:
        read = blank((len(rows), *self.shape[1:]))
        for pixels, row in zip(read.numpy(), self.rows[rows].tolist(), strict=True):
            pixels[:] = self.array[row]
            if self.crc32 is not None and zlib.crc32(pixels) != self.crc32[row]:
                raise UserError(f"image {row} of {self.path} has changed since it was packed: {PACK_AGAIN}")
        return read, {}

    def here(self) -> str:
        return f"an array {self.array.shape}"


def _reopened(path: Path, rows: Tensor) -> ArrayImages:
    return replace(ArrayImages.of(open_array(path)), rows=rows)


def manifest_of_pack(path: Path) -> Manifest:
    """Of what lies next to the pack. The pack itself, which may be larger than all memory, has a checksum an image."""
    return Manifest(path.with_suffix(".manifest.json"), path)


def open_array(path: Path) -> Opened:
    """The array in a file.

    A .npy stays on disk; its labels may be next to it in NAME.labels.npz. A .npz has the entry images and, if there are
    labels, the entries labels and classes. What lies next to a pack is compared with its manifest.
    """
    beside, manifest, sha256 = path.with_suffix(".labels.npz"), manifest_of_pack(path), ""
    if path.suffix == ".npz":
        entries = read_arrays(path)
        if "images" not in entries and len(entries) != 1:
            raise UserError(f"{path} has the entries {', '.join(entries) or 'none'}: call the pixels images")
        images = entries.pop("images") if "images" in entries else entries.popitem()[1]
    else:
        with _reading(path):
            check_regular(path)
            with open(path, "rb") as opened:  # np.load would not close a broken file
                np.lib.format.read_magic(opened)
            images = np.load(path, mmap_mode="r")
        entries = {}
        if path.suffix == ".npy" and (os.path.lexists(beside) or manifest.exists):
            if manifest.exists:
                content = manifest.content(beside.name)
                entries, sha256 = arrays_in(content, path=beside), hashlib.sha256(content).hexdigest()
            else:
                entries = read_arrays(beside)
            if manifest.exists != ("crc32" in entries):
                raise UserError(f"{manifest.file} of this pack is missing: {PACK_AGAIN}")
            if "crc32" in entries and entries["shape"].tolist() != [*images.shape]:
                raise UserError(f"{path} has changed since it was packed: {PACK_AGAIN}")
    if images.dtype != np.uint8:
        raise UserError(f"{path} holds {images.dtype}: needed uint8, 0 … 255; scale and convert it first")
    pixels = channels_first(images, path=path)
    names = Names(entries["paths"].tobytes(), entries["path_ends"]) if "paths" in entries else None
    labels, classes = _labels(entries, n=len(pixels), path=path)
    return Opened(path, pixels, labels, classes, names, entries.get("crc32"), sha256)


def read_arrays(path: Path, *, remedy: str = SAVE) -> dict[str, np.ndarray]:
    """All arrays of an .npz file. Pickles are refused, and so are arrays that are larger than the memory."""
    with _reading(path, remedy=remedy):
        check_regular(path)
        with open(path, "rb") as opened:
            return _arrays(opened, path=path, remedy=remedy)


def arrays_in(content: bytes, *, path: Path, remedy: str = SAVE) -> dict[str, np.ndarray]:
    """The same of the content of a file that was read already."""
    with _reading(path, remedy=remedy):
        return _arrays(io.BytesIO(content), path=path, remedy=remedy)


def _arrays(opened: BinaryIO, *, path: Path, remedy: str) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(opened) as archive:
        need, free = sum(entry.file_size for entry in archive.infolist()), free_memory()
        if need > free:
            raise UserError(f"{path} unpacks to {need / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free: {remedy}")
    opened.seek(0)
    with np.load(opened, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"the entry {name} is no array")
    return arrays


@contextmanager
def _reading(path: Path, *, remedy: str = SAVE) -> Iterator[None]:
    """One line for whatever goes wrong in a file: a damaged header can raise almost any error."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror or error}): {remedy}") from error
    except Exception as error:
        raise UserError(f"{path} is no array of numbers ({why(error)}): {remedy}") from error


def channels_first(pixels: np.ndarray, *, path: Path | str) -> np.ndarray:
    """(N, H, W), (N, H, W, C) or (N, C, H, W) as (N, C, H, W), a view.

    The channels are the second or the last axis: the one that differs from the other two axes if these are equal
    (square images), otherwise the one that is smaller than both.
    """
    if pixels.ndim == 3:
        return pixels[:, None]
    if pixels.ndim != 4:
        raise UserError(f"{path} has shape {pixels.shape}: needed (N, H, W), (N, H, W, C) or (N, C, H, W)")
    a, b, c = pixels.shape[1:]
    if b == c != a or (a != b and a < min(b, c)):
        return pixels
    if a == b != c or (b != c and c < min(a, b)):
        return pixels.transpose(0, 3, 1, 2)
    raise UserError(f"{path} has shape {pixels.shape}, and no axis is clearly the channels: crop it to squares")


def _labels(entries: dict[str, Any], *, n: int, path: Path) -> tuple[Tensor | None, tuple[str, ...]]:
    if "labels" not in entries or n == 0:
        return None, ()
    labels = entries["labels"]
    if labels.shape != (n,) or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise UserError(f"the labels of {path} are {labels.dtype} {labels.shape}: needed ({n},) whole numbers ≥ 0")
    names = entries.get("classes", np.arange(min(int(labels.max()) + 1, CLASSES)))
    if names.ndim != 1 or labels.max() >= len(names):
        what = f"a label {labels.max()} and {names.size:,} class names"
        raise UserError(f"{path} has {what}: number the classes from 0, and name them all in one list")
    return torch.from_numpy(labels.astype(np.int64)), tuple(map(str, names))
