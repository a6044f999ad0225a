"""Does the accuracy survive float16? The probes of a run and of its exported encoder, on the same images.

    curvssl export RUN --to hub-folder --half --license Apache-2.0 --out weights/cifar10-resnet18
    python benchmarks/halved.py RUN weights/cifar10-resnet18 [--out results/halved.json]

Nothing is written into either folder, unlike `curvssl probe`, which keeps its features in it.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from curvssl.evaluate.features import Features, extract_over_ranks
from curvssl.evaluate.probes import PROBES
from curvssl.evaluate.runs import SPLITS, best_device, dataset_of, here, probe_features
from curvssl.files import write_json
from curvssl.rundir import Run, provenance


def features(run: Run) -> list[Features]:
    """h of the training and of the test images, not those that the run may have stored."""
    data, (encoder, _) = dataset_of(run), run.load_parts()
    shape = {"size": run.config.image_size, "mean": data.mean, "std": data.std, "device": here()}
    parts = (getattr(data, split) for split in SPLITS)
    return [extract_over_ranks(encoder, part.images, labels=part.labels, **shape) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("exported", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/halved.json"))
    asked = parser.parse_args()
    found: dict[str, Any] = {"config": Run.read(asked.run).config.to_dict()}
    h = {}
    for name, path in (("float32", asked.run), ("float16", asked.exported)):
        train, test = features(Run.read(path))
        assert train.y is not None
        probes = probe_features(train, test, seeds=(0, 1, 2), classes=int(train.y.max()) + 1)
        found[name] = {"probes": probes, "megabytes": (path / "encoder.safetensors").stat().st_size / 1e6}
        h[name] = test.h
        print(name, {probe: round(probes[probe]["mean"], 2) for probe in PROBES}, flush=True)
    found["difference"] = float((h["float16"] - h["float32"]).norm() / h["float32"].norm())
    device = best_device()
    found["provenance"] = provenance(device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
    write_json(asked.out, found)


if __name__ == "__main__":
    main()
