"""Evaluation of run directories: features, probes, comparisons, maps."""

import dataclasses
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pipeline import TINY, one_thread, weights

import curvssl
from curvssl.cli import main
from curvssl.config import UserError
from curvssl.data import named as data
from curvssl.data.views import Augment
from curvssl.evaluate import runs as evaluate
from curvssl.evaluate.features import extract_views
from curvssl.evaluate.probes import PROBES, RETRIEVAL
from curvssl.evaluate.quality import MEASURES
from curvssl.rundir import Run
from curvssl.train.loop import pretrain
from curvssl.verify import verify

ONCE = dataclasses.replace(TINY, method="vicreg", epochs=1, warmup_epochs=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    """Two probed runs that differ only in their seed."""
    with one_thread():
        yield probed_runs(tmp_path_factory.mktemp("runs"))


def probed_runs(where: Path) -> list[Run]:
    made = [pretrain(dataclasses.replace(ONCE, seed=s), out=where / f"seed{s}", progress=False) for s in (0, 1)]
    # The second has another setting that does not change the result.
    config = dataclasses.replace(made[1].config, checkpoint_seconds=7.0)
    made[1].keep_json("config.json", config.to_dict(), by="")
    verify(made[1].path, accept=True)
    runs = [Run.read(run.path) for run in made]
    (where / "weights").write_bytes(b"".join(weights(runs[0].path)))
    evaluate.probe(runs[0], seeds=(0, 1))
    evaluate.probe(runs[1], seeds=(0, 1), floors=False)
    return runs


def test_a_probe_leaves_weights_and_buffers_as_they_were(runs: list[Run]):
    assert b"".join(weights(runs[0].path)) == (runs[0].path.parent / "weights").read_bytes()


def test_features_are_what_the_frozen_encoder_gives(runs: list[Run]):
    digits = data.load("digits")
    pixels = digits.test.images.pixels.float() / 255  # already 8×8: no resize
    x = ((pixels - digits.mean[0]) / digits.std[0]).repeat(1, 3, 1, 1)
    with torch.no_grad():
        h = curvssl.load_encoder(runs[0].path)(x)
        z = runs[0].load_net().projector(h)
    with np.load(runs[0].path / "features-test.npz") as file:
        assert np.allclose(file["h"], h, atol=1e-5)
        assert np.allclose(file["z"], z, atol=1e-5)
        assert np.array_equal(file["y"], digits.test.labels)


def test_the_results_hold_every_probe_seed_by_seed_beside_its_floors(runs: list[Run]):
    found = runs[0].read_json("probes.json")
    assert found.keys() == {*PROBES, "retrieval", "raw pixels", "random encoder"}
    for probes in (found, found["raw pixels"], found["random encoder"]):
        for name in PROBES:
            accuracy = probes[name]["accuracy"]
            assert probes[name]["mean"] == pytest.approx(statistics.mean(accuracy))
            assert all(50 < value <= 100 for value in accuracy)
            assert probes[name]["settings"]
        assert all(20 < probes["retrieval"][figure] <= 100 for figure in RETRIEVAL)
    assert len(found["linear"]["accuracy"]) == 2
    assert runs[1].read_json("probes.json").keys() == {*PROBES, "retrieval"}


def test_the_predictions_kept_are_those_that_the_accuracy_counts(runs: list[Run]):
    found, labels = runs[0].read_json("probes.json"), data.load("digits").test.labels
    assert labels is not None
    with np.load(runs[0].path / "predictions-test.npz") as file:
        for name in PROBES:
            predicted = file[f"{name}_predictions"].reshape(-1, len(labels))
            accuracy = 100 * (predicted == labels.numpy()).mean(1)
            assert accuracy[0] == pytest.approx(found[name]["accuracy"][0], abs=1e-3)


def test_the_random_encoder_is_the_runs_own_before_training(runs: list[Run]):
    from curvssl.evaluate.features import extract
    from curvssl.evaluate.probes import knn

    digits = data.load("digits")
    encoder = runs[0].make_net(channels=3).encoder
    settings = {"size": 8, "mean": digits.mean, "std": digits.std}
    train, test = (extract(encoder, part.images, **settings).h for part in (digits.train, digits.test))
    expected = knn(train, digits.train.labels, test, digits.test.labels, classes=10).accuracy
    assert runs[0].read_json("probes.json")["random encoder"]["knn"]["accuracy"] == pytest.approx(expected)


def test_runs_that_differ_in_their_seed_alone_are_one_row_with_mean_and_deviation(
    runs: list[Run], capsys: pytest.CaptureFixture[str]
):
    probed = [run.read_json("probes.json") for run in runs]
    means = [[probes[name]["mean"] for probes in probed] for name in PROBES]
    means += [[probes["retrieval"][name] for probes in probed] for name in RETRIEVAL]
    cells = [f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}" for values in means]
    assert evaluate.compare(runs) == [["digits", "VICReg", "2", *cells]]
    main(["compare", *(str(run.path) for run in runs)])
    header, rule, row = capsys.readouterr().out.rstrip("\n").split("\n")
    assert header.split() == ["data", "method", "seeds", *PROBES, *RETRIEVAL]
    assert set(rule) == {"─"}
    assert row.split() == ["digits", "VICReg", "2", *" ".join(cells).split()]


def test_a_run_and_its_copy_are_one_seed(runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    again, copy = runs[0].path / ".." / runs[0].path.name, shutil.copytree(runs[0].path, tmp_path / "copy")
    main(["compare", str(runs[0].path), str(again), str(copy)])
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].split()[:3] == ["digits", "VICReg", "1"]
    assert "±" not in said.out
    assert said.err.count(f"has the settings and the seed of {runs[0].path}, and does not count again") == 2


def test_other_settings_are_another_row(runs: list[Run], tmp_path: Path):
    longer = Run.create(tmp_path, dataclasses.replace(ONCE, epochs=3))
    longer.keep_json("probes.json", runs[0].read_json("probes.json"), by="")
    assert [row[2] for row in evaluate.compare([*runs, longer])] == ["2", "1"]


def test_a_run_without_results_is_named(runs: list[Run], tmp_path: Path):
    with pytest.raises(UserError, match=f"not probed yet: {tmp_path}; run curvssl probe"):
        evaluate.compare([runs[0], Run.create(tmp_path, dataclasses.replace(ONCE, seed=7))])


def test_embed_gives_an_arrays_features(runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    np.save(tmp_path / "images.npy", data.load("digits").test.images.pixels[:, 0].numpy())
    main(["embed", str(runs[0].path), str(tmp_path / "images.npy"), "--out", str(tmp_path / "f.npz")])
    assert "h (360, 128), z (360, 64)" in capsys.readouterr().out
    with np.load(tmp_path / "f.npz") as found, np.load(runs[0].path / "features-test.npz") as expected:
        assert np.allclose(found["h"], expected["h"], atol=1e-5)
        assert np.allclose(found["z"], expected["z"], atol=1e-5)


def test_a_map_of_z_is_drawn_as_png_and_pdf_with_its_points(runs: list[Run], capsys: pytest.CaptureFixture[str]):
    main(["map", str(runs[0].path), "--of", "z"])
    png = runs[0].path / "map-z-test.png"
    assert capsys.readouterr().out.strip() == str(png)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    with np.load(png.with_suffix(".npz")) as file:
        assert file["xy"].shape == (360, 2)


def test_a_table_aligns_names_left_and_numbers_right():
    text = evaluate.table(("", "linear"), [["a", "9.0"], ["longer", "10.5 ± 0.1"]])
    assert text.split("\n") == [
        "            linear",
        "──────────────────",
        "a              9.0",
        "longer  10.5 ± 0.1",
    ]


def test_a_spread_over_one_value_is_the_value():
    assert evaluate.spread([93.25]) == "93.2"
    assert evaluate.spread([90.0, 92.0, 94.0]) == "92.0 ± 2.0"


def test_a_run_that_was_probed_before_there_was_a_probe_is_compared_by_the_others(runs: list[Run], tmp_path: Path):
    probed = runs[0]
    known = probed.read_json("probes.json")
    for seed, (name, kept) in enumerate((("old", {"linear": known["linear"]}), ("new", known))):
        config = dataclasses.replace(probed.config, seed=seed)
        Run.create(tmp_path / name, config).keep_json("probes.json", kept, by="")
    (row,) = evaluate.compare([Run.read(tmp_path / "old")])
    assert row[3:] == [f"{known['linear']['mean']:.1f}", *6 * ["–"]]
    (row,) = evaluate.compare(Run.read(tmp_path / name) for name in ("old", "new"))
    assert row[4] == f"{known['mlp']['mean']:.1f}"


def test_quality_measures_the_trained_and_the_untrained_encoder_and_says_what_it_thinks(
    runs: list[Run], capsys: pytest.CaptureFixture[str]
):
    main(["quality", *(str(run.path) for run in runs)])
    said = capsys.readouterr().out
    digits = data.load("digits")
    for run in runs:
        stored = run.read_json("quality.json")
        assert (stored["images"], stored["dimensions"], stored["images_and_views"]) == (1437, 128, [1000, 10])
        h = evaluate.features_of(run, digits, "train").h
        s = np.linalg.svd(h.double().numpy(), compute_uv=False)
        p = s / s.sum() + 1e-7
        assert stored["measures"]["rankme"] == pytest.approx(np.exp(-(p * np.log(p)).sum()))
        assert stored["measures"].keys() == stored["untrained"].keys() == MEASURES.keys()
        assert f"{run.path}: {stored['verdict']}" in said
    assert all(measure.title in said and measure.reading in said for measure in MEASURES.values())
    assert "compare only runs that share these" in said


def test_the_views_of_lidar_are_augmented_images_through_the_encoder(runs: list[Run]):
    digits, net = data.load("digits"), runs[0].load_net()
    augment = Augment(size=8, mean=digits.mean, std=digits.std, **vars(runs[0].config.augment))
    made = extract_views(net.encoder, digits.train.images[torch.arange(70)], augment, views=3)
    assert made.shape == (70, 3, 128)
    u = torch.rand(3 * 70, augment.draws, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        h = net.encoder(augment(digits.train.images.pixels[5].expand(3, -1, -1, -1), u[15:18]))
    assert torch.allclose(made[5], h, atol=1e-5)
