"""Decides whether all images fit into memory, and loads them: otherwise each epoch reads them (`Images.batches`).

Both ways give the same pixels for the same rows, so a resumed run may use the other one.
"""

import contextlib
import os
from pathlib import Path

import torch
from torch import Tensor

from curvssl import ranks
from curvssl.collectives import rank
from curvssl.data.images import CHUNK, Images, own_cores


def resident(images: Images, *, device: torch.device) -> Tensor:
    """All images on the device. Each rank reads its share and sends it to the other ranks."""
    if images.pixels is not None:
        return images.pixels.to(device)
    everything = torch.empty(images.shape, dtype=torch.uint8, device=device)
    shares = [torch.arange(len(images))[part] for part in ranks.shares(len(images))]
    mine = shares[rank()]
    workers = min(own_cores(), len(mine) // (2 * CHUNK))
    filled = int(mine[0]) if len(mine) else 0
    for batch in images.batches(mine.split(CHUNK), device=device, workers=workers):
        everything[filled : filled + len(batch)] = batch
        filled += len(batch)
    for source, share in enumerate(shares):
        ranks.broadcast(everything[int(share[0]) : int(share[-1]) + 1] if len(share) else None, source=source)
    return everything


def fits(images: Images, *, device: torch.device) -> bool:
    """Whether the images take at most half of a CUDA device's free memory, or a quarter of this rank's share of RAM."""
    n, channels, height, width = images.shape
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] // 2  # the rest is for the network and its activations
    elif images.pixels is not None:
        return True  # already in memory
    else:
        room = free_memory() // 4 // ranks.ranks_here()
    return n * channels * height * width <= room


def free_memory() -> int:
    """Bytes that this process may still allocate: the machine's free memory, or less where a limit is set."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for look in (_machine, _cgroup, _limit):
        with contextlib.suppress(OSError, ValueError, KeyError, ImportError):
            limits.append(look())
    return max(0, min(limits))


def _kilobytes(file: str, name: str) -> int:
    lines = Path(file).read_text().splitlines()
    return 1024 * int(dict(line.split(":", 1) for line in lines)[name].split()[0])


def _machine() -> int:
    return _kilobytes("/proc/meminfo", "MemAvailable")


def _cgroup() -> int:
    """The limit of cgroup version 2, as containers and SLURM set it; "max", no limit, raises ValueError."""
    folder = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().split("::")[1].strip().lstrip("/"))
    return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())


def _limit() -> int:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if limit == resource.RLIM_INFINITY:
        raise ValueError("no limit")
    return limit - _kilobytes("/proc/self/status", "VmData")
