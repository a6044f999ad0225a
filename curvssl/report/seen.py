"""What the network sees: some images and all views of one step of them, as pixels and as one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvssl.config import PretrainConfig, UserError
from curvssl.data.named import Dataset
from curvssl.data.order import batches, mix
from curvssl.data.views import Views
from curvssl.evaluate import maps
from curvssl.losses import GLOBAL
from curvssl.report.page import Columns, fitted, size_of
from curvssl.train.loop import chosen, make_views

CELLS = 160, 256  # pixels of a view in the picture: at least and at most
GAP, HEAD, MARGIN = 10, 78, 30  # pixels between cells, above them, and around all
LETTER = 17  # pixels of a letter in the title


@torch.inference_mode()
def first_step(config: PretrainConfig, data: Dataset, *, images: int = 8) -> Columns:
    """The first images of a run's first step, and all views of them. On a CPU the run sees these very pixels; on CUDA
    it sees the same images, and views that were drawn from other random numbers. Nothing in `config` is left open."""
    views, fit = make_views(config, data), chosen(config, data).fit
    pairs = 1 + views.blends  # whoever is blended needs a partner, whether it is shown or not
    most = min(len(fit), config.batch_size) // pairs * pairs
    b = min(-(-images // pairs) * pairs, most)
    if b < 1:
        raise UserError(f"{data.name} has {len(fit)} images to pretrain on: a blend needs two")
    order = next(batches(len(fit), size=b, seed=config.seed, first=0, last=1, device=torch.device("cpu")))
    (pixels,) = data.pretraining.batches([fit[order]], workers=0)
    numbers = torch.Generator().manual_seed(mix(config.seed, 0))
    u = [part[:, :b] for part in views.draw(config.batch_size, generator=numbers)]
    return {name: column[:images] for name, column in columns(views, pixels, u).items()}


def columns(views: Views, images: Tensor, u: Sequence[Tensor]) -> Columns:
    """uint8 images (b, C, H, W) and all their views from the uniform numbers u, with the normalisation undone."""
    whole, *local = (batch.unflatten(0, (-1, len(images))) for batch in views(images, u))
    mean, std = (part[:, None, None] for part in (views.makers[0].mean, views.makers[0].std))
    named = {f"global {i + 1}": whole[i] for i in range(GLOBAL)}
    named |= {f"local {i + 1}": view for i, view in enumerate(local[0] if local else ())}
    named |= {"blend": whole[GLOBAL]} if views.blends else {"middle": whole[GLOBAL]} if views.middle else {}
    pixels = {name: (255 * (view * std + mean)).round().clamp(0, 255) for name, view in named.items()}
    grey = images.shape[1] == 1  # its views have three equal channels
    everything = {"image": images.float()} | pixels
    return {name: _visible(column[:, :1] if grey else column) for name, column in everything.items()}


def _visible(pixels: Tensor) -> np.ndarray:
    """One or three channels: any other number has no colours, and its mean is shown."""
    shown = pixels if pixels.shape[1] in (1, 3) else pixels.mean(1, keepdim=True)
    return shown.round().byte().contiguous().numpy()


def summary(shown: Columns) -> str:
    """What the columns are, in words."""
    n, local = len(shown["image"]), sum(name.startswith("local") for name in shown)
    parts = [f"{n} image{'s' * (n > 1)} with {GLOBAL} global views of {size_of(shown['global 1'])}"]
    parts += [f"{local} local of {size_of(shown['local 1'])}"] if local else []
    more = {"blend": "a blend", "middle": "one midway between the global ones"}
    return ", ".join(parts + [what for name, what in more.items() if name in shown])


def draw(shown: Columns, *, title: str, out: Path) -> None:
    """Write the picture, one row per image and one column per view, to a .png or .pdf."""
    from matplotlib.figure import Figure
    from PIL import Image

    cell = min(max(CELLS[0], *(column.shape[2] for name, column in shown.items() if name != "image")), CELLS[1])
    step, rows = cell + GAP, len(shown["image"])
    # A wider space separates what the network sees from where it comes from.
    lefts = [MARGIN + i * step + (2 * GAP if i else 0) for i in range(len(shown))]
    width, height = lefts[-1] + cell + MARGIN, HEAD + MARGIN + rows * step - GAP + MARGIN
    if max(width, height) >= 2**16:  # more than matplotlib draws
        raise UserError(f"the picture would have {width:,}×{height:,} pixels: draw fewer images or fewer views")
    sheet = Image.new("RGB", (width, height), "white")
    inches = ((width + 0.01) / maps.DPI, (height + 0.01) / maps.DPI)  # matplotlib rounds the pixels down
    figure = Figure(figsize=inches, dpi=maps.DPI, facecolor="white")
    for left, (name, column) in zip(lefts, shown.items(), strict=True):
        for row, pixels in enumerate(column):
            tile = fitted(pixels, side=cell, enlarge=True)
            top = HEAD + MARGIN + row * step
            sheet.paste(tile, (left + (cell - tile.width) // 2, top + (cell - tile.height) // 2))
        middle, bottom = (left + cell / 2) / width, 1 - (HEAD + MARGIN - 8) / height
        label: Any = {"ha": "center", "va": "bottom", "fontsize": 7}
        figure.text(middle, bottom + 22 / height, name, color=maps.INK, fontweight="bold", **label)
        figure.text(middle, bottom, size_of(column), color=maps.FAINT, **label)
    axes = figure.add_axes((0, 0, 1, 1), zorder=-1)
    axes.imshow(np.asarray(sheet), interpolation="none", aspect="auto")
    axes.set_axis_off()
    letters = (width - 2 * MARGIN) // LETTER
    title = title if len(title) <= letters else f"{title[: letters - 1]}…"
    figure.text(MARGIN / width, 1 - 16 / height, title, color=maps.INK, fontsize=9, fontweight="bold", va="top")
    maps.write_picture(figure, out)
