"""Compute the features (h, z) of a frozen encoder, and save and load them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvssl import ranks
from curvssl.collectives import rank
from curvssl.config import UserError
from curvssl.data.images import Images
from curvssl.data.views import Augment, prepare
from curvssl.files import say
from curvssl.models import full_precision, no_search
from curvssl.rundir import Run

BATCH_SIZE = 512  # images at a time; with thousands cuDNN's convolutions in float32 are slow


@dataclass(frozen=True)
class Features:
    """Outputs of the frozen network for N images, on the CPU."""

    h: Tensor  # (N, d_h) float32, the encoder's output
    z: Tensor | None = None  # (N, d_z) float32, the projector's output
    y: Tensor | None = None  # (N,) int64
    index: Tensor | None = None  # (N,) int64, positions in the split, if some of its images could not be read

    @property
    def has_labels(self) -> bool:
        return self.y is not None


@torch.inference_mode()
def extract(
    encoder: nn.Module,
    images: Images,
    *,
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    projector: nn.Module | None = None,
    labels: Tensor | None = None,
    batch_size: int = BATCH_SIZE,
    device: torch.device | str | None = None,
) -> Features:
    """h = f(x) and z = g(h) of uint8 images (N, C, H, W), after the evaluation transform.

    Encoder and projector run in eval mode; afterwards every weight, buffer and mode is as before. They run on their
    own device or on `device`, always in float32, so that features have the same precision everywhere.
    """
    if len(images) == 0:
        raise UserError("there is no image to make features of: give at least one")
    nets = [net for net in (encoder, projector) if net is not None]
    if device is not None:
        for net in nets:
            net.to(device)
    place = next(encoder.parameters(), torch.empty(0)).device
    hs, zs = [], []
    with _eval_mode(nets), no_search(), full_precision(), torch.autocast(place.type, enabled=False):
        for batch in images.split(batch_size):
            x = prepare(batch.to(place, non_blocking=True), size=size, mean=mean, std=std)
            hs.append(encoder(x))
            if projector is not None:
                zs.append(projector(hs[-1]).float())
    h = torch.cat(hs).float()
    if h.ndim != 2:
        raise UserError(f"the encoder gives {tuple(h.shape[1:])} an image, not one vector: pool its output first")
    # Clones made outside inference mode are normal tensors, which autograd accepts.
    with torch.inference_mode(False):
        return Features(h=h.cpu().clone(), z=torch.cat(zs).cpu().clone() if zs else None, y=labels)


def extract_over_ranks(
    encoder: nn.Module, images: Images, *, labels: Tensor | None = None, **settings: Any
) -> Features:
    """`extract` on all ranks: each computes a share, and every rank gets all features. Unreadable images are left out.

    All ranks must call it. The settings are those of `extract`.
    """
    mine = ranks.shares(len(images))[rank()]
    part = extract(encoder, images[mine], **settings) if mine.stop > mine.start or len(images) == 0 else None
    parts = [part for part in ranks.from_all(part) if part is not None]
    h = torch.cat([part.h for part in parts])
    z = None if parts[0].z is None else torch.cat([part.z for part in parts if part.z is not None])
    images.exchange_bad()
    index = images.places()
    if len(index) == len(images):
        return Features(h, z, labels)
    return Features(h[index], None if z is None else z[index], None if labels is None else labels[index], index)


@torch.inference_mode()
def extract_views(encoder: nn.Module, images: Images, augment: Augment, *, views: int) -> Tensor:
    """h of augmented views of each image, with a fixed seed, (n, views, d), from the encoder as it is in `extract`.
    Unreadable images are left out."""
    place = next(encoder.parameters(), torch.empty(0)).device
    numbers, made = torch.Generator().manual_seed(0), []
    with _eval_mode([encoder]), no_search(), full_precision(), torch.autocast(place.type, enabled=False):
        for batch in images.split(BATCH_SIZE // views):
            u = torch.rand(views * len(batch), augment.draws, generator=numbers)
            h = encoder(augment(batch.to(place).repeat_interleave(views, 0), u.to(place)))
            made.append(h.float().unflatten(0, (-1, views)).cpu())
    return torch.cat(made)[images.places()]


@contextmanager
def _eval_mode(nets: list[nn.Module]) -> Iterator[None]:
    """Eval mode for a while; then each module gets its own mode back, since a BatchNorm may be frozen on its own."""
    modes = [(module, module.training) for net in nets for module in net.modules()]
    for net in nets:
        net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def raw_pixels(images: Tensor) -> Tensor:
    """uint8 (N, C, H, W) → float32 (N, C·H·W) in [0, 1]: the baseline that features must beat."""
    return images.flatten(1).float() / 255


def save(features: Features, run: Run, name: str, *, by: str = "curvssl probe RUN") -> None:
    """Keep an npz with h and, where they exist, z, y and index in the run, if it can be written to."""
    if not run.writable:
        say(f"{run.path} cannot be written to, so {name} is not kept and will be computed again")
        return
    arrays = {"h": features.h, "z": features.z, "y": features.y, "index": features.index}
    kept = {key: array.numpy() for key, array in arrays.items() if array is not None}
    run.keep_arrays(name, by=by, **kept)


def load(run: Run, name: str) -> Features | None:
    """What `save` kept; None if it has to be made again."""
    stored = run.stored_arrays(name)
    if stored is None:
        return None
    arrays = {key: torch.from_numpy(array) for key, array in stored.items()}
    return Features(h=arrays["h"], z=arrays.get("z"), y=arrays.get("y"), index=arrays.get("index"))
