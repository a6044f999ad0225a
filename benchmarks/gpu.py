"""How fast a training step is on one CUDA device, against the device's own ceilings and against peers, in one run.

    python benchmarks/gpu.py [--out results/gpu.json]

Every time is that of a whole step, with the device synchronised, without the warm-up, the median of several repeats.
Steps are compiled in parallel processes; for cuDNN's search and for the timing each has the device to itself.
"""

import argparse
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

IMAGES = 50_000  # as many as CIFAR-10 has, with random pixels: the work of both sides does not depend on them
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
FLOPS = {"imagenet": 0.217e9, "small": 3.329e9}  # forward + backward of ResNet-18 per 32×32 view
METHODS = {name: {"method": name} for name in ("barlow-twins", "vicreg", "curvssl", "kernel-curvssl")}
VIEWS: dict[str, dict[str, Any]] = {  # the same objective over more views
    "two views": {"method": "curvssl"},
    "two and four": {"method": "curvssl", "local_views": 4},
    "two and a blend": {"method": "curvssl", "alpha_chord": 1.0},
}
TWINS = {"method": "barlow-twins"}
FAST = {**TWINS, "projector_width": 2048, "projector_depth": 3, "d_z": 1024}  # as in the preset fast-cifar10
FAST_VIEWS: dict[str, dict[str, Any]] = {"fast": {}, "fast, local views": {"local_views": 4}}
TAUGHT = {"average": 0.99, "teacher": True}
# The arms of docs/curvature.md whose step is another one, behind their baseline; their names are those of RATIOS in
# studies.py.
ARMS: list[tuple[str, dict[str, dict[str, Any]]]] = [
    (
        "imagenet",
        {
            "barlow-twins": TWINS,
            "path": {**TWINS, "alpha_path": 1.0},
            "profile": {**TWINS, "arm": {"alpha": 1.0, "term": "profile"}},
            "bank": {**TWINS, "arm": {"alpha": 1.0, "term": "bank"}},
            "kernel bank": {**TWINS, "arm": {"alpha": 1.0, "term": "bank", "kernel": "rbf"}},
            "k 20": {**TWINS, "arm": {"alpha": 1.0, "k": 20}},
            "kernel, k 50": {**TWINS, "arm": {"alpha": 1.0, "kernel": "rbf", "k": 50}},
        },
    ),
    *(
        (
            "imagenet",
            {
                loss: {**TWINS, "arm": {"loss": loss}},
                f"{loss}, curvature": {**TWINS, "arm": {"loss": loss, "alpha": 1.0}},
                f"{loss}, kernel": {**TWINS, "arm": {"loss": loss, "alpha": 1.0, "kernel": "rbf"}},
            },
        )
        for loss in ("vicreg", "nt-xent")
    ),
    *(
        ("small", {name: {**FAST, **views}, f"{name}, kernel": {**FAST, **views, "method": "kernel-curvssl"}})
        for name, views in FAST_VIEWS.items()
    ),
    *(
        (
            "small",
            {
                f"{name}, teacher": {**FAST, **views, **TAUGHT},
                f"{name}, flow": {**FAST, **views, **TAUGHT, "arm": {"alpha": 0.5, "term": "flow", "k": 5}},
            },
        )
        for name, views in FAST_VIEWS.items()
    ),
]


def images(n: int = IMAGES, *, device: str = "cpu") -> Tensor:
    numbers = torch.Generator(device).manual_seed(0)
    return torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, device=device, generator=numbers)


def median_ms(work: Callable[[], Any], *, times: int = 40, repeats: int = 5) -> float:
    """Milliseconds of one call: the median over `repeats` of the mean over `times`."""
    for _ in range(5):
        work()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - started) / times)
    return statistics.median(found)


def network(stem: str, *, width: int = 512, depth: int = 2, d_z: int = 128) -> Any:
    """The same network for us and for the peers."""
    from curvssl.models import make_net

    shape = {"channels": 3, "size": 32, "width": width, "depth": depth, "d_z": d_z, "norm": False, "seed": 0}
    return make_net(encoder="resnet18", stem=stem, **shape).cuda().to(memory_format=torch.channels_last)


def make_step(
    stem: str, batch: int, method: str, mode: str, *, arm: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, Callable[[], None]]:
    """Our own step on random images, and a function that takes one step. `settings` are those of the configuration,
    `arm` those of a loss of paper/arms.py."""
    from types import SimpleNamespace

    from curvssl.config import PretrainConfig
    from curvssl.paper.arms import Arm
    from curvssl.train import loop
    from curvssl.train.step import make_optimizer

    device = torch.device("cuda")
    config = PretrainConfig(method=method, **settings)
    net = network(stem, width=config.projector_width, depth=config.projector_depth, d_z=config.d_z)
    rates = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
    criterion = loop.make_criterion(config) if arm is None else Arm(**{"loss": method, **arm}).make(config)
    data: Any = SimpleNamespace(mean=MEAN, std=STD)
    step = loop.make_step(
        mode,
        net=net,
        criterion=criterion.to(device),
        views=loop.make_views(config, data).to(device),
        optimizer=make_optimizer(net, name=config.optimizer, **rates, device=device, mode=mode),
        images=images(device="cuda"),
        device=device,
        bf16=True,
        average=loop.make_average(config, net),
    )
    order = torch.randperm(IMAGES, device=device)
    numbers = torch.Generator(device=device)
    calls = 0

    def call() -> None:
        nonlocal calls
        rows = order[(calls * batch) % (IMAGES - batch) :][:batch]
        numbers.manual_seed(calls)
        step(rows, step.views.draw(batch, generator=numbers), config.lr)
        calls += 1

    return step, call


def search(stem: str, batch: int, shapes: Iterable[tuple[int, int]] = ((2, 32),)) -> None:
    """Forward and backward passes in which cuDNN times its algorithms for these numbers and sizes of views; the process
    keeps the choice."""
    from curvssl.gpu import layers, overlap
    from curvssl.gpu.steps import seek_fastest_convolutions

    seek_fastest_convolutions()
    for n, size in shapes:
        x = torch.randn(n * batch, 3, size, size, device="cuda", dtype=torch.bfloat16)
        x = x.contiguous(memory_format=torch.channels_last)
        with overlap.one_stream():
            layers.encode(network(stem).encoder, lambda x=x: x, passes=(n,), dtype=x.dtype)[0].sum().backward()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def step_worker(
    case: int, stem: str, batch: int, kinds: dict[str, dict[str, Any]], ready: Any, turn: Any, answers: Any
) -> None:
    """All kinds of step of one network and batch in one process, so that cuDNN has chosen the same algorithms for them.
    Each is captured twice, because the position of its memory matters, too. They take turns, each first as often as
    last, when every process has compiled and no other is timing."""
    try:
        with turn:
            search(stem, batch, sorted({shape for kind in kinds.values() for shape in shapes_of(kind)}))
        ready.wait()
        calls, room = [], {}
        for name in 2 * [*kinds]:
            before = torch.cuda.memory_reserved()
            step, call = make_step(stem, batch, mode="captured", **kinds[name])
            for _ in range(6):
                call()
            torch.cuda.synchronize()
            assert step.mode == "captured"
            room[name] = (torch.cuda.memory_reserved() - before) / 1e9
            calls.append(call)
        ready.wait()
    except Exception as error:
        answers.put({"error": f"{stem}, {batch}: {type(error).__name__}: {error}"})
        ready.abort()
        raise
    with turn:
        turns: list[list[float]] = [[] for _ in calls]
        times = round(50 / median_ms(calls[0], times=5))  # a turn takes about 50 ms, because clocks go up and down
        for i in range(32 if batch == 256 else 16):
            for j in range(len(calls)):
                k = (i + j) % len(calls)
                turns[k].append(median_ms(calls[k], times=times, repeats=1))
        for k, (name, kind) in enumerate(kinds.items()):
            rounds = [(one + other) / 2 for one, other in zip(turns[k], turns[k + len(kinds)], strict=True)]
            row = {
                "case": case,
                "stem": stem,
                "batch": batch,
                "name": name,
                "ms": statistics.median(rounds),
                "rounds": rounds,
            }
            answers.put(row | kind | {"peak_GB": room[name]})


def shapes_of(kind: dict[str, Any]) -> list[tuple[int, int]]:
    """Numbers and sizes of the views of a kind of step."""
    local = kind.get("local_views", 0)
    more = bool(kind.get("alpha_chord") or kind.get("alpha_path"))
    return [(2 + more, kind.get("global_size", 32)), *([(local, kind.get("local_size", 16))] if local else [])]


def steps(*cases: tuple[str, int, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The times of all kinds of step of each (stem, batch, kinds), in a process for each case."""
    context = mp.get_context("spawn")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4"  # four compile at once
    answers, turn = context.Queue(), context.Lock()
    ready = context.Barrier(len(cases))
    workers = [
        context.Process(target=step_worker, args=(i, *case, ready, turn, answers)) for i, case in enumerate(cases)
    ]
    for worker in workers:
        worker.start()
    found: list[dict[str, Any]] = []
    while len(found) < sum(len(kinds) for _, _, kinds in cases):
        found.append(answers.get(timeout=600))
        if "error" in found[-1]:
            raise RuntimeError(found[-1]["error"])
    for worker in workers:
        worker.join()
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    return sorted(found, key=lambda r: (r["case"], [*cases[r["case"]][2]].index(r["name"])))


def strong() -> list[dict[str, Any]]:
    """The step of the preset fast-cifar10, and the same with Adam at its usual rate."""
    import dataclasses

    from curvssl.config import PretrainConfig, fast_cifar10

    usual, preset = PretrainConfig(), fast_cifar10()
    names = [field.name for field in dataclasses.fields(preset)]
    changed = {name: getattr(preset, name) for name in names if getattr(preset, name) != getattr(usual, name)}
    stem = changed.pop("stem")
    adam = {name: getattr(usual, name) for name in ("optimizer", "lr", "weight_decay")}
    return steps((stem, preset.batch_size, {"LARS": changed, "Adam": changed | adam}))


FIRST_STEPS = """
import sys, time
sys.path.insert(0, "benchmarks")
import torch, gpu
step, call = gpu.make_step("imagenet", 256, "curvssl", "captured")
call(); torch.cuda.synchronize(); print(time.time())
for _ in range(5): call()
torch.cuda.synchronize(); print(time.time())
"""


def start_up() -> dict[str, float]:
    """Seconds from the start of a process to the end of its first step, and of its sixth, which is captured: with an
    empty compile cache, and with the cache that the first process filled."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        places = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
        for name in ("cold", "warm"):
            started = time.time()
            done = subprocess.run([sys.executable, "-c", FIRST_STEPS], env=os.environ | places, capture_output=True)
            first, sixth = (float(line) - started for line in done.stdout.split())
            found |= {f"{name}_first_step_s": first, f"{name}_captured_s": sixth}
    return found


def floor(stem: str, batch: int, ceiling: dict[str, float], *, local: int = 0) -> dict[str, Any]:
    """A lower bound for a step in which cuDNN computes the convolutions and BatchNorm is a separate pass: the
    convolutions of all layers alone, and the bytes of BatchNorm, ReLU and residuals at the speed of a copy. With
    `local` views of 16×16 beside the two of 32×32.

    Passes over an activation with ReLU, forward: read for the statistics; read, write. Backward: read x and ∂y for two
    sums; read both, write ∂x. A residual adds three: it is read, the ReLU's mask is read, its gradient is written.
    """
    from torchvision.models.resnet import BasicBlock

    from curvssl.gpu.driver import zero_by_kernels
    from curvssl.gpu.steps import seek_fastest_convolutions

    net = network(stem).bfloat16()
    seek_fastest_convolutions()
    seen: list[tuple[Tensor, Tensor, nn.Conv2d]] = []
    residual = {id(module.bn2) for module in net.modules() if isinstance(module, BasicBlock)}
    bytes_moved = 0

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal bytes_moved
        if isinstance(module, nn.Conv2d):
            seen.append((inputs[0].detach(), torch.randn_like(output), module))
        else:
            bytes_moved += (11 if id(module) in residual else 8) * 2 * output.numel()

    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            module.register_forward_hook(look)
    for n, size in shapes_of({"local_views": local}):
        x = torch.randn(n * batch, 3, size, size, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            net(x.contiguous(memory_format=torch.channels_last))

    def convolve() -> None:
        for x, dy, layer in seen:
            shape = (layer.stride, layer.padding, [1, 1])
            nn.functional.conv2d(x, layer.weight, None, layer.stride, layer.padding)
            wanted = [layer.in_channels > 3, True, False]  # nobody needs the gradient of a view
            torch.ops.aten.convolution_backward(dy, x, layer.weight, None, *shape, False, [0, 0], 1, wanted)

    with torch.no_grad():
        for _ in range(3):
            convolve()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            convolve()
        zero_by_kernels(graph)
        graph.instantiate()
    ms = median_ms(graph.replay)
    norm = bytes_moved / ceiling["copy_TB_per_s"] / 1e9
    found = {"convolutions_ms": ms, "norm_GB": bytes_moved / 1e9, "norm_ms": norm}
    return {"stem": stem, "batch": batch, "local_views": local} | found


def ceilings() -> dict[str, float]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c, d = (torch.randn(8192, 8192, device="cuda") for _ in range(2))
    big = torch.randint(0, 256, (2**32,), dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    flop = 2 * 8192**3
    return {
        "bf16_TFLOP_per_s": flop / median_ms(lambda: a @ b, times=10) / 1e9,
        "fp32_TFLOP_per_s": flop / median_ms(lambda: c @ d, times=3) / 1e9,
        "copy_TB_per_s": 2 * big.numel() / median_ms(lambda: other.copy_(big), times=10) / 1e9,
    }


class Pictures(torch.utils.data.Dataset[Any]):
    """The same random images as PIL pictures, which the peers need."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.pixels, self.transform = images().permute(0, 2, 3, 1).contiguous().numpy(), transform

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> Any:
        from PIL import Image

        return self.transform(Image.fromarray(self.pixels[i]))


def peer(stem: str, batch: int, *, lightly: bool, workers: int, local: int = 0) -> dict[str, Any]:
    """Barlow Twins as users of lightly or torchvision write it: DataLoader workers, eager step, bf16 autocast. With
    local views it is lightly's multi-crop transform, and the loss is the mean over the same pairs as ours."""
    from torchvision.transforms import v2

    net = network(stem)
    criterion: nn.Module
    two_views: Callable[[Any], Any]
    if lightly:
        from lightly.loss import BarlowTwinsLoss
        from lightly.transforms import SimCLRTransform, SwaVTransform

        colour = {"cj_bright": 0.4, "cj_contrast": 0.4, "cj_sat": 0.4, "cj_hue": 0.1}
        settings = {"gaussian_blur": 0.0, "normalize": {"mean": list(MEAN), "std": list(STD)}, **colour}
        crops = {"crop_sizes": (32, 16), "crop_counts": (2, local), "crop_min_scales": (0.2, 0.05)}
        if local:
            two_views = SwaVTransform(**crops, crop_max_scales=(1.0, 0.25), **settings)
        else:
            two_views = SimCLRTransform(32, min_scale=0.2, **settings)
        criterion = BarlowTwinsLoss(lambda_param=1.0)
    else:
        from curvssl.losses import BarlowTwinsLoss as Ours

        view = v2.Compose(
            [
                v2.RandomResizedCrop(32, scale=(0.2, 1.0)),
                v2.RandomHorizontalFlip(),
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                v2.RandomGrayscale(0.2),
                v2.PILToTensor(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )
        criterion, two_views = Ours(), lambda picture: [view(picture), view(picture)]
    loader = torch.utils.data.DataLoader(
        Pictures(two_views),
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=True,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)
    counted, started = 0, 0.0
    compared = [(g, v) for g in range(2) for v in range(g + 1, 2 + local)]
    for n, views in enumerate(loader):
        if n == 20:
            torch.cuda.synchronize()
            started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            z = [net(x.cuda(non_blocking=True).contiguous(memory_format=torch.channels_last)) for x in views]
        first, *apart = (criterion(z[g].float(), z[v].float()) for g, v in compared)
        loss = (first + torch.stack(apart).mean()) / 2 if apart else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counted = n - 19
        if counted == 100 * 256 // batch:
            break
    torch.cuda.synchronize()
    name = "lightly" if lightly else "torchvision DataLoader"
    ms = 1e3 * (time.perf_counter() - started) / counted
    return {"peer": name, "stem": stem, "batch": batch, "workers": workers, "ms": ms, "local_views": local}


def augmentation(views: int = 512) -> dict[str, float]:
    """Crop, flip, jitter, grayscale and normalise: ours eager, compiled and captured against kornia."""
    import kornia.augmentation as K

    from curvssl.data.views import Augment

    x = images(views, device="cuda")
    ours = Augment(size=32, mean=MEAN, std=STD).cuda()
    u = torch.rand(views, ours.draws, device="cuda")
    compiled = torch.compile(ours, dynamic=False)
    theirs = nn.Sequential(
        K.RandomResizedCrop((32, 32), scale=(0.2, 1.0)),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomGrayscale(p=0.2),
        K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
    ).cuda()
    found = {
        "kornia_ms": median_ms(lambda: theirs(x.float() / 255), times=10),
        "eager_ms": median_ms(lambda: ours(x, u), times=10),
        "compiled_ms": median_ms(lambda: compiled(x, u)),
    }
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled(x, u)
    return {"views": views} | found | {"captured_ms": median_ms(graph.replay)}


def large_batch(ceiling: dict[str, float], n: int = 65_536, d: int = 128, k: int = 10) -> dict[str, float]:
    """The loss with its gradient on a huge batch, and how close its neighbour search comes to plain matrix products."""
    from curvssl.geometry import neighbors_of
    from curvssl.losses import CurvSSLLoss

    z0 = torch.randn(n, d, device="cuda", requires_grad=True)
    z1 = (z0 + 0.3 * torch.randn(n, d, device="cuda")).detach().requires_grad_()
    criterion = CurvSSLLoss(k=k)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms = median_ms(lambda: criterion(z0, z1).backward(), times=1, repeats=3)
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    z = z0.detach()[None]
    search = median_ms(lambda: neighbors_of(z, z, k=k), times=1, repeats=3)
    product = median_ms(lambda: [z[0, i : i + 4096] @ z[0].T for i in range(0, n, 4096)], times=1, repeats=3)
    rate = 2 * n * n * d / search / 1e9
    return {
        "batch": n,
        "d": d,
        "k": k,
        "loss_and_gradient_ms": ms,
        "peak_GB": peak,
        "search_ms": search,
        "products_alone_ms": product,
        "search_TFLOP_per_s": rate,
        "share_of_fp32_ceiling": rate / ceiling["fp32_TFLOP_per_s"],
    }


def probe_run() -> dict[str, float]:
    """Features and three probes of a finished CIFAR-10 run. One epoch is enough: the time is the same after more."""
    import dataclasses

    from curvssl.config import paper_cifar10
    from curvssl.evaluate.runs import probe
    from curvssl.train.loop import pretrain

    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(paper_cifar10(), epochs=1, warmup_epochs=0)
        run = pretrain(config, out=folder, progress=False)
        started = time.perf_counter()
        probe(run, floors=False)
        return {"seconds": time.perf_counter() - started}


def command(epochs: int = 61, *, settled: int = 10) -> dict[str, float]:
    """Milliseconds per step of the paper's CIFAR-10 run as the command trains it, after the `settled` epochs in which
    it is captured: with the order, the random numbers, the metrics of every epoch and the kNN monitor. Beside it, the
    bare step of the same objective in the same process."""
    import dataclasses

    from curvssl.config import paper_cifar10
    from curvssl.train.loop import pretrain

    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(paper_cifar10(), epochs=epochs, warmup_epochs=10)
        rows = pretrain(config, out=folder, progress=False).metrics()
    # Up to the last epoch but one: the run also ends with a monitor, which a long run would not notice.
    steps, seconds = (rows[-2][key] - rows[settled - 1][key] for key in ("step", "seconds"))
    step, call = make_step("imagenet", config.batch_size, config.method, "captured")
    bare = median_ms(call, times=1000)
    assert step.mode == "captured"
    return {"epochs": epochs, "steps": steps, "seconds": seconds, "ms": 1e3 * seconds / steps, "bare_ms": bare}


def table(found: dict[str, Any]) -> str:
    """Steps and peers; the rest is in the JSON, and in docs/notebook.md."""
    top = found["ceilings"]["bf16_TFLOP_per_s"]
    rows = [*found["steps"], *found.get("peers", [])]
    ms = {(r["stem"], r["batch"], r.get("method")): r["ms"] for r in rows}
    base = {(r["stem"], r["batch"]): r["rounds"] for r in found["steps"] if r["method"] == "barlow-twins"}
    lines = [f"{'stem':9} {'batch':>5} {'':24} {'ms/step':>8} {'views/s':>10} {'of bf16':>8} {'over BT':>8} {'GB':>6}"]
    for r in rows:
        views = 2e3 * r["batch"] / r["ms"]
        line = f"{r['stem']:9} {r['batch']:5} {r.get('method') or r['peer']:24} {r['ms']:8.3f} {views:10,.0f}"
        if "method" in r:
            over = statistics.median(x / y for x, y in zip(r["rounds"], base[r["stem"], r["batch"]], strict=True)) - 1
            line += f" {views * FLOPS[r['stem']] / top / 1e12:8.1%} {over:+8.1%} {r['peak_GB']:6.1f}"
        else:
            line += f"   our CurvSSL step is {r['ms'] / ms[r['stem'], r['batch'], 'curvssl']:.1f}× faster"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/gpu.json"))
    usual = [name for name in PARTS if name != "arms"]
    parser.add_argument("--parts", nargs="+", default=usual, choices=[*PARTS], help="what to measure")
    parser.add_argument("--workers", type=int, default=16, help="loader workers of the peers")
    options = parser.parse_args()
    from curvssl.rundir import provenance

    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "workers": options.workers, "steps": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        started = time.monotonic()
        found[name] = PARTS[name](found)
        torch.cuda.empty_cache()
        found["provenance"] = provenance(device=found["device"])
        options.out.write_text(json.dumps(found, indent=1) + "\n")  # so that an interrupted run keeps its results
        print(f"{name}, {time.monotonic() - started:.0f} s: {json.dumps(found[name])}", flush=True)
    if found["steps"] and "ceilings" in found:
        print(table(found))


PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ceilings": lambda found: ceilings(),
    "peers": lambda found: [
        peer(stem, 256, lightly=lightly, workers=found["workers"]) for stem in FLOPS for lightly in (True, False)
    ],
    "steps": lambda found: steps(*((stem, batch, METHODS) for batch in (256, 1024) for stem in FLOPS)),
    "views": lambda found: steps(*((stem, 256, VIEWS) for stem in FLOPS)),
    "strong": lambda found: strong(),
    "arms": lambda found: steps(*((stem, 256, kinds) for stem, kinds in ARMS)),
    "view_peers": lambda found: [
        peer(stem, 256, lightly=True, workers=found["workers"], local=local) for stem in FLOPS for local in (0, 4)
    ],
    "floors": lambda found: [floor(stem, 256, found["ceilings"], local=n) for stem in FLOPS for n in (0, 4)],
    "large_batch": lambda found: large_batch(found["ceilings"]),
    "augmentation": lambda found: augmentation(),
    "start_up": lambda found: start_up(),
    "probe": lambda found: probe_run(),
    "command": lambda found: command(),
}


if __name__ == "__main__":
    main()
