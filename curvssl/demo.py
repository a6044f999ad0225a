"""The demo, the paper in minutes: pretrain, probe and map all four objectives on scikit-learn's digits."""

import dataclasses
from pathlib import Path

from curvssl.config import demo
from curvssl.data.named import load
from curvssl.evaluate.probes import PROBES
from curvssl.evaluate.runs import PREDICTIONS, draw_map, floors_of, probe, probe_rows, table
from curvssl.methods import METHODS, title_of
from curvssl.report.collect import report
from curvssl.rundir import ROOTS, Run
from curvssl.train.loop import pretrain

SEEDS = (0, 1, 2)  # of the probes
NEXT = """
next, with your own images:
  curvssl pretrain --dataset folder:PHOTOS --out runs/photos   train on a folder, without labels
  curvssl embed runs/photos PHOTOS --out features.npz          features of every image
  curvssl search runs/photos PHOTO --out like-it.html          photographs like one of them
  curvssl inspect runs/photos                                  near-duplicates, outliers, typical images
  curvssl report runs/photos                                   the page for your run"""


def run_demo(out: Path, *, epochs: int, pictures: bool) -> list[Run]:
    """Pretrain, probe and draw every method; returns one run per method."""
    runs = []
    for method in METHODS:
        config = dataclasses.replace(demo(), method=method, epochs=epochs, warmup_epochs=min(2, epochs))
        runs.append(pretrain(config, out=out / method))
    results = {title_of(run.config.method): probe(run, floors=False, seeds=SEEDS) for run in runs}
    floors = floors_of(runs[0], load("digits"), seeds=SEEDS)  # all four runs start from the same random encoder
    for run in runs:
        of = (*ROOTS, PREDICTIONS)
        run.keep_json("probes.json", run.read_json("probes.json") | floors, of=of, by="curvssl probe RUN")
    print(f"\nAccuracy in percent on the test digits, mean ± standard deviation over {len(SEEDS)} seeds of the probe\n")
    print(table(("", *PROBES), probe_rows(floors | results, columns=tuple(PROBES))))
    print()
    if pictures:
        for run in runs:
            print(f"map of {run.path.name}: {draw_map(run)}")
        # The page opens with the first two side by side: the paper's method, and Barlow Twins, to which it adds a term.
        shown = sorted(runs, key=lambda run: run.config.method not in ("curvssl", "barlow-twins"))
        shown[:2] = sorted(shown[:2], key=lambda run: run.config.method, reverse=True)
        print(f"\nlook at the whole of it: {report([run.path for run in shown], out / 'report.html')}")
    print(NEXT)
    return runs
