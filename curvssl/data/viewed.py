"""Large views on a CPU: worker processes read the images and make the views, ahead of the step.

The views are written to memory that the workers share with the main process, straight to their places in the batch, so
that nothing is copied afterwards. The workers get the same rows and uniform numbers as a step that makes its own views,
and make the same views to the last bit (single.py).
"""

import math
import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from curvssl.config import UserError
from curvssl.data.images import AHEAD, CHUNK, Bad, Images, as_read, own_cores, started
from curvssl.data.views import Views

# Workers must inherit the shared memory, so they have to be forks. Elsewhere the main process makes the views.
POSSIBLE = sys.platform == "linux"


def viewed(
    images: Images,
    views: Views,
    steps: Iterable[tuple[Tensor, Sequence[Tensor]]],
    *,
    b: int,
    workers: int | None = None,
) -> Iterator[tuple[Tensor, ...]]:
    """What `views` makes of the images of each step: from its row numbers (b,) and uniform numbers u, one batch for
    each size. A batch is overwritten after the next one has been asked for."""
    workers = own_cores() if workers is None else workers
    # Pairs that are blended must not be torn apart.
    chunk = min(CHUNK, 2 * math.ceil(b / (2 * workers * AHEAD)))
    chunks_per_batch, begun = math.ceil(b / chunk), workers * AHEAD
    batches = 2 + (begun - 1) // chunks_per_batch  # the one in use, and those to which the begun chunks belong
    channels = 3 if images.shape[1] == 1 else images.shape[1]
    shapes = [(count * b, size, size, channels) for count, size in zip(views.passes, views.sizes, strict=True)]
    buffers = [tuple(shared(shape).permute(0, 3, 1, 2) for shape in shapes) for _ in range(batches)]

    def chunks() -> Iterator[Any]:
        for s, (rows, u) in enumerate(steps):
            for first in range(0, b, chunk):
                part = slice(first, first + chunk)
                yield s % batches, part, rows[part].tolist(), [numbers[:, part].numpy() for numbers in u]

    loader = torch.utils.data.DataLoader(
        _Maker(images, views, buffers, b=b),
        batch_sampler=chunks(),
        collate_fn=as_read,
        num_workers=workers,
        prefetch_factor=AHEAD,
        multiprocessing_context="fork",
        generator=torch.Generator(),  # the loader draws its workers' seed from this, not from the global generator
    )
    for n, made in enumerate(started(loader)):
        if isinstance(made, UserError):
            raise made
        images.note(made)
        s, place = divmod(n, chunks_per_batch)
        if place == chunks_per_batch - 1:
            yield buffers[s % batches]


class _Maker(torch.utils.data.Dataset):
    def __init__(self, images: Images, views: Views, buffers: list[tuple[Tensor, ...]], *, b: int) -> None:
        self.images, self.views, self.buffers, self.b = images, views, buffers, b

    def __getitems__(self, asked: Any) -> Bad | UserError:
        buffer, part, rows, u = asked
        try:
            pixels, bad = self.images.read(rows, stand_ins=True)
        except UserError as error:  # raised in a worker, it would come back with the worker's traceback in its text
            return UserError(str(error))
        made = self.views(pixels, [torch.from_numpy(numbers) for numbers in u])
        for batch, views in zip(self.buffers[buffer], made, strict=True):
            batch.unflatten(0, (-1, self.b))[:, part].copy_(views.unflatten(0, (-1, len(rows))))
        return bad


def shared(shape: tuple[int, ...]) -> Tensor:
    """float32 zeros in memory that forks share. It needs no room in /dev/shm, which is small in a container."""
    return torch.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), dtype=torch.float32).view(shape)
