"""Images that are not in memory: read by worker processes in a given order, some batches ahead of who uses them.

What fits on the device is read once and lives there (`resident`); what does not is read again in every epoch
(`stream`). Both give the same pixels for the same rows, so a run may change from one to the other.
"""

import contextlib
import gc
import math
import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from curvssl import ranks
from curvssl.collectives import rank
from curvssl.config import UserError

CHUNK = 64  # images that a worker reads at a time; a batch is made of several
AHEAD = 2  # chunks that each worker may have ready
WORKERS = 16  # at most this many a rank
BAD_SHARE = 0.05  # share of the images that may be unreadable before a run stops

Bad = dict[int, str]  # file number → why it could not be read


class Source(Protocol):
    """N images on disk that look like a uint8 tensor (N, C, H, W) to those who want a part or batches of it."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    @property
    def files(self) -> int:
        """How many images there are in all, with those outside this part of them."""
        ...

    @property
    def bad(self) -> Bad:
        """Which of all files could not be read so far."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Tensor | slice) -> "Source":
        """Some of them, in this order, still on disk."""
        ...

    def read(self, rows: list[int], *, stand_ins: bool) -> tuple[Tensor, Bad]:
        """uint8 (b, C, H, W) and what could not be read: such a row is another image, or black without stand-ins."""
        ...

    def places(self) -> Tensor:
        """Row numbers of those that are not in `bad`."""
        ...

    def here(self) -> str:
        """What this machine sees of them, to compare with others."""
        ...

    def split(self, size: int) -> Iterator[Tensor]:
        """All of them in order, `size` at a time; what cannot be read is black and noted in `bad`."""
        ...


Images = Tensor | Source


def stream(
    images: Images,
    batches: Iterable[Tensor],
    *,
    device: torch.device | None = None,
    stand_ins: bool = True,
    workers: int | None = None,
) -> Iterator[Tensor]:
    """The images of each batch of row numbers, uint8 (b, C, H, W), on `device`; workers read ahead, in this order."""
    cuda = device is not None and device.type == "cuda"
    workers = own_cores() if workers is None else workers
    chunk = chunk_size(images, workers=workers)
    sizes: list[int] = []  # of the batches whose chunks have been handed out, so at most a few

    def chunks() -> Iterator[list[int]]:
        for rows in batches:
            sizes.append(len(rows))
            yield from (part.tolist() for part in rows.split(chunk))

    loader = torch.utils.data.DataLoader(
        _Reader(images, stand_ins=stand_ins),
        batch_sampler=chunks(),
        collate_fn=_as_read,
        num_workers=workers,
        prefetch_factor=AHEAD if workers else None,
        pin_memory=cuda,
        generator=torch.Generator(),  # it draws a seed for its workers, and not from the caller's numbers
    )
    batch: Tensor | None = None
    filled = 0
    for pixels, bad in _started(loader):
        note(images, bad)
        if batch is None:
            shape = (sizes[0], *images.shape[1:])
            batch = torch.empty(shape, dtype=torch.uint8, device=device) if cuda else blank(shape)
        batch[filled : filled + len(pixels)].copy_(pixels, non_blocking=cuda)
        filled += len(pixels)
        if filled == len(batch):
            yield batch
            sizes.pop(0)
            batch, filled = None, 0


def blank(shape: tuple[int, ...]) -> Tensor:
    """Zeros in pages of their own, which go back to the system with the tensor. Batches from the C library's heap would
    leave holes that the next, aligned, does not quite fit: memory would creep up by a third of what is read."""
    pages = mmap.mmap(-1, math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)


class _Reader(torch.utils.data.Dataset):
    def __init__(self, images: Images, *, stand_ins: bool) -> None:
        self.images, self.stand_ins = images, stand_ins

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Bad]:
        if isinstance(self.images, Tensor):
            return self.images[rows], {}
        return self.images.read(rows, stand_ins=self.stand_ins)


def _as_read(read: Any) -> tuple[Tensor, Bad]:
    return read


def _started(loader: Iterable[tuple[Tensor, Bad]]) -> Iterator[tuple[Tensor, Bad]]:
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork in a process with threads; the workers use none of what those threads hold.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        # A worker must not collect the garbage it was born with: to free a CUDA tensor there ends it.
        gc.collect()
        gc.freeze()
        try:
            return iter(loader)
        finally:
            gc.unfreeze()


def note(images: Images, bad: Bad) -> None:
    """Keep what could not be read; too much of it is an error."""
    if isinstance(images, Tensor) or not bad:
        return
    images.bad.update(bad)
    check_share(len(images.bad), images.files, example=next(iter(bad.values())))


def check_share(bad: int, n: int, *, example: str) -> None:
    if bad > BAD_SHARE * n:
        raise UserError(
            f"{bad:,} of {n:,} images cannot be read, more than the {BAD_SHARE:.0%} that are skipped (the last: "
            f"{example}): mend or remove them"
        )


def in_batches(images: Source, size: int) -> Iterator[Tensor]:
    """`Source.split` for those who implement it; a few images are not worth a process."""
    rows = torch.arange(len(images)).split(size)
    return stream(images, rows, stand_ins=False, workers=min(own_cores(), len(images) // (2 * CHUNK)))


# ---- what fits


def resident(images: Images, *, device: torch.device) -> Tensor:
    """All images on the device. Each rank reads its share of them and gets the others' from the others."""
    if isinstance(images, Tensor):
        return images.to(device)
    everything = torch.empty(images.shape, dtype=torch.uint8, device=device)
    shares = [torch.arange(len(images))[part] for part in ranks.shares(len(images))]
    mine = shares[rank()]
    workers = min(own_cores(), len(mine) // (2 * CHUNK))
    filled = int(mine[0]) if len(mine) else 0
    for batch in stream(images, mine.split(CHUNK), device=device, workers=workers):
        everything[filled : filled + len(batch)] = batch
        filled += len(batch)
    for source, share in enumerate(shares):
        ranks.broadcast(everything[int(share[0]) : int(share[-1]) + 1] if len(share) else None, source=source)
    return everything


def fits(images: Images, *, device: torch.device) -> bool:
    """Whether they take at most half of a CUDA device's free memory, or a quarter of the RAM this rank can have."""
    n, channels, height, width = images.shape
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] // 2  # the rest is for the network and its activations
    elif isinstance(images, Tensor):
        return True  # it is in memory already
    else:
        room = free_memory() // 4 // ranks.ranks_here()
    return n * channels * height * width <= room


def free_memory() -> int:
    """Bytes that this process may still take: what the machine has left, or less where a limit is set for it."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for look in (_machine, _cgroup, _limit):
        with contextlib.suppress(OSError, ValueError, KeyError, ImportError):
            found.append(look())
    return max(0, min(found))


def _kilobytes(file: str, name: str) -> int:
    lines = Path(file).read_text().splitlines()
    return 1024 * int(dict(line.split(":", 1) for line in lines)[name].split()[0])


def _machine() -> int:
    return _kilobytes("/proc/meminfo", "MemAvailable")


def _cgroup() -> int:
    """Version 2, as containers and SLURM use it; "max", no limit, is a ValueError."""
    folder = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().split("::")[1].strip().lstrip("/"))
    return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())


def _limit() -> int:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if limit == resource.RLIM_INFINITY:
        raise ValueError("no limit")
    return limit - _kilobytes("/proc/self/status", "VmData")


def own_cores() -> int:
    """Worker processes for this rank: the cores it may use, shared with the other ranks of this machine."""
    known: Callable[[int], Iterable[int]] | None = getattr(os, "sched_getaffinity", None)
    cores = len(list(known(0))) if known else os.cpu_count() or 1
    return max(1, min(WORKERS, cores // ranks.ranks_here()))


def chunk_size(images: Images, *, workers: int) -> int:
    """CHUNK, or fewer where shared memory, through which workers hand over pixels, is small (64 MB in a container)."""
    _, channels, height, width = images.shape
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        return CHUNK
    room = shared.f_bavail * shared.f_frsize // 2 // ranks.ranks_here()
    chunks = max(1, workers) * (AHEAD + 1)
    return max(1, min(CHUNK, room // (chunks * channels * height * width)))
