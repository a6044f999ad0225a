"""How accurate lightly's Barlow Twins is after so much time, on the same device as ours and judged by the same probes.

    python benchmarks/lightly_accuracy.py [--minutes 4] [--out results/lightly-accuracy.json]

All is as in lightly's own CIFAR-10 benchmark (its docs, cifar10_benchmark.py): ResNet-18 with the 3×3 stem, projector
2048-2048, λ 0.005, SimCLR's views without blur, batches of 128, SGD with a cosine. Three things are not, in its favour:
bf16 autocast, channels_last, and a cosine that follows the time instead of the epochs, so that it uses all of it. The
time begins with the first batch's workers; the probes come after it, as with our runs.

    python benchmarks/lightly_accuracy.py --images 512 --minutes 0.2 --workers 0 --out try.json   # without a GPU
"""

import argparse
import json
import math
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightly.loss import BarlowTwinsLoss
from lightly.models.modules.heads import ProjectionHead
from lightly.transforms import SimCLRTransform
from lightly.transforms.utils import IMAGENET_NORMALIZE
from PIL import Image
from torch import nn

from curvssl.data.named import Dataset, load
from curvssl.evaluate.features import extract
from curvssl.evaluate.runs import probe_features
from curvssl.models import make_encoder
from curvssl.rundir import provenance

BATCH, LR, MOMENTUM, DECAY = 128, 0.06, 0.9, 5e-4
VIEWS: dict[str, Any] = {"input_size": 32, "cj_strength": 0.5, "gaussian_blur": 0.0}


class Pictures(torch.utils.data.Dataset[Any]):
    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels, self.transform = pixels, SimCLRTransform(**VIEWS)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> Any:
        return self.transform(Image.fromarray(self.pixels[i]))


def train(net: nn.Module, pictures: Pictures, *, seconds: float, workers: int, device: torch.device) -> dict[str, Any]:
    """lightly's loop until the time is over; the last epoch may be a part of one."""
    parallel: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    pinned = {"pin_memory": device.type == "cuda"}
    loader = torch.utils.data.DataLoader(
        pictures, BATCH, shuffle=True, drop_last=True, num_workers=workers, **pinned, **parallel
    )
    criterion = BarlowTwinsLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    started, steps, spent = time.perf_counter(), 0, 0.0
    while spent < seconds:
        for views in loader:
            optimizer.param_groups[0]["lr"] = LR * (1 + math.cos(math.pi * min(1.0, spent / seconds))) / 2
            with torch.autocast(device.type, torch.bfloat16):
                x = (view.to(device, non_blocking=True, memory_format=torch.channels_last) for view in views)
                z0, z1 = map(net, x)
            loss = criterion(z0.float(), z1.float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps, spent = steps + 1, time.perf_counter() - started
            if spent >= seconds:
                break
        print(f"{steps} steps, {spent:.0f} s, loss {loss.item():.1f}", flush=True)
    epochs = steps / len(loader)
    return {"seconds": time.perf_counter() - started, "steps": steps, "epochs": epochs, "last_loss": loss.item()}


def judge(encoder: nn.Module, data: Dataset, rows: slice) -> dict[str, Any]:
    """Our probes of h; the images are normalised as lightly does it."""
    shape = {"size": 32, "mean": IMAGENET_NORMALIZE["mean"], "std": IMAGENET_NORMALIZE["std"]}
    parts = []
    for split in (data.train, data.test):
        assert split.labels is not None
        parts.append(extract(encoder, split.images[rows], labels=split.labels[rows], **shape))
    return probe_features(*parts, seeds=(0, 1, 2), classes=len(data.classes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=16, help="processes that make views")
    parser.add_argument("--images", type=int, default=None, help="only so many training and test images, to try it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/lightly-accuracy.json"))
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    data, rows = load("cifar10"), slice(asked.images)
    assert data.train.images.pixels is not None
    pictures = Pictures(data.train.images.pixels[rows].permute(0, 2, 3, 1).contiguous().numpy())
    head = ProjectionHead([(512, 2048, nn.BatchNorm1d(2048), nn.ReLU(inplace=True)), (2048, 2048, None, None)])
    encoder = make_encoder("resnet18", stem="small")
    net: Any = nn.Sequential(encoder, head).to(device).to(memory_format=torch.channels_last)
    trained = train(net, pictures, seconds=60 * asked.minutes, workers=asked.workers, device=device)
    found = {
        "peer": f"lightly {metadata.version('lightly')}",
        "settings": {"batch": BATCH, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "views": VIEWS}
        | {"images": len(pictures), "workers": asked.workers, "seed": asked.seed, "minutes": asked.minutes},
        **trained,
        "judged_on": "test images",
        "probes": judge(encoder, data, rows),
        "provenance": provenance(device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu"),
    }
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print({name: round(found["probes"][name]["mean"], 2) for name in ("linear", "mlp", "knn")})


if __name__ == "__main__":
    main()
