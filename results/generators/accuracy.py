"""Tables and the figure of accuracy: the paper's studies, the presets, what was tried on the way."""

import hashlib
import json
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

from generators.base import HERE, STEMS, TABLES, cells_of, device_minutes, markdown, read, span, table
from generators.speed import VIEW_RUNS, steps_of


@table
def demo() -> str:
    measured = read("demo.json")
    rows = [[name, *(f"{p['mean']:.1f} ± {p['std']:.1f}" if p["std"] else f"{p['mean']:.1f}" for p in probes.values())]
            for name, probes in measured["accuracy"].items()]  # fmt: skip
    return markdown(("", *next(iter(measured["accuracy"].values()))), rows, "demo.json")


@table
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


@table
def time_to_accuracy() -> str:
    return accuracy_over_time(lambda r: r["linear"] and r["method"] in SHORT)


@table
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


STUDIES = ("faithful", "literal", "alpha", "recipe", "precision", "presets", "small-batches")
TABLES |= {f"study-{name}": of_study(name) for name in STUDIES}


@table
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


@table
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


@table
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


@table
def maps() -> str:
    """How well UMAP's maps preserve neighbourhoods, and how well they separate the classes."""
    records = [read(f"faithful/maps/{file.name}") for file in sorted((HERE / "faithful" / "maps").glob("*.json"))]
    keys = ("trustworthiness", "silhouette")
    rows = [[one["cell"], *(f"{one['quality'][key]:.2f}" for key in keys)] for one in records]
    made = f"commit {', '.join(sorted({one['provenance']['commit'] for one in records}))}"
    return markdown(("cell", "trustworthiness", "silhouette of the classes"), rows, "faithful/maps/", made)


@table
def repeated() -> str:
    """Cells that were run twice with the same seed."""
    rows, commits = [], set()
    for file in sorted((HERE / "repeated").glob("*.json")):
        runs = [read(f"{folder}/{file.name}") for folder in ("repeated", "faithful")]
        cells = [[f"{run['probes'][probe]['mean']:.2f}" for run in runs] for probe in ("mlp", "linear", "knn")]
        rows.append([file.stem, *(" → ".join(pair) for pair in cells)])
        commits.add(" → ".join(run["provenance"]["commit"] for run in runs))
    return markdown(("cell", "mlp", "linear", "kNN"), rows, "repeated/ → faithful/", f"commits {', '.join(commits)}")


@table
def probe_notes() -> str:
    """The hidden-layer probe's open settings, on held-out training images."""
    rows = [
        [str(r["hidden"]), f"{r['weight_decay']:g}", f"{r['lr']:g}", f"{r['accuracy']:.1f}"]
        for r in read("probe-notes.json")["rows"]
    ]
    return markdown(("hidden units", "weight decay", "learning rate", "held-out accuracy"), rows, "probe-notes.json")


@table
def probe_augmented() -> str:
    """The hidden-layer probe trained on features of augmented images, on held-out training images."""
    rows = [
        [r["what"], str(r["copies"]), str(r["epochs"]), f"{r['weight_decay']:g}", f"{r['accuracy']:.1f}"]
        for r in read("probe-notes.json")["augmented"]
    ]
    header = ("features of", "sets of them", "epochs over all", "weight decay", "held-out accuracy")
    return markdown(header, rows, "probe-notes.json", key="augmented_provenance")


@table
def defaults() -> str:
    """A thousand images with the paper's settings and with those of the default preset."""
    noted = read("default-notes.json")
    rows = [
        [r["settings"], str(r["batch"] or ""), str(r["epochs"]), *(f"{r[probe]:.1f}" for probe in ("linear", "knn"))]
        for r in noted["rows"]
    ]
    return markdown(("settings", "batch", "epochs", "linear", "kNN"), rows, "default-notes.json")


SMALL_BATCH = {"lr": "rate × √(b / 256)", "lambda_emb": "λ_emb × b / 256", "d_z": "d_z 128"}


@table
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


@table
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


@table
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


@table
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


@table
def view_pairs() -> str:
    """How the pairs of views are weighed, and whose statistics BatchNorm keeps."""
    measured = read("views-notes.json")
    rows = [[r["what"], *(f"{r[probe]:.1f}" for probe in ("linear", "mlp", "knn"))] for r in measured["pairs"]]
    return markdown((measured["what"], "linear", "mlp", "kNN"), rows, "views-notes.json")


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


@table
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


LARS = "LARS and local crops 0.1 to 0.4"
STRONG = {  # what a cell of the study changes, in words, in the table's order
    "": "as in the study of views, Adam",
    "lars": "LARS, rate 0.03, decay 1e-3, for Adam",
    "local.1-.4": "local crops 0.1 to 0.4 for 0.05 to 0.25",
    "turn400": "turns, weight 400, four more small views",
    "turn400-local0": "turns, weight 400, without local views",
    "lars-local0": "LARS, without local views",
    "lars-turn400x1-local.1-.4": "LARS, turns of one view at weight 400 and local crops 0.1 to 0.4",
    "lars-turn100x1-local.1-.4": "LARS, turns of one view at weight 100 and local crops 0.1 to 0.4",
    "lars-local.1-.4": LARS,
    **{f"lars-global{size}": f"{LARS}, global views of {size}×{size}" for size in (24, 20, 16)},
}
FURTHER = {  # the same for a change to the best of these
    "eight": "eight local views",
    "teacher.99": "a teacher, decay 0.99",
    "crop.08": "global crops from 0.08 on",
    "dz2048": "d_z 2048",
    "lambda.01": "λ_emb 0.01",
    "rate.06": "rate 0.06",
    "solarize": "solarized second view",
    "size12": "local views of 12×12",
    "b512": "batches of 512, rate 0.06",
    "lambda.0025": "λ_emb 0.0025",
    "decay3e-4": "decay 3e-4",
    "adam": "Adam",
    "weak-first": "a first view without changed colours",
    "average.999": "an average of the weights, decay 0.999",
    "teacher.996": "a teacher, decay 0.996",
}
STRONG |= {f"lars-global24-{name}": f"24×24 as above, {what}" for name, what in FURTHER.items()}


def changed_from(name: str) -> str:
    """The cell that a cell of the study is a change of; "" is the one without a change."""
    longer, short = "150-" * name.startswith("150-"), name.removeprefix("150-")
    if short.startswith("lars-global24-"):
        return f"{longer}lars-global24"
    return f"{longer}lars-local.1-.4" if longer or "global" in short else ""


@table
def strong_screening() -> str:
    """Changes to Barlow Twins with two and four views, each beside the cell that it is a change of."""
    cells = {"": cells_of("views")["cifar10-barlow-twins-local4-40-seed0"]}
    cells |= {name.removeprefix("cifar10-"): cell for name, cell in cells_of("strong").items()}
    order = [*STRONG]
    rows = []
    for name, cell in sorted(
        cells.items(), key=lambda pair: (pair[1]["config"]["epochs"], order.index(pair[0].removeprefix("150-")))
    ):
        base = cells.get(changed_from(name), cell)["probes"]
        values = []
        for probe in ("linear", "knn"):
            gain = cell["probes"][probe]["mean"] - base[probe]["mean"]
            values.append(
                f"{cell['probes'][probe]['mean']:.1f}" + (f" ({gain:+.1f})" if base != cell["probes"] else "")
            )
        rows.append([STRONG[name.removeprefix("150-")], str(cell["config"]["epochs"]), *values])
    where = "NVIDIA H200, torch 2.11.0, one seed, held-out training images; in brackets: the gain over what is changed"
    header = ("two and four views, with", "epochs", "linear", "kNN")
    return markdown(header, rows, "strong/ and strong-notes.json", where)


@table
def turn_head() -> str:
    """How the head for turns failed under LARS."""
    rows = [
        [str(r["epoch"]), f"{r['turn']:.2f}", f"{r['turn_accuracy']:.0%}"]
        for r in read("strong-notes.json")["turn_head"]["rows"]
    ]
    return markdown(("epoch", "cross-entropy of the head", "right"), rows, "strong-notes.json")


@table
def statistics_of_whole_images() -> str:
    """BatchNorm's statistics of views, or of whole images."""
    noted = read("strong-notes.json")["statistics"]
    rows = [
        [f"{r['seed']}", *(f"{r[kind][probe]:.1f}" for probe in ("linear", "knn") for kind in ("kept", "whole"))]
        for r in noted["rows"]
    ]
    header = ("seed", "linear", "with statistics of whole images", "kNN", "with statistics of whole images")
    return markdown(header, rows, "strong-notes.json", f"CPU, commit {noted['commit']}")


def proxy(key: str, header: tuple[str, ...], named: Callable[[Any], list[str]]) -> str:
    """Runs of a proxy on a CPU, from strong-notes.json: what `named` says of each, and its accuracies by seed."""
    noted = read("strong-notes.json")[key]
    rows = [
        [*named(r), *(" / ".join(f"{seed[probe]:.1f}" for seed in r["seeds"]) for probe in ("linear", "knn"))]
        for r in noted["rows"]
    ]
    where = f"CPU, commit {noted['commit']}"
    return markdown((*header, "linear, by seed", "kNN"), rows, "strong-notes.json", where)


@table
def teacher_on_cpu() -> str:
    """A teacher and a flow on a small proxy, at equal epochs and in about equal time."""
    return proxy("teacher_on_cpu", ("", "epochs"), lambda r: [r["name"], f"{r['epochs']}"])


@table
def global_size_on_cpu() -> str:
    """Smaller global views on a small proxy, at equal epochs, and for about the same work."""

    def named(r: Any) -> list[str]:
        return [f"{r['size']}×{r['size']}" + f", {r['local']} local" * bool(r["local"]), f"{r['epochs']}"]

    return proxy("global_size_on_cpu", ("global views", "epochs"), named)


@table
def global_size_of_default() -> str:
    """Smaller global views with the default preset on a thousand images."""
    header = ("whole images", "global views")
    return proxy("global_size_of_default", header, lambda r: [f"{r[name]}×{r[name]}" for name in ("size", "global")])


@table
def chord_on_cpu() -> str:
    """The chord on a small proxy, in a short and in a long run, at about equal time."""
    return proxy("chord_on_cpu", ("chord's weight", "epochs"), lambda r: [f"{r['alpha']:g}", f"{r['epochs']}"])


@table
def probed_size() -> str:
    """The probes of the strong encoder on whole images of several sizes."""
    noted = read("strong-notes.json")["probed_size"]
    rows = [[f"{r['size']}×{r['size']}", f"{r['linear']:.1f}", f"{r['knn']:.1f}"] for r in noted["rows"]]
    return markdown(("whole images", "linear", "kNN"), rows, "strong-notes.json", f"CPU, commit {noted['commit']}")


@table
def strong_time() -> str:
    """What the longer runs of the study took."""
    rows, cells = [], cells_of("strong")
    for name, cell in cells.items():
        if (epochs := cell["config"]["epochs"]) > 40:
            (start, end), spans = span(cell), map(span, cells.values())
            at_once = sum(first < end and start < last for first, last in spans)
            minutes = f"{cell['provenance']['seconds'] / 60:.1f}" + f", {at_once} at once" * (at_once > 1)
            probes = [f"{cell['probes'][probe]['mean']:.1f}" for probe in ("linear", "mlp", "knn")]
            rows.append([STRONG[name.removeprefix("cifar10-150-")], str(epochs), minutes, *probes])
    where = "NVIDIA H200, torch 2.11.0, one seed, 45,000 images, judged on 5,000 held-out ones"
    header = ("two and four views, with", "epochs", "minutes", "linear", "mlp", "kNN")
    return markdown(header, rows, "strong/ and strong-notes.json", where)


@table
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
