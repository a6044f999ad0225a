"""The reproduction: studies, no cell runs twice, tables come from the JSON alone."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generators import curvature
from scipy import stats
from sklearn.neighbors import NearestNeighbors

from curvssl.cli import main
from curvssl.config import PretrainConfig, demo, paper_cifar10, paper_mnist
from curvssl.data.order import hold_out
from curvssl.files import lock
from curvssl.manifest import seal
from curvssl.paper import reproduce, studies
from curvssl.rundir import Run


def tiny() -> studies.Study:
    small = {"epochs": 1, "warmup_epochs": 0, "image_size": 8, "batch_size": 256, "monitor_every": 0, "holdout": 0.0}
    preset = dataclasses.replace(demo(), **small)
    return studies.cells(preset, methods=("barlow-twins", "curvssl"), seeds=(0,))


def write_cell(results: Path, cell: str, config: PretrainConfig, accuracy: float, criterion: Any = None) -> None:
    probes = {name: {"mean": accuracy} for name in ("linear", "mlp", "knn")}
    curves = [{"epoch": 1, "rho": 0.1, "effective_rank": 9.0}, {"epoch": 2, "rho": 0.25, "effective_rank": 12.0}]
    found = {"config": config.to_dict(), "criterion": criterion, "probes": probes, "curves": curves}
    found["seconds_with_probes"] = 60.0
    path = results / f"{cell}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(seal(found)))


def test_the_faithful_study_is_the_papers_eight_cells_with_three_seeds_each():
    study = studies.faithful()
    assert len(study) == 4 * 2 * 3
    assert {(c.dataset, c.method) for c in study.values()} == set(reproduce.PAPER)
    presets = {"mnist": paper_mnist(), "cifar10": paper_cifar10()}
    for config in study.values():
        assert dataclasses.replace(presets[config.dataset], method=config.method, seed=config.seed) == config


def test_the_literal_study_departs_from_the_faithful_one_by_what_the_paper_does_not_state_alone():
    for ours, words in zip(studies.faithful().values(), studies.literal().values(), strict=True):
        assert (words.warmup_epochs, words.schedule) == (0, "constant")
        unstated = ("warmup_epochs", "schedule", "projector_width", "projector_norm", "gamma", "augment")
        assert dataclasses.replace(words, **{name: getattr(ours, name) for name in unstated}) == ours


def test_the_alpha_study_varies_the_weight_and_nothing_else():
    weights = {}
    for config in studies.alpha().values():
        same = dataclasses.replace(config, method="curvssl", seed=0, alpha_curv=1.0)
        assert same == dataclasses.replace(paper_cifar10(), epochs=100, warmup_epochs=50, method="curvssl")
        weights.setdefault(config.method, set()).add(config.alpha_curv)
    assert weights["curvssl"] == weights["kernel-curvssl"] == {1, 10, 100}


def test_curves_have_a_colour_for_each_row_and_where_these_are_too_many_for_each_method():
    for name, labels in (("alpha", 7), ("recipe", 3)):
        cells = {cell: c.to_dict() for cell, (c, *_) in studies.study_of(name).items() if c.dataset == "cifar10"}
        drawn = reproduce.looks(cells)
        assert (
            len({look["label"] for look in drawn.values()}) == len({look["color"] for look in drawn.values()}) == labels
        )
    variants = [drawn[f"cifar10-vicreg-{kind}"] for kind in ("cosine", "cosine-wide")]
    alone = reproduce.looks({"mnist-vicreg-seed2": {"dataset": "mnist", "method": "vicreg"}})
    assert variants == [alone["mnist-vicreg-seed2"]] * 2


def test_of_two_processes_each_takes_what_the_other_has_not_and_cells_say_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(studies.STUDIES, "tiny", tiny)
    where = {"results": tmp_path / "results", "runs": tmp_path / "runs"}
    with lock(tmp_path / "runs/tiny/digits-barlow-twins-seed0/cell"):  # as if another process were running it
        assert reproduce.run_study("tiny", **where) == ["digits-curvssl-seed0"]
    assert reproduce.run_study("tiny", only="curvssl", **where) == []  # no cell is run twice
    assert "1 of 2 cells" in reproduce.status("tiny", results=where["results"])
    assert "missing: digits-barlow-twins-seed0" in reproduce.status("tiny", results=where["results"])
    assert "1 of 1 cells" in (curv := reproduce.status("tiny", results=where["results"], only="curv"))
    assert "missing" not in curv
    assert reproduce.run_study("tiny", only="barlow", **where) == ["digits-barlow-twins-seed0"]
    assert reproduce.run_study("tiny", **where) == []

    found = json.loads((tmp_path / "results/tiny/digits-barlow-twins-seed0.json").read_text())
    assert PretrainConfig.from_dict(found["config"]) == tiny()["digits-barlow-twins-seed0"]
    assert set(found["probes"]) == {"linear", "mlp", "knn", "retrieval"}
    assert {"commit", "versions", "device", "data_sha256", "seconds"} <= set(found["provenance"])
    assert found["provenance"]["command"] == "curvssl reproduce --study tiny --only digits-barlow-twins-seed0"
    assert found["curves"][-1]["epoch"] == 1


def test_settings_are_chosen_on_training_images_that_were_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The test images are not available."""
    chosen = {"digits-vicreg-held": dataclasses.replace(next(iter(tiny().values())), holdout=0.2)}
    monkeypatch.setitem(studies.STUDIES, "choice", lambda: chosen)
    reproduce.run_study("choice", results=tmp_path / "results", runs=tmp_path / "runs")
    found = json.loads((tmp_path / "results/choice/digits-vicreg-held.json").read_text())
    assert found["judged_on"] == "held-out training images"
    held = int(0.2 * 1437)
    right = found["probes"]["knn"]["mean"] / 100 * held
    assert right == pytest.approx(round(right), abs=1e-6)  # a whole number of held-out images
    assert not (tmp_path / "runs/choice/digits-vicreg-held/features-test.npz").exists()

    measures = found["measures"]  # of the same images, so of as many
    assert measures["images"] == held
    run = Run.read(tmp_path / "runs/choice/digits-vicreg-held")
    _, rows, _ = hold_out(1437, share=0.2, seed=0)
    h = np.load(run.path / "features-train.npz")["h"][rows.sort().values].astype(np.float64)
    sigma = np.linalg.svd(h, compute_uv=False)
    assert measures["stable_rank"] == pytest.approx((sigma**2).sum() / sigma[0] ** 2, rel=1e-5)
    edges = h[NearestNeighbors(n_neighbors=11).fit(h).kneighbors(h)[1][:, 1:]] - h[:, None]
    edges /= np.linalg.norm(edges, axis=2, keepdims=True)
    cosines = np.einsum("iad,ibd->iab", edges, edges)
    assert measures["curvature"] == pytest.approx((cosines.sum((1, 2)) - 10).mean() / 2, rel=1e-4)


def test_the_table_has_the_papers_number_the_spread_over_seeds_and_the_paired_difference(tmp_path: Path):
    accuracies = {"barlow-twins": (70.0, 72.0, 71.0), "curvssl": (71.0, 72.5, 72.0)}
    for name, config in studies.faithful().items():
        if config.dataset == "cifar10" and config.method in accuracies:
            write_cell(tmp_path / "faithful", name, config, accuracies[config.method][config.seed])
    header, rows = reproduce.study_rows("faithful", results=tmp_path)
    ours = dict(zip(header, rows[1], strict=True))
    assert ours[""] == "cifar10, CurvSSL"
    assert ours["paper"] == "75.1"
    assert ours["mlp (the paper's)"] == "71.8 ± 0.8"
    low, high = stats.t.interval(0.95, 2, loc=2.5 / 3, scale=stats.sem((1.0, 0.5, 1.0)))
    assert ours["over Barlow Twins"] == f"+0.8 ({low:+.1f} … {high:+.1f})"


@pytest.mark.parametrize("freedom", reproduce.STUDENT)
def test_students_t_is_scipys(freedom: int):
    assert reproduce.STUDENT[freedom] == pytest.approx(stats.t.ppf(0.975, freedom), abs=5e-4)


def test_the_command_prints_status_and_table_without_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["reproduce", "--status", "--results", str(tmp_path)])
    assert "faithful: 0 of 24 cells" in capsys.readouterr().out
    main(["reproduce", "--table", "--study", "alpha", "--results", str(tmp_path)])
    assert "no results yet" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["reproduce", "--study", "fatihful", "--status"])
    assert stopped.value.code == 2
    assert "did you mean 'faithful'" in capsys.readouterr().err


def test_the_recipe_study_departs_by_what_the_paper_leaves_open_and_never_sees_the_test_images():
    stated = ("batch_size", "k", "d_z", "optimizer", "lr", "weight_decay", "stem", "encoder")
    stated += ("lambda_emb", "lambda_curv", "alpha_curv", "projector_depth")
    for config in studies.recipe().values():
        assert config.holdout > 0
        paper = {"cifar10": paper_cifar10(), "mnist": paper_mnist()}[config.dataset]
        assert [getattr(config, name) for name in stated] == [getattr(paper, name) for name in stated]


def test_every_arm_of_curvature_differs_from_its_baseline_by_the_term_and_by_the_epochs_that_pay_for_it():
    stages = {name: studies.study_of(name) for name in ("curvature", "curvature-arms", "curvature-fast")}
    cells = {name: cell for stage in stages.values() for name, cell in stage.items()}
    assert len(cells) == sum(map(len, stages.values()))  # so a name says which cell is meant
    term = {"method", "alpha_curv", "k", "gamma", "alpha_chord", "alpha_path"}
    ratios = set()
    for name, (config, arm, baseline) in cells.items():
        assert config.holdout > 0
        if not baseline:
            continue
        base = cells[f"{baseline}-seed{config.seed}"]
        assert not base.baseline
        ratio = base.config.epochs / config.epochs
        ratios.add(round(ratio, 1))
        assert ratio >= 1
        assert config.warmup_epochs / config.epochs == pytest.approx(
            base.config.warmup_epochs / base.config.epochs, abs=0.02
        )
        ours, theirs = config.to_dict(), base.config.to_dict()
        assert {key for key in ours if ours[key] != theirs[key]} <= term | {"epochs", "warmup_epochs"}
        assert arm is None or arm.loss == (base.arm.loss if base.arm else base.config.method)
        assert arm is not None or config.method != "own", name
    assert ratios == {1.0, 1.1, 1.2, 1.3, 1.4}
    for stage in stages.values():  # the first seed of all arms comes first
        seeds = [cell.config.seed for cell in stage.values()]
        assert seeds == sorted(seeds)


def test_arms_that_were_a_point_below_their_baseline_with_the_first_seed_get_no_other():
    results = Path(__file__).parents[2] / "results"
    cells = {name: cell for stage in curvature.CURVATURE for name, cell in studies.study_of(stage).items()}
    found = {
        name: value["probes"]["linear"]["mean"]
        for stage in curvature.CURVATURE
        for name, value in reproduce.read_results(stage, results=results).items()
    }
    below = {
        name.removesuffix("-seed0")
        for name in found
        if name.endswith("-seed0") and cells[name].baseline and found[name] < found[f"{cells[name].baseline}-seed0"] - 1
    }
    assert below == {f"cifar10-{name}" for name in studies.GIVEN_UP}
    more = {name.removesuffix("-seed1") for name in cells if name.endswith("-seed1")}
    assert not below & more
    assert {cells[f"{name}-seed0"].baseline for name in more} - {""} <= more  # each arm has its baseline
    assert "cifar10-barlow-twins-d16" not in more  # which would be the baseline of nothing


def test_an_arm_goes_on_if_it_gains_half_a_point_in_three_seeds_and_is_given_up_if_its_first_is_a_point_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    base, gains = (70.0, 72.0, 71.0), {"alpha3": (0.5, 0.6, 0.7), "alpha10": (0.9, 0.1, 0.4), "alpha30": (-1.5,)}
    twins, late = studies.curvature(), studies.curvature_arms()
    for seed, accuracy in enumerate(base):
        name = f"cifar10-barlow-twins-seed{seed}"
        write_cell(tmp_path / "curvature", name, twins[name].config, accuracy)
        for weight, gain in gains.items():
            name = f"cifar10-late{'-kernel' * (weight == 'alpha30')}-{weight}-seed{seed}"
            if seed < len(gain):
                criterion = reproduce.criterion_of(late[name])
                write_cell(tmp_path / "curvature-arms", name, late[name].config, accuracy + gain[seed], criterion)
    monkeypatch.setattr(curvature, "HERE", tmp_path)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in curvature.curvature_arms().splitlines()[2:5]]
    half = stats.t.ppf(0.975, 2) * stats.sem((0.5, 0.6, 0.7))
    assert rows[0] == [
        "late-alpha3",
        "100",
        "3",
        "71.6",
        "71.6",
        f"+0.6 ({0.6 - half:+.1f} … {0.6 + half:+.1f})",
        "yes",
    ]
    assert [row[-1] for row in rows] == ["yes", "no", "given up"]
    assert rows[2][2:6] == ["1", "68.5", "68.5", "-1.5"]
    assert "No cell of this study has been run yet" in curvature.curvature_fast()


def test_the_ratios_of_steps_are_those_that_were_measured():
    results = Path(__file__).parents[2] / "results"

    def rows(file: str, part: str) -> list[dict[str, Any]]:
        return json.loads((results / file).read_text())[part]

    blends = {
        "chord": ("gpu-views.json", "imagenet", "two and a blend", "two views"),
        "fast, chord": ("gpu-views.json", "small", "two and a blend", "two views"),
        "fast, local views, chord": ("gpu-views-595dc09.json", "small", "two, four and a blend", "two and four"),
    }
    measured = {}
    for name, (file, stem, with_blend, without) in blends.items():
        ms = {row["name"]: row["ms"] for row in rows(file, "views") if row["stem"] == stem}
        measured[name] = ms[with_blend] / ms[without]
    baselines: dict[int, float] = {}
    for row in rows("gpu-arms.json", "arms"):
        measured[row["name"]] = row["ms"] / baselines.setdefault(row["case"], row["ms"])
    for name, ratio in studies.RATIOS.items():
        assert ratio == pytest.approx(measured[name], abs=2e-3), name


def test_the_precision_study_is_one_recipe_in_two_arithmetics():
    study = studies.precision()
    same = {dataclasses.replace(c, precision="auto", step="auto", seed=0) for c in study.values()}
    assert same == {dataclasses.replace(studies.bare(paper_mnist()), epochs=20, warmup_epochs=4)}
    assert sorted((c.precision, c.step, c.seed) for c in study.values()) == [
        (precision, step, seed) for precision, step in (("bf16", "captured"), ("fp32", "eager")) for seed in range(3)
    ]


def test_maps_and_figures_are_made_once_from_what_lies_in_runs_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(studies.STUDIES, "faithful", tiny)
    where = {"results": tmp_path / "results", "runs": tmp_path / "runs"}
    assert "missing: digits-barlow-twins-seed0" in reproduce.status("faithful", results=where["results"])
    reproduce.run_study("faithful", only="curvssl", **where)
    assert "map of digits-barlow-twins-seed0" in reproduce.status("faithful", results=where["results"])
    record = json.loads((tmp_path / "results/faithful/maps/digits-curvssl-seed0.json").read_text())
    assert len(record["x"]) == len(record["labels"]) == 360
    assert record["quality"].keys() == {"trustworthiness", "silhouette"}
    assert record["provenance"]["commit"]

    first = reproduce.draw_figures("faithful", results=where["results"])
    assert [file.name for file in first] == ["curves-faithful-digits.png", "umap-faithful-digits.png"]
    bytes_drawn = [file.read_bytes() for file in first]
    for folder in ("runs", "results/figures"):  # neither is needed to draw the figures again
        shutil.rmtree(tmp_path / folder)
    again = reproduce.draw_figures("faithful", results=where["results"])
    assert [file.read_bytes() for file in again] == bytes_drawn
    assert all(file.with_suffix(".pdf").exists() for file in again)

    # The map of an earlier result is not shown for a new one.
    file = tmp_path / "results/faithful/digits-curvssl-seed0.json"
    file.write_text(json.dumps(seal(json.loads(file.read_text()) | {"seconds_with_probes": 1.0})))
    assert "map of digits-curvssl-seed0" in reproduce.status("faithful", results=where["results"])
    drawn = reproduce.draw_figures("faithful", results=where["results"])
    assert [file.name for file in drawn] == ["curves-faithful-digits.png"]
