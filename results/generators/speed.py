"""Tables of speed: steps, their parts, other libraries, folders, processes, the page."""

import random
from statistics import median, quantiles
from typing import Any

from generators.base import FLOPS, STEMS, markdown, read, table


@table
def demo_costs() -> str:
    """Where the demo's time goes."""
    measured = read("demo.json")
    step = measured["step_ms"]
    names = {
        "encoder, forward and backward": "encoder_forward_backward_ms",
        "two views": "views_ms",
        "projector, forward and backward": "projector_ms",
        "loss, forward and backward": "loss_ms",
        "Adam": "optimizer_ms",
    }
    rows = [
        ["the whole demo", f"{measured['seconds']:.0f} s", ""],
        ["of it training, four runs", f"{measured['training_seconds']:.0f} s", ""],
        ["a CurvSSL step", f"{step:.0f} ms", "100%"],
        *([f"{name}, alone", f"{measured[key]:.1f} ms", f"{measured[key] / step:.0%}"] for name, key in names.items()),
    ]
    return markdown(("", "time", "of a step"), rows, "demo.json")


@table
def speed() -> str:
    """The short form: our steps, one row per network and batch size, next to lightly's Barlow Twins step."""
    measured = read("gpu.json")
    top = measured["ceilings"]["bf16_TFLOP_per_s"]
    steps = {(r["stem"], r["batch"], r.get("method") or r["peer"]): r for r in measured["steps"] + measured["peers"]}
    rows = []
    for stem, batch in dict.fromkeys((r["stem"], r["batch"]) for r in measured["steps"]):
        base, ours, kernel = (steps[stem, batch, name] for name in ("barlow-twins", "curvssl", "kernel-curvssl"))
        views = 2e3 * batch / ours["ms"]
        peer = steps.get((stem, batch, "lightly"))
        theirs = f"{peer['ms']:.1f} ms, {peer['ms'] / ours['ms']:.1f}×" if peer else ""
        rate = [f"{views:,.0f}", f"{views * FLOPS[stem] / top / 1e12:.0%}"]
        terms = [cost(ours, base), cost(kernel, base)]
        rows.append(
            [f"{STEMS[stem]}, {batch}", f"{ours['ms']:.2f} ms", theirs, *rate, *terms, f"{ours['peak_GB']:.1f} GB"]
        )
    costs = ("the curvature costs", "the kernel curvature costs")
    header = (
        "stem, batch",
        "CurvSSL, ours",
        "Barlow Twins, lightly",
        "views/s",
        "of the bf16 ceiling",
        *costs,
        "memory",
    )
    return markdown(header, rows, "gpu.json")


@table
def gpu() -> str:
    """Training steps, their extra cost over Barlow Twins, and other libraries' steps in the same run."""
    measured = read("gpu.json")
    top = measured["ceilings"]["bf16_TFLOP_per_s"]
    base = {(r["stem"], r["batch"]): r for r in measured["steps"] if r["method"] == "barlow-twins"}
    ours = {(r["stem"], r["batch"]): r["ms"] for r in measured["steps"] if r["method"] == "curvssl"}
    rows = []
    for r in measured["steps"] + measured["peers"]:
        key = (r["stem"], r["batch"])
        views = 2e3 * r["batch"] / r["ms"]
        share = f"{views * FLOPS[r['stem']] / top / 1e12:.1%}"
        over = cost(r, base[key]) if "method" in r else f"{r['ms'] / ours[key]:.1f}× our CurvSSL step"
        name = r.get("method") or f"Barlow Twins, {r['peer']}, {r['workers']} workers"
        room = f"{r['peak_GB']:.1f} GB" if "peak_GB" in r else ""
        rows.append([STEMS[r["stem"]], str(r["batch"]), name, f"{r['ms']:.2f}", f"{views:,.0f}", share, over, room])
    header = ("stem", "batch", "method", "ms a step", "views/s", "of the bf16 ceiling", "over Barlow Twins", "memory")
    return markdown(header, rows, "gpu.json")


def cost(step: Any, base: Any) -> str:
    """The extra time of a step over another: the median over rounds in which both were measured, and a bootstrap 95 %
    interval."""
    if step is base:
        return ""
    draw = random.Random(0)
    over = [mine / theirs - 1 for mine, theirs in zip(step["rounds"], base["rounds"], strict=True)]
    cuts = quantiles([median(draw.choices(over, k=len(over))) for _ in range(2000)], n=40)
    return f"{median(over):+.1%} [{100 * cuts[0]:+.1f}, {100 * cuts[-1]:+.1f}]"


def steps_of(found: Any) -> dict[tuple[str, str], Any]:
    """{(stem, method or peer): its measurements at b = 256} of one run of the benchmark."""
    every = [r for r in found["steps"] + found["peers"] if r["batch"] == 256]
    return {(r["stem"], r.get("method") or r["peer"]): r for r in every}


@table
def gpu_hosts() -> str:
    """Numbers that depend on the host, in four runs. Each ratio is within one run. Not every run has every part."""
    runs = [read(f"gpu{name}.json") for name in ("", "-5932e1d", "-c00f255", "-8ba9f76")]
    steps = [steps_of(run) for run in runs]
    rows = []
    for stem, name in STEMS.items():
        ours, theirs = ([run[stem, method]["ms"] for run in steps] for method in ("curvssl", "lightly"))
        ratios = [f"{y:.1f} ms, {y / x:.1f}× our CurvSSL step" for x, y in zip(ours, theirs, strict=True)]
        rows += [
            [f"our CurvSSL step, {name} stem", *(f"{x:.2f} ms" for x in ours)],
            [f"Barlow Twins' step, lightly, {name} stem", *ratios],
        ]
        for method in ("curvssl", "kernel-curvssl"):
            over = [cost(run[stem, method], run[stem, "barlow-twins"]) for run in steps]
            rows.append([f"{method} over barlow-twins, {name} stem", *over])
    for what, part, key, unit in (
        ("augmentation of 512 views, kornia", "augmentation", "kornia_ms", "ms"),
        ("to the first step, nothing compiled before", "start_up", "cold_first_step_s", "s"),
        ("the same with what that left in the cache", "start_up", "warm_first_step_s", "s"),
    ):
        rows.append([what, *(f"{run[part][key]:.0f} {unit}" if part in run else "" for run in runs)])
    header = ("b = 256", *(run["provenance"]["commit"][:7] for run in runs))
    return markdown(header, rows, "gpu*.json", "one run a column")


@table
def gpu_rest() -> str:
    """The hardware limits, the augmentation, the loss alone on a huge batch, and the probes."""
    measured, a = read("gpu.json"), read("gpu-5932e1d.json")["augmentation"]
    top, big = (measured[part] for part in ("ceilings", "large_batch"))
    rows = [
        ["bf16 matrix product, 8192³", f"{top['bf16_TFLOP_per_s']:.0f} TFLOP/s"],
        ["fp32 matrix product, 8192³", f"{top['fp32_TFLOP_per_s']:.0f} TFLOP/s"],
        ["copy, bytes read and written", f"{top['copy_TB_per_s']:.2f} TB/s"],
        [f"augmentation of {a['views']} views, kornia", f"{a['kornia_ms']:.2f} ms"],
        ["the same, ours: eager", f"{a['eager_ms']:.2f} ms"],
        ["compiled", f"{a['compiled_ms']:.3f} ms"],
        ["captured", f"{a['captured_ms']:.3f} ms"],
        [f"CurvSSL's loss with gradient, b = {big['batch']:,}", f"{big['loss_and_gradient_ms']:.0f} ms"],
        ["its memory above the input", f"{big['peak_GB']:.1f} GB"],
        ["its neighbour search, one view", f"{big['search_ms']:.0f} ms, {big['search_TFLOP_per_s']:.0f} TFLOP/s"],
        ["the search's matrix products alone", f"{big['products_alone_ms']:.0f} ms"],
        ["the search, of the fp32 product's rate", f"{big['share_of_fp32_ceiling']:.0%}"],
        ["features and three probes of a CIFAR-10 run", f"{measured['probe']['seconds']:.1f} s"],
    ]
    return markdown(("", "measured"), rows, "gpu.json", "the augmentation: gpu-5932e1d.json")


@table
def gpu_command() -> str:
    """The time of a step in the command, next to the step alone, on one host."""
    measured = read("gpu-command.json")
    bare = next(iter(measured["step"].values()))
    rows = [[name, f"{ms:.3f} ms", f"{ms / bare - 1:+.1%}"] for name, ms in measured["step"].items()]
    for r in measured["command"]:
        if "bare_ms" in r:  # on another host, so next to a bare step of its own
            what = f"the whole command at {r['commit'][:7]}, bare step {r['bare_ms']:.3f} ms"
            rows.append([what, f"{r['ms']:.3f} ms", f"{r['ms'] / r['bare_ms'] - 1:+.1%}"])
    return markdown(("one step", "time", "over the graph alone"), rows, "gpu-command.json")


@table
def gpu_again() -> str:
    """The step of earlier commits and of later ones, on three hosts; on the last one both in turn."""
    runs = [(host, read(file)) for host, file in enumerate(("gpu.json", "gpu-a94a0f4.json"), 1)]
    runs = [(host, found["provenance"]["commit"][:7], found["steps"]) for host, found in runs]
    runs += [(3, run["commit"], run["steps"]) for run in read("gpu-71412b6.json")["runs"]]
    rows = []
    for host, commit, steps in runs:
        ms = {(r["stem"], r["method"]): f"{r['ms']:.3f}" for r in steps if r["batch"] == 256}
        shown = [ms.get((stem, method), "") for stem in STEMS for method in ("barlow-twins", "curvssl")]
        rows.append([str(host), commit, *shown])
    header = (
        *("host", "ms a step, b = 256"),
        *(f"{title}, {name} stem" for name in STEMS.values() for title in ("Barlow Twins", "CurvSSL")),
    )
    files = "gpu.json, results/gpu-a94a0f4.json, results/gpu-71412b6.json"
    return markdown(header, rows, files, "NVIDIA H200, torch 2.11.0")


@table
def gpu_strong() -> str:
    """The step of the fast preset with both optimisers."""
    rows = [[r["name"], f"{r['ms']:.2f} ms", f"{r['peak_GB']:.1f} GB"] for r in read("gpu-strong.json")["strong"]]
    return markdown(("optimiser", "step", "memory"), rows, "gpu-strong.json")


VIEW_RUNS = {"595dc09": "gpu-views-595dc09.json", "5d87ffb": "gpu-views-5d87ffb.json", "5d73699": "gpu-views.json"}


@table
def gpu_views() -> str:
    """Steps with more views next to the step with two, and lightly's loop with the same views, in one run each."""
    rows = []
    for commit, file in VIEW_RUNS.items():
        measured = read(file)
        peers = {(r["stem"], r["local_views"]): r["ms"] for r in measured.get("view_peers", ())}
        for stem in STEMS:
            steps = [r for r in measured["views"] if r["stem"] == stem]
            for r in steps:
                ratio = median(x / y for x, y in zip(r["rounds"], steps[0]["rounds"], strict=True))
                peer = None if r.get("alpha_chord") else peers.get((stem, r.get("local_views", 0)))
                lightly = f"{peer:.0f} ms, {peer / r['ms']:.0f}×" if peer else ""
                times = [f"{r['ms']:.2f} ms", f"{ratio:.2f}", lightly, f"{r['peak_GB']:.1f} GB"]
                rows.append([commit, STEMS[stem], r["name"], *times])
    header = ("commit", "stem", "views", "CurvSSL, ours", "of two views", "Barlow Twins, lightly", "memory")
    return markdown(header, rows, "gpu-views*.json", "NVIDIA H200, torch 2.11.0, one host a run")


@table
def view_floors() -> str:
    """The convolutions alone, with and without local views."""
    measured = read("gpu-views-5d87ffb.json")
    names = {"convolutions_ms": "convolutions alone", "norm_ms": "BatchNorm, ReLU, residuals as copies"}
    rows = []
    for stem in STEMS:
        two, four = (r for r in measured["floors"] if r["stem"] == stem)
        for key, name in names.items():
            rows.append([STEMS[stem], name, f"{two[key]:.2f} ms", f"{four[key]:.2f} ms", f"{four[key] / two[key]:.2f}"])
    return markdown(("stem", "", "two views", "two and four", "ratio"), rows, "gpu-views-5d87ffb.json")


@table
def view_orders() -> str:
    """Where the local views' pass goes."""
    noted = read("views-notes.json")["orders"]
    names = {"beside": "beside the global ones", "before": "before them", "after": "after them"}
    rows = []
    for stem, ms in noted["ms"].items():
        current = {"current": "before" if stem == "small" else "beside"}
        found = {current.get(name, name): value for name, value in ms.items()}
        rows.append([STEMS[stem], *(f"{found[name]:.2f} ms, {found[name] / ms['two']:.2f}" for name in names)])
    where = f"NVIDIA H200, torch 2.11.0, commit {noted['commit']}"
    return markdown(("stem", *(f"local views {name}" for name in names.values())), rows, "views-notes.json", where)


@table
def backbones() -> str:
    """Large backbones at 224: our captured step next to a plain eager loop."""
    measured = read("backbones.json")
    rows = [
        [
            r["backbone"],
            str(r["batch"]),
            r["ours"]["mode"],
            *(f"{r[side]['ms']:.0f} ms" for side in ("ours", "plain")),
            f"{r['ratio']:.2f}×",
            f"{2e3 * r['batch'] / r['ours']['ms']:,.0f}",
            *(f"{r[side]['peak_GB']:.0f} GB" for side in ("ours", "plain")),
        ]
        for r in measured["rows"]
    ]
    header = ("224×224", "batch", "step", "ours", "eager loop", "ratio", "views/s", "memory", "memory, eager loop")
    return markdown(header, rows, "backbones.json")


@table
def gpu_features() -> str:
    """The time for features of 10,000 images, which is most of the time of the kNN monitor."""
    rows = [
        [r["precision"], str(r["batch"]), f"{median(r['ms']):.0f} ms"]
        for r in read("gpu-command.json")["features_of_10000"]
    ]
    return markdown(("precision", "images at a time", "10,000 images"), rows, "gpu-command.json")


@table
def gpu_floors() -> str:
    """Lower bounds for the time of a step in its present form."""
    rows = []
    for r in read("gpu-8ba9f76.json")["floors"]:
        both = r["convolutions_ms"] + r["norm_ms"]
        rows.append(
            [
                STEMS[r["stem"]],
                f"{r['convolutions_ms']:.2f} ms",
                f"{r['norm_GB']:.2f} GB",
                f"{r['norm_ms']:.2f} ms",
                f"{both:.2f} ms",
            ]
        )
    header = ("stem", "cuDNN's convolutions alone", "BatchNorm, ReLU, residuals", "at the speed of a copy", "together")
    return markdown(header, rows, "gpu-8ba9f76.json")


@table
def gpu_fusions() -> str:
    """cuDNN's time for a convolution that is fused with BatchNorm before it and sums after it."""
    rows = []
    for r in read("gpu-notes.json")["fusions"]:
        low, half = r["bf16"], r["fp16"]
        names = ("conv", "conv_sums", "norm_conv_sums", "wgrad", "norm_wgrad")
        cells = (low["conv"], low["wgrad"], *(half[name] for name in names))
        rate = 256 * r["side"] ** 2 * 2 * (3 * r["channels"]) ** 2 / low["conv"] / 1e6
        shape = f"256 × {r['channels']} × {r['side']} × {r['side']}"
        rows.append([shape, f"{rate:.0f} TFLOP/s", *(f"{us:.1f}" for us in cells)])
    header = ("3×3, µs", "bf16, rate", "bf16", "weight gradient", "fp16", "with sums", "norm, ReLU, sums",
              "weight gradient", "with norm, ReLU")  # fmt: skip
    return markdown(header, rows, "gpu-notes.json", key="fusions_provenance")


@table
def gpu_sharing() -> str:
    """Several processes on one GPU."""
    measured = read("gpu-notes.json")["sharing"]
    ms = {(r["mps"], r["processes"]): r["ms"] for r in measured}
    rows = [
        [str(n), *(f"{ms[mps, n]:.2f}" if (mps, n) in ms else "" for mps in (False, True))]
        for n in sorted({r["processes"] for r in measured})
    ]
    return markdown(("processes", "ms a step of all, plain", "with MPS"), rows, "gpu-notes.json")


@table
def gpu_shares() -> str:
    """Several processes, each with a share of the multiprocessors: their speed and their results."""
    rows = [
        [
            *(str(r["processes"]), f"{r['percent']} %", r["step"]),
            f"{1e3 / r['steps_per_s']:.2f}" if r["steps_per_s"] else "",
            *(r[key] or "" for key in ("first", "later")),
        ]
        for r in read("gpu-notes.json")["shares"]
    ]
    header = ("processes", "multiprocessors for each", "step", "ms a step of all", "L_emb, first step", "steps 6 to 50")
    return markdown(header, rows, "gpu-notes.json", key="shares_provenance")


@table
def gpu_profile() -> str:
    """How the time of a step is divided."""
    rows = [
        [STEMS[r["stem"]], r["part"], f"{r['us'] / 1e3:.2f} ms", str(r["kernels"])]
        for r in read("gpu-notes.json")["profile"]
    ]
    return markdown(("stem", "part of a step", "time", "kernels"), rows, "gpu-notes.json", key="profile_provenance")


@table
def gpu_kernels() -> str:
    """Each hand-written kernel alone: its time, and how many of the necessary bytes it moves per second."""
    rows = [
        [r["kernel"], r["shape"], f"{r['us']:.1f} µs", f"{r['TB_per_s']:.2f} TB/s" if "TB_per_s" in r else ""]
        for r in read("gpu-notes.json")["kernels"]
    ]
    header = ("kernel", "shape, bf16", "time", "bytes that must move")
    return markdown(header, rows, "gpu-notes.json", key="kernels_provenance")


@table
def gpu_parts() -> str:
    """The parts of the loss alone, and the kernels of the curvatures."""
    measured = read("gpu-notes.json")["parts"]
    rows = [[r["what"], f"{r['us']:.1f} µs"] for r in measured]
    return markdown(("b = 256, d = 128", "time"), rows, "gpu-notes.json", key="parts_provenance")


@table
def gpu_start_up() -> str:
    """How the time until the first step is divided."""
    rows = [
        [r["what"], *(f"{r[key]:.1f} s" for key in ("first_step_s", "import_s", "in_compiler_s"))]
        for r in read("gpu-notes.json")["start_up"]
    ]
    header = ("", "first step after", "of that imports, data and network", "tracing and compiling")
    return markdown(header, rows, "gpu-notes.json", key="start_up_provenance")


@table
def gpu_experiments() -> str:
    measured = read("gpu-experiments.json")
    commits = {int(run): made["commit"][:7] for run, made in measured["runs"].items()}
    rows = [
        [f"{r['run']}, {commits[r['run']]}", STEMS[r["stem"]], r["method"], r["what"], f"{r['ms']:.3f}"]
        for r in measured["rows"]
    ]
    return markdown(("run, commit", "stem", "method", "variant, b = 256", "ms a step"), rows, "gpu-experiments.json")


@table
def losses() -> str:
    rows = []
    for r in read("losses-cpu.json")["losses"]:
        s = r["seconds"]
        over, naive = s["curvssl"] / s["barlow_twins"], s["naive"] / s["curvssl"]
        rows.append([str(r["b"]), str(r["d"]), f"{1e3 * s['curvssl']:.1f}", f"{over:.1f}×", f"{naive:.2f}×"])
    header = ("b", "d", "CurvSSL, ms", "over Barlow Twins alone", "naive Gram form over ours")
    return markdown(header, rows, "losses-cpu.json")


@table
def streaming() -> str:
    measured = read("streaming-cpu.json")
    base = measured["per_second"]["views, torchvision's pipeline"]
    rows = [
        [name, f"{value:,.0f}", f"{value / base:.2f}×" if name.startswith("views") else ""]
        for name, value in measured["per_second"].items()
    ]
    rows.append(["images packed (`curvssl pack`)", f"{measured['pack_images_per_s']:,.0f}", ""])
    header = (f"a second, {measured['settings']['workers']} workers", "measured", "over torchvision")
    return markdown(header, rows, "streaming-cpu.json")


@table
def weak_scaling() -> str:
    measured = read("ranks-cpu.json")["weak_scaling"]
    one = measured["views_per_s"]["1 rank"]
    rows = [[name, f"{value:,.0f}", f"{value / one:.2f}×"] for name, value in measured["views_per_s"].items()]
    return markdown((f"{measured['batch_per_rank']} images each", "views/s", ""), rows, "ranks-cpu.json")


def exchanged(method: str, *, batch: int, d: int) -> tuple[int, int]:
    """Numbers that one step of a loss gathers and sums over the ranks, gradient included (docs/scaling.md)."""
    if method == "vicreg":
        return 0, 2 * (2 * d * d + 2 * d + 1)
    emb = 2 * (d * d + 4 * d)
    return (0, emb) if method == "barlow-twins" else (2 * batch * d, emb + 2 * 8 + 2 * batch * d)


@table
def communication() -> str:
    """256 images per rank, d_z = 128: bytes that each rank sends, and its neighbour search at the measured rate."""
    each, d, parameters = 256, 128, 11_176_512 + 512 * 512 + 2 * 512 + 512 * 128 + 128  # ResNet-18, 7×7 stem
    speed = 1e12 * read("gpu.json")["large_batch"]["search_TFLOP_per_s"]
    rows = []
    for ranks in (1, 2, 8, 64, 256, 1024):
        batch, ring = each * ranks, (ranks - 1) / ranks
        sent = []
        for method in ("barlow-twins", "curvssl"):
            gathered, summed = exchanged(method, batch=batch, d=d)
            sent.append(4 * ring * (gathered + 2 * summed) / 1e6)
        flop = 2 * 2 * each * batch * d
        weights = 4 * ring * 2 * parameters / 1e6
        times = f"{1e3 * flop / speed:.2f}"
        rows.append([f"{ranks:,}", f"{batch:,}", *(f"{x:,.1f}" for x in (weights, *sent)), f"{flop / 1e9:,.1f}", times])
    header = ("ranks", "global batch", "weights' gradients, MB", "Barlow Twins, MB", "CurvSSL, MB")
    return markdown((*header, "neighbours, GFLOP a rank", "neighbours, ms a rank"), rows, "gpu.json")


@table
def page() -> str:
    """The report's page in a browser."""
    columns = {
        "MB": "file, MB",
        "opened_s": "shown after, s",
        "median_ms": "redraw, median ms",
        "worst_ms": "worst ms",
        "frames_per_s": "frames/s",
    }
    rows = [
        [f"{r['points']:,}", f"{r['pixel_ratio']}×", *(f"{r[key]:.1f}" for key in columns)]
        for r in read("page.json")["maps"]
    ]
    return markdown(("images", "pixel ratio", *columns.values()), rows, "page.json")


@table
def large_folder() -> str:
    """What the commands need for 100,000 files."""
    rows = [
        [f"`{r['command']}`", f"{r['cpu_s']:.0f}", f"{r['wall_s']:.0f}", f"{r['memory_MB'] / 1000:.1f}"]
        for r in read("large-folder-notes.json")["rows"]
    ]
    return markdown(("command", "CPU time, s", "wall time, s", "memory, GB"), rows, "large-folder-notes.json")
