"""How fast large backbones train on 224×224 images, compared with a plain eager loop in the same run.

    python benchmarks/backbones.py [--out results/backbones.json]

Both sides take whole steps on random images on the device: two views, forward, loss, backward, Adam; bf16 autocast,
channels_last, cuDNN's full search. Ours is the step that `curvssl pretrain` uses by default. The plain loop is ordinary
torch: no compiler, no CUDA graph, no hand-written kernel. It, too, makes its views on the device, by the same
operations. Times are medians, with the device synchronised, without the warm-up. Each backbone has its own process:
all compile at the same time, then each has the device to itself.
"""

import argparse
import gc
import json
import multiprocessing as mp
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

BACKBONES = {"ResNet-50": "resnet50", "ViT-S/16": "timm:vit_small_patch16_224", "ConvNeXt-T": "timm:convnext_tiny"}
IMAGES = 2048  # with random pixels: the work of both sides does not depend on them
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ADAM = {"lr": 1e-3, "weight_decay": 1e-4}
WARM_UP = 6  # steps that search, compile and capture
SMALLEST = 16  # images in a batch; if even these do not fit into memory, the benchmark fails


class Setting(NamedTuple):
    size: int
    batch: int
    steps: int  # in one repeat
    repeats: int
    device: str


class Side:
    """What both sides share: the same weights, images and random numbers. `step` takes one training step."""

    def __init__(self, encoder: str, setting: Setting) -> None:
        from curvssl.data.views import Augment, Views
        from curvssl.losses import CurvSSLLoss
        from curvssl.models import make_net

        self.device = torch.device(setting.device)
        shape = {"channels": 3, "size": setting.size, "width": 512, "depth": 2, "d_z": 128, "norm": False, "seed": 0}
        net = make_net(encoder=encoder, stem="imagenet", **shape).to(self.device)
        self.net = net.to(memory_format=torch.channels_last)
        self.views = Views(Augment(size=setting.size, mean=MEAN, std=STD)).to(self.device)
        self.criterion = CurvSSLLoss(k=min(10, setting.batch - 1))
        self.numbers = torch.Generator(self.device).manual_seed(0)
        pixels = (IMAGES, 3, setting.size, setting.size)
        self.images = torch.randint(0, 256, pixels, dtype=torch.uint8, device=self.device, generator=self.numbers)
        self.batch, self.mode = setting.batch, "plain"

    def __call__(self) -> None:
        rows = torch.randint(0, IMAGES, (self.batch,), device=self.device, generator=self.numbers)
        self.step(rows, self.views.draw(self.batch, generator=self.numbers))

    def step(self, rows: Tensor, u: tuple[Tensor, ...]) -> None:
        raise NotImplementedError


class Plain(Side):
    """A training loop as in torch's tutorials."""

    def __init__(self, encoder: str, setting: Setting) -> None:
        super().__init__(encoder, setting)
        fused = True if self.device.type == "cuda" else None
        self.optimizer = torch.optim.Adam(self.net.parameters(), fused=fused, **ADAM)

    def step(self, rows: Tensor, u: tuple[Tensor, ...]) -> None:
        x = self.images[rows]
        with torch.autocast(self.device.type, torch.bfloat16):
            z0, z1 = (self.net(view) for view in self.views(x, u)[0].chunk(2))
        loss = self.criterion(z0.float(), z1.float())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class Ours(Side):
    """Our step in its default mode. It takes its first step, in which it is compiled, when it is made."""

    def __init__(self, encoder: str, setting: Setting) -> None:
        super().__init__(encoder, setting)
        from curvssl.models import no_search
        from curvssl.train.loop import make_step, pick_mode
        from curvssl.train.step import make_optimizer

        mode = pick_mode("auto", device=self.device)
        optimizer = make_optimizer(self.net, name="adam", momentum=0.9, device=self.device, mode=mode, **ADAM)
        parts = {"net": self.net, "criterion": self.criterion, "views": self.views, "images": self.images}
        self.training_step = make_step(mode, optimizer=optimizer, device=self.device, bf16=True, **parts)
        with no_search():  # other processes use the device now and would disturb the search
            self()

    def step(self, rows: Tensor, u: tuple[Tensor, ...]) -> None:
        self.training_step(rows, u, ADAM["lr"])
        self.mode = self.training_step.mode  # differs from the mode asked for if that failed


def measure(side: Side, setting: Setting, *, held: int = 0) -> dict[str, Any]:
    """Milliseconds per step, and the memory that it takes above the bytes held before."""
    cuda = side.device.type == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        side()
    rounds = []
    for _ in range(setting.repeats):
        wait()
        started = time.perf_counter()
        for _ in range(setting.steps):
            side()
        wait()
        rounds.append(1e3 * (time.perf_counter() - started) / setting.steps)
    figures = {"ms": statistics.median(rounds), "rounds": rounds, "mode": side.mode}
    if cuda:
        figures |= {"peak_GB": (torch.cuda.max_memory_allocated() - held) / 1e9}
        figures |= {"reserved_GB": torch.cuda.max_memory_reserved() / 1e9}  # with torch's cache
    return figures


def free(device: str) -> int:
    """Release unused memory; return the bytes that are still in use."""
    gc.collect()
    if device == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def worker(name: str, setting: Setting, ready: Any, turn: Any, answers: Any) -> None:
    """One backbone, both sides."""
    try:
        answers.put(compared(BACKBONES[name], setting, ready, turn) | {"backbone": name, "encoder": BACKBONES[name]})
    except threading.BrokenBarrierError:
        pass  # the process that failed has reported why
    except Exception as error:
        answers.put({"error": f"{name}: {type(error).__name__}: {error}"})
        ready.abort()
        raise


def compared(encoder: str, setting: Setting, ready: Any, turn: Any) -> dict[str, Any]:
    """Compile beside the other processes, then measure alone; a batch that does not fit into memory is halved."""
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 0
    ours: Ours | None = None
    with suppress(torch.OutOfMemoryError):  # later, alone, there is more memory
        ours = Ours(encoder, setting)
    free(setting.device)
    ready.wait()
    with turn:
        while True:
            try:
                ours = ours or Ours(encoder, setting)
                row: dict[str, Any] = {"batch": setting.batch, "ours": measure(ours, setting)}
                ours = None
                held = free(setting.device)
                row["plain"] = measure(Plain(encoder, setting), setting, held=held)
                return row | {"ratio": row["plain"]["ms"] / row["ours"]["ms"]}
            except torch.OutOfMemoryError:
                if setting.batch // 2 < SMALLEST:
                    raise
            ours, setting = None, setting._replace(batch=setting.batch // 2)
            free(setting.device)


def answer(answers: Any, workers: Sequence[Any]) -> dict[str, Any]:
    """The next backbone's figures; a process that failed or died ends the benchmark."""
    while True:
        with suppress(queue.Empty):
            row = answers.get(timeout=5)
            if "error" in row:
                raise RuntimeError(row["error"])
            return row
        if died := [process.exitcode for process in workers if process.exitcode]:
            raise RuntimeError(f"a process ended with {died[0]} and said nothing")


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':11} {'batch':>5} {'step':>9} {'ms':>8} {'plain ms':>9} {'ratio':>6} {'GB':>6} {'plain GB':>9}"]
    for r in rows:
        ours, plain = r["ours"], r["plain"]
        line = f"{r['backbone']:11} {r['batch']:5} {ours['mode']:>9} {ours['ms']:8.1f} {plain['ms']:9.1f}"
        line += f" {r['ratio']:6.2f}"
        if "peak_GB" in ours:
            line += f" {ours['peak_GB']:6.1f} {plain['peak_GB']:9.1f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/backbones.json"))
    parser.add_argument("--backbones", nargs="+", default=[*BACKBONES], choices=[*BACKBONES])
    parser.add_argument("--size", type=int, default=224, help="pixels of images and views, wide and high")
    parser.add_argument("--batch", type=int, default=256, help="images in a step; each gives two views")
    parser.add_argument("--steps", type=int, default=10, help="steps in a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    setting = Setting(options.size, options.batch, options.steps, options.repeats, options.device)
    from curvssl.rundir import provenance

    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    started, names = time.monotonic(), options.backbones
    context = mp.get_context("spawn")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(names)))
    answers, turn, ready = context.Queue(), context.Lock(), context.Barrier(len(names))
    workers = [context.Process(target=worker, args=(name, setting, ready, turn, answers)) for name in names]
    rows: list[dict[str, Any]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for process in workers:
            process.start()
        while len(rows) < len(names):
            row = answer(answers, workers)
            rows = sorted([*rows, row], key=lambda r: names.index(r["backbone"]))
            results = {"device": device, "setting": setting._asdict(), "rows": rows}
            results |= {"seconds": time.monotonic() - started, "provenance": provenance(device=device)}
            options.out.write_text(json.dumps(results, indent=1) + "\n")  # so that an interrupted run keeps its results
            print(f"{row['backbone']}, after {results['seconds']:.0f} s: {json.dumps(row)}", flush=True)
    except BaseException:
        for process in workers:
            if process.pid is not None:
                process.kill()
        raise
    for process in workers:
        process.join()
    print(table(rows))


if __name__ == "__main__":
    main()
