"""Finding images like a given one: against a loop in float64, faiss, and copies that are known."""

import dataclasses
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gallery import photographed, photographs
from PIL import Image

from curvssl.cli import main
from curvssl.config import UserError
from curvssl.data.images import TensorImages
from curvssl.evaluate import search as searching
from curvssl.evaluate.search import Collection, approximate, collection_of, exact, nearest
from curvssl.rundir import Run


@pytest.mark.parametrize("others", [False, True])
def test_exact_search_in_blocks_is_the_sorted_cosine_of_a_loop(others: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(searching, "QUERIES", 7)
    monkeypatch.setattr(searching, "ROWS", 11)
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    queries = rows if others else rows[:9] + 0.3
    similarity, found = exact(queries, rows, k=13, others=others)
    assert found.shape == similarity.shape == (len(queries), 13)
    a, b = queries.double().numpy(), rows.double().numpy()
    for i, query in enumerate(a):
        s = np.array([query @ row / np.sqrt((query @ query) * (row @ row)) for row in b])
        order = [j for j in np.argsort(-s) if not (others and j == i)][:13]
        assert found[i].tolist() == order
        np.testing.assert_allclose(similarity[i], s[order], atol=1e-6)


def test_more_than_there_is_gives_all_there_is():
    rows = torch.eye(3)
    assert exact(rows[:1], rows, k=10)[1].shape == (1, 3)
    assert exact(rows, rows, k=10, others=True)[1].tolist() == [[1, 2], [0, 2], [0, 1]]


@pytest.fixture(scope="module")
def clouds() -> torch.Tensor:
    """As features are: many clouds of different sizes."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(60, 24, generator=g)
    return centres[torch.randint(60, (8000,), generator=g)] + 0.4 * torch.randn(8000, 24, generator=g)


def test_the_index_finds_nearly_all_that_exact_search_finds(clouds: torch.Tensor):
    (true, known), (s, found) = (search(clouds[:500], clouds, k=10) for search in (exact, approximate))
    recall = np.mean([len({*a} & {*b}) / 10 for a, b in zip(known.tolist(), found.tolist(), strict=True)])
    assert recall > 0.98
    hit = found == known
    assert torch.allclose(s[hit], true[hit], atol=1e-6)
    _, found = approximate(clouds, clouds, k=5, others=True)
    assert not (found == torch.arange(len(clouds))[:, None]).any()


def test_an_index_is_used_for_many_comparisons_only(clouds: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(searching, "EXACT", 40 * len(clouds))
    monkeypatch.setattr(searching, "PROBED", 1)  # so that its results show where they come from
    for n, search in ((40, exact), (41, approximate)):
        assert nearest(clouds[:n], clouds, k=30)[1].equal(search(clouds[:n], clouds, k=30)[1])
    assert not approximate(clouds[:40], clouds, k=30)[1].equal(exact(clouds[:40], clouds, k=30)[1])


def test_an_image_and_its_copies_are_found_first_and_the_same_pixels_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    root, planted = photographs()
    asked, copy = sorted(next(pair for pair in planted if any("exact 0" in name for name in pair)), reverse=True)
    changed = next(name for name in os.listdir(root / "copies") if name.startswith("resized"))
    out = [tmp_path / f"found.{kind}" for kind in ("json", "html", "png")]
    queries = [str(root / asked), str(root / "copies" / changed)]
    main(["search", str(photographed().path), *queries, "--k", "4", "--out", *map(str, out)])
    said = capsys.readouterr().out
    result = json.loads(out[0].read_bytes())
    assert result["images"] == 78
    assert [query["image"] for query in result["queries"]] == queries
    first, second = (query["found"] for query in result["queries"])
    assert {one["name"] for one in first[:2]} == {asked, copy}
    assert [one["same"] for one in first] == [True, True, False, False]
    assert first[0]["similarity"] == pytest.approx(1, abs=1e-6)
    assert second[0]["name"] == f"copies/{changed}"
    assert frozenset(one["name"] for one in second[:2]) in planted
    assert [one["same"] for one in second] == [True, False, False, False]
    for found in (first, second):
        assert [one["similarity"] for one in found] == sorted((one["similarity"] for one in found), reverse=True)
    assert said.count("(same pixels)") == 3
    assert f"  1.0000  {asked}  (same pixels)\n" in said
    with Image.open(out[2]) as sheet:
        assert sheet.width > 4 * 160
    assert out[1].read_text().count("<img") == 10


def test_the_features_of_another_folder_are_kept_until_it_changes(tmp_path: Path):
    root, _ = photographs()
    other, ignored = tmp_path / "other", shutil.ignore_patterns("features-in-*")
    run = Run.read(shutil.copytree(photographed().path, tmp_path / "run", ignore=ignored))
    shutil.copytree(root / "copies", other)
    assert len(collection_of(run, other)) == 8
    (kept,) = run.path.glob("features-in-*.npz")
    made = kept.stat().st_mtime_ns
    assert collection_of(run, other).names([0]) == ["cropped 3.jpg"]
    assert kept.stat().st_mtime_ns == made
    shutil.copy(other / "exact 0.jpg", other / "another.jpg")
    now = collection_of(run, other)
    assert now.names(range(9))[0] == "another.jpg"
    assert [file.name != kept.name for file in run.path.glob("features-in-*.npz")] == [True]
    np.save(tmp_path / "pixels.npy", np.full((3, 32, 32, 3), 99, np.uint8))
    assert collection_of(run, tmp_path / "pixels.npy").names([2, 0]) == ["row 2", "row 0"]


def test_a_runs_own_images_have_the_features_of_a_probe_in_the_order_of_the_folder():
    run, (root, _) = photographed(), photographs()
    own, again = collection_of(run), collection_of(run, root)
    assert own.names(range(len(own))) == again.names(range(len(again)))
    assert torch.allclose(own.h, again.h, atol=1e-5)
    assert own.pixels([5, 77, 0]).equal(again.pixels([5, 77, 0]))
    assert own.unreadable.keys() == again.unreadable.keys() == {"broken.jpg"}


def test_a_folder_that_has_changed_since_is_searched_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Run.read(shutil.copytree(photographed().path, tmp_path / "run"))
    facts = run.read_json("data.json")
    facts["sha256"]["listing"] = "of another time"
    (run.path / "data.json").write_text(json.dumps(facts))
    assert len(collection_of(run)) == 78
    assert "has changed since" in capsys.readouterr().err


def test_a_run_that_cannot_be_written_to_is_searched_and_inspected_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = Run.read(shutil.copytree(photographed().path, tmp_path / "a run", ignore=shutil.ignore_patterns("*.npz")))
    before = {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()}
    run.path.chmod(0o555)
    may = os.access  # which root always may
    monkeypatch.setattr(os, "access", lambda path, mode: path != run.path and may(path, mode))
    root, _ = photographs()
    try:
        main(["search", str(run.path), str(root / "8.png"), "--in", str(root / "copies"), "--k", "1"])
        main(["inspect", str(run.path), "--out", str(tmp_path / "found")])
        said = capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["inspect", str(run.path)])
    finally:
        run.path.chmod(0o755)
    assert {file.name: file.read_bytes() for file in run.path.iterdir() if file.is_file()} == before
    assert (tmp_path / "found" / "inspect.json").is_file()
    assert f"{run.path} cannot be written to, so features-test.npz is not kept" in said
    assert "cannot be written to: give another folder as --out" in capsys.readouterr().err


@pytest.mark.parametrize("below", [True, False])
def test_images_that_were_moved_are_told_so_and_found_where_they_are_now(
    below: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    run, (root, _) = photographed(), photographs()
    was = "my photos" if below else str(tmp_path / "my photos")
    run = Run(run.path, dataclasses.replace(run.config, dataset=f"folder:{was}"))
    seen = f" below {tmp_path}" if below else ""
    with pytest.raises(UserError, match=re.escape(f"was trained on {was}, which is not there{seen}: put it back")):
        collection_of(run)
    assert len(collection_of(run, root)) == 78


def test_a_command_that_is_suggested_can_be_typed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, images = tmp_path / "my run", tmp_path / "my images"
    shutil.copytree(photographed().path, run)
    images.mkdir()
    for name in ("8.png", "10.png", "12.png", "broken.jpg"):
        shutil.copy(photographs()[0] / name, images)
    main(["search", str(run), str(images / "8.png"), "--in", str(images)])
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "names them" in line)
    command = line.partition("took no part: ")[2].removesuffix(" names them")
    main(shlex.split(command)[1:])
    assert "unreadable: 1 file" in capsys.readouterr().out


def test_images_without_names_are_called_by_their_split_and_row():
    parts = [TensorImages.of(torch.full((n, 1, 2, 2), n, dtype=torch.uint8)) for n in (3, 4)]
    both = Collection("digits", torch.ones(7, 2), (("train ", parts[0]), ("test ", parts[1])), {})
    assert both.names([6, 0, 3, 2]) == ["test 3", "train 0", "test 0", "train 2"]
    assert both.pixels([6, 0, 3, 2])[:, 0, 0, 0].tolist() == [4, 3, 4, 3]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("nothere.jpg",), "does not exist"),
        (("broken.jpg",), r"broken.jpg cannot be read \(.*\): give another image"),
        (("copies",), "is no image file: give images to look for, and the folder to search as --in"),
        ((), "no image was given"),
        (("8.png", "--in", "empty"), "holds no image"),
        (("8.png", "--k", "0"), "k=0 needs to be 1 or more"),
        (("8.png", "--out", "found.gif"), "needs to end in .png, .html or .json"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line(
    words: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    root, _ = photographs()
    (tmp_path / "empty").mkdir()
    paths = [
        str((tmp_path if word == "empty" else root) / word) if "." in word or word in ("copies", "empty") else word
        for word in words
    ]
    with pytest.raises(SystemExit) as end:
        main(["search", str(photographed().path), *paths])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(complaint, line)


def test_features_that_are_not_numbers_are_refused():
    with pytest.raises(UserError, match="hold NaN or infinity"):
        Collection("x", torch.tensor([[1.0, torch.nan]]), (), {})
