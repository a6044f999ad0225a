"""Which of the default settings should change for a small batch: the rate, λ_emb or d_z? Every combination is tried.

    python benchmarks/small_batches.py [--seeds 1] [--out results/small-batches-cpu.json]

A small proxy on a CPU: Barlow Twins, 2,000 images of CIFAR-10, views of 16×16, the demo's encoder and the default
preset's projector. A batch of another size sees as many images, so a smaller one takes more steps. A linear probe is
fitted to the same images, and 5,000 other training images judge.
"""

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing as mp
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from curvssl.config import PretrainConfig, default
from curvssl.data.named import load
from curvssl.evaluate.features import extract
from curvssl.evaluate.probes import knn, linear
from curvssl.evaluate.runs import images_in
from curvssl.rundir import Run, provenance
from curvssl.train.loop import pretrain

IMAGES, HELD_OUT, EPOCHS = 2_000, 5_000, 16
USUAL, SMALL = 256, (32, 64)  # batch sizes
NARROW = 128  # d_z


def settings(batch: int, changed: tuple[str, ...]) -> dict[str, Any]:
    """The default preset's, with what is named changed for the batch.

    The rate follows the root, as Adam's noise does. The off-diagonal of the correlation of two views has noise 1 / √b,
    whose square is summed over d_z² entries: with λ_emb in proportion to b, it weighs as much as in the usual batch.
    """
    usual = default()
    share = batch / USUAL
    changes = {"lr": usual.lr * math.sqrt(share), "lambda_emb": usual.lambda_emb * share, "d_z": NARROW}
    return {"batch_size": batch, **{name: changes[name] for name in changed}}


def cells(seeds: int) -> list[dict[str, Any]]:
    """Seeds come first, then the batch sizes, so that an interrupted run has whole tables."""
    names = ("lr", "lambda_emb", "d_z")
    subsets = [subset for n in range(len(names) + 1) for subset in itertools.combinations(names, n)]
    found = []
    for seed in range(seeds):
        for batch in SMALL:
            found += [{"batch": batch, "changed": subset, "seed": seed} for subset in subsets]
        found.append({"batch": USUAL, "changed": (), "seed": seed})
    return found


def config_of(cell: dict[str, Any], array: Path) -> PretrainConfig:
    return dataclasses.replace(
        default(),
        method="barlow-twins",
        dataset=f"array:{array}",
        encoder="resnet-mini",
        image_size=16,
        epochs=EPOCHS,
        warmup_epochs=EPOCHS / 10,  # the preset's share
        monitor_every=0,
        holdout=0.0,
        seed=cell["seed"],
        **settings(cell["batch"], cell["changed"]),
    )


def measure(cell: dict[str, Any], *, place: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    name = f"{cell['batch']}-{'-'.join(cell['changed'])}-{cell['seed']}"
    run = pretrain(config_of(cell, place / "train.npz"), out=place / name, progress=False)
    row = {**cell, **judged(run.load_parts()[0], run, place), "seconds": run.metrics()[-1]["seconds"]}
    if cell["batch"] == USUAL:
        row["untrained"] = judged(run.make_net(channels=3).encoder, run, place)
    return row


def judged(encoder: nn.Module, run: Run, place: Path) -> dict[str, float]:
    known, parts = run.read_json("data.json"), []
    for file in ("train.npz", "held-out.npz"):
        labels = torch.from_numpy(np.load(place / file)["labels"])
        shape = {"size": run.config.image_size, "mean": known["mean"], "std": known["std"]}
        parts += [extract(encoder, images_in(run, place / file), **shape).h, labels]
    probed = {"linear": linear(*parts, classes=10, seeds=(0, 1, 2)), "knn": knn(*parts, classes=10)}
    return {name: sum(result.accuracy) / len(result.accuracy) for name, result in probed.items()}


def write_arrays(folder: Path) -> None:
    train = load("cifar10").train
    assert train.images.pixels is not None
    assert train.labels is not None
    for name, rows in (("train", slice(IMAGES)), ("held-out", slice(-HELD_OUT, None))):
        pixels = train.images.pixels[rows].permute(0, 2, 3, 1).contiguous().numpy()
        np.savez(folder / name, images=pixels, labels=train.labels[rows].numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/small-batches-cpu.json"))
    asked = parser.parse_args()
    found: dict[str, Any] = {
        "provenance": provenance(device="cpu, one thread a run"),
        "settings": {"images": IMAGES, "held_out": HELD_OUT, "epochs": EPOCHS, "view": 16, "encoder": "resnet-mini"},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        write_arrays(Path(folder))
        work = partial(measure, place=Path(folder))
        with ProcessPoolExecutor(asked.processes, mp_context=mp.get_context("spawn")) as pool:
            for row in pool.map(work, cells(asked.seeds)):
                found["rows"].append(row)
                asked.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
