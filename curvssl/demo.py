"""The paper in two minutes: all four objectives on scikit-learn's digits, probed, drawn, in one table."""

import dataclasses
from pathlib import Path

from curvssl.config import CHOICES, demo
from curvssl.data import load
from curvssl.evaluate import NAMES, draw_map, floors_of, probe, probe_rows, table
from curvssl.probes import PROBES
from curvssl.rundir import Run
from curvssl.train import pretrain

SEEDS = (0, 1, 2)  # of the probes


def run_demo(out: Path, *, epochs: int, maps: bool) -> list[Run]:
    """Pretrain, probe and draw; the runs, one a method."""
    results, runs = {}, []
    for method in CHOICES["method"]:
        config = dataclasses.replace(demo(), method=method, epochs=epochs, warmup_epochs=min(2, epochs))
        run = pretrain(config, out=out / method)
        results[NAMES[method]] = probe(run, floors=False)
        runs.append(run)
    floors = floors_of(runs[0], load("digits"), seeds=SEEDS)
    print(f"\nAccuracy in percent on the test digits, mean ± standard deviation over {len(SEEDS)} seeds of the probe\n")
    print(table(("", *PROBES), probe_rows(floors | results)))
    print()
    if maps:
        for run in runs:
            print(f"map of {run.path.name}: {draw_map(run)}")
    return runs
