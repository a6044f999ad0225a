"""What the canvas costs in accuracy: crops from the square that a folder is decoded to, or from the whole photograph.

    python benchmarks/canvas.py [--seeds 3] [--out results/canvas-cpu.json]

A small proxy, because no large labelled photographs are at hand: CIFAR-10's images of 32×32 are the photographs, and
views have 16×16. From a canvas of 18×18, a crop of a fifth of the area has 8×8 pixels; from the photograph, 14×14. All
arrays hold the same images, resized as a folder's files are. The same seeds train on all, and a linear probe on
held-out images judges.
"""

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from curvssl.config import AugmentConfig, demo
from curvssl.data.named import load
from curvssl.evaluate.probes import linear
from curvssl.evaluate.runs import dataset_of, features_of
from curvssl.rundir import provenance
from curvssl.train.loop import pretrain

SIZE = 16
SIDES = (18, 26, 32)  # 1.15, 1.6 and 2 times the view; the last is the whole photograph
IMAGES, EPOCHS = 10_000, 3


def resized(pixels: np.ndarray, *, side: int) -> np.ndarray:
    """uint8 (n, H, W, 3) resized as decode.py does it."""
    return np.stack([Image.fromarray(x).resize((side, side), Image.Resampling.BILINEAR) for x in pixels])


def accuracy(array: Path, out: Path, *, seed: int) -> float:
    """Percent of the held-out images that a linear probe gets right after pretraining."""
    config = dataclasses.replace(
        demo(),
        dataset=f"array:{array}",
        image_size=SIZE,
        epochs=EPOCHS,
        seed=seed,
        warmup_epochs=1,
        monitor_every=0,
        augment=AugmentConfig(),
    )
    run = pretrain(config, out=out, progress=False)
    data = dataset_of(run)
    train, test = (features_of(run, data, split) for split in ("train", "test"))
    return linear(train.h, train.y, test.h, test.y, classes=len(data.classes), seeds=(0,)).accuracy[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/canvas-cpu.json"))
    asked = parser.parse_args()
    train = load("cifar10").train
    assert train.images.pixels is not None
    assert train.labels is not None
    photographs = train.images.pixels[:IMAGES].permute(0, 2, 3, 1).contiguous().numpy()
    found: dict[int, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as place:
        for side in SIDES:
            np.savez(
                Path(place, f"{side}.npz"),
                images=resized(photographs, side=side),
                labels=train.labels[:IMAGES].numpy(),
            )
        for seed in range(asked.seeds):
            for side in SIDES:
                found[side].append(accuracy(Path(place, f"{side}.npz"), Path(place, f"{side} {seed}"), seed=seed))
                print(side, seed, found[side][-1], flush=True)
    result: dict[str, Any] = {
        "provenance": provenance(device=f"cpu, {os.cpu_count()} cores"),
        "settings": {"images": IMAGES, "epochs": EPOCHS, "view": SIZE, "encoder": demo().encoder},
        "linear": found,
    }
    asked.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
