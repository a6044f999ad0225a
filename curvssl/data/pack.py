"""Pack a folder of images into one .npy, which training reads without decoding."""

import os
import shutil
import zlib
from array import array as packed
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from curvssl.config import UserError
from curvssl.data.arrays import PACKING, manifest_of_pack
from curvssl.data.folders import classes_of, framed, list_images, write_bad_images
from curvssl.data.images import CHUNK
from curvssl.files import part_of


def pack(folder: Path, out: Path, *, size: int, progress: bool = True) -> tuple[Path, tuple[int, ...]]:
    """Write uint8 (N, C, S, S) for views of up to `size` pixels, one batch in memory at a time; returns path and shape.

    Labels, the files' names and a checksum of every image go to NAME.labels.npz, which NAME.manifest.json describes.
    Unreadable files are left out and listed in NAME.bad-images.txt. The array is written atomically. At every moment
    the labels next to an array are its own: an earlier pack's are deleted before the array is replaced, and the new
    ones are written after it. A pack without them, which a kill may leave, is refused.
    """
    if size < 1:
        raise UserError(f"image_size={size} needs to be 1 or more")
    out = out if out.suffix == ".npy" else out.with_name(out.name + ".npy")
    names = list_images(folder)
    images = framed(folder, names, size=size)
    classes, labels = classes_of(names)
    out.parent.mkdir(parents=True, exist_ok=True)
    need, free = int(np.prod(images.shape)), shutil.disk_usage(out.parent).free
    if need > free:
        raise UserError(f"{out} would take {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: lower --image-size")

    def write(file: BinaryIO) -> None:
        _header(file, images.shape)
        first = 0
        with tqdm(total=len(images), desc=f"packing {need / 1e9:.1f} GB", disable=not progress) as bar:
            for batch in images.split(CHUNK):
                for i, pixels in enumerate(batch.numpy(), first):
                    if i not in images.bad:
                        file.write(pixels)
                        crc32.append(zlib.crc32(pixels))
                first += len(batch)
                bar.update(len(batch))
        file.seek(0)
        _header(file, (len(images.places()), *images.shape[1:]))

    beside, crc32 = out.with_suffix(".labels.npz"), packed("I")
    with part_of(out, write) as part:
        manifest_of_pack(out).begin(beside.name, by=PACKING)  # from now on the array is a pack, and needs them
        beside.unlink(missing_ok=True)
        os.replace(part, out)
    kept = images.places()
    shape = len(kept), *images.shape[1:]
    paths = [os.fsencode(name) for name in images[kept].names]
    arrays: dict[str, np.ndarray] = {
        "shape": np.array(shape),
        "crc32": np.array(crc32, dtype=np.uint32),
        "paths": np.frombuffer(b"".join(paths), dtype=np.uint8),
        "path_ends": np.cumsum([len(path) for path in paths], dtype=np.int64),
    }
    if labels is not None:
        arrays |= {"labels": labels[kept].numpy(), "classes": np.array(classes)}
    manifest_of_pack(out).keep(beside.name, lambda file: np.savez(file, **arrays), by=PACKING)  # type: ignore[arg-type]
    write_bad_images(out.with_suffix(".bad-images.txt"), images.bad)
    return out, shape


def _header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """numpy reserves space for a longer first axis, so the header has the same length for any number of rows."""
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
