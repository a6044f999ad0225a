"""Read one uint8 array on disk, .npy or .npz, as images (N, C, H, W) and labels."""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvssl.config import UserError
from curvssl.data.images import Bad, Images, blank, why
from curvssl.data.memory import free_memory
from curvssl.files import check_regular

SAVE = "give a file of numpy.save or savez"
CLASSES = 1_000_000  # labels without names may be below this


@dataclass(frozen=True)
class ArrayImages(Images):
    """Rows of one array, which may be memory-mapped."""

    path: Path
    array: np.ndarray  # uint8 (n, C, H, W), a view of the file

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
        return read, {}

    def here(self) -> str:
        return f"an array {self.array.shape}"


def _reopened(path: Path, rows: Tensor) -> ArrayImages:
    return ArrayImages(rows, path, open_array(path)[0])


def open_array(path: Path) -> tuple[np.ndarray, Tensor | None, tuple[str, ...]]:
    """Pixels (N, C, H, W), labels (N,) and class names.

    A .npy stays on disk; its labels may be next to it in NAME.labels.npz. A .npz has the entry images and, if there are
    labels, the entries labels and classes.
    """
    beside = path.with_suffix(".labels.npz")
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
        entries = read_arrays(beside) if beside.exists() else {}
    if images.dtype != np.uint8:
        raise UserError(f"{path} holds {images.dtype}: needed uint8, 0 … 255; scale and convert it first")
    pixels = channels_first(images, path=path)
    return pixels, *_labels(entries, n=len(pixels), path=path)


def read_arrays(path: Path, *, remedy: str = SAVE) -> dict[str, np.ndarray]:
    """All arrays of an .npz file. Pickles are refused, and so are arrays that are larger than the memory."""
    with _reading(path, remedy=remedy):
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            need, free = sum(entry.file_size for entry in archive.infolist()), free_memory()
            if need > free:
                raise UserError(f"{path} unpacks to {need / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free: {remedy}")
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
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
