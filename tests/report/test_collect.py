"""What the page is made from: run directories, and their numbers as the page stores them."""

import base64
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from report_page import Opened, pictured, run, single

from curvssl.config import UserError
from curvssl.report.page import RunData, groups, packed, payload


def test_packed_numbers_come_back_within_half_a_step() -> None:
    values = np.random.default_rng(0).normal(size=1000) * 40
    made = packed(values)
    steps = np.frombuffer(base64.b64decode(made["data"]), "<u2")
    back = made["low"] + steps * (made["high"] - made["low"]) / 65535
    assert np.abs(back - values).max() <= 0.5 * np.ptp(values) / 65535 * 1.0001
    constant = packed(np.full(5, 3.0))
    assert (constant["low"] <= 3.0 <= constant["high"]) is True


def test_features_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="diverged"):
        packed(np.array([1.0, np.nan]))


def test_no_run_is_refused() -> None:
    with pytest.raises(UserError, match="at least one run"):
        payload([])


def test_runs_are_grouped_by_everything_but_their_seed() -> None:
    runs = [run("curvssl", None), run("curvssl", None, seed=1), run("vicreg", None)]
    changed = dataclasses.replace(runs[0], name="k-20", config=runs[0].config | {"k": 20})
    assert groups(runs) == [{"name": "CurvSSL", "runs": [0, 1]}, {"name": "VICReg", "runs": [2]}]
    assert [group["name"] for group in groups([*runs, changed])] == ["digits-curvssl-seed0", "VICReg", "k-20"]


def test_methods_that_see_the_same_share_a_table_and_seeds_show_their_first() -> None:
    def seeing(shade: int, method: str, **settings: Any) -> RunData:
        seen = {name: np.full((2, 3, 100, 50), shade, np.uint8) for name in ("image", "global 1", "global 2")}
        return dataclasses.replace(run(method, None, **settings), seen=seen)

    runs = [seeing(10, "curvssl"), seeing(20, "curvssl", seed=1), seeing(10, "vicreg"), seeing(30, "barlow-twins")]
    made = payload([*runs, run("kernel-curvssl", None)])["seen"]
    assert [table["groups"] for table in made] == [["CurvSSL", "VICReg"], ["Barlow Twins"]]
    assert [column["size"] for column in made[0]["columns"]] == ["50×100"] * 3
    with Image.open(io.BytesIO(base64.b64decode(made[1]["columns"][1]["images"][1].split(",")[1]))) as image:
        assert image.size == (32, 64)
        assert image.getpixel((16, 32)) == (30, 30, 30)


def test_edges_agree_with_the_double_loop() -> None:
    import torch

    from curvssl.geometry import nearest_neighbors
    from curvssl.report.collect import edges_of

    h = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    near = nearest_neighbors(h, k=6)
    lengths, cosines = edges_of(h, near)
    for i in (0, 17, 49):
        edges = [h[j] - h[i] for j in near[i]]
        assert lengths[i].tolist() == pytest.approx([float(e.norm()) for e in edges])
        pairs = [
            float(edges[a] @ edges[b] / edges[a].norm() / edges[b].norm()) for a in range(6) for b in range(a + 1, 6)
        ]
        assert cosines[i].tolist() == pytest.approx(pairs)


def test_pictures_are_png_and_pdf(grid: RunData, tmp_path: Path) -> None:
    from curvssl.report.collect import pictures

    made = pictures(grid, tmp_path)
    names = ["map-by-class", "map-by-curvature", "curvature-of-views", "curves"]
    assert [path.name for path in made] == [f"{name}.{kind}" for name in names for kind in ("png", "pdf")]
    for path in made:
        if path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF")
        else:
            with Image.open(path) as image:
                assert image.size[0] >= 1000


def test_a_run_directory_becomes_a_page(browser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything from training to the page, except UMAP, which takes longer than all the rest."""
    import torch

    from curvssl.config import demo
    from curvssl.data.named import load
    from curvssl.data.order import permutation
    from curvssl.data.views import Augment
    from curvssl.evaluate import maps
    from curvssl.evaluate.runs import probe
    from curvssl.geometry import kernel_curvature
    from curvssl.report.collect import collect, report
    from curvssl.report.seen import first_step
    from curvssl.train.loop import pretrain

    views: Any = {"local_views": 3, "local_size": 8, "alpha_chord": 1.0, "holdout": 0.5}
    config = dataclasses.replace(demo(), method="kernel-curvssl", epochs=1, warmup_epochs=0, **views)
    made = pretrain(config, out=tmp_path / "run", progress=False)
    probe(made, seeds=(0,), floors=False)
    maps.save(torch.rand(360, 2, generator=torch.Generator().manual_seed(0)), made, "map-h-test.npz")
    page = report([made.path, made.path / ".." / "run"], tmp_path / "report.html")
    assert "1 were given twice, and are shown once" in capsys.readouterr().err
    kept = {path: path.stat().st_mtime_ns for path in made.path.iterdir()}
    found = collect(made)
    assert {path: path.stat().st_mtime_ns for path in made.path.iterdir()} == kept  # nothing is computed twice

    data = load("digits")
    assert found.points is not None
    # ρ is that of the training chart: the curvature of the run's own loss, among the images of a random batch.
    config, net, generator = made.config, made.load_net(), torch.Generator().manual_seed(0)
    augment = Augment(size=config.image_size, mean=data.mean, std=data.std, **vars(config.augment))
    order, size = permutation(360, seed=0, number=0), config.batch_size
    assert 360 % size
    expected = np.zeros((2, 360))
    for start in range(0, 360, size):
        rows = order[start : start + size] if start + size <= 360 else order[-size:]
        u = torch.rand(2, size, augment.draws, generator=generator)
        for view in range(2):
            with torch.inference_mode():
                z = net.projector(net.encoder(augment(data.test.images.pixels[rows], u[view])))
            expected[view, rows] = kernel_curvature(z, k=config.k, kernel=config.kernel, gamma=config.gamma)
    np.testing.assert_allclose(found.points.curvature, expected, atol=1e-3)
    assert found.points.kind == "Eq. (10), rbf kernel, k = 10"
    predicted = found.points.predicted
    assert predicted is not None
    assert data.test.labels is not None
    accuracy = 100 * float((predicted == data.test.labels.numpy()).mean())
    assert accuracy == pytest.approx(found.probes["linear"]["accuracy"][0])

    opened = Opened(browser, page)
    rho = f"{np.corrcoef(found.points.curvature)[0, 1]:.3f}"
    assert opened.page.inner_text("#summary tbody").split("\t")[3] == rho
    assert opened.page.inner_text("#scatters h4") == f"ρ = {rho}"
    assert found.points.kind in opened.page.inner_text("#scatters")
    opened.point_at(100)
    shown = opened.rows_of("#chosen .chosen canvas")[0]
    np.testing.assert_array_equal(opened.thumbnail("#tip canvas")[..., 0], data.test.images.pixels[shown, 0].numpy())
    heads = opened.page.locator("#views th").all_inner_texts()
    local = [f"local {i}\n8×8" for i in (1, 2, 3)]
    assert heads == ["image\n8×8", "global 1\n16×16", "global 2\n16×16", *local, "blend\n16×16"]
    seen = first_step(config, data)
    table = opened.images("#views tbody")
    assert len(table) == 8
    for row, pictures in enumerate(table):
        for picture, column in zip(pictures, seen.values(), strict=True):
            np.testing.assert_array_equal(picture, column[row].transpose(1, 2, 0).repeat(3, 2))
    texts = opened.page.locator("#views img").evaluate_all("(images) => images.map((image) => image.alt)")
    assert texts[:2] == ["row 1, image", "row 1, global 1"]
    assert len(set(texts)) == 8 * 7
    assert "A blend mixes" in opened.page.inner_text("#views")
    assert opened.complaints == []
    opened.context.close()


def test_a_folder_with_a_broken_file_becomes_a_page_of_the_others(browser: Any, tmp_path: Path) -> None:
    import torch

    from curvssl.config import demo
    from curvssl.data.folders import FolderImages
    from curvssl.data.named import load
    from curvssl.evaluate import maps
    from curvssl.report.collect import collect
    from curvssl.train.loop import pretrain

    (tmp_path / "images" / "a" / "b").mkdir(parents=True)
    for i, pixels in enumerate(pictured(200).images[:, 0]):
        folder = "a/b" if i % 2 else "."
        Image.fromarray(pixels).resize((40, 30)).save(tmp_path / "images" / folder / f"{i:03}.png")
    settings: Any = {"dataset": f"folder:{tmp_path / 'images'}", "batch_size": 32, "k": 5}
    config = dataclasses.replace(demo(), epochs=1, warmup_epochs=0, **settings)
    held = load(config.dataset, size=config.image_size).test.images
    assert isinstance(held, FolderImages)
    broken = int(held.rows[3])
    Path(held.path(broken)).write_bytes(b"no image")
    made = pretrain(config, out=tmp_path / "run", progress=False)
    kept = torch.tensor([i for i in range(200) if i != broken])  # of the whole folder, not of the held-out tenth alone
    xy = torch.rand(len(kept), 2, generator=torch.Generator().manual_seed(0))
    maps.save(xy, made, "map-h-all.npz", index=kept)

    found = collect(made)
    assert found.pictured is not None
    assert found.pictured.index is not None
    assert found.pictured.index.tolist() == kept.tolist()
    assert list(found.pictured.files) == [held.files[i] for i in kept]
    assert found.findings is not None
    assert found.findings["unreadable"] == [{"name": held.files[broken]}]
    named = {row: {"row": -1, "name": held.files[row]} for row in range(200)}
    inspected = {
        "near_duplicates": {"groups": [[named[0], named[1], named[2]], [named[broken], named[5]]]},
        "outliers": {"fence": 2.5, "beyond": 1, "ranked": [named[150] | {"score": 4.5}, named[9] | {"score": 2.1}]},
        "typical": [named[199] | {"stands_for": 120}, named[7] | {"stands_for": 79}],
        "unreadable": [{"name": held.files[broken], "error": "no image"}],
    }
    made.keep_json("inspect.json", inspected, by="curvssl inspect RUN")
    opened = single(browser, [collect(made)], tmp_path)
    name = held.files[150]
    opened.search(name)
    assert len(opened.selected()) == 1
    shown = opened.thumbnail("#chosen .chosen canvas")[..., 0].astype(float)
    with Image.open(held.path(150)) as image:
        source = np.asarray(image.crop((5, 0, 35, 30)).resize(shown.shape), dtype=float)
    assert np.corrcoef(shown.ravel(), source.ravel())[0, 1] > 0.97

    # What `curvssl inspect` found; the group whose second image cannot be read is no group.
    numbers = [found.pictured.index[row] for row in opened.rows_of("#findings canvas")]
    assert numbers == [0, 1, 2, 150, 9, 199, 7]
    text = opened.page.inner_text("#findings")
    for part in (
        "1 group of",
        f"4.50\n{Path(name).name}",
        "begin at 2.50",
        "120\n",
        f"{held.files[broken]} no image",
    ):
        assert part in text
    opened.page.click("#findings button >> text=Show all 3")
    assert opened.page.inner_text("#selection h3") == "3 images selected"
    opened.page.click("#findings button >> text=Show all 1 ")  # of the two in the list, one is beyond the fence
    assert found.pictured.index[opened.selected()].tolist() == [150]
    assert opened.page.inner_text("h1") == "CurvSSL on images"  # the folder's name, not its path
    assert "no labels" in opened.page.inner_text("#probes")
    opened.context.close()


def test_the_line_of_a_run_that_did_not_learn_says_so(browser: Any, grid: RunData, tmp_path: Path) -> None:
    """With the stored curves of two published runs: one in the trap, one that learned."""
    results = Path(__file__).parents[2] / "results"
    runs = []
    for study in ("literal", "faithful"):
        cell = json.loads((results / study / "cifar10-barlow-twins-seed0.json").read_text())
        runs.append(dataclasses.replace(grid, name=study, config=cell["config"], metrics=cell["curves"]))
    opened = single(browser, runs, tmp_path)
    lines = opened.page.locator("#summary tbody tr").all_inner_texts()
    assert [line.split("\t")[0] for line in (lines[0], lines[2])] == ["literal", "faithful"]
    assert "Does not learn: the two views of an image hardly agree" in lines[1]
    assert "try a longer --warmup-epochs" in lines[1]
    assert not any("Does not learn" in line for line in (lines[0], *lines[2:]))
    for width in (390, 1280):  # all of it can be read without scrolling
        opened.page.set_viewport_size({"width": width, "height": 800})
        opened.frame()
        assert opened.page.evaluate("byId('summary').scrollWidth - byId('summary').clientWidth") == 0
        assert opened.page.locator("#summary").bounding_box()["height"] < 300
    opened.context.close()


def test_the_line_of_a_run_that_collapsed_says_so(browser: Any, grid: RunData, tmp_path: Path) -> None:
    rows = [row | {"z_std": 3e-5} if row["epoch"] > 18 else row for row in grid.metrics]
    narrow = [row | {"effective_rank": 1.04} for row in grid.metrics]
    again = [row | {"effective_rank": 1.04} if row["epoch"] < 10 else row for row in grid.metrics]
    runs = [
        dataclasses.replace(grid, name=name, metrics=found, config=grid.config | {"d_z": 64, "k": i})
        for i, (name, found) in enumerate({"one": rows, "line": narrow, "recovered": again}.items())
    ]
    opened = single(browser, runs, tmp_path)
    lines = opened.page.locator("#summary tbody tr").all_inner_texts()
    assert [line.split("\t")[0] for line in lines[::2][:2]] == ["one", "line"]
    assert "Does not learn: all images get nearly the same embedding (standard deviation 3.0e-05): try" in lines[1]
    assert "Does not learn: the embeddings use 1.0 of 64 dimensions: try" in lines[3]
    assert not any("Does not learn" in line for line in lines[4:])
    opened.context.close()


def test_of_a_labelled_folder_only_held_out_images_are_judged(tmp_path: Path) -> None:
    import torch

    from curvssl.config import demo
    from curvssl.data.folders import array
    from curvssl.evaluate.features import Features, save
    from curvssl.evaluate.runs import features_of, images_of
    from curvssl.report.collect import judged
    from curvssl.rundir import Run

    of = pictured(40)
    np.savez(tmp_path / "own.npz", images=of.images, labels=of.labels)
    data = array(str(tmp_path / "own.npz"), size=8)
    made = Run.create(tmp_path / "run", dataclasses.replace(demo(), dataset=data.name))
    index = torch.tensor([0, 1, 3])  # the third test image has no features
    for split, rows in (("train", data.train.images.rows), ("test", data.test.images.rows[index])):
        kept = Features(h=rows[:, None].float(), y=getattr(data, split).labels[: len(rows)])
        save(dataclasses.replace(kept, index=index if split == "test" else None), made, f"features-{split}.npz")
    features = features_of(made, data, "all")
    assert features.index is not None
    assert len(features.index) == 39
    assert features.h[:, 0].tolist() == features.index.tolist() == sorted(features.index.tolist())
    np.testing.assert_array_equal(next(images_of(data, "all").split(40)).numpy(), of.images)

    answers = {"linear_predictions": np.array([5, 6, 7]), "linear_confidence": np.array([0.5, 0.6, 0.7])}
    made_of = judged(made, data, "all", features.index, answers)
    for row, number in enumerate(features.index.tolist()):
        place = data.test.images.rows[index].tolist()
        expected = (5 + place.index(number), 0.5 + 0.1 * place.index(number)) if number in place else (-1, 0)
        assert (made_of["predicted"][row], pytest.approx(made_of["confidence"][row])) == expected


def test_images_that_were_not_judged_are_in_no_count(browser: Any, grid: RunData, tmp_path: Path) -> None:
    from sklearn.metrics import confusion_matrix

    assert grid.points is not None
    assert grid.pictured is not None
    assert grid.pictured.labels is not None
    predicted = np.where(np.arange(60) < 30, grid.points.predicted, -1)
    made = dataclasses.replace(grid, points=dataclasses.replace(grid.points, predicted=predicted))
    opened = single(browser, [made], tmp_path)
    cells = opened.page.locator("#confusions td").all_inner_texts()
    expected = confusion_matrix(grid.pictured.labels[:30], predicted[:30], labels=range(10))
    np.testing.assert_array_equal(np.array([int(cell or 0) for cell in cells]).reshape(10, 10), expected)
    opened.page.select_option("#colour", "predicted")
    opened.frame()
    assert opened.colour(45)[:3] == (184, 188, 196)
    opened.point_at(45)
    assert "not asked" in opened.page.inner_text("#chosen .facts")
    assert max(opened.rows_of("#mistakes canvas"), default=0) < 30
    assert opened.complaints == []
    opened.context.close()
