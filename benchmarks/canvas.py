"""What the canvas costs in accuracy: crops from the square that a folder is decoded to, or from the whole photograph.

    python benchmarks/canvas.py [--seeds 3] [--out results/canvas-cpu.json]

A small proxy, because no large labelled photographs are at hand: CIFAR-10's images of 32×32 are the photographs, and
views have 16×16. So the canvas has 18×18 pixels (1.15 times the view), and a crop of a fifth of its area 8×8. Both
arrays hold the same images, resized as a folder's files are. The same seeds train on both, and a linear probe on
held-out images judges.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from curvssl.config import AugmentConfig, demo
from curvssl.data.folders import CANVAS
from curvssl.data.named import load
from curvssl.evaluate.probes import linear
from curvssl.evaluate.runs import dataset_of, features_of
from curvssl.rundir import provenance
from curvssl.train.loop import pretrain

SIZE = 16
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
    sides = {"canvas": round(CANVAS * SIZE), "whole photograph": photographs.shape[1]}
    found: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as place:
        for name, side in sides.items():
            pixels = photographs if side == photographs.shape[1] else resized(photographs, side=side)
            np.savez(Path(place, f"{name}.npz"), images=pixels, labels=train.labels[:IMAGES].numpy())
        for seed in range(asked.seeds):
            for name in sides:
                run = Path(place, f"{name} {seed}")
                found[name].append(accuracy(Path(place, f"{name}.npz"), run, seed=seed))
                print(name, seed, found[name][-1], flush=True)
    gaps = [a - b for a, b in zip(*found.values(), strict=True)]
    result: dict[str, Any] = {
        "provenance": provenance(device=f"cpu, {os.cpu_count()} cores"),
        "settings": {"images": IMAGES, "epochs": EPOCHS, "view": SIZE, "sides": sides, "encoder": demo().encoder},
        "linear": found,
        "gap": {"mean": statistics.mean(gaps), "sd": statistics.stdev(gaps), "seeds": gaps},
    }
    asked.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
