"""Planted near-duplicates, outliers, typical images and tables: against scikit-learn, scipy and hand values."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gallery import ODD, photographed, photographs
from torch import Tensor

from curvssl.cli import main
from curvssl.config import UserError
from curvssl.data.images import TensorImages
from curvssl.evaluate import inspect as inspecting
from curvssl.evaluate.inspect import (
    correlation,
    duplicate_threshold,
    groups_of,
    inspect,
    near_duplicates,
    outlier_scores,
    shrunk,
    summary,
    typical,
    write_csv,
)
from curvssl.evaluate.search import Collection, exact, search
from curvssl.outliers import CurvatureOutlierDetector
from curvssl.rundir import Run


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the command writes."""
    out = tmp_path_factory.mktemp("inspected")
    main(["inspect", str(photographed().path), "--out", str(out)])
    return out


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---- near-duplicates


def test_the_planted_copies_are_found_and_nothing_else():
    result, _, _ = inspect(photographed())
    groups = [frozenset(one["name"] for one in group) for group in result["near_duplicates"]["groups"]]
    assert sorted(map(sorted, groups)) == sorted(map(sorted, photographs()[1]))
    assert photographed().read_json("inspect.json") == result


def test_the_threshold_does_not_depend_on_how_many_images_have_copies():
    """Points on a sphere, then each of them four times with a little noise: the points' own distance is what counts."""
    points = F.normalize(drawn(150, 12), dim=1)
    copies = torch.cat([points + 0.01 * drawn(150, 12, seed=i) for i in range(4)])
    thresholds = [duplicate_threshold(exact(h, h, k=20, others=True)[0]) for h in (points, copies)]
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1) + 9 * np.eye(150)
    expected = 1 - (np.median(distance.min(1)) / 2) ** 2 / 2
    assert thresholds[0] == pytest.approx(expected, abs=1e-3)
    assert thresholds[1] == pytest.approx(expected, abs=0.01)
    assert thresholds[1] < 1 - 10 * 0.01**2  # well beyond the noise


def test_groups_are_the_connected_components_of_scipy():
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    pairs = torch.randint(200, (120, 2), generator=torch.Generator().manual_seed(1))
    ones = (np.ones(120), tuple(pairs.T.numpy()))
    _, label = connected_components(coo_array(ones, shape=(200, 200)), directed=False)
    expected = [np.flatnonzero(label == i).tolist() for i in np.unique(label) if (label == i).sum() > 1]
    found = groups_of(pairs, n=200)
    assert sorted(found) == sorted(expected)
    assert [len(group) for group in found] == sorted(map(len, expected), reverse=True)


def test_a_long_chain_and_more_equal_images_than_neighbours_are_one_group_each():
    chain = torch.stack((torch.arange(499), torch.arange(1, 500)), dim=1)
    assert groups_of(chain[torch.randperm(499)], n=500) == [list(range(500))]
    h = torch.cat((torch.ones(60, 8), drawn(100, 8)))
    pixels = torch.cat((torch.full((60, 3, 8, 8), 7), torch.randint(256, (100, 3, 8, 8)))).byte()
    collection = Collection("x", h, (("row ", TensorImages.of(pixels)),), {})
    similarity, neighbors = exact(h, h, k=inspecting.NEIGHBORS, others=True)
    pairs = near_duplicates(collection, similarity, neighbors, threshold=0.999)
    assert groups_of(pairs, n=160) == [list(range(60))]


def test_near_features_are_not_enough_if_the_pixels_differ():
    h = torch.ones(4, 8)  # an encoder that gives the same features to all images
    pixels = torch.randint(256, (2, 3, 16, 16), generator=torch.Generator().manual_seed(0)).byte()
    images = TensorImages.of(pixels[[0, 1, 0, 1]])
    similarity, neighbors = exact(h, h, k=3, others=True)
    pairs = near_duplicates(Collection("x", h, (("row ", images),), {}), similarity, neighbors, threshold=0.999)
    assert pairs.tolist() == [[0, 2], [1, 3]]


def test_pixels_are_correlated_as_numpy_does_and_blank_pages_agree():
    a, b = torch.randint(256, (2, 5, 1, 16, 16), generator=torch.Generator().manual_seed(0)).byte()
    b[1:3] = a[1:3] // 2 + 60  # darker and with less contrast
    found = correlation(shrunk(a), shrunk(b))
    for i in range(5):
        expected = np.corrcoef(a[i].flatten(), b[i].flatten())[0, 1]
        assert found[i] == pytest.approx(expected, abs=0.01)
    assert (found[1:3] > 0.99).all()
    blank = torch.full((1, 1, 16, 16), 250, dtype=torch.uint8)
    assert correlation(shrunk(blank), shrunk(blank + 2)) == pytest.approx(1)
    assert correlation(shrunk(blank), shrunk(a[:1])) < 0.2


# ---- outliers and typical images


def test_the_outlier_score_is_the_detectors_default_and_the_far_image_comes_first(monkeypatch: pytest.MonkeyPatch):
    from sklearn.preprocessing import StandardScaler

    h = drawn(90, 6)
    h[17] *= 9
    h[:, 0] *= 100  # of one feature with a larger spread nothing depends
    x = StandardScaler().fit_transform(h.double().numpy())
    scores, fence = outlier_scores(h)
    detector = CurvatureOutlierDetector().fit(x)
    np.testing.assert_allclose(scores, -detector.scores_)
    assert np.median(scores) == pytest.approx(1, abs=0.05)
    assert ((scores > fence) == (detector.predict(x) == -1)).all()
    monkeypatch.setattr(inspecting, "REFERENCE", 30)  # then the far image is not one of those it is compared with
    sampled, _ = outlier_scores(h)
    np.testing.assert_allclose(sampled, -CurvatureOutlierDetector().fit(x[::3]).score_samples(x))
    assert scores.argmax() == sampled.argmax() == 17


def test_a_feature_that_is_dead_or_nearly_so_makes_no_outlier():
    h = drawn(60, 4)
    dead = torch.cat((h, torch.zeros(60, 1), 1e-6 * (torch.arange(60) == 5)[:, None]), dim=1)
    np.testing.assert_allclose(outlier_scores(dead)[0], outlier_scores(h)[0], rtol=1e-3)
    assert np.isfinite(outlier_scores(torch.ones(9, 4))[0]).all()


def test_typical_images_are_the_most_central_of_their_part_and_copies_do_not_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inspecting, "EXAMPLES", 3)
    sizes, centres = (50, 30, 10), 10 * torch.eye(3, 8)
    h = torch.cat([centre + 0.5 * drawn(n, 8, seed=n) for n, centre in zip(sizes, centres, strict=True)])
    found = typical(h, among=torch.arange(90))
    assert list(found.values()) == [50, 30, 10]
    for row, (start, n) in zip(found, ((0, 50), (50, 30), (80, 10)), strict=True):
        u = F.normalize(h[start : start + n], dim=1).double()
        assert row == start + int((u @ u.mean(0)).argmax())
    few = typical(torch.cat((h, h[80:81].expand(500, -1))), among=torch.arange(90))
    assert few == found
    assert typical(torch.ones(9, 4), among=torch.arange(9)) == {0: 9}


def test_fewer_than_three_images_cannot_be_compared(tmp_path: Path):
    np.save(tmp_path / "two.npy", np.zeros((2, 16, 16, 3), np.uint8))
    with pytest.raises(UserError, match="has 2 readable images: inspect needs 3"):
        inspect(photographed(), where=tmp_path / "two.npy")


# ---- the command


def test_the_tables_hold_every_image_in_one_encoding_and_no_formula(table: Path):
    names = [row["file"] for row in read(table / "outliers.csv")]
    assert len(names) == 78
    assert {"./=1+2.png", "new\nline.png", "caf\\udce9.png", "日本.png", "it's <b>bold.png"} < set(names)
    scores = [float(row["score"]) for row in read(table / "outliers.csv")]
    assert scores == sorted(scores, reverse=True)
    assert len(read(table / "near-duplicates.csv")) == 16
    assert [row["group"] for row in read(table / "near-duplicates.csv")[:3]] == ["1", "1", "2"]
    assert sum(int(row["stands for"]) for row in read(table / "typical.csv")) == 78 - 8
    (bad,) = read(table / "unreadable.csv")
    assert bad["file"] == "broken.jpg"
    assert "truncated" in bad["error"].lower()


def test_json_and_console_say_what_the_run_keeps(table: Path):
    result = json.loads((table / "inspect.json").read_bytes())
    assert result == photographed().read_json("inspect.json")
    said = summary(result)
    assert "78 images of folder:" in said
    assert "near-duplicates: 8 groups with 16 images\n" in said
    assert "  new\\nline.png\n" in summary(
        result
        | {"typical": [], "outliers": {"beyond": 1, "fence": 1.0, "ranked": [{"name": "new\nline.png", "score": 2.0}]}}
    )
    assert "unreadable: 1 file\n  broken.jpg: " in said


def test_another_folder_is_not_taken_for_the_runs_own(table: Path, tmp_path: Path):
    before = photographed().read_json("inspect.json")
    root, _ = photographs()
    main(["inspect", str(photographed().path), "--in", str(root / "copies"), "--out", str(tmp_path)])
    assert json.loads((tmp_path / "inspect.json").read_bytes())["images"] == 8
    assert photographed().read_json("inspect.json") == before


def test_two_folders_of_one_name_have_tables_each(tmp_path: Path):
    root, _ = photographs()
    run = Path(shutil.copytree(photographed().path, tmp_path / "run"))
    here = shutil.copytree(root / "copies", tmp_path / "copies")
    for where in (root / "copies", here, here):
        main(["inspect", str(run), "--in", str(where)])
    for name, where in (("inspect-copies", root / "copies"), ("inspect-copies-2", here)):
        assert json.loads((run / name / "inspect.json").read_bytes())["collection"] == str(where)
    assert not (run / "inspect-copies-3").exists()


def test_all_unreadable_files_are_named_however_many_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In another folder, and in the run's own, of which files were damaged after training."""
    root, _ = photographs()
    own = shutil.copytree(root / "copies", tmp_path / "own")
    for file in sorted(own.iterdir())[:4]:
        file.write_bytes(b"no image")
    main(["inspect", str(photographed().path), "--in", str(own), "--out", str(tmp_path / "in")])
    bad = [row["file"] for row in read(tmp_path / "in" / "unreadable.csv")]
    assert bad == ["cropped 3.jpg", "cropped 7.jpg", "encoded 1.jpg", "encoded 5.jpg"]
    run = Run.read(shutil.copytree(photographed().path, tmp_path / "run"))
    config = json.loads((run.path / "config.json").read_text()) | {"dataset": f"folder:{own}"}
    (run.path / "config.json").write_text(json.dumps(config))
    main(["verify", str(run.path), "--accept"])
    result, collection, _ = inspect(Run.read(run.path))
    assert ([one["name"] for one in result["unreadable"]], len(collection)) == (bad, 4)
    assert "has changed since" in capsys.readouterr().err
    main(["search", str(run.path), str(own / "exact 0.jpg"), "--k", "1"])
    said = capsys.readouterr()
    assert "among 4 images" in said.out
    assert f"4 images could not be read and took no part: curvssl inspect {run.path} names them" in said.err
    for file in own.iterdir():
        file.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"no image of .* can be read .cropped 3.jpg: .*: give another folder as --in"):
        search(Run.read(run.path), [root / "8.png"])


def test_names_survive_a_csv_file(tmp_path: Path):
    names = [*ODD, "-rf.png", "@here.png", "a,b;c.png"]
    write_csv(tmp_path / "names.csv", ("file",), [(name,) for name in names])
    for name, row in zip(names, read(tmp_path / "names.csv"), strict=True):
        written = row["file"].encode().decode("unicode_escape") if "\\udc" in row["file"] else row["file"]
        assert os.path.normpath(written) == name


def test_the_sheet_shows_odd_names_as_they_are_and_runs_nothing(table: Path, browser):
    page = browser.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((table / "sheet.html").as_uri())
    shown = page.evaluate("[...document.querySelectorAll('span')].map((one) => one.textContent)")
    sizes = page.evaluate("Promise.all([...document.images].map((one) => one.decode().then(() => one.naturalWidth)))")
    page.close()
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [(table / "sheet.html").as_uri()]
    assert {"<script>alert(1)<.png", 'say "hi" & go.png', "new\\nline.png", "caf\\udce9.png"} <= set(shown)
    assert set(sizes) == {160}
