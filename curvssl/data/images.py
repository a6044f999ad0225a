"""One type for N images, uint8 (N, C, H, W), in memory or on disk, and one way to get batches of them on a device.

Worker processes read images that are not in memory, in a given order and some batches ahead.
"""

import gc
import hashlib
import math
import mmap
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from curvssl import ranks
from curvssl.config import UserError

CHUNK = 64  # images that a worker reads at a time; a batch consists of several chunks
AHEAD = 2  # chunks that each worker reads ahead
WORKERS = 16  # at most this many per rank
BAD_SHARE = 0.05  # share of the images that may be unreadable before a run stops
ATTEMPTS = 100  # replacements that are tried for an image that cannot be read

Bad = dict[int, str]  # number of an image → the error when it was read


@dataclass(frozen=True)
class Images:
    """Some rows of a source of images. A subclass defines how to `read` them, and their `shape`."""

    rows: Tensor  # int64 (N,): numbers of these images in the source
    bad: Bad = field(default_factory=dict, kw_only=True)  # all images of the source that could not be read so far
    bearable: float = field(default=BAD_SHARE, kw_only=True)  # share of the source that may be unreadable

    @property
    def shape(self) -> tuple[int, int, int, int]:
        raise NotImplementedError

    @property
    def source_size(self) -> int:
        """The number of images in the source, including those outside these rows."""
        raise NotImplementedError

    @property
    def pixels(self) -> Tensor | None:
        """All pixels, if they are in memory."""
        return None

    @property
    def names(self) -> list[str] | None:
        """The names of the images, if the source has names."""
        return None

    def read(self, rows: list[int], *, stand_ins: bool) -> tuple[Tensor, Bad]:
        """uint8 (b, C, H, W), and the unreadable images: another image replaces each, or black without stand-ins."""
        raise NotImplementedError

    def here(self) -> str:
        """A description of the images as this machine sees them, to compare between machines."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Tensor | slice) -> Self:
        """These rows, in this order; no pixels are read."""
        return replace(self, rows=self.rows[rows])

    def places(self) -> Tensor:
        """Row numbers of the images that are not in `bad`."""
        return (~torch.isin(self.rows, torch.tensor(sorted(self.bad), dtype=torch.int64))).nonzero()[:, 0]

    def split(self, size: int) -> Iterator[Tensor]:
        """All images in order, `size` at a time; an unreadable image is black and is listed in `bad`."""
        workers = min(own_cores(), len(self) // (2 * CHUNK))  # for a few images a process is not worth its start
        return self.batches(torch.arange(len(self)).split(size), stand_ins=False, workers=workers)

    def batches(
        self,
        batches: Iterable[Tensor],
        *,
        device: torch.device | None = None,
        stand_ins: bool = True,
        workers: int | None = None,
    ) -> Iterator[Tensor]:
        """The images of each batch of row numbers, uint8 (b, C, H, W), on `device`; workers read ahead, in order."""
        cuda = device is not None and device.type == "cuda"
        workers = own_cores() if workers is None else workers
        chunk = chunk_size(self.shape, workers=workers)
        sizes: list[int] = []  # of the batches whose chunks are being read, so at most a few

        def chunks() -> Iterator[list[int]]:
            for rows in batches:
                sizes.append(len(rows))
                yield from (part.tolist() for part in rows.split(chunk))

        loader = torch.utils.data.DataLoader(
            _Reader(self, stand_ins=stand_ins),
            batch_sampler=chunks(),
            collate_fn=as_read,
            num_workers=workers,
            prefetch_factor=AHEAD if workers else None,
            pin_memory=cuda,
            generator=torch.Generator(),  # the loader draws its workers' seed from this, not from the global generator
        )
        batch: Tensor | None = None
        filled = 0
        for read in started(loader):
            if isinstance(read, UserError):
                raise read
            pixels, bad = read
            self.note(bad)
            if batch is None:
                shape = (sizes[0], *self.shape[1:])
                batch = torch.empty(shape, dtype=torch.uint8, device=device) if cuda else blank(shape)
            batch[filled : filled + len(pixels)].copy_(pixels, non_blocking=cuda)
            filled += len(pixels)
            if filled == len(batch):
                yield batch
                sizes.pop(0)
                batch, filled = None, 0

    def note(self, bad: Bad) -> None:
        """Record unreadable images; too many are an error."""
        if bad:
            self.bad.update(bad)
            check_share(len(self.bad), self.source_size, example=next(iter(bad.values())), bearable=self.bearable)

    def exchange_bad(self) -> Bad:
        """The images that any rank could not read so far, now known to all ranks. All ranks must call it."""
        for bad in ranks.from_all(dict(self.bad)):
            self.bad.update(bad)
        return self.bad


@dataclass(frozen=True)
class TensorImages(Images):
    """Images in memory."""

    source: Tensor  # uint8 (n, C, H, W)

    @classmethod
    def of(cls, pixels: Tensor) -> Self:
        return cls(torch.arange(len(pixels)), pixels)

    @property
    def pixels(self) -> Tensor:
        return self.source if len(self.rows) == len(self.source) else self.source[self.rows]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (len(self.rows), *self.source.shape[1:])

    @property
    def source_size(self) -> int:
        return len(self.source)

    def __getitem__(self, rows: Tensor | slice) -> Self:
        return type(self).of(self.pixels[rows])

    def split(self, size: int) -> Iterator[Tensor]:
        return iter(self.pixels.split(size))

    def read(self, rows: list[int], *, stand_ins: bool) -> tuple[Tensor, Bad]:
        return self.pixels[rows], {}

    def here(self) -> str:
        digest = hashlib.sha256(self.pixels.contiguous().numpy().data).hexdigest()
        return f"an array {self.shape} with SHA-256 {digest[:12]}"


@dataclass(frozen=True)
class DecodedImages(Images):
    """Images that are decoded one by one when they are read; a subclass defines how to `decode` one."""

    channels: int
    canvas: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.rows), self.channels, self.canvas, self.canvas

    def decode(self, image: int) -> np.ndarray:
        """One image of the source, uint8 (channels, canvas, canvas). Raises any error that a damaged image causes."""
        raise NotImplementedError

    def name(self, image: int) -> str:
        raise NotImplementedError

    def read(self, rows: list[int], *, stand_ins: bool) -> tuple[Tensor, Bad]:
        read = blank((len(rows), *self.shape[1:]))
        pixels = read.numpy()
        bad: Bad = {}
        for i, row in enumerate(rows):
            first = int(self.rows[row])
            for image in self._in_place_of(first) if stand_ins else (first,):
                if image in bad or image in self.bad:
                    continue
                try:
                    pixels[i] = self.decode(image)
                    break
                except UserError:
                    raise
                except Exception as error:  # a damaged image can raise almost any error
                    bad[image] = f"{self.name(image)}: {why(error)}"
        return read, bad

    def _in_place_of(self, image: int) -> Iterator[int]:
        """The image, then random replacements; the same ones on every rank and in every epoch."""
        yield image
        drawn = random.Random(image)
        for _ in range(ATTEMPTS):
            yield int(self.rows[drawn.randrange(len(self.rows))])


class _Reader(torch.utils.data.Dataset):
    def __init__(self, images: Images, *, stand_ins: bool) -> None:
        self.images, self.stand_ins = images, stand_ins

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Bad] | UserError:
        try:
            return self.images.read(rows, stand_ins=self.stand_ins)
        except UserError as error:  # raised in a worker, it would come back with the worker's traceback in its text
            return UserError(str(error))


def as_read(read: Any) -> Any:
    return read


def started(loader: Any) -> Iterator[Any]:
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork in a process with threads; the workers use no lock that those threads may hold.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        # A worker must not collect garbage inherited from its parent: freeing a CUDA tensor there would crash it.
        # What was frozen counts as old afterwards, so young garbage goes first; to search everything takes a second.
        if loader.num_workers:
            gc.collect(1)
            gc.freeze()
        try:
            return iter(loader)
        finally:
            gc.unfreeze()


def blank(shape: tuple[int, ...]) -> Tensor:
    """Zeros in memory pages of their own, which the system gets back with the tensor. Batches on the C library's heap
    would leave holes that the next, aligned batch does not fit into: memory would grow by a third of what is read."""
    pages = mmap.mmap(-1, math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)


class Unreadable(UserError):
    """Too many images cannot be read."""


def check_share(bad: int, n: int, *, example: str, bearable: float = BAD_SHARE) -> None:
    if bad > bearable * n:
        raise Unreadable(
            f"{bad:,} of {n:,} images cannot be read, more than the {bearable:.0%} that are skipped (the last: "
            f"{example}): mend or remove them"
        )


def why(error: Exception) -> str:
    """The error as one short line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())[:200]}"


def own_cores() -> int:
    """Number of worker processes for this rank: the usable cores, divided by the number of ranks on this machine."""
    known: Callable[[int], Iterable[int]] | None = getattr(os, "sched_getaffinity", None)
    cores = len(list(known(0))) if known else os.cpu_count() or 1
    return max(1, min(WORKERS, cores // ranks.ranks_here()))


def chunk_size(shape: tuple[int, int, int, int], *, workers: int) -> int:
    """CHUNK, or fewer where shared memory is small (64 MB in a container): workers return pixels through it."""
    _, channels, height, width = shape
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        return CHUNK
    room = shared.f_bavail * shared.f_frsize // 2 // ranks.ranks_here()
    chunks = max(1, workers) * (AHEAD + 1)
    return max(1, min(CHUNK, room // (chunks * channels * height * width)))
