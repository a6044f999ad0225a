"""Does the memory of a long training run grow?

    python benchmarks/memory.py [--device cpu|cuda] [--steps 10000] [--out results/memory-cpu.json]

A whole CurvSSL run of a tiny network, with metrics, monitor and checkpoints. While it trains, a second thread reads the
memory of the process and, on CUDA, that of torch's allocator. The first tenth of the run is left out: it compiles,
captures and fills caches. On CUDA the default is 2,000 steps, captured in a graph.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

import curvssl
from curvssl.config import AugmentConfig, PretrainConfig
from curvssl.files import write_json
from curvssl.rundir import provenance

BATCH, PER_EPOCH = 32, 100


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def trained(steps: int, *, device: str, folder: Path) -> tuple[list[tuple[float, int, int]], list[tuple[float, int]]]:
    """(time, memory, CUDA memory) all along a run, and (time, step) at the end of each epoch."""
    images = torch.randint(256, (BATCH * PER_EPOCH, 3, 8, 8), dtype=torch.uint8)
    config = PretrainConfig(
        method="curvssl",
        encoder="resnet-mini",
        image_size=8,
        epochs=steps // PER_EPOCH,
        batch_size=BATCH,
        projector_width=16,
        d_z=16,
        holdout=0.0,
        monitor_every=10,
        checkpoint_seconds=5,
        device=device,
        augment=AugmentConfig(crop_scale=(0.6, 1.0)),
    )
    read: list[tuple[float, int, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            read.append((time.monotonic(), resident(), torch.cuda.memory_allocated() if device == "cuda" else 0))

    thread = threading.Thread(target=watch)
    started = time.monotonic()
    thread.start()
    try:
        run = curvssl.pretrain(config, out=folder, images=images, progress=False)
    finally:
        over.set()
        thread.join()
    rows = run.metrics()
    late = time.monotonic() - started - rows[-1]["seconds"]  # the run's clock starts after the network is made
    return read, [(started + late + row["seconds"], row["step"]) for row in rows]


def growth(when: np.ndarray, steps: np.ndarray, bytes_: np.ndarray) -> dict[str, float]:
    """Memory in MB at the end of each fifth, and its slope over the steps by least squares."""
    inside = steps >= steps[-1] / 10
    x, y = steps[inside], bytes_[inside] / 2**20
    marks = [
        float(y[np.searchsorted(x, share * steps[-1]).clip(max=len(x) - 1)]) for share in (0.1, 0.2, 0.4, 0.6, 0.8, 1)
    ]
    return {
        "MB_at_10_20_40_60_80_100_percent": [round(mark, 2) for mark in marks],
        "MB_per_1000_steps": round(float(np.polyfit(x, y, 1)[0] * 1000), 4),
        "largest_MB": round(float(y.max()), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, help="default: 10,000 on CPU, 2,000 on CUDA")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    steps = arguments.steps or {"cpu": 10_000, "cuda": 2_000}[arguments.device]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        read, epochs = trained(steps, device=arguments.device, folder=Path(folder))
    when, memory, device = (np.array(column, dtype=float) for column in zip(*read, strict=True))
    at = np.interp(when, *zip(*epochs, strict=True))
    found = {"steps": steps, "process": growth(when, at, memory)}
    if arguments.device == "cuda":
        found["cuda"] = growth(when, at, device)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(found)
    out = arguments.out or Path(f"results/memory-{arguments.device}.json")
    write_json(out, found | {"provenance": provenance(device=name)})


if __name__ == "__main__":
    main()
