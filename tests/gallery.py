"""A folder of pieces of real photographs with odd names and planted copies, and a run on it. Shared by some tests."""

import dataclasses
import functools
import os
from pathlib import Path

import numpy as np
from PIL import Image
from pipeline import TINY, folder, one_thread
from sklearn.datasets import load_sample_images

from curvssl.rundir import Run
from curvssl.train.loop import pretrain

ODD = (
    "it's <b>bold.png",
    'say "hi" & go.png',
    "<script>alert(1)<.png",
    "=1+2.png",
    "new\nline.png",
    os.fsdecode(b"caf\xe9.png"),
    "日本.png",
)


def pieces(n: int) -> list[Image.Image]:
    """The n squares of 64×64 pixels with the most contrast, of the two photographs that come with scikit-learn."""
    photos = np.stack(load_sample_images().images)[:, :384]
    tiles = photos.reshape(2, 6, 64, 10, 64, 3).swapaxes(2, 3).reshape(-1, 64, 64, 3)
    order = np.argsort(-tiles.std((1, 2, 3)), kind="stable")
    return [Image.fromarray(tiles[i]) for i in order[:n]]


@functools.cache
def photographs() -> tuple[Path, set[frozenset[str]]]:
    """The folder, and the pairs of names that are an image and a copy: exact, as JPEG, resized, slightly cropped."""
    root = folder() / "photographs"
    (root / "deep" / "er").mkdir(parents=True)
    names = [*ODD, *(f"deep/er/{i}.png" if i % 2 else f"{i}.png" for i in range(len(ODD), 70))]
    for name, piece in zip(names, pieces(70), strict=True):
        piece.save(root / name)
    planted = set()
    for i, piece in enumerate(pieces(8)):
        kind = ("exact", "encoded", "resized", "cropped")[i % 4]
        copy = root / "copies" / f"{kind} {i}.jpg"
        copy.parent.mkdir(exist_ok=True)
        if kind == "exact":
            copy.write_bytes((root / names[i]).read_bytes())  # a PNG, whatever its suffix says
        elif kind == "encoded":
            piece.save(copy, quality=60)
        elif kind == "resized":
            piece.resize((40, 40)).save(copy, quality=90)
        else:
            piece.crop((1, 1, 63, 63)).save(copy, quality=95)
        planted.add(frozenset((names[i], f"copies/{copy.name}")))
    (root / "broken.jpg").write_bytes((root / "copies" / "encoded 1.jpg").read_bytes()[:200])
    return root, planted


@functools.cache
def photographed() -> Run:
    """A run on the photographs. Tests only read it."""
    recipe = {"image_size": 16, "epochs": 1, "warmup_epochs": 0, "batch_size": 35, "holdout": 0.0}
    config = dataclasses.replace(TINY, dataset=f"folder:{photographs()[0]}", **recipe)
    with one_thread():
        return pretrain(config, out=folder() / "photographed", progress=False)
