"""What curvature costs: ratios to peers that are measured in turns in the same run. Prints tables, writes JSON.

    python benchmarks/losses.py [--out results/losses-cpu.json]

1. CurvSSL's loss with its gradient against Barlow Twins' alone, and against the form the equations suggest (`naive`).
2. Neighbour search against faiss's flat index.
3. Time and memory of `curvature` as n grows, each n in its own process.

Times are CPU times of one thread unless stated: other load on the machine disturbs these least.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvssl import BarlowTwinsLoss, CurvSSLLoss, curvature, nearest_neighbors
from curvssl.files import write_json
from curvssl.losses import standardise
from curvssl.rundir import provenance

BATCHES, WIDTHS = (256, 1024, 4096), (128, 2048)
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
K = 10

Row = dict[str, Any]


class NaiveCurvSSLLoss(BarlowTwinsLoss):
    """CurvSSL as written: all distances, the k×k Gram matrix of each point's edges, and the b×b matrix M."""

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        b = len(z0)
        c0, c1 = (standardise(self.scores(z)[:, None], eps=self.eps) for z in (z0, z1))  # (b, 1)
        m = c0 @ c1.mT / b
        identity = torch.eye(b)
        on, off = ((m - 1) * identity).square().sum(), (m * (1 - identity)).square().sum()
        return super().forward(z0, z1) + on + off

    def scores(self, z: Tensor) -> Tensor:
        distance = torch.cdist(z.detach(), z.detach()).fill_diagonal_(torch.inf)
        edges = z[distance.topk(K, largest=False).indices] - z[:, None]  # (b, k, d)
        u = edges / edges.norm(dim=-1, keepdim=True)
        gram = u @ u.mT  # (b, k, k)
        return gram.triu(1).sum((1, 2))


def medians(peers: dict[str, Callable[[], object]], *, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each; the peers take turns, so that a slow minute affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(repeats):
        for name, run in peers.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def losses() -> list[Row]:
    def with_gradient(loss: torch.nn.Module, z0: Tensor, z1: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(z0, z1), (z0, z1))

    rows = []
    for d in WIDTHS:
        for b in BATCHES:
            z0 = torch.randn(b, d)
            z1 = (z0 + 0.5 * torch.randn(b, d)).requires_grad_()
            z0.requires_grad_()
            peers = {"barlow_twins": BarlowTwinsLoss(), "curvssl": CurvSSLLoss(k=K), "naive": NaiveCurvSSLLoss()}
            torch.testing.assert_close(peers["curvssl"](z0, z1), peers["naive"](z0, z1), rtol=1e-3, atol=0)
            runs = {name: with_gradient(loss, z0, z1) for name, loss in peers.items()}
            seconds = medians(runs, repeats=max(3, min(15, 4096 * 128 * 3 // (b * d))), clock=time.process_time)
            rows.append({"b": b, "d": d, "k": K, "seconds": seconds})
    return rows


def neighbors(*, n: int = 16_384, d: int = 128) -> list[Row]:
    import faiss

    x = torch.randn(n, d)

    def flat_index() -> Any:
        index = faiss.IndexFlatL2(d)
        index.add(x.numpy())
        return index.search(x.numpy(), K + 1)[1]

    rows = []
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        faiss.omp_set_num_threads(threads)
        peers = {"curvssl": lambda: nearest_neighbors(x, k=K), "faiss": flat_index}
        # With several threads, wall time: threads that wait for each other use CPU time, too.
        clock = time.process_time if threads == 1 else time.perf_counter
        seconds = medians(peers, repeats=5, clock=clock)
        rows.append({"n": n, "d": d, "k": K, "threads": threads, "clock": clock.__name__, "seconds": seconds})
    torch.set_num_threads(1)
    agreement = (nearest_neighbors(x, k=K).numpy() == flat_index()[:, 1:]).mean()
    return [row | {"agreement": float(agreement)} for row in rows]


def growth_at(n: int, stage: str, *, d: int = 128) -> Row:
    """CPU time of one stage and its peak memory above the input; in a new process, so that its peak is this stage's."""
    torch.set_num_threads(1)
    curvature(torch.randn(500, d))  # load the libraries
    x, anyone = torch.randn(n, d), torch.randint(n, (n, K))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, start = _memory("VmRSS"), time.process_time()
    if stage == "search":
        nearest_neighbors(x, k=K)
    else:
        curvature(x, neighbors=anyone)
    return {"seconds": time.process_time() - start, "bytes": _memory("VmHWM") - before}


def growth() -> dict[str, Any]:
    rows: list[Row] = []
    for n in SIZES:
        row: Row = {"n": n, "d": 128, "k": K}
        for stage in ("search", "scores"):
            command = [sys.executable, __file__, "--growth-at", str(n), stage]
            row[stage] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        rows.append(row)
    large = [row for row in rows if row["n"] >= 10_000]  # for smaller n fixed costs matter
    exponents = {
        "time": slope([(row["n"], row["search"]["seconds"] + row["scores"]["seconds"]) for row in large]),
        "memory": slope([(row["n"], max(row["search"]["bytes"], row["scores"]["bytes"])) for row in large]),
    }
    return {"rows": rows, "exponents": exponents}


def slope(points: list[tuple[float, float]]) -> float:
    """p of the least-squares fit y ∝ xᵖ."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"no {field} in /proc/self/status")


def tables(results: dict[str, Any]) -> str:
    lines = ["| b | d | Barlow Twins | CurvSSL | CurvSSL / Barlow Twins | naive / CurvSSL |", "|--:" * 6 + "|"]
    for row in results["losses"]:
        s = row["seconds"]
        lines.append(
            f"| {row['b']} | {row['d']} | {1e3 * s['barlow_twins']:.1f} ms | {1e3 * s['curvssl']:.1f} ms "
            f"| {s['curvssl'] / s['barlow_twins']:.2f} | {s['naive'] / s['curvssl']:.2f} |"
        )
    lines += ["", "| n | d | threads | nearest_neighbors | faiss | ratio |", "|--:" * 6 + "|"]
    for row in results["neighbors"]:
        s = row["seconds"]
        lines.append(
            f"| {row['n']} | {row['d']} | {row['threads']} | {s['curvssl']:.2f} s | {s['faiss']:.2f} s "
            f"| {s['curvssl'] / s['faiss']:.2f} |"
        )
    lines += ["", "| n | search | scores | memory of the search | memory of the scores |", "|--:" * 5 + "|"]
    for row in results["growth"]["rows"]:
        a, b = row["search"], row["scores"]
        lines.append(
            f"| {row['n']} | {a['seconds']:.3f} s | {b['seconds']:.3f} s "
            f"| {a['bytes'] / 2**20:.0f} MiB | {b['bytes'] / 2**20:.0f} MiB |"
        )
    exponents = results["growth"]["exponents"]
    lines += ["", f"From n = 10,000 on: time ∝ n^{exponents['time']:.2f}, memory ∝ n^{exponents['memory']:.2f}."]
    return "\n".join(lines)


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else "unknown CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/losses-cpu.json"))
    parser.add_argument("--growth-at", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.growth_at:
        print(json.dumps(growth_at(int(arguments.growth_at[0]), arguments.growth_at[1])))
        return
    start = time.perf_counter()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"neighbors": neighbors(), "losses": losses(), "growth": growth()}
    origin = provenance(device=cpu())
    origin["versions"]["faiss-cpu"] = metadata.version("faiss-cpu")
    origin["wall_seconds"] = round(time.perf_counter() - start, 1)
    write_json(arguments.out, {"provenance": origin | {"threads": 1}} | results)
    print(tables(results))


if __name__ == "__main__":
    main()
