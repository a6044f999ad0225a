"""Tables of what curvature is good for: training, prediction of accuracy, planted faults, outliers."""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import correlation, mean, quantiles
from typing import Any

from generators.base import HERE, STEMS, cells_of, markdown, read, table
from generators.speed import cost

OURS, LOF = "both curvatures, our default", "LOF, k = 20"  # in benchmarks/outliers.py
SIGNS = {"auroc": -1, "rank": 1}  # the best has the highest AUROC and the lowest rank
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
        verdict = ""  # of an arm that waits for more seeds
        if len(pairs) >= 3:
            verdict = "yes" if mean(pairs) >= 0.5 else "no"
        elif 0 in seeds and pairs and pairs[0] < -1:
            verdict = "given up"
        epochs = str(next(iter(seeds.values()))["config"]["epochs"])
        row = [name.removeprefix("cifar10-"), epochs, str(len(seeds)), *(f"{probe:.1f}" for probe in probes)]
        rows.append([*row, difference(pairs) if baseline else "", verdict])
    if not rows:
        return "No cell of this study has been run yet.\n"
    header = ("arm", "epochs", "seeds", "linear", "kNN", "linear, over its baseline", "goes on")
    return markdown(header, rows, f"{study}/", "NVIDIA H200, torch 2.11.0, held-out training images")


@table
def curvature_screening() -> str:
    return screening("curvature")


@table
def curvature_arms() -> str:
    return screening("curvature-arms")


@table
def curvature_fast() -> str:
    return screening("curvature-fast")


@table
def arm_steps() -> str:
    """What the steps of the arms take, over those of their baselines."""
    baselines: dict[int, Any] = {}  # of a case the first
    rows = []
    for r in read("gpu-arms.json")["arms"]:
        baseline = baselines.setdefault(r["case"], r)
        rows.append([STEMS[r["stem"]], r["name"], f"{r['ms']:.3f} ms", cost(r, baseline) if r is not baseline else ""])
    return markdown(("stem", "arm, b = 256", "a step", "over its baseline"), rows, "gpu-arms.json")


@table
def planted() -> str:
    """How well planted faults are found; the scores that find wrong labels best come first."""
    problems, weaker = (
        next(iter(read(file)["runs"].values()))["means"] for file in ("planted.json", "planted-fast-cifar10.json")
    )

    def entry(name: str, problem: str) -> str:
        found, before = problems[problem].get(name), weaker[problem].get(name)
        if found is None:
            return ""
        then = "" if before is None or name == OURS else f" ({before['auroc']:.1f})"  # it had another default
        return f"{found['auroc']:.1f} ± {found['within']:.1f}{then}"

    names = {name: None for scores in problems.values() for name in scores}
    rows = [
        [name, *(entry(name, problem) for problem in problems)]
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


@table
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
    where = "the last epoch of every run of all studies; bootstrap 95 % intervals"
    return markdown(header, rows, "*/ and strong-notes.json", where)


@table
def predictors_of_learners() -> str:
    """The same for the measures of features, with and without the runs that learnt nothing."""
    cells = [cell for study in CURVATURE for cell in cells_of(study).values()]
    learners = [cell for cell in cells if cell["probes"]["linear"]["mean"] > 50]
    rows = []
    for key, title in MEASURED.items():
        pairs = [[(shown_by(cell, key), cell["probes"]["linear"]["mean"]) for cell in of] for of in (cells, learners)]
        rows.append([title, *map(rank_correlation, pairs)])
    header = ("rank correlation with linear accuracy", f"all {len(cells)}", f"the {len(learners)} that learnt")
    return markdown(header, rows, "curvature*/", "bootstrap 95 % intervals")


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) + 1) / 2 for value in values]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> str:
    """Spearman's, and a bootstrap 95 % interval over the pairs."""

    def spearman(chosen: Sequence[tuple[float, float]]) -> float:
        x, y = zip(*chosen, strict=True)
        return correlation(ranks(x), ranks(y))

    draw = random.Random(0)
    cuts = quantiles([spearman(draw.choices(pairs, k=len(pairs))) for _ in range(1000)], n=40)
    return f"{spearman(pairs):+.2f} [{cuts[0]:+.2f}, {cuts[-1]:+.2f}]"


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


@table
def outliers() -> str:
    return outlier_tables("first")


@table
def outliers_second() -> str:
    return outlier_tables("second")


@table
def outliers_classes() -> str:
    return outlier_tables("scikit-learn")


@table
def outliers_new() -> str:
    return outlier_tables("keel")


@table
def outlier_margins() -> str:
    return margins_of("first")


@table
def outlier_margins_new() -> str:
    return margins_of("keel")


def margins_of(group: str) -> str:
    """Our default's AUROC minus each peer's over a group of tables, with bootstrap 95 % intervals."""
    tables = list(read("outliers.json")[group]["tables"].values())
    draw = random.Random(0)
    samples = [draw.choices(range(len(tables)), k=len(tables)) for _ in range(2000)]
    ours, *peers = tables[0]["mixed"]
    rows = []
    for peer in peers:
        row = [peer]
        for setting in ("mixed", "clean"):
            over = [table[setting][ours]["auroc"] - table[setting][peer]["auroc"] for table in tables]
            cuts = quantiles([mean(over[i] for i in sample) for sample in samples], n=40)
            row.append(f"{mean(over):+.1f} [{cuts[0]:+.1f}, {cuts[-1]:+.1f}]")
        rows.append(row)
    return markdown(("our default's AUROC minus that of", "mixed", "clean"), rows, "outliers.json")


Judged = dict[str, dict[str, float]]  # of each detector: AUROC and rank on mixed data, AUROC on clean data


def judged(sizes: str, *groups: str) -> Judged:
    """Our default with other sizes of the neighbourhood, and its eleven peers, over the tables of these groups."""
    stored, candidates = read("outliers.json"), read("outlier-sizes.json")["tables"]
    values: dict[str, dict[str, list[float]]] = {}
    for peers, ours in (
        (peers, candidates[group][name]) for group in groups for name, peers in stored[group]["tables"].items()
    ):
        of = {s: {d: v["auroc"] for d, v in peers[s].items()} | {OURS: ours[s][sizes]} for s in ("mixed", "clean")}
        places = dict(zip(of["mixed"], ranks([-round(value, 6) for value in of["mixed"].values()]), strict=True))
        for detector in of["mixed"]:
            found = values.setdefault(detector, {"auroc": [], "rank": [], "clean": []})
            found["auroc"].append(of["mixed"][detector])
            found["rank"].append(places[detector])
            found["clean"].append(of["clean"][detector])
    return {detector: {key: mean(of) for key, of in found.items()} for detector, found in values.items()}


def all_sizes() -> list[str]:
    tables = read("outlier-sizes.json")["tables"]["first"]
    return list(next(iter(tables.values()))["mixed"])


def chosen_sizes(*groups: str) -> str:
    """The rule of docs/mathematics.md: of what is not below LOF on clean data, the best mean rank on mixed data."""
    found = {sizes: judged(sizes, *groups) for sizes in all_sizes()}
    sound = [sizes for sizes, of in found.items() if of[OURS]["clean"] >= of[LOF]["clean"]]
    return min(sound, key=lambda sizes: found[sizes][OURS]["rank"])


@table
def outliers_crossed() -> str:
    """Each half of the tables, judged with the sizes that the rule chooses on the other half; and both together."""
    halves = ("second", "first"), ("first", "second")
    parts = [(*pair, chosen_sizes(pair[0])) for pair in halves]
    shown = [(f"the {on} half", judged(sizes, on), f"the {by} half: {sizes}") for by, on, sizes in parts]
    counts = [len(read("outliers.json")[on]["tables"]) for _, on, _ in parts]
    both: Judged = {
        name: {
            key: sum(n * of[name][key] for n, (_, of, _) in zip(counts, shown, strict=True)) / sum(counts)
            for key in values
        }
        for name, values in shown[0][1].items()
    }
    rows = []
    for title, of, by in [*shown, ("both, each by the other's", both, "")]:
        best = {key: min((n for n in of if n != OURS), key=lambda n: sign * of[n][key]) for key, sign in SIGNS.items()}
        row = [title, by]
        for key, digits in (("auroc", 1), ("rank", 2)):
            row.append(f"{of[OURS][key]:.{digits}f}; {best[key]}: {of[best[key]][key]:.{digits}f}")
        rows.append([*row, f"{of[OURS]['clean']:.1f}; {of[LOF]['clean']:.1f}"])
    header = ("judged on", "sizes chosen on", "mixed: AUROC; best peer", "rank; best peer", "clean: AUROC; LOF")
    return markdown(header, rows, "outlier-sizes.json")


@table
def outlier_sizes() -> str:
    """The default with other sizes of the neighbourhood."""
    groups = {"first half": ["first"], "second half": ["second"], "both": ["first", "second"], "third group": ["keel"]}
    rows = []
    for sizes in all_sizes():
        row = [sizes]
        for of in groups.values():
            ours = judged(sizes, *of)[OURS]
            row.append(f"{ours['auroc']:.1f} / {ours['rank']:.2f} / {ours['clean']:.1f}")
        rows.append(row)
    return markdown(("neighbours, to a share of the points", *groups), rows, "outlier-sizes.json")


@table
def outliers_refits() -> str:
    """Refits without the worst points, and transformed features."""
    rows = []
    for r in read("outliers-notes.json")["refits"]["rows"]:
        keys = ("first_mixed", "keel_mixed", "first_clean", "keel_clean")
        rows.append([r["what"], f"{r['rows']:,}", *(f"{r[key]:.1f}" if key in r else "" for key in keys)])
    header = ("AUROC", "rows at most", "first half, mixed", "third group, mixed", "first half, clean", "third, clean")
    return markdown(header, rows, "outliers-notes.json", key="refits")


@table
def outliers_mixtures() -> str:
    """Mixtures of scores, on the tables that are not reported on."""
    noted = read("outliers-notes.json")["mixtures"]["rows"]
    keys = ("choose_mixed", "keel_mixed", "choose_clean", "keel_clean")
    rows = [[r["what"], *(f"{r[key]:.1f}" for key in keys)] for r in noted]
    header = ("AUROC", "first half, mixed", "third group, mixed", "first half, clean", "third group, clean")
    return markdown(header, rows, "outliers-notes.json", key="mixtures")


@table
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
