"""Writes every table in README and docs, and README's figure, from the JSON files next to this file; --check fails if
one is out of date.

A table is between `<!-- table NAME -->` and `<!-- end -->`; NAME is a function below.
"""

import functools
import hashlib
import json
import random
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import correlation, mean, median, quantiles, stdev
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
STEMS = {"imagenet": "7×7", "small": "3×3"}
FLOPS = {"imagenet": 0.217e9, "small": 3.329e9}  # forward + backward of ResNet-18 per 32×32 view
MARK = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def read(name: str) -> Any:
    return json.loads((HERE / name).read_text())


def markdown(
    header: Sequence[str], rows: Sequence[Sequence[str]], source: str, where: str = "", *, key: str = "provenance"
) -> str:
    """A table with a line below it about the origin of its numbers: `where`, or by default the JSON's provenance."""
    if not where:
        made = read(source)[key]
        where = f"{made['device']}, torch {made['versions']['torch']}, commit {made['commit']}, {made['created'][:10]}"
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join([*lines, "", f"<sub>results/{source}: {where}</sub>", ""])


def demo() -> str:
    measured = read("demo.json")
    rows = [[name, *(f"{p['mean']:.1f} ± {p['std']:.1f}" if p["std"] else f"{p['mean']:.1f}" for p in probes.values())]
            for name, probes in measured["accuracy"].items()]  # fmt: skip
    return markdown(("", *next(iter(measured["accuracy"].values()))), rows, "demo.json")


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


def gains() -> str:
    """README's first table: accuracy next to the paper's, and the time of a training step next to lightly's."""
    from curvssl.methods import title_of
    from curvssl.paper.reproduce import PAPER, read_results

    accuracies: dict[tuple[str, str], list[float]] = {}
    for cell in read_results("faithful", results=HERE).values():
        key = cell["config"]["dataset"], cell["config"]["method"]
        accuracies.setdefault(key, []).append(cell["probes"]["mlp"]["mean"])
    order = ("barlow-twins", "curvssl", "kernel-curvssl", "vicreg")
    titles = {method: title_of(method) for method in order}
    rows = []
    for dataset, title in (("cifar10", "CIFAR-10"), ("mnist", "MNIST")):
        theirs = [f"{PAPER[dataset, method]:.1f}" for method in titles]
        ours = [f"{mean(accuracies[dataset, method]):.1f}" for method in titles]
        rows.append([f"accuracy on {title}, %", f"the paper: {' / '.join(theirs)}", " / ".join(ours)])
    steps = steps_of(read("gpu.json"))
    for stem, name in STEMS.items():
        mine, peer = (steps[stem, method]["ms"] for method in ("curvssl", "lightly"))
        times = [f"lightly: {peer:.1f} ms", f"{mine:.2f} ms, {peer / mine:.0f}× faster"]
        rows.append([f"one training step, ResNet-18, {name} stem", *times])
    made = read("gpu.json")["provenance"]
    where = f"accuracy: {' / '.join(titles.values())}, mean of three seeds; step: {made['device']}"
    return markdown(("", "elsewhere", "curvssl"), rows, "faithful/, results/gpu.json", where)


LIGHTLY, PAPER_TWINS = "lightly's Barlow Twins", "the paper's recipe, Barlow Twins"


def timed_runs() -> dict[str, list[dict[str, float]]]:
    """{what: its runs on CIFAR-10}, each with epochs, minutes of training, linear and kNN accuracy; a preset that was
    not run has none."""
    from curvssl.paper.studies import study_of

    def run(found: Any, *, epochs: float, minutes: float) -> dict[str, float]:
        accuracy = {probe: found["probes"][probe]["mean"] for probe in ("linear", "knn")}
        return {"epochs": epochs, "minutes": minutes, **accuracy}

    runs: dict[str, list[dict[str, float]]] = {}
    done = cells_of("presets")
    for name in study_of("presets"):
        dataset, kind, _ = name.rsplit("-", 2)
        if dataset == "cifar10":
            found = runs.setdefault(f"{kind}-{dataset}", [])
            if name in done:
                seconds = done[name]["provenance"]["seconds"]
                found.append(run(done[name], epochs=done[name]["config"]["epochs"], minutes=seconds / 60))
    runs[LIGHTLY] = []
    if (HERE / "lightly-accuracy.json").exists():
        theirs = read("lightly-accuracy.json")
        runs[LIGHTLY].append(run(theirs, epochs=theirs["epochs"], minutes=theirs["seconds"] / 60))
    step_ms = read("gpu-command.json")["command"][-1]["ms"]  # these cells shared the device: their time says little
    for seed in range(3):
        cell = read(f"faithful/cifar10-barlow-twins-seed{seed}.json")
        steps = cell["config"]["epochs"] * (50_000 // cell["config"]["batch_size"])
        minutes = steps * step_ms / 60_000
        runs.setdefault(PAPER_TWINS, []).append(run(cell, epochs=cell["config"]["epochs"], minutes=minutes))
    return runs


SHORT = ("All4One", "Barlow Twins", "MNN")  # the best after 1,000 epochs, the same method, and the best after 200


def time_to_accuracy() -> str:
    return accuracy_over_time(lambda r: r["linear"] and r["method"] in SHORT)


def published() -> str:
    return accuracy_over_time(lambda r: True)


def accuracy_over_time(shown: Callable[[Any], bool]) -> str:
    """Accuracy on CIFAR-10 over the time of training, next to what others publish after so many epochs."""
    from curvssl.evaluate.runs import spread

    rows, measured = [], timed_runs()
    missing = [what for what, runs in measured.items() if not runs]
    for what, runs in measured.items():
        if not runs:
            continue
        epochs, minutes = (mean(run[key] for run in runs) for key in ("epochs", "minutes"))
        accuracy = (spread([run[probe] for run in runs]) for probe in ("linear", "knn"))
        rows.append([what, f"{epochs:.0f}", f"{minutes:.1f}", *accuracy])
    for r in sorted(filter(shown, read("published.json")["rows"]), key=lambda r: -(r["linear"] or 0)):
        accuracy = (f"{r[probe]:.1f}" if r[probe] else "" for probe in ("linear", "knn"))
        rows.append([f"published: {r['method']} ({r['source']})", f"{r['epochs']:,}", "", *accuracy])
    where = (
        "ResNet-18, one H200, compiling included and probes not; mean ± deviation over seeds. The paper's recipe has "
        "the 7×7 stem, all others the 3×3 one; its time is that of its steps (results/gpu-command.json)"
    )
    source = "presets/, faithful/, lightly-accuracy.json, published.json"
    text = markdown(("", "epochs", "minutes", "linear", "kNN"), rows, source, where)
    return text + (f"\nNot run yet: {', '.join(missing)}.\n" if missing else "")


FIGURE = HERE / "figures" / "time-to-accuracy"


def drawn_from() -> dict[str, Any]:
    """All that the figure of time to accuracy shows: our runs, and the published ones of the same method."""
    measured = {what: [(run["minutes"], run["linear"]) for run in runs] for what, runs in timed_runs().items() if runs}
    published = {
        f"published: {r['method']}, {r['epochs']:,} epochs ({r['source']})": r["linear"]
        for r in read("published.json")["rows"]
        if r["linear"] and r["method"].endswith("Barlow Twins")
    }
    return {"measured": measured, "published": published}


def digest(shown: Any) -> str:
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def draw_figure() -> None:
    """Draw it, and remember what it was drawn from in the PNG's own text: other fonts would give other bytes."""
    from PIL import Image, PngImagePlugin

    from curvssl.paper.figures import draw_times

    shown = drawn_from()
    png, _ = draw_times(**shown, title="CIFAR-10: accuracy over the time of training", out=FIGURE)
    note = PngImagePlugin.PngInfo()
    note.add_text("drawn from", digest(shown))
    with Image.open(png) as image:
        image.load()
    image.save(png, pnginfo=note, optimize=True)


def figure_is_stale() -> bool:
    from PIL import Image

    png = FIGURE.with_suffix(".png")
    if not png.exists():
        return True
    with Image.open(png) as image:
        return image.info.get("drawn from") != digest(drawn_from())


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


VIEW_RUNS = {"595dc09": "gpu-views-595dc09.json", "5d87ffb": "gpu-views-5d87ffb.json", "5d73699": "gpu-views.json"}


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


def step_times() -> dict[tuple[int, bool], float]:
    """Milliseconds of a 3×3-stem step by (local views, with blends), each of the newest run that has it."""
    found = {}
    for file in VIEW_RUNS.values():
        for r in read(file)["views"]:
            if r["stem"] == "small":
                found[r.get("local_views", 0), bool(r.get("alpha_chord"))] = r["ms"]
    # Not measured. The costs add up: for four local views and a blend, their sum is right to 0.2 %.
    found.setdefault((8, True), found[8, False] + found[0, True] - found[0, False])
    return found


def defaults() -> str:
    """A thousand images with the paper's settings and with those of the default preset."""
    noted = read("default-notes.json")
    rows = [
        [r["settings"], str(r["batch"] or ""), str(r["epochs"]), *(f"{r[probe]:.1f}" for probe in ("linear", "knn"))]
        for r in noted["rows"]
    ]
    return markdown(("settings", "batch", "epochs", "linear", "kNN"), rows, "default-notes.json")


SMALL_BATCH = {"lr": "rate × √(b / 256)", "lambda_emb": "λ_emb × b / 256", "d_z": "d_z 128"}


def small_batches() -> str:
    """Every combination of three changes to the default settings, for two small batches."""
    measured = read("small-batches-cpu.json")
    accuracy: dict[tuple[str, ...], dict[int, list[Any]]] = {}
    for r in measured["rows"]:
        accuracy.setdefault(tuple(r["changed"]), {}).setdefault(r["batch"], []).append(r)
    batches = sorted({r["batch"] for r in measured["rows"]})

    def value(found: list[Any], probe: str) -> str:
        return f"{mean(r[probe] for r in found):.1f}" if found else ""

    rows = [
        [
            ", ".join(SMALL_BATCH[name] for name in changed) or "nothing",
            *(value(by_batch.get(b, []), probe) for probe in ("linear", "knn") for b in batches),
        ]
        for changed, by_batch in accuracy.items()
    ]
    header = [f"{title}, b = {b}" for title in ("linear", "kNN") for b in batches]
    floors = [r["untrained"] for r in measured["rows"] if "untrained" in r]
    floor = " and ".join(f"{mean(f[probe] for f in floors):.1f}" for probe in ("linear", "knn"))
    made = measured["provenance"]
    where = f"{made['device']}, commit {made['commit']}; the encoder before training has {floor}"
    return markdown(("changed for the batch", *header), rows, "small-batches-cpu.json", where)


def small_batch_effects() -> str:
    """What one change brings: the mean over all pairs of runs that differ in it alone."""
    measured = read("small-batches-cpu.json")
    runs = {(r["batch"], r["seed"], frozenset(r["changed"])): r for r in measured["rows"]}
    batches = sorted({batch for batch, _, _ in runs})[:-1]
    rows = []
    for name, title in SMALL_BATCH.items():
        row = [title]
        for probe in ("linear", "knn"):
            for batch in batches:
                gains = [r[probe] - runs[b, seed, changed - {name}][probe]
                         for (b, seed, changed), r in runs.items() if name in changed and b == batch]  # fmt: skip
                row.append(f"{mean(gains):+.1f} ± {stdev(gains) / len(gains) ** 0.5:.1f}")
        rows.append(row)
    header = [f"{what}, b = {b}" for what in ("linear", "kNN") for b in batches]
    return markdown(("gain from", *header), rows, "small-batches-cpu.json", "mean of pairs ± standard error")


def halved() -> str:
    """The probes of the best encoder in float32 and rounded to float16."""
    if not (HERE / "halved.json").exists():
        return "Not run yet: `python benchmarks/halved.py`.\n"
    measured = read("halved.json")
    rows = []
    for name in ("float32", "float16"):
        accuracy = (f"{measured[name]['probes'][probe]['mean']:.2f}" for probe in ("linear", "mlp", "knn"))
        rows.append([name, f"{measured[name]['megabytes']:.1f} MB", *accuracy])
    return markdown(("weights", "file", "linear", "mlp", "kNN"), rows, "halved.json")


def large_folder() -> str:
    """What the commands need for 100,000 files."""
    rows = [
        [f"`{r['command']}`", f"{r['cpu_s']:.0f}", f"{r['wall_s']:.0f}", f"{r['memory_MB'] / 1000:.1f}"]
        for r in read("large-folder-notes.json")["rows"]
    ]
    return markdown(("command", "CPU time, s", "wall time, s", "memory, GB"), rows, "large-folder-notes.json")


def cells_of(study: str) -> dict[str, Any]:
    return {file.stem: json.loads(file.read_text()) for file in sorted((HERE / study).glob("*.json"))}


def view_study() -> str:
    """What local views and the chord bring, at equal epochs and at equal GPU time."""
    ms, groups = step_times(), {}
    for cell in cells_of("views").values():
        config = cell["config"]
        groups.setdefault((config["alpha_chord"], config["local_views"], config["epochs"]), []).append(cell)
    rows = []
    for (alpha, n, epochs), members in sorted(groups.items(), key=lambda item: (item[0][0], -item[0][2], item[0][1])):
        name = ("two" if not n else f"two and {n}") + (f", chord {alpha:g}" if alpha else "")
        time = ms.get((n, alpha > 0), float("nan")) / ms[0, False] * epochs / 40
        probes = [" / ".join(f"{m['probes'][probe]['mean']:.1f}" for m in members) for probe in ("linear", "knn")]
        rows.append([name, str(epochs), f"{time:.2f}", *probes])
    where = "NVIDIA H200, torch 2.11.0; a cell for each seed; GPU time from the steps of results/gpu-views*.json"
    return markdown(("views", "epochs", "GPU time", "linear, seeds 0 / 1", "kNN"), rows, "views/", where)


STRONG = {  # what a cell of the study changes, in words
    "lars": "LARS, rate 0.03, decay 1e-3, for Adam",
    "local.1-.4": "local crops 0.1 to 0.4 for 0.05 to 0.25",
    "turn400": "turns, weight 400, four more small views",
    "turn400-local0": "turns, weight 400, without local views",
    "lars-local0": "LARS, without local views",
    "lars-turn400-local0": "LARS and turns, without local views",
    "lars-turn400-local.1-.4": "LARS, turns and local crops 0.1 to 0.4",
    "lars-turn400x1-local.1-.4": "LARS, turns of one view and local crops 0.1 to 0.4",
    "lars-local.1-.4": "LARS and local crops 0.1 to 0.4",
    **{
        f"lars-{name}-local.1-.4": f"LARS and local crops 0.1 to 0.4, {what}"
        for name, what in {
            "rate.06": "rate 0.06",
            "decay3e-4": "decay 3e-4",
            "lambda.0025": "λ_emb 0.0025",
            "lambda.01": "λ_emb 0.01",
            "dz2048": "d_z 2048",
            "b512": "batches of 512, rate 0.06",
            "eight": "eight local views",
            "size20": "local views of 20×20",
            "crop.08": "global crops from 0.08 on",
            "solarize": "solarized second view",
        }.items()
    },
    "lars-weak-first": "LARS, and no change of colours in the first view",
    "turn100": "turns, weight 100",
    "crop.08": "global crops from 0.08 on for 0.2",
    "solarize": "solarized second view, probability 0.2",
}


def strong_screening() -> str:
    """Changes to Barlow Twins with two and four views, one at a time."""
    base = cells_of("views")["cifar10-barlow-twins-local4-40-seed0"]
    cells = [("as in the study of views, Adam", base)]
    for name, cell in cells_of("strong").items():
        cells.append((STRONG[name.removeprefix("cifar10-").removeprefix("150-")], cell))
    rows = []
    for what, cell in sorted(cells, key=lambda pair: pair[1]["config"]["epochs"]):
        values = {probe: cell["probes"][probe]["mean"] for probe in ("linear", "knn")}
        gains = [f"{value:.1f} ({value - base['probes'][probe]['mean']:+.1f})" for probe, value in values.items()]
        shown = gains if cell is not base else [f"{value:.1f}" for value in values.values()]
        rows.append([what, str(cell["config"]["epochs"]), *shown])
    where = "NVIDIA H200, torch 2.11.0, one seed, held-out training images"
    return markdown(("two and four views, with", "epochs", "linear", "kNN"), rows, "strong/", where)


def strong_time() -> str:
    """What the longer runs of the study took."""
    rows = []
    for name, cell in cells_of("strong").items():
        if (epochs := cell["config"]["epochs"]) > 40:
            minutes = f"{cell['provenance']['seconds'] / 60:.1f}"
            probes = [f"{cell['probes'][probe]['mean']:.1f}" for probe in ("linear", "mlp", "knn")]
            rows.append([STRONG[name.removeprefix("cifar10-150-")], str(epochs), minutes, *probes])
    where = "NVIDIA H200, torch 2.11.0, one seed, 45,000 images, judged on 5,000 held-out ones"
    header = ("two and four views, with", "epochs", "minutes", "linear", "mlp", "kNN")
    return markdown(header, rows, "strong/", where)


CURVATURE = ("curvature", "curvature-arms", "curvature-fast")


def screening(study: str) -> str:
    """The arms of a study of curvature, each beside its own baseline, by the rule of docs/curvature.md."""
    from curvssl.paper.reproduce import difference, read_results
    from curvssl.paper.studies import study_of

    arms: dict[str, dict[int, Any]] = {}
    for name in CURVATURE:  # a baseline may be a cell of another stage
        for cell, found in read_results(name, results=HERE).items():
            arms.setdefault(cell.rpartition("-")[0], {})[found["config"]["seed"]] = found
    baselines = {name.rpartition("-")[0]: cell.baseline for name, cell in study_of(study).items()}
    rows = []
    for name, baseline in baselines.items():
        if name not in arms:
            continue
        seeds, known = arms[name], arms.get(baseline, {})
        probes = [mean(cell["probes"][probe]["mean"] for cell in seeds.values()) for probe in ("linear", "knn")]
        pairs = [cell["probes"]["linear"]["mean"] - known[seed]["probes"]["linear"]["mean"]
                 for seed, cell in seeds.items() if seed in known]  # fmt: skip
        promising = len(pairs) == 3 and min(pairs) > 0 and mean(pairs) >= 0.5
        epochs = str(next(iter(seeds.values()))["config"]["epochs"])
        row = [name.removeprefix("cifar10-"), epochs, str(len(seeds)), *(f"{probe:.1f}" for probe in probes)]
        rows.append([*row, difference(pairs) if baseline else "", "yes" * promising])
    if not rows:
        return "No cell of this study has been run yet.\n"
    header = ("arm", "epochs", "seeds", "linear", "kNN", "linear, over its baseline", "goes on")
    return markdown(header, rows, f"{study}/", "NVIDIA H200, torch 2.11.0, held-out training images")


def curvature_screening() -> str:
    return screening("curvature")


def curvature_arms() -> str:
    return screening("curvature-arms")


def curvature_fast() -> str:
    return screening("curvature-fast")


def arm_steps() -> str:
    """What the steps of the arms take, over those of their baselines."""
    if not (HERE / "gpu-arms.json").exists():
        return "Not measured yet: `python benchmarks/gpu.py --parts arms --out results/gpu-arms.json`.\n"
    steps = {r["name"]: r for r in read("gpu-arms.json")["arms"]}
    rows = [
        [STEMS[r["stem"]], name, f"{r['ms']:.3f} ms", cost(r, steps[r["over"]]) if r.get("over") else ""]
        for name, r in steps.items()
    ]
    return markdown(("stem", "arm, b = 256", "a step", "over its baseline"), rows, "gpu-arms.json")


def planted() -> str:
    """How well planted faults are found; the scores that find wrong labels best come first."""
    (found,) = read("planted.json")["runs"].values()
    problems = found["means"]
    names = {name: None for scores in problems.values() for name in scores}
    rows = [
        [
            name,
            *(f"{of[name]['auroc']:.1f} ± {of[name]['within']:.1f}" if name in of else "" for of in problems.values()),
        ]
        for name in sorted(names, key=lambda name: -problems["wrong label"].get(name, {"auroc": 0})["auroc"])
    ]
    return markdown(("AUROC", *problems), rows, "planted.json")


PREDICTORS = {  # what the last row of a run's metrics may tell of its accuracy
    "rho": "ρ, the agreement of the views' curvature",
    "effective_rank": "effective rank of the embeddings",
    "knn": "accuracy of the kNN monitor, which needs labels",
}
MEASURED = {  # and what its features may
    "curvature": "mean curvature of the features",
    "kernel_curvature": "mean kernel curvature of the features",
    "rankme": "RankMe",
    "alpha_req": "α-ReQ, its nearness to 1",
    "nesum": "NESum",
    "stable_rank": "stable rank",
    "selfcluster": "SelfCluster",
    "twonn": "TwoNN",
}


def shown_by(cell: Any, key: str) -> float | None:
    """A predictor of a cell, if the cell has it: those before the measures were added do not."""
    if key not in MEASURED:
        return cell["curves"][-1].get(key)
    value = cell.get("measures", {}).get(key)
    return -abs(value - 1) if key == "alpha_req" and value is not None else value


def predictors() -> str:
    """Rank correlation, over the cells of all studies, of what training and features show with the accuracy of the
    linear probe."""
    # Presets have recipes of their own, and their accuracy is that of another network.
    folders = [folder for folder in sorted(HERE.glob("*/")) if folder.name != "presets"]
    cells = [cell for folder in folders for cell in cells_of(folder.name).values() if "curves" in cell]
    groups: dict[str, list[Any]] = {}
    for cell in cells:
        stem = f", {STEMS[cell['config']['stem']]} stem" if cell["config"]["dataset"] == "cifar10" else ""
        groups.setdefault(cell["config"]["dataset"] + stem, []).append(cell)
    rows = []
    for key, title in (PREDICTORS | MEASURED).items():
        row = [title]
        for members in groups.values():
            shown = [(shown_by(cell, key), cell["probes"]["linear"]["mean"]) for cell in members]
            pairs = [(value, accuracy) for value, accuracy in shown if value is not None]
            of = f", {len(pairs)} runs" if len(pairs) < len(members) else ""
            row.append(rank_correlation(pairs) + of if len(pairs) >= 10 else "–")
        if {*row[1:]} != {"–"}:
            rows.append(row)
    header = ("rank correlation with linear accuracy", *(f"{name}, {len(of)} runs" for name, of in groups.items()))
    return markdown(header, rows, "*/", "the last epoch of every run of all studies; bootstrap 95 % intervals")


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> str:
    """Spearman's, and a bootstrap 95 % interval over the pairs."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [(bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in values]

    def spearman(chosen: Sequence[tuple[float, float]]) -> float:
        x, y = zip(*chosen, strict=True)
        return correlation(ranks(x), ranks(y))

    draw = random.Random(0)
    cuts = quantiles([spearman(draw.choices(pairs, k=len(pairs))) for _ in range(1000)], n=40)
    return f"{spearman(pairs):+.2f} [{cuts[0]:+.2f}, {cuts[-1]:+.2f}]"


def view_pairs() -> str:
    """How the pairs of views are weighed, and whose statistics BatchNorm keeps."""
    measured = read("views-notes.json")
    rows = [[r["what"], *(f"{r[probe]:.1f}" for probe in ("linear", "mlp", "knn"))] for r in measured["pairs"]]
    return markdown((measured["what"], "linear", "mlp", "kNN"), rows, "views-notes.json")


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


def gpu_strong() -> str:
    """The step of the fast preset with both optimisers."""
    rows = [[r["name"], f"{r['ms']:.2f} ms", f"{r['peak_GB']:.1f} GB"] for r in read("gpu-strong.json")["strong"]]
    return markdown(("optimiser", "step", "memory"), rows, "gpu-strong.json")


def few_labels() -> str:
    """What the encoder of a preset is worth with a part of the labels."""
    found = read("finetune-cifar10.json")
    ways = ("linear probe", "fine-tuned", "from scratch")
    rows = []
    for share, entry in found["labels"].items():
        values = [entry[way] for way in ways]
        spread = [f"{v['mean']:.1f} ± {v['std']:.1f}" if len(v["accuracy"]) > 1 else f"{v['mean']:.1f}" for v in values]
        rows.append([share, f"{entry['settings']['labels']:,}", str(len(values[0]["accuracy"])), *spread])
    return markdown(("labels", "number", "draws", *ways), rows, "finetune-cifar10.json")


def gpu_features() -> str:
    """The time for features of 10,000 images, which is most of the time of the kNN monitor."""
    rows = [
        [r["precision"], str(r["batch"]), f"{median(r['ms']):.0f} ms"]
        for r in read("gpu-command.json")["features_of_10000"]
    ]
    return markdown(("precision", "images at a time", "10,000 images"), rows, "gpu-command.json")


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


def gpu_sharing() -> str:
    """Several processes on one GPU."""
    measured = read("gpu-notes.json")["sharing"]
    ms = {(r["mps"], r["processes"]): r["ms"] for r in measured}
    rows = [
        [str(n), *(f"{ms[mps, n]:.2f}" if (mps, n) in ms else "" for mps in (False, True))]
        for n in sorted({r["processes"] for r in measured})
    ]
    return markdown(("processes", "ms a step of all, plain", "with MPS"), rows, "gpu-notes.json")


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


def gpu_profile() -> str:
    """How the time of a step is divided."""
    rows = [
        [STEMS[r["stem"]], r["part"], f"{r['us'] / 1e3:.2f} ms", str(r["kernels"])]
        for r in read("gpu-notes.json")["profile"]
    ]
    return markdown(("stem", "part of a step", "time", "kernels"), rows, "gpu-notes.json", key="profile_provenance")


def probe_notes() -> str:
    """The hidden-layer probe's open settings, on held-out training images."""
    rows = [
        [str(r["hidden"]), f"{r['weight_decay']:g}", f"{r['lr']:g}", f"{r['accuracy']:.1f}"]
        for r in read("probe-notes.json")["rows"]
    ]
    return markdown(("hidden units", "weight decay", "learning rate", "held-out accuracy"), rows, "probe-notes.json")


def probe_augmented() -> str:
    """The hidden-layer probe trained on features of augmented images, on held-out training images."""
    rows = [
        [r["what"], str(r["copies"]), str(r["epochs"]), f"{r['weight_decay']:g}", f"{r['accuracy']:.1f}"]
        for r in read("probe-notes.json")["augmented"]
    ]
    header = ("features of", "sets of them", "epochs over all", "weight decay", "held-out accuracy")
    return markdown(header, rows, "probe-notes.json", key="augmented_provenance")


def trap() -> str:
    """Cells that ended with a low rank: the diagonal of C, and its best value at that rank."""
    from curvssl.paper.reproduce import read_results

    cells = {
        f"{name}: {cell}": c for name in ("recipe", "literal") for cell, c in read_results(name, results=HERE).items()
    }
    rows = []
    for cell, result in sorted(cells.items()):
        c, last = result["config"], result["curves"][-1]
        if last["effective_rank"] > 20 or c["method"] == "vicreg":
            continue
        d, rank = c["d_z"], last["effective_rank"]
        best, seen = rank / (rank + c["lambda_emb"] * (d - rank)), 1 - (last["invariance"] / d) ** 0.5
        rows.append(
            [cell, f"{rank:.1f}", f"{best:.3f}", f"{seen:.3f}", f"{last['invariance'] + last['redundancy']:.0f}"]
        )
    header = ("cell", "effective rank r", "r / (r + λ(d − r))", "C's diagonal", "L_emb")
    return markdown(header, rows, "recipe/, literal/", "the last epoch's means; commits in their tables")


def recipe_effects() -> str:
    """The effect of one setting: pairs of cells of the study `recipe` that differ only in it."""
    pairs = (
        ("cifar10-barlow-twins-200-cosine-warm40", "200-cosine-warm40-crop.08"),
        ("cifar10-barlow-twins-200-cosine-warm40-crop.08", "200-best-crop.05"),
        ("cifar10-barlow-twins-cosine", "cosine-crop.4"),
        ("cifar10-barlow-twins-cosine", "cosine-crop.08"),
        ("mnist-barlow-twins-crop.8", "crop.5"),
        ("mnist-barlow-twins-crop.8", "crop.3"),
        ("cifar10-barlow-twins-200-cosine-warm40-crop.08", "200-best-colour.2"),
        ("cifar10-barlow-twins-200-best-constant-warm80-colour.4", "200-best-constant-warm80-colour.6"),
        ("cifar10-barlow-twins-200-best-constant-warm80-colour.4", "200-best-constant-warm80-colour.8"),
        ("cifar10-barlow-twins-cosine", "cosine-colour.8"),
        ("cifar10-barlow-twins-cosine", "cosine-warm20"),
        ("cifar10-barlow-twins-200-cosine", "200-cosine-warm40"),
        ("cifar10-barlow-twins-200-best-constant", "200-best-constant-warm80-colour.4"),
        ("cifar10-barlow-twins-cosine", "constant"),
        ("cifar10-barlow-twins-200-cosine", "200-constant"),
        ("cifar10-barlow-twins-200-cosine-warm40-crop.08", "200-best-constant"),
        ("cifar10-barlow-twins-cosine", "cosine-norm"),
        ("cifar10-barlow-twins-cosine", "cosine-wide"),
        ("cifar10-barlow-twins-200-cosine-warm40", "200-cosine-warm40-wide"),
        ("cifar10-barlow-twins-200-cosine-warm40-crop.08", "200-best-narrow"),
        ("cifar10-vicreg-cosine", "cosine-wide"),
        ("cifar10-barlow-twins-cosine", "cosine-blur"),
        ("cifar10-kernel-curvssl-cosine-median", "cosine-scale"),
        ("cifar10-kernel-curvssl-cosine-median", "cosine-auto"),
    )
    rows = []
    for before, after in pairs:
        dataset, _, rest = before.partition("-")
        method = next(m for m in ("barlow-twins", "vicreg", "kernel-curvssl") if rest.startswith(m))
        old, new = (read(f"recipe/{name}.json") for name in (before, f"{dataset}-{method}-{after}"))
        changes = [
            f"{new['probes'][probe]['mean'] - old['probes'][probe]['mean']:+.1f}" for probe in ("mlp", "linear", "knn")
        ]
        rows.append([f"{dataset}, {rest}", changed(old["config"], new["config"]), *changes])
    header = ("starting from", "what changes", "mlp", "linear", "kNN")
    return markdown(header, rows, "recipe/", "change in points of held-out accuracy; one seed")


def changed(old: Any, new: Any) -> str:
    """The one setting in which two configurations differ: `name: old → new`."""
    before, after = ({**config, **config["augment"], "augment": None} for config in (old, new))
    names = [name for name in before if before[name] != after[name]]
    if names == ["brightness", "contrast", "saturation", "hue"]:  # strengths of one operation, changed together
        return f"colour strength: {before['brightness']} → {after['brightness']}"
    (name,) = names
    if name == "crop_scale":
        return f"smallest crop: {before[name][0]} → {after[name][0]}"
    return f"{name}: {before[name]} → {after[name]}"


def literal_runs() -> str:
    """Each run of the study `literal` that can fall into the trap: its rank early and at the end."""
    from curvssl.paper.reproduce import read_results

    rows = []
    for cell, result in read_results("literal", results=HERE).items():
        if result["config"]["method"] == "vicreg":
            continue
        (early,) = (row for row in result["curves"] if row["epoch"] == 5)
        last = result["curves"][-1]
        ranks = [f"{row['effective_rank']:.0f}" for row in (early, last)]
        rows.append([cell, *ranks, f"{last['invariance']:.0f}", f"{result['probes']['mlp']['mean']:.1f}"])
    header = ("cell", "effective rank after 5 epochs", "at the end", "invariance at the end", "mlp")
    return markdown(header, sorted(rows), "literal/", "commits in the table above")


def maps() -> str:
    """How well UMAP's maps preserve neighbourhoods, and how well they separate the classes."""
    records = [read(f"faithful/maps/{file.name}") for file in sorted((HERE / "faithful" / "maps").glob("*.json"))]
    keys = ("trustworthiness", "silhouette")
    rows = [[one["cell"], *(f"{one['quality'][key]:.2f}" for key in keys)] for one in records]
    made = f"commit {', '.join(sorted({one['provenance']['commit'] for one in records}))}"
    return markdown(("cell", "trustworthiness", "silhouette of the classes"), rows, "faithful/maps/", made)


def repeated() -> str:
    """Cells that were run twice with the same seed."""
    rows, commits = [], set()
    for file in sorted((HERE / "repeated").glob("*.json")):
        runs = [read(f"{folder}/{file.name}") for folder in ("repeated", "faithful")]
        cells = [[f"{run['probes'][probe]['mean']:.2f}" for run in runs] for probe in ("mlp", "linear", "knn")]
        rows.append([file.stem, *(" → ".join(pair) for pair in cells)])
        commits.add(" → ".join(run["provenance"]["commit"] for run in runs))
    return markdown(("cell", "mlp", "linear", "kNN"), rows, "repeated/ → faithful/", f"commits {', '.join(commits)}")


def gpu_kernels() -> str:
    """Each hand-written kernel alone: its time, and how many of the necessary bytes it moves per second."""
    rows = [
        [r["kernel"], r["shape"], f"{r['us']:.1f} µs", f"{r['TB_per_s']:.2f} TB/s" if "TB_per_s" in r else ""]
        for r in read("gpu-notes.json")["kernels"]
    ]
    header = ("kernel", "shape, bf16", "time", "bytes that must move")
    return markdown(header, rows, "gpu-notes.json", key="kernels_provenance")


def gpu_parts() -> str:
    """The parts of the loss alone, and the kernels of the curvatures."""
    measured = read("gpu-notes.json")["parts"]
    rows = [[r["what"], f"{r['us']:.1f} µs"] for r in measured]
    return markdown(("b = 256, d = 128", "time"), rows, "gpu-notes.json", key="parts_provenance")


def gpu_start_up() -> str:
    """How the time until the first step is divided."""
    rows = [
        [r["what"], *(f"{r[key]:.1f} s" for key in ("first_step_s", "import_s", "in_compiler_s"))]
        for r in read("gpu-notes.json")["start_up"]
    ]
    header = ("", "first step after", "of that imports, data and network", "tracing and compiling")
    return markdown(header, rows, "gpu-notes.json", key="start_up_provenance")


def gpu_experiments() -> str:
    measured = read("gpu-experiments.json")
    commits = {int(run): made["commit"][:7] for run, made in measured["runs"].items()}
    rows = [
        [f"{r['run']}, {commits[r['run']]}", STEMS[r["stem"]], r["method"], r["what"], f"{r['ms']:.3f}"]
        for r in measured["rows"]
    ]
    return markdown(("run, commit", "stem", "method", "variant, b = 256", "ms a step"), rows, "gpu-experiments.json")


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


def outlier_tables(group: str) -> str:
    """Detectors on mixed and on clean data, best mean AUROC on mixed data first."""
    means = read("outliers.json")[group]["means"]
    keys = [(setting, key) for setting in ("mixed", "clean") for key in ("auroc", "ap", "rank")]
    rows = [
        [f"**{name}**" if "default" in name else name, *(f"{means[setting][name][key]:.1f}" for setting, key in keys)]
        for name in sorted(means["mixed"], key=lambda name: -means["mixed"][name]["auroc"])
    ]
    names = {"auroc": "AUROC", "ap": "average precision", "rank": "rank"}
    first, *rest = (names[key] for _, key in keys)
    count = len(read("outliers.json")[group]["tables"])
    header = (f"mean over {count} tables", f"mixed: {first}", *rest[:2], f"clean: {rest[2]}", *rest[3:])
    return markdown(header, rows, "outliers.json")


def outliers() -> str:
    return outlier_tables("report")


def outliers_chosen() -> str:
    return outlier_tables("choose")


def outliers_classes() -> str:
    return outlier_tables("scikit-learn")


def outliers_new() -> str:
    return outlier_tables("keel")


def outlier_margins() -> str:
    return margins_of("report")


def outlier_margins_new() -> str:
    return margins_of("keel")


def margins_of(group: str) -> str:
    """Our default minus each peer on a group of tables."""
    rows = [[peer, *over.values()] for peer, over in margins(group).items()]
    return markdown(("our default's AUROC minus that of", "mixed", "clean"), rows, "outliers.json")


def margins(*groups: str) -> dict[str, dict[str, str]]:
    """Our default's AUROC minus each peer's over the tables of these groups, with bootstrap 95 % intervals."""
    tables = [table for group in groups for table in read("outliers.json")[group]["tables"].values()]
    draw = random.Random(0)
    samples = [draw.choices(range(len(tables)), k=len(tables)) for _ in range(2000)]
    ours, *peers = tables[0]["mixed"]
    found: dict[str, dict[str, str]] = {peer: {} for peer in peers}
    for peer in peers:
        for setting in ("mixed", "clean"):
            over = [table[setting][ours]["auroc"] - table[setting][peer]["auroc"] for table in tables]
            cuts = quantiles([mean(over[i] for i in sample) for sample in samples], n=40)
            found[peer][setting] = f"{mean(over):+.1f} [{cuts[0]:+.1f}, {cuts[-1]:+.1f}]"
    return found


def outliers_unseen() -> str:
    """All tables that nothing was chosen on."""
    groups = ("report", "keel")
    found, over = read("outliers.json"), margins("report", "keel")
    shares = {group: len(found[group]["tables"]) for group in groups}
    count = sum(shares.values())
    values = {
        name: [
            sum(n * found[group]["means"][setting][name][key] for group, n in shares.items()) / count
            for setting, key in (("mixed", "auroc"), ("mixed", "rank"), ("clean", "auroc"))
        ]
        for name in found["report"]["means"]["mixed"]
    }
    rows = []
    for name, (auroc, rank, clean) in sorted(values.items(), key=lambda item: -item[1][0]):
        less = over.get(name, {"mixed": "", "clean": ""})
        title = name if name in over else f"**{name}**"
        rows.append([title, f"{auroc:.1f}", f"{rank:.1f}", less["mixed"], f"{clean:.1f}", less["clean"]])
    minus = "our default minus it"
    header = (f"mean over {count} tables", "mixed: AUROC", "rank", minus, "clean: AUROC", minus)
    return markdown(header, rows, "outliers.json")


def outliers_ends() -> str:
    """The default with other largest neighbourhoods."""
    noted = read("outliers-notes.json")["upper_ends"]["rows"]
    keys = ("mixed_auroc", "mixed_rank", "clean_auroc")
    rows = [
        [f"{r['up_to']:.0%}", *(f"{r[key]:.2f}" for key in keys)]
        for r in sorted(noted, key=lambda r: r["up_to"])
        if r["tables"] == "choose and keel"
    ]
    header = ("largest neighbourhood, of all points", "mixed: AUROC", "rank among twelve", "clean: AUROC")
    return markdown(header, rows, "outliers-notes.json")


def outliers_tried() -> str:
    """Of each family of scores that was tried, the one with the best mean AUROC on mixed data."""
    best: dict[tuple[int, str, str], Any] = {}
    for row in read("outliers-notes.json")["rows"]:
        family = (row["rows"], row["what"].split(",")[0], row["what"].partition(";")[2])
        if "peer" not in row and row["mixed_auroc"] > best.get(family, {"mixed_auroc": 0})["mixed_auroc"]:
            best[family] = row
    rows = [
        [f"{r['rows']:,}", r["what"], *(f"{r[key]:.1f}" for key in ("mixed_auroc", "mixed_rank", "clean_auroc"))]
        for r in sorted(best.values(), key=lambda r: (r["rows"], -r["mixed_auroc"]))
    ]
    header = ("rows at most", "best of its family", "mixed: AUROC", "rank among twelve", "clean: AUROC")
    return markdown(header, rows, "outliers-notes.json")


def fuzz() -> str:
    """Random inputs to the library, by function and outcome."""
    found = read("fuzz.json")
    outcomes = ("right", "refused", "shown", "finite", "FAULT")
    total = {outcome: sum(counts[outcome] for counts in found["counts"].values()) for outcome in outcomes}
    rows = [
        [name, f"{sum(counts.values()):,}", *(f"{counts[outcome]:,}" for outcome in outcomes)]
        for name, counts in (*found["counts"].items(), ("**all**", total))
    ]
    header = ("function", "cases", "right", "refused", "not finite, and shown", "rounding decides", "wrong")
    return markdown(header, rows, "fuzz.json")


def memory() -> str:
    """The memory of a process during long runs."""
    rows, made = [], []
    for device in ("cpu", "cuda"):
        found = read(f"memory-{device}.json")
        made.append(f"{found['provenance']['device']}, commit {found['provenance']['commit']}")
        for part in ("process", "cuda"):
            if part in found:
                marks = [f"{mark:.1f}" for mark in found[part]["MB_at_10_20_40_60_80_100_percent"]]
                slope = f"{found[part]['MB_per_1000_steps']:+.3f}"
                rows.append([f"{device}, {part}", f"{found['steps']:,}", *marks, slope])
    header = ("memory in MB", "steps", "at 10 %", "20 %", "40 %", "60 %", "80 %", "100 %", "MB per 1,000 steps")
    return markdown(header, rows, "memory-cpu.json, results/memory-cuda.json", "; ".join(made))


def losses() -> str:
    rows = []
    for r in read("losses-cpu.json")["losses"]:
        s = r["seconds"]
        over, naive = s["curvssl"] / s["barlow_twins"], s["naive"] / s["curvssl"]
        rows.append([str(r["b"]), str(r["d"]), f"{1e3 * s['curvssl']:.1f}", f"{over:.1f}×", f"{naive:.2f}×"])
    header = ("b", "d", "CurvSSL, ms", "over Barlow Twins alone", "naive Gram form over ours")
    return markdown(header, rows, "losses-cpu.json")


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


def canvas() -> str:
    measured = read("canvas-cpu.json")
    view, found = measured["settings"]["view"], measured["linear"]
    least = next(iter(found.values()))
    rows = []
    for side, values in found.items():
        gains = [value - other for value, other in zip(values, least, strict=True)]
        gain = f"{mean(gains):+.1f} ± {stdev(gains):.1f}" if any(gains) else ""
        name = f"{int(side) / view:.2f} times the view: {side}×{side}"
        rows.append([name, f"{mean(values):.1f} ± {stdev(values):.1f}", gain])
    return markdown(("canvas", "linear probe, %", "gain with the same seeds"), rows, "canvas-cpu.json")


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


def device_minutes(cells: Iterable[Any]) -> float:
    """Minutes in which at least one of the cells was running; a cell's JSON is written when it ends."""
    ends = [(datetime.fromisoformat(cell["provenance"]["created"]).timestamp(), cell) for cell in cells]
    spent, until = 0.0, 0.0
    for start, end in sorted((end - cell["seconds_with_probes"], end) for end, cell in ends):
        spent, until = spent + max(0.0, end - max(start, until)), max(until, end)
    return spent / 60


def of_campaign(table: Callable[[], str]) -> Callable[[], str]:
    """A table of the campaigns of benchmarks/faults.py, or where to find it."""

    @functools.wraps(table)
    def made() -> str:
        return table() if (HERE / "faults.json").exists() else "Not run yet: `make faults`.\n"

    return made


VERIFY_COLUMNS = {"verify_seconds": "`curvssl verify`, s", "sha256sum_seconds": "`sha256sum`, s"}
DAMAGE_VERDICTS = {"told": "told", "mended": "mended", "same": "the same", "failed": "failed"}


@of_campaign
def faults_damage() -> str:
    """What each kind of damage did."""
    found = read("faults.json")["corruption"]["by_damage"]
    rows = [[kind, *verdict_columns(counts)] for kind, counts in found.items()]
    totals = [sum(int(row[i]) for row in rows) for i in range(1, 6)]
    return markdown(("damage", "cases", *DAMAGE_VERDICTS.values()), [*rows, ["all", *map(str, totals)]], "faults.json")


def verdict_columns(counts: dict[str, int]) -> list[str]:
    """The number of cases, then of each verdict; whatever is no verdict of ours has failed."""
    good = [counts.get(name, 0) for name in ("told", "mended", "same")]
    return [str(n) for n in (sum(counts.values()), *good, sum(counts.values()) - sum(good))]


@of_campaign
def faults_files() -> str:
    """The same by file."""
    found = read("faults.json")["corruption"]["by_file"]
    names = {
        "stopped/OLDER": "stopped/checkpoint-*.pt, the older",
        "stopped/NEWER": "stopped/checkpoint-*.pt, the newer",
        "run/FEATURES IN ANOTHER FOLDER": "run/features-in-*.npz",
    }
    rows = [[f"`{names.get(name, name)}`", *verdict_columns(counts)] for name, counts in sorted(found.items())]
    return markdown(("file", "cases", *DAMAGE_VERDICTS.values()), rows, "faults.json")


@of_campaign
def faults_kills() -> str:
    names = {
        "begin": "pretrain",
        "two ranks": "pretrain over two ranks",
        "data": "the cache's first write",
        "pack": "pack, over an older pack",
    }
    found = read("faults.json")["kills"]
    rows = [
        [names.get(name, name), *(str(counts.get(key, 0)) for key in ("kills", "worlds", "same", "failed"))]
        for name, counts in found.items()
    ]
    totals = [sum(int(row[i]) for row in rows) for i in range(1, 5)]
    header = ("killed", "kills", "worlds", "the same to the last bit", "failed")
    return markdown(header, [*rows, ["all", *map(str, totals)]], "faults.json")


@of_campaign
def faults_rest() -> str:
    found = read("faults.json")
    disks = found["full_or_read_only_disk"]
    rows = [
        [
            "a full or a read-only disk: a line, then the same result",
            str(sum(disks.values())),
            str(disks.get("failed", 0)),
        ]
    ]
    for key, what in (
        ("changed_data", "changed images: a line, exit code 2"),
        ("two_processes", "two processes on one run: refused, or the same result"),
    ):
        verdicts = list(found[key].values())
        rows.append([what, str(len(verdicts)), str(verdicts.count("failed"))])
    return markdown(("", "cases", "failed"), rows, "faults.json")


@of_campaign
def faults_verify() -> str:
    found = read("faults.json")["verify"]
    row = [f"{found['files']} files, {found['megabytes']} MB", *(f"{found[name]:.2f}" for name in VERIFY_COLUMNS)]
    return markdown(("a run of the usual size", *VERIFY_COLUMNS.values()), [row], "faults.json")


def of_study(name: str) -> Callable[[], str]:
    """The table of a study of `curvssl reproduce`."""

    def made() -> str:
        from curvssl.paper.reproduce import read_results, study_rows

        cells = read_results(name, results=HERE)
        if not cells:
            return "No cell of this study has been run yet.\n"
        from_ = [cell["provenance"] for cell in cells.values()]
        devices, commits = (", ".join(sorted({str(p[key]) for p in from_})) for key in ("device", "commit"))
        spent = f"{device_minutes(cells.values()):.0f} minutes of the device, which several may have shared"
        where = f"{len(cells)} cells, {spent}: {devices}, commit {commits}"
        return markdown(*study_rows(name, results=HERE), f"{name}/", where)

    return made


MADE = (
    demo,
    demo_costs,
    gains,
    time_to_accuracy,
    published,
    speed,
    gpu,
    gpu_rest,
    gpu_hosts,
    backbones,
    gpu_views,
    view_floors,
    view_orders,
    view_study,
    strong_screening,
    strong_time,
    curvature_screening,
    curvature_arms,
    curvature_fast,
    arm_steps,
    planted,
    predictors,
    defaults,
    small_batches,
    small_batch_effects,
    halved,
    view_pairs,
    gpu_command,
    gpu_again,
    few_labels,
    gpu_strong,
    gpu_features,
    gpu_floors,
    gpu_sharing,
    gpu_shares,
    gpu_profile,
    gpu_kernels,
    gpu_parts,
    gpu_fusions,
    gpu_start_up,
    trap,
    recipe_effects,
    literal_runs,
    maps,
    repeated,
    probe_notes,
    probe_augmented,
    gpu_experiments,
    losses,
    outliers,
    outliers_chosen,
    outliers_classes,
    outliers_new,
    outlier_margins,
    outlier_margins_new,
    outliers_unseen,
    outliers_ends,
    outliers_tried,
    fuzz,
    memory,
    page,
    large_folder,
    streaming,
    canvas,
    weak_scaling,
    communication,
    faults_damage,
    faults_files,
    faults_kills,
    faults_rest,
    faults_verify,
)
TABLES: dict[str, Callable[[], str]] = {f.__name__: f for f in MADE}
STUDIES = ("faithful", "literal", "alpha", "recipe", "precision", "presets", "small-batches")
TABLES |= {f"study-{name}": of_study(name) for name in STUDIES}


def rewritten(text: str) -> str:
    return MARK.sub(lambda m: m[1] + TABLES[m[2]]() + m[4], text)


def main() -> None:
    stale = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = document.read_text()
        if rewritten(text) != text:
            stale.append(document.name)
            if "--check" not in sys.argv:
                document.write_text(rewritten(text))
    if figure_is_stale():
        stale.append(FIGURE.name)
        if "--check" not in sys.argv:
            draw_figure()
    if stale and "--check" in sys.argv:
        sys.exit(f"not up to date with results/: {', '.join(stale)}; run python results/tables.py")


if __name__ == "__main__":
    main()
