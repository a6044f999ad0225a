"""Reproduce the paper's table and figures: run the cells of a study one by one (studies.py defines them).

Each finished cell is one JSON in results/STUDY/, with its provenance, and is not run again. So a study can be divided
over many sessions and machines. Tables and figures are made from the JSON alone.
"""

import dataclasses
import math
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvssl.config import PretrainConfig, UserError, differences, unknown
from curvssl.data.order import hold_out
from curvssl.evaluate.features import Features, load
from curvssl.evaluate.maps import COLOURS
from curvssl.evaluate.quality import MEASURES
from curvssl.evaluate.runs import dataset_of, features_of, here, probe, probe_features, sampled, spread, table
from curvssl.files import Busy, lock, say, write_json
from curvssl.geometry import curvature, kernel_curvature
from curvssl.manifest import seal, sealed
from curvssl.methods import METHODS, title_of
from curvssl.paper import figures
from curvssl.paper.studies import SEEDS, Cell, study_of
from curvssl.rundir import Run, provenance
from curvssl.train.loop import pretrain

CURVE_POINTS = 100  # rows of metrics in a cell's JSON
MEASURED_IMAGES = 5_000  # for the measures, which shift with their number: CIFAR-10 holds out so many
PICTURED = ("barlow-twins", "curvssl", "kernel-curvssl")  # their first seed in the study "faithful" gets a map
WATCHED = (("rho", 2), ("effective_rank", 0))  # columns for metrics of the last batch, with their number of decimals
CURVES = ("invariance", "redundancy", "effective_rank", "rho", "z_std", "knn")
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
# Two-sided 95 % quantiles of Student's t by degrees of freedom, since differences are paired over few seeds.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


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
    """Run the cells that have no result yet, until the time is over; returns the names of the cells it finished.

    After `minutes` the running training writes a checkpoint and stops.
    """
    if minutes is not None and not 0 < minutes < 1e6:
        raise UserError(f"minutes={minutes} needs to be above 0, and below a million")
    study, todo = study_of(name), to_do(name, results=results, only=only)
    if torch.cuda.is_available():  # several processes may share a device, and their CPU threads would compete
        torch.set_num_threads(2)
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
        except Busy:  # another process is running this cell
            continue
    map_cells(name, results=results, runs=runs)
    return finished


def to_do(name: str, *, results: Path, only: str = "") -> list[str]:
    """Cells without a result. An error if no cell's name contains `only`."""
    study = study_of(name)
    if not any(only in cell for cell in study):
        raise unknown("cell", only, study)
    done = read_results(name, results=results)
    return [cell for cell in study if only in cell and cell not in done]


def finish_cell(study: str, cell: str, of: Cell, *, results: Path, run_path: Path, source: str) -> None:
    started, config = time.monotonic(), of.config
    criterion = None if of.arm is None else of.arm.make(config)
    run = pretrain(config, out=run_path, source=source, criterion=criterion)
    judged = judge(run, source=source)
    seconds = time.monotonic() - started
    made = provenance(device=run.read_json("provenance.json")["device"])
    made["command"] = f"curvssl reproduce --study {study} --only {cell}"  # without paths, and of this cell alone
    made |= {key: run.read_json("provenance.json").get(key) for key in ("data_sha256", "seconds")}
    value = {
        "study": study,
        "cell": cell,
        "config": config.to_dict(),
        "criterion": criterion_of(of),
        "judged_on": "held-out training images" if config.holdout else "test images",
        **judged,
        "curves": thin(run.metrics()),
        "seconds_with_probes": seconds,
        "provenance": made,
    }
    write_json(results / study / f"{cell}.json", seal(value))


def criterion_of(cell: Cell) -> dict[str, Any] | None:
    """The name and the settings of a cell's own loss; None for a method."""
    return None if cell.arm is None else dataclasses.asdict(cell.arm)


def judge(run: Run, *, source: str) -> dict[str, Any]:
    """Probes and measures on the test images; for studies that choose settings, on held-out training images instead."""
    data = dataset_of(run, source=source)
    if not run.config.holdout:
        probes = probe(run, source=source, floors=False)
        return {"probes": probes, "measures": measures(features_of(run, data, "test").h)}
    train = features_of(run, data, "train")
    assert train.y is not None
    fit, held, _ = hold_out(len(train.h), share=run.config.holdout, seed=run.config.seed)
    parts = (Features(h=train.h[rows], y=train.y[rows]) for rows in (fit, held))
    probes = probe_features(*parts, seeds=SEEDS, classes=len(data.classes))
    return {"probes": probes, "measures": measures(train.h[held])}


def measures(h: Tensor) -> dict[str, Any]:
    """What features (n, d) show without labels: the measures that need no views, and the mean of both curvatures."""
    h = h[sampled(len(h), MEASURED_IMAGES)].to(here())
    found = {name: measure(h) for name, measure in MEASURES.items() if not measure.views}
    found |= {"curvature": float(curvature(h).mean()), "kernel_curvature": float(kernel_curvature(h).mean())}
    finite = {name: value if math.isfinite(value) else None for name, value in found.items()}  # JSON has no NaN
    return {"images": len(h)} | finite


def to_map(name: str, *, results: Path) -> list[str]:
    """Cells that need a map of their test features and have none, or one of an earlier result."""
    first = {cell: c for cell, (c, *_) in study_of(name).items() if name == "faithful" and c.seed == SEEDS[0]}
    pictured = [cell for cell, c in first.items() if c.method in PICTURED]
    done = read_results(name, results=results) if pictured else {}
    return [cell for cell in pictured if map_of(name, cell, done.get(cell), results=results) is None]


def map_of(name: str, cell: str, result: dict[str, Any] | None, *, results: Path) -> dict[str, Any] | None:
    """The map that was made from this very result of a cell, if there is one."""
    file = results / name / "maps" / f"{cell}.json"
    if not os.path.lexists(file):
        return None
    found = sealed(file, remedy=f"restore it, or delete it and run curvssl reproduce --study {name}")
    return found if result is not None and found.get("from") == result["sha256"] else None


def map_cells(name: str, *, results: Path, runs: Path) -> None:
    """UMAP of the features in finished runs, which may come from a machine without umap-learn."""
    done = read_results(name, results=results)
    for cell in to_map(name, results=results):
        folder = runs / name / cell
        if cell not in done or not (folder / "features-test.npz").exists():
            continue
        if find_spec("umap") is None:
            say(f"{cell} has no map yet: that needs umap-learn; copy {folder} to where that is, and go on there")
            continue
        run = Run.read(folder)
        data = dataset_of(run) if (stored := load(run, "features-test.npz")) is None else None
        made = stored if data is None else features_of(run, data, "test")
        assert made is not None
        assert made.y is not None
        record = figures.map_record(made.h, made.y, classes=run.read_json("data.json")["classes"])
        value = {"cell": cell, "from": done[cell]["sha256"]} | record | {"provenance": provenance(device="cpu")}
        write_json(results / name / "maps" / f"{cell}.json", seal(value))


def thin(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most CURVE_POINTS rows, evenly spaced, including the last."""
    every = math.ceil(len(rows) / CURVE_POINTS) or 1
    return [row for i, row in enumerate(reversed(rows)) if i % every == 0][::-1]


# ---- tables and figures ----


def read_results(name: str, *, results: Path) -> dict[str, dict[str, Any]]:
    """{cell: its JSON} of the finished cells. One that is damaged, or of other settings, is an error."""
    found = {}
    for cell, of in study_of(name).items():
        file, again = results / name / f"{cell}.json", f"curvssl reproduce --study {name} --only {cell}"
        if os.path.lexists(file):
            remedy = f"restore it, or delete it and run {again}"
            value = sealed(file, remedy=remedy)
            changed = differences(PretrainConfig.from_dict(value["config"]), of.config)
            if value.get("criterion") != criterion_of(of):
                changed = f"criterion {value.get('criterion')} → {criterion_of(of)}"
            if changed:
                raise UserError(f"{file} has other settings than the study ({changed}): {remedy}")
            found[cell] = value
    return found


def status(name: str, *, results: Path, only: str = "") -> str:
    """How many cells are done, and which are missing, of those whose name contains `only`."""
    study = [cell for cell in study_of(name) if only in cell]
    done = {cell: result for cell, result in read_results(name, results=results).items() if only in cell}
    missing = [cell for cell in study if cell not in done] + [
        f"map of {cell}" for cell in to_map(name, results=results) if only in cell
    ]
    spent = sum(result["seconds_with_probes"] for result in done.values()) / 60
    return f"{name}: {len(done)} of {len(study)} cells, whose runs add up to {spent:.1f} minutes" + (
        f"; missing: {', '.join(missing)}" if missing else ""
    )


def study_rows(name: str, *, results: Path) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a study's table; cells that differ only in their seed share a row. The columns: the paper's
    value; every probe's mean ± standard deviation over pretraining seeds; the paired difference of the paper's probe
    (mlp) with its 95 % interval. The difference is to Barlow Twins on the same data with the same number of epochs or,
    in a study without it, to the first row."""
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for cell, result in read_results(name, results=results).items():
        groups.setdefault(re.sub(r"-seed\d+", "", cell), {})[result["config"]["seed"]] = result
    bases: dict[tuple[str, int], str] = {}
    for group, by_seed in groups.items():
        c = next(iter(by_seed.values()))["config"]
        among = c["dataset"], c["epochs"]
        if among not in bases or (c["method"] == "barlow-twins" and "barlow" not in bases[among]):
            bases[among] = group
    rows = []
    for group, by_seed in sorted(groups.items()):
        c = next(iter(by_seed.values()))["config"]
        dataset, method = c["dataset"], c["method"]
        first = bases[dataset, c["epochs"]]
        base = groups[first]
        pairs = [by_seed[s]["probes"]["mlp"]["mean"] - base[s]["probes"]["mlp"]["mean"] for s in by_seed if s in base]
        paper = PAPER.get((dataset, method)) if name in ("faithful", "literal") else None
        accuracy = (spread([f["probes"][p]["mean"] for f in by_seed.values()]) for p in ("mlp", "linear", "knn"))
        over = "" if group == first else difference(pairs)
        last = [f["curves"][-1] for f in by_seed.values()]
        watched = (f"{statistics.mean(row[key] for row in last):.{digits}f}" for key, digits in WATCHED)
        what = [f"{dataset}, {row_name(group, c)}", str(len(by_seed)), f"{paper:.1f}" if paper else "–"]
        rows.append([*what, *accuracy, over, *watched])
    over = "over Barlow Twins" if any("barlow" in base for base in bases.values()) else "over the first"
    return ["", "seeds", "paper", "mlp (the paper's)", "linear", "kNN", over, "ρ", "effective rank"], rows


def row_name(cell: str, config: dict[str, Any]) -> str:
    """A cell's name without seed and data set: the same for cells that differ only in these."""
    rest = re.sub(r"-seed\d+", "", cell).removeprefix(config["dataset"]).removeprefix(f"-{config['method']}")
    return title_of(config["method"]) + rest.replace("-", ", ").replace("alpha", "α ")


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


def looks(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Colour and label of each cell's curves, from {name: configuration}: one colour per row of the table or, if there
    are too many rows, one per method."""
    labels = {cell: row_name(cell, config) for cell, config in cells.items()}
    if len({*labels.values()}) > len(COLOURS):
        labels = {cell: title_of(config["method"]) for cell, config in cells.items()}
    names = sorted({*labels.values()})
    titles = [method.title for method in METHODS.values()]
    if {*names} <= {*titles}:
        names = titles  # a method has the same colour in every figure
    return {cell: {"color": COLOURS[names.index(label)], "label": label} for cell, label in labels.items()}


def draw_figures(name: str, *, results: Path) -> list[Path]:
    """Draw a study's training curves and maps, one figure per data set, as PNG and PDF in results/figures; returns the
    PNGs."""
    cells = read_results(name, results=results)
    drawn = []
    for dataset in sorted({result["config"]["dataset"] for result in cells.values()}):
        mine = {cell: result for cell, result in cells.items() if result["config"]["dataset"] == dataset}
        style = looks({cell: result["config"] for cell, result in mine.items()})
        curves = {cell: result["curves"] for cell, result in mine.items()}
        title = f"{name}: {dataset}, one line a seed"
        out = results / "figures" / f"curves-{name}-{dataset}"
        drawn.append(figures.draw_curves(curves, keys=CURVES, title=title, out=out, style=style)[0])
        pictured = {method: f"{dataset}-{method}-seed{SEEDS[0]}" for method in PICTURED}
        made = {m: map_of(name, cell, mine.get(cell), results=results) for m, cell in pictured.items()}
        records = {title_of(method): record for method, record in made.items() if record is not None}
        if records:
            title, out = f"UMAP of h, {dataset}, test images", results / "figures" / f"umap-{name}-{dataset}"
            drawn.append(figures.draw_maps(records, title=title, out=out)[0])
    return drawn
