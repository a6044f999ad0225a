"""Times the whole demo, and its training step piece by piece, compared with the bare encoder, on this machine's CPU.

python benchmarks/demo.py [--out results/demo.json]
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from curvssl.config import CHOICES, demo
from curvssl.data.named import load
from curvssl.evaluate.probes import PROBES
from curvssl.methods import title_of
from curvssl.rundir import Run, provenance
from curvssl.train.loop import make_criterion, make_views
from curvssl.train.step import Step, make_optimizer


def milliseconds(works: dict[str, Callable[[], Any]], *, rounds: int = 15) -> dict[str, float]:
    """The median of each. They take turns, so that other load on the machine affects all of them alike."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for r in range(rounds + 3):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if r >= 3:
                found[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(times) for name, times in found.items()}


def step_costs() -> dict[str, float]:
    """A whole CurvSSL step, forward + backward of the encoder alone on as many views, and each other piece alone."""
    config = dataclasses.replace(demo(), device="cpu")
    data, device = load("digits"), torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        net = Run(Path(folder), config).make_net(channels=3).to(memory_format=torch.channels_last)
    step = Step(
        net=net,
        criterion=make_criterion(config),
        views=make_views(config, data),
        optimizer=make_optimizer(
            net, name="adam", lr=1e-3, weight_decay=1e-4, momentum=0.9, device=device, mode="eager"
        ),
        images=data.train.images.pixels,
        device=device,
        bf16=False,
    )
    rows = torch.arange(config.batch_size)
    u = step.views.draw(config.batch_size, generator=torch.Generator())
    views = torch.randn(2 * config.batch_size, 3, config.image_size, config.image_size)
    views = views.contiguous(memory_format=torch.channels_last)
    h = net.encoder(views).detach()
    z0, z1 = (torch.randn(config.batch_size, config.d_z, requires_grad=True) for _ in range(2))
    return milliseconds(
        {
            "step_ms": lambda: step(rows, u, 1e-3),
            "encoder_forward_backward_ms": lambda: net.encoder(views).sum().backward(),
            "views_ms": lambda: step.see(rows, u),
            "projector_ms": lambda: net.projector(h).sum().backward(),
            "loss_ms": lambda: step.criterion(z0, z1).backward(),
            "optimizer_ms": step.optimizer.step,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/demo.json"))
    out = parser.parse_args().out
    costs = step_costs()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "curvssl", "demo", "--out", folder], check=True)
        seconds = time.perf_counter() - started
        runs = [Run.read(Path(folder) / method) for method in CHOICES["method"]]
        training = sum(run.read_json("provenance.json")["seconds"] for run in runs)
        probed = {title_of(run.config.method): run.read_json("probes.json") for run in runs}
        floors = {name: probed["CurvSSL"][name] for name in ("raw pixels", "random encoder")}
        accuracy = {name: {p: probes[p] for p in PROBES} for name, probes in (floors | probed).items()}
    found = {"seconds": seconds, "training_seconds": training, "threads": torch.get_num_threads()} | costs
    found |= {"accuracy": accuracy, "provenance": provenance(device="CPU")}
    out.write_text(json.dumps(found, indent=1) + "\n")
    share = costs["encoder_forward_backward_ms"] / costs["step_ms"]
    print(f"demo {seconds:.0f} s; a step {costs['step_ms']:.0f} ms, {share:.0%} of it the bare encoder")


if __name__ == "__main__":
    main()
