"""The paper's table, run again: a study is a function that returns configurations, one for each cell.

Each finished cell is one JSON in results/STUDY/, with its provenance. What is there is not run again, so a campaign can
be spread over as many bookings and machines as it takes.
"""

import dataclasses
import json
import math
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from curvssl.config import CHOICES, AugmentConfig, PretrainConfig, paper_cifar10, paper_mnist, unknown
from curvssl.evaluate import NAMES, dataset_of, features_of, probe, probe_features, spread, table
from curvssl.features import Features
from curvssl.rundir import Busy, Run, lock, provenance, write_json
from curvssl.train import hold_out, pretrain

Study = dict[str, PretrainConfig]

SEEDS = (0, 1, 2)
CURVE_POINTS = 100  # rows of metrics that a cell's JSON keeps
PAPER = {  # Table 1, accuracy in percent
    ("mnist", "vicreg"): 95.9,
    ("mnist", "barlow-twins"): 94.9,
    ("mnist", "curvssl"): 97.9,
    ("mnist", "kernel-curvssl"): 98.4,
    ("cifar10", "vicreg"): 74.5,
    ("cifar10", "barlow-twins"): 73.6,
    ("cifar10", "curvssl"): 75.1,
    ("cifar10", "kernel-curvssl"): 76.5,
}
# Two-sided 95 % points of Student's t, by degrees of freedom: differences are paired over few seeds.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


# ---- the studies ----


def faithful() -> Study:
    """Table 1 with the smallest declared departures that train: the presets as they are."""
    return cells(paper_mnist(), paper_cifar10(), methods=CHOICES["method"], seeds=SEEDS)


def literal() -> Study:
    """Table 1 with nothing that the paper does not state: no warm-up."""
    presets = (dataclasses.replace(preset(), warmup_epochs=0.0) for preset in (paper_mnist, paper_cifar10))
    return cells(*presets, methods=CHOICES["method"], seeds=SEEDS)


def alpha() -> Study:
    """A first look at the term: α_curv on CIFAR-10 at 100 epochs, paired over two seeds; α = 0 is Barlow Twins."""
    short = dataclasses.replace(paper_cifar10(), epochs=100)
    found = cells(short, methods=("barlow-twins",), seeds=SEEDS[:2])
    for weight in (1.0, 10.0, 100.0):
        weighed = dataclasses.replace(short, alpha_curv=weight)
        curved = cells(weighed, methods=("curvssl", "kernel-curvssl"), seeds=SEEDS[:2])
        found |= {f"{name}-alpha{weight:g}": config for name, config in curved.items()}
    return found


def recipe() -> Study:
    """What the paper leaves open, a change at a time, on CIFAR-10 at 50 epochs; judged on held-out training images."""
    base = dataclasses.replace(paper_cifar10(), epochs=50, holdout=0.1, schedule="constant", projector_width=512)
    base = dataclasses.replace(base, projector_norm=False, gamma="median", augment=AugmentConfig())
    cosine = dataclasses.replace(base, schedule="cosine")
    strong = AugmentConfig(brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2)
    variants: dict[str, dict[str, Any]] = {
        "cosine": {},
        "cosine-norm": {"projector_norm": True},
        "cosine-wide": {"projector_width": 2048},
        "cosine-wide-norm": {"projector_width": 2048, "projector_norm": True},
        "cosine-crop.08": {"augment": AugmentConfig(crop_scale=(0.08, 1.0))},
        "cosine-crop.4": {"augment": AugmentConfig(crop_scale=(0.4, 1.0))},
        "cosine-colour.8": {"augment": strong},
        "cosine-blur": {"augment": AugmentConfig(blur=0.5)},
        "cosine-warm20": {"warmup_epochs": 20},
    }
    twins = dataclasses.replace(base, method="barlow-twins")
    found = {"cifar10-barlow-twins-constant": twins}
    for name, changes in variants.items():
        found[f"cifar10-barlow-twins-{name}"] = dataclasses.replace(cosine, method="barlow-twins", **changes)
    for gamma in ("median", "scale", "auto"):
        found[f"cifar10-kernel-curvssl-cosine-{gamma}"] = dataclasses.replace(
            cosine, method="kernel-curvssl", gamma=gamma
        )
    for name in ("cosine", "cosine-wide"):
        found[f"cifar10-vicreg-{name}"] = dataclasses.replace(cosine, method="vicreg", **variants[name])
    return found


def precision() -> Study:
    """Whether the fast step trains as well: bf16 captured against fp32 eager, MNIST at 20 epochs, three seeds each."""
    short = dataclasses.replace(paper_mnist(), epochs=20)
    found: Study = {}
    for kind, step in (("fp32", "eager"), ("bf16", "captured")):
        chosen = dataclasses.replace(short, precision=kind, step=step)
        curved = cells(chosen, methods=("curvssl",), seeds=SEEDS)
        found |= {f"{name}-{kind}-{step}": config for name, config in curved.items()}
    return found


STUDIES: dict[str, Callable[[], Study]] = {
    "faithful": faithful,
    "literal": literal,
    "alpha": alpha,
    "recipe": recipe,
    "precision": precision,
}


def cells(*presets: PretrainConfig, methods: Sequence[str], seeds: Sequence[int]) -> Study:
    """Seed by seed, so that a campaign cut short has whole rows."""
    return {
        f"{preset.dataset}-{method}-seed{seed}": dataclasses.replace(preset, method=method, seed=seed)
        for seed in seeds
        for preset in presets
        for method in methods
    }


def study_of(name: str) -> Study:
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    return STUDIES[name]()


# ---- running ----


def run_study(
    name: str,
    *,
    results: Path,
    runs: Path,
    minutes: float | None = None,
    only: str = "",
    source: str = "auto",
) -> list[str]:
    """Run the cells that have no result yet, as far as the time goes; the names of those finished now.

    After `minutes` the training under way writes a checkpoint and stops.
    """
    study, todo = study_of(name), to_do(name, results=results, only=only)
    if minutes is not None:
        alarm = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
        alarm.daemon = True
        alarm.start()
    finished = []
    for i, cell in enumerate(todo, 1):
        try:
            with lock(runs / name / cell / "cell"):
                if cell in to_do(name, results=results, only=cell):
                    print(f"{name}: {cell} ({i} of {len(todo)})", flush=True)
                    finish_cell(name, cell, study[cell], results=results, run_path=runs / name / cell, source=source)
                    finished.append(cell)
        except Busy:  # several processes may work at a study: each takes what no other has
            continue
    return finished


def to_do(name: str, *, results: Path, only: str = "") -> list[str]:
    """Cells without a result."""
    return [cell for cell in study_of(name) if only in cell and not (results / name / f"{cell}.json").exists()]


def finish_cell(study: str, cell: str, config: PretrainConfig, *, results: Path, run_path: Path, source: str) -> None:
    started = time.monotonic()
    run = pretrain(config, out=run_path, source=source)
    probes = judge(run, source=source)
    seconds = time.monotonic() - started
    made = provenance(device=run.read_json("provenance.json")["device"])
    made |= {key: run.read_json("provenance.json").get(key) for key in ("data_sha256", "seconds")}
    write_json(
        results / study / f"{cell}.json",
        {
            "study": study,
            "cell": cell,
            "config": config.to_dict(),
            "judged_on": "held-out training images" if config.holdout else "test images",
            "probes": probes,
            "curves": thin(run.metrics()),
            "seconds_with_probes": seconds,
            "provenance": made,
        },
    )


def judge(run: Run, *, source: str) -> dict[str, Any]:
    """The probes: on the test images, or on the training images that were held out, where settings are to be chosen."""
    if not run.config.holdout:
        return probe(run, source=source, floors=False)
    data = dataset_of(run, source=source)
    train = features_of(run, data, "train")
    assert train.y is not None
    fit, held = hold_out(len(train.h), share=run.config.holdout, seed=run.config.seed)
    parts = (Features(h=train.h[rows], y=train.y[rows]) for rows in (fit, held))
    return probe_features(*parts, seeds=SEEDS, classes=len(data.classes))


def thin(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most CURVE_POINTS rows, evenly spaced, the last among them."""
    every = math.ceil(len(rows) / CURVE_POINTS) or 1
    return [row for i, row in enumerate(reversed(rows)) if i % every == 0][::-1]


# ---- what has been found ----


def read_results(name: str, *, results: Path) -> dict[str, dict[str, Any]]:
    """Cell → its JSON, of those that are there."""
    files = {cell: results / name / f"{cell}.json" for cell in study_of(name)}
    return {cell: json.loads(file.read_text()) for cell, file in files.items() if file.exists()}


def status(name: str, *, results: Path) -> str:
    done, study = read_results(name, results=results), study_of(name)
    missing = [cell for cell in study if cell not in done]
    spent = sum(found["seconds_with_probes"] for found in done.values()) / 60
    return f"{name}: {len(done)} of {len(study)} cells, {spent:.1f} minutes" + (
        f"; missing: {', '.join(missing)}" if missing else ""
    )


def study_rows(name: str, *, results: Path) -> tuple[list[str], list[list[str]]]:
    """Header and rows, cells that differ in their seed alone together: what the paper says, every probe's mean ±
    standard deviation over pretraining seeds, and the paired difference of the paper's probe (mlp) with its 95 %
    interval, to Barlow Twins on the same data or, in a study without it, to the first row."""
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for cell, found in read_results(name, results=results).items():
        groups.setdefault(re.sub(r"-seed\d+", "", cell), {})[found["config"]["seed"]] = found
    bases: dict[str, str] = {}
    for group, by_seed in groups.items():
        c = next(iter(by_seed.values()))["config"]
        if c["dataset"] not in bases or (c["method"] == "barlow-twins" and "barlow" not in bases[c["dataset"]]):
            bases[c["dataset"]] = group
    rows = []
    for group, by_seed in sorted(groups.items()):
        c = next(iter(by_seed.values()))["config"]
        dataset, method = c["dataset"], c["method"]
        base = groups[bases[dataset]]
        pairs = [by_seed[s]["probes"]["mlp"]["mean"] - base[s]["probes"]["mlp"]["mean"] for s in by_seed if s in base]
        rest = group.removeprefix(f"{dataset}-{method}").replace("-", ", ").replace("alpha", "α ")
        paper = f"{PAPER[dataset, method]:.1f}" if name in ("faithful", "literal") else "–"
        accuracy = (spread([f["probes"][p]["mean"] for f in by_seed.values()]) for p in ("mlp", "linear", "knn"))
        over = "" if group == bases[dataset] else difference(pairs)
        rows.append([f"{dataset}, {NAMES[method]}{rest}", str(len(by_seed)), paper, *accuracy, over])
    over = "over Barlow Twins" if any("barlow" in base for base in bases.values()) else "over the first"
    return ["", "seeds", "paper", "mlp (the paper's)", "linear", "kNN", over], rows


def difference(pairs: Sequence[float]) -> str:
    """Mean paired difference and its 95 % interval by Student's t."""
    if not pairs:
        return "–"
    mean = statistics.mean(pairs)
    if len(pairs) - 1 not in STUDENT:
        return f"{mean:+.1f}"
    half = STUDENT[len(pairs) - 1] * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{mean:+.1f} ({mean - half:+.1f} … {mean + half:+.1f})"


def study_table(name: str, *, results: Path) -> str:
    header, rows = study_rows(name, results=results)
    return table(header, rows) if rows else f"{name}: no results yet in {results / name}"
