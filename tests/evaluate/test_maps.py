"""Maps: the same bits for the same seed, separate clusters, valid files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pipeline import TINY, one_thread
from torch import Tensor

from curvssl.config import UserError
from curvssl.evaluate.maps import COLOURS, draw, map_quality, save, umap
from curvssl.rundir import Run


def clusters(n: int = 90) -> tuple[Tensor, Tensor]:
    """Three tight clouds far from each other in ten dimensions."""
    y = torch.arange(n) % 3
    return 20 * torch.eye(10)[y] + torch.randn(n, 10, generator=torch.Generator().manual_seed(0)), y


def test_umap_is_bit_identical_for_a_seed_and_keeps_clusters_apart():
    x, y = clusters()
    with one_thread():
        xy = umap(x, seed=1)
        assert torch.get_num_threads() == 1  # a process's first map gives OpenMP all cores
    assert xy.shape == (90, 2)
    assert xy.dtype == torch.float32
    assert torch.equal(xy, umap(x, seed=1))
    assert not torch.equal(xy, umap(x, seed=2))
    quality = map_quality(x, xy, labels=y)
    assert quality["silhouette"] > 0.6
    assert quality["trustworthiness"] > 0.8
    assert umap(x[:4]).isfinite().all()  # fewer points than neighbours


def test_umap_refuses_what_has_no_map_in_one_line():
    with pytest.raises(UserError, match="at least 4"):
        umap(torch.zeros(3, 5))
    with pytest.raises(UserError, match="NaN"):
        umap(torch.full((9, 5), torch.nan))


def test_trustworthiness_is_one_for_the_points_themselves_and_chance_for_noise():
    flat = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(400, 2, generator=torch.Generator().manual_seed(1))
    assert map_quality(flat, flat) == {"trustworthiness": pytest.approx(1)}
    assert map_quality(flat, noise)["trustworthiness"] == pytest.approx(0.5, abs=0.05)
    assert map_quality(flat, flat, points=60)["trustworthiness"] == pytest.approx(1)


def test_silhouette_is_worked_out_by_hand_for_two_pairs():
    # Two pairs at distance 10, distance 1 inside a pair: a = 1, b = mean distance to the other pair, s = (b − a) / b.
    xy = torch.tensor([[0.0, 0], [0, 1], [10, 0], [10, 1]])
    b = (10 + np.sqrt(101)) / 2
    quality = map_quality(xy, xy, labels=torch.tensor([0, 0, 1, 1]))
    assert quality["silhouette"] == pytest.approx((b - 1) / b)
    assert "silhouette" not in map_quality(xy, xy, labels=torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("colour", ["labels", "values", "nothing"])
def test_a_drawn_map_is_a_png_of_200_dpi_and_a_pdf(tmp_path: Path, colour: str):
    from PIL import Image

    xy = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    colours = {
        "labels": {"labels": torch.arange(50) % 13, "classes": ("cat", "dog")},
        "values": {"values": torch.rand(50), "values_name": "curvature"},
        "nothing": {},
    }
    png, pdf = draw(xy, title="a map", out=tmp_path / "runs" / "map-h-test", **colours[colour])
    assert (png.name, pdf.name) == ("map-h-test.png", "map-h-test.pdf")
    with Image.open(png) as image:
        assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1)
        assert image.size == (1280, 1040)
    assert pdf.read_bytes().startswith(b"%PDF")
    assert sorted(p.name for p in png.parent.iterdir()) == ["map-h-test.pdf", "map-h-test.png"]


def test_every_class_has_its_colour_in_the_picture(tmp_path: Path):
    from PIL import Image

    angle = torch.arange(10) * 2 * torch.pi / 10
    png, _ = draw(
        torch.stack([angle.cos(), angle.sin()], 1), labels=torch.arange(10), title="ten", out=tmp_path / "map"
    )
    with Image.open(png) as image:
        pixels = np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)
    seen = {"#{:02x}{:02x}{:02x}".format(*pixel) for pixel in pixels}
    assert set(COLOURS) <= seen  # the legend's markers are opaque


def test_the_same_map_is_drawn_as_the_same_bytes(tmp_path: Path):
    xy, labels = torch.randn(30, 2), torch.arange(30) % 3
    first = [p.read_bytes() for p in draw(xy, labels=labels, title="once", out=tmp_path / "a")]
    assert first == [p.read_bytes() for p in draw(xy, labels=labels.numpy(), title="once", out=tmp_path / "b.png")]


def test_labels_and_values_together_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="one of them"):
        draw(torch.zeros(5, 2), labels=torch.zeros(5), values=torch.zeros(5), title="", out=tmp_path / "map")


def test_a_saved_map_holds_the_points_and_which_images_they_are(tmp_path: Path):
    xy, run = torch.randn(6, 2), Run.create(tmp_path, TINY)
    save(xy, run, "map.npz", index=torch.tensor([5, 4, 3, 2, 1, 0]))
    with np.load(tmp_path / "map.npz") as file:
        np.testing.assert_array_equal(file["xy"], xy.numpy())
        np.testing.assert_array_equal(file["index"], [5, 4, 3, 2, 1, 0])
    save(xy, run, "map.npz")
    with np.load(tmp_path / "map.npz") as file:
        np.testing.assert_array_equal(file["index"], np.arange(6))


def test_a_class_may_have_any_name(tmp_path: Path):
    x, y = clusters()
    odd = ("$\\frac$", "caf\udce9", "日本\x1b\n" + "x" * 200)  # no formula, not UTF-8, no glyph and too long
    png, pdf = draw(x[:, :2], labels=y, classes=odd, title="a $b_ of caf\udce9 $", out=tmp_path / "map")
    assert png.stat().st_size > 1000
    assert pdf.stat().st_size > 1000
