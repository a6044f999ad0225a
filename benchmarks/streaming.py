"""Views/s from a folder of JPEGs, from a packed array and from device memory, against torchvision's usual pipeline.

    python benchmarks/streaming.py [--device cpu] [--workers 2] [--out results/streaming-cpu.json]
    python benchmarks/streaming.py --ranks --out results/ranks-cpu.json

Every rate is that of the steady state (the first batch is left out), the median of several rounds in which all take
turns. A "view" is a normalised float32 tensor on the device; two are made of every image. --ranks measures the weak
scaling of pretraining instead, from 1 to 2 ranks, one thread each: the batch per rank is the same, so the views/s
should double.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvssl.config import AugmentConfig
from curvssl.data.images import Images, TensorImages
from curvssl.data.memory import resident
from curvssl.data.named import load
from curvssl.data.pack import pack
from curvssl.data.viewed import viewed
from curvssl.data.views import Augment, Views
from curvssl.rundir import Run, provenance

SIZE, BATCH = 224, 64
PHOTO = (500, 375)  # the usual size of a photograph in ImageNet
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def make_folder(root: Path, *, count: int) -> int:
    """Write `count` JPEGs with 64 different contents; return the mean size of a file in bytes."""
    from PIL import Image

    numbers = np.random.default_rng(0)
    for c in range(2):
        (root / f"class{c}").mkdir(parents=True)
    sizes = []
    for i in range(64):
        coarse = Image.fromarray(numbers.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        large = np.asarray(coarse.resize(PHOTO, Image.Resampling.BICUBIC))
        grain = numbers.normal(0, 12, (PHOTO[1], PHOTO[0], 3))
        first = root / "class0" / f"{i}.jpg"
        Image.fromarray((large + grain).clip(0, 255).astype(np.uint8)).save(first, quality=90)
        sizes.append(first.stat().st_size)
        for j in range(i + 64, count, 64):
            os.link(first, root / f"class{j % 2}" / f"{j}.jpg")
    return round(statistics.mean(sizes))


def rate(batches: Iterator[Any], *, device: torch.device) -> float:
    """Images per second after the first batch."""
    next(batches)
    started, seen = time.perf_counter(), 0
    for batch in batches:
        seen += len(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return seen / (time.perf_counter() - started)


def orders(n: int) -> Iterator[Tensor]:
    return iter(torch.randperm(n)[: n // BATCH * BATCH].split(BATCH))


def by_workers(images: Images, views: Views, *, workers: int) -> Iterator[Tensor]:
    """Two views of every image, as training makes them on a CPU."""
    numbers = torch.Generator()
    steps = ((rows, views.draw(BATCH, generator=numbers)) for rows in orders(len(images)))
    return (made[:BATCH] for (made,) in viewed(images, views, steps, b=BATCH, workers=workers))


def by_device(batches: Iterator[Tensor], views: Callable[..., Any], draws: int) -> Iterator[Tensor]:
    """Two views of every image, as training makes them on a CUDA device."""
    for images in batches:
        views(images, [torch.rand(2, len(images), draws, device=images.device)])
        yield images


def torchvision_batches(root: Path, *, workers: int, device: torch.device) -> Iterator[Tensor]:
    """The pipeline of most self-supervised code: PIL, two random views in the worker, a collated batch."""
    from torchvision import datasets, transforms

    view = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, scale=(0.2, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            transforms.RandomGrayscale(0.2),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    pictures = datasets.ImageFolder(root, transform=lambda image: (view(image), view(image)))
    loader = torch.utils.data.DataLoader(
        pictures, batch_size=BATCH, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda", drop_last=True
    )
    for (first, second), _ in loader:
        second.to(device, non_blocking=True)
        yield first.to(device, non_blocking=True)


def streaming(root: Path, packed: Path, *, workers: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Medians over the rounds, in images per second for "images …" and views per second for "views …"."""
    folder = load(f"folder:{root}", size=SIZE).train.images
    array = load(f"array:{packed}", size=SIZE).train.images
    memory = resident(array, device=device)
    augment = Augment(size=SIZE, mean=MEAN, std=STD, **vars(AugmentConfig()))
    views = Views(augment).to(device)
    cpu = device.type == "cpu"
    compiled = torch.compile(views, dynamic=False)

    def pixels(images: Images) -> Iterator[Tensor]:
        if images.pixels is None:
            return images.batches(orders(len(images)), device=device, workers=workers)
        return (memory[rows.to(device)] for rows in orders(len(images)))

    def two_views(images: Images) -> Iterator[Tensor]:
        if cpu:
            return by_workers(images, views, workers=workers)
        return by_device(pixels(images), compiled, augment.draws)

    works: dict[str, Callable[[], Iterator[Tensor]]] = {
        "images from the folder": lambda: pixels(folder),
        "images from the packed array": lambda: pixels(array),
        "views, torchvision's pipeline": lambda: torchvision_batches(root, workers=workers, device=device),
        "views from the folder": lambda: two_views(folder),
        "views from the packed array": lambda: two_views(array),
        "views from device memory": lambda: two_views(TensorImages.of(memory)),
    }
    for _ in two_views(TensorImages.of(memory)):  # compiled once, before the clock runs
        break
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append((2 if name.startswith("views") else 1) * rate(work(), device=device))
    return {name: statistics.median(rates) for name, rates in found.items()}


def weak_scaling(folder: Path, *, rounds: int) -> dict[str, Any]:
    """Views/s of pretraining (resnet-mini, digits at 16×16, 64 images per rank) with 1 and 2 ranks of one thread each.

    Two independent processes show the most that two cores can give.
    """
    found: dict[str, list[float]] = {"1 rank": [], "2 ranks": [], "2 separate processes": []}
    for r in range(rounds):
        for name, rates in found.items():
            ranks = 2 if name == "2 ranks" else 1
            runs = [folder / f"{name} {r} {i}" for i in range(2 if "separate" in name else 1)]
            flags = ["--preset", "demo", "--batch-size", str(64 * ranks), "--epochs", "4", "--monitor-every", "0"]
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "curvssl"]
            start = [sys.executable, *torchrun, "pretrain", *flags, "--device", "cpu", "--out"]
            alone = os.environ | {"OMP_NUM_THREADS": "1"}
            processes = [subprocess.Popen([*start, str(run)], stderr=subprocess.DEVNULL, env=alone) for run in runs]
            codes = [process.wait() for process in processes]
            if any(codes):
                sys.exit(f"{name}: a run failed")
            rows = zip(*(Run.read(run).metrics()[1:] for run in runs), strict=True)
            rates += [sum(row["views_per_s"] for row in side_by_side) for side_by_side in rows]
    views = {name: statistics.median(rates) for name, rates in found.items()}
    efficiency = views["2 ranks"] / (2 * views["1 rank"])
    return {"views_per_s": views, "efficiency": efficiency, "batch_per_rank": 64}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/streaming-cpu.json"))
    asked = parser.parse_args()
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {os.cpu_count()} cores"
    result: dict[str, Any] = {"provenance": provenance(device=name) | {"load_before": os.getloadavg()[0]}}
    with tempfile.TemporaryDirectory() as place:
        if asked.ranks:
            result["weak_scaling"] = weak_scaling(Path(place), rounds=asked.rounds)
        else:
            root = Path(place, "pictures")
            size = make_folder(root, count=asked.images)
            started = time.perf_counter()
            packed, shape = pack(root, Path(place, "packed"), size=SIZE, progress=False)
            seconds = time.perf_counter() - started
            result["settings"] = {
                "images": asked.images,
                "file_bytes": size,
                "photo": PHOTO,
                "canvas": shape[-1],
                "image_size": SIZE,
                "batch": BATCH,
                "workers": asked.workers,
                "rounds": asked.rounds,
                "threads": torch.get_num_threads(),
            }
            result["pack_images_per_s"] = shape[0] / seconds
            rates = streaming(root, packed, workers=asked.workers, device=device, rounds=asked.rounds)
            result |= {"per_second": rates, "load_after": os.getloadavg()[0]}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
