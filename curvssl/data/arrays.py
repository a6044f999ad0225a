"""Read one uint8 array on disk, .npy or .npz, as images (N, C, H, W) and labels."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvssl.config import UserError
from curvssl.data.images import Bad, Images, blank, why


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
    try:
        if path.suffix == ".npz":
            entries = _entries(path)
            if "images" not in entries and len(entries) > 1:
                raise UserError(f"{path} has the entries {', '.join(entries)}: call the pixels images")
            images = entries.pop("images") if "images" in entries else entries.popitem()[1]
        else:
            with open(path, "rb") as opened:  # np.load would not close a broken file
                np.lib.format.read_magic(opened)
            images, beside = np.load(path, mmap_mode="r"), path.with_suffix(".labels.npz")
            entries = _entries(beside) if beside.exists() else {}
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror or error}): give a .npy or .npz file") from error
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no array of numbers ({why(error)}): save it with numpy.save or savez") from error
    if images.dtype != np.uint8:
        raise UserError(f"{path} holds {images.dtype}: needed uint8, 0 … 255; scale and convert it first")
    pixels = channels_first(images, path=path)
    return pixels, *_labels(entries, n=len(pixels), path=path)


def _entries(path: Path) -> dict[str, np.ndarray]:
    with open(path, "rb") as opened, np.load(opened) as file:
        return {name: file[name] for name in file.files}


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
    if "labels" not in entries:
        return None, ()
    labels = entries["labels"]
    if labels.shape != (n,) or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise UserError(f"the labels of {path} are {labels.dtype} {labels.shape}: needed ({n},) whole numbers ≥ 0")
    names = entries.get("classes", np.arange(int(labels.max()) + 1))
    if labels.max() >= len(names):
        raise UserError(f"{path} has a label {labels.max()} and {len(names)} class names: name them all")
    return torch.from_numpy(labels.astype(np.int64)), tuple(map(str, names))
