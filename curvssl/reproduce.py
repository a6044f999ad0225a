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

from curvssl.config import CHOICES, PretrainConfig, UserError, paper_cifar10, paper_mnist, unknown
from curvssl.evaluate import NAMES, probe, spread, table
from curvssl.rundir import provenance, write_json
from curvssl.train import pretrain

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


STUDIES: dict[str, Callable[[], Study]] = {"faithful": faithful, "literal": literal, "alpha": alpha}


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
    share: str = "1/1",
    only: str = "",
    source: str = "auto",
) -> list[str]:
    """Run the cells that have no result yet, as far as the time goes; the names of those finished now.

    After `minutes` the training under way writes a checkpoint and stops.
    """
    study, todo = study_of(name), to_do(name, results=results, share=share, only=only)
    if minutes is not None:
        alarm = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
        alarm.daemon = True
        alarm.start()
    for i, cell in enumerate(todo, 1):
        print(f"{name}: {cell} ({i} of {len(todo)})", flush=True)
        finish_cell(name, cell, study[cell], results=results, run_path=runs / name / cell, source=source)
    return todo


def to_do(name: str, *, results: Path, share: str = "1/1", only: str = "") -> list[str]:
    """Cells without a result. `share` "2/4" takes every fourth from the second on: four processes divide a study."""
    mine, of = (int(part) for part in share.split("/")) if re.fullmatch(r"\d+/\d+", share) else (0, 0)
    if not 1 <= mine <= of:
        raise UserError(f"share {share!r} is not understood: write 2/4 for the second of four")
    cells = [cell for cell in study_of(name) if only in cell][mine - 1 :: of]
    return [cell for cell in cells if not (results / name / f"{cell}.json").exists()]


def finish_cell(study: str, cell: str, config: PretrainConfig, *, results: Path, run_path: Path, source: str) -> None:
    started = time.monotonic()
    run = pretrain(config, out=run_path, source=source)
    probes = probe(run, source=source, floors=False)
    seconds = time.monotonic() - started
    made = provenance(device=run.read_json("provenance.json")["device"])
    made |= {key: run.read_json("provenance.json").get(key) for key in ("data_sha256", "seconds")}
    write_json(
        results / study / f"{cell}.json",
        {
            "study": study,
            "cell": cell,
            "config": config.to_dict(),
            "probes": probes,
            "curves": thin(run.metrics()),
            "seconds_with_probes": seconds,
            "provenance": made,
        },
    )


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
    """Header and rows: what the paper says, every probe's mean ± standard deviation over pretraining seeds, and the
    paired difference of the paper's probe (mlp) to Barlow Twins with its 95 % interval."""
    groups: dict[tuple[str, str, float], dict[int, dict[str, Any]]] = {}
    for found in read_results(name, results=results).values():
        c = found["config"]
        alpha = c["alpha_curv"] if "curvssl" in c["method"] else 0.0
        groups.setdefault((c["dataset"], c["method"], alpha), {})[c["seed"]] = found["probes"]
    rows = []
    for (dataset, method, alpha), by_seed in sorted(groups.items()):
        base = groups.get((dataset, "barlow-twins", 0.0), {})
        pairs = [by_seed[s]["mlp"]["mean"] - base[s]["mlp"]["mean"] for s in by_seed if s in base]
        paper = PAPER[dataset, method] if name != "alpha" else None
        rows.append(
            [
                f"{dataset}, {NAMES[method]}" + (f", α {alpha:g}" if name == "alpha" and alpha else ""),
                str(len(by_seed)),
                f"{paper:.1f}" if paper else "–",
                *(spread([probes[p]["mean"] for probes in by_seed.values()]) for p in ("mlp", "linear", "knn")),
                difference(pairs) if method != "barlow-twins" else "",
            ]
        )
    return ["", "seeds", "paper", "mlp (the paper's)", "linear", "kNN", "over Barlow Twins"], rows


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
