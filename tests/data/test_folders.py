"""The user's own data: decoding, labels, errors; the same results streamed, packed and in memory."""

import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pipeline import one_thread, weights

from curvssl.config import PretrainConfig, UserError, demo
from curvssl.data import memory
from curvssl.data.arrays import channels_first, open_array
from curvssl.data.decode import decode, header
from curvssl.data.folders import CANVAS, FolderImages, list_images, open_images
from curvssl.data.named import describe, load
from curvssl.data.order import test_split as split_of
from curvssl.data.pack import pack
from curvssl.data.views import resize
from curvssl.evaluate.runs import dataset_of, draw_map, embed, features_of, probe
from curvssl.rundir import Run
from curvssl.train.loop import load_suiting, pretrain

CPU = torch.device("cpu")
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def save(path: Path, pixels: np.ndarray, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)  # type: ignore[arg-type]
    return path


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 240 digits as PNG files, one folder per class."""
    root = tmp_path_factory.mktemp("digits")
    images = load("digits").train
    assert images.labels is not None
    for i in range(240):
        save(root / f"class {images.labels[i]}" / f"{i:04}.png", images.images.pixels[i, 0].numpy())  # type: ignore[index]
    return root


def config(dataset: str, **changes: object) -> PretrainConfig:
    """Six steps of 32 images per epoch, for 240 images."""
    small = {"dataset": dataset, "image_size": 8, "epochs": 1, "batch_size": 32, "k": 5, "d_z": 16}
    return dataclasses.replace(demo(), warmup_epochs=0, monitor_every=1, **(small | changes))  # type: ignore[arg-type]


# ---- one file


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif"])
@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        (1, lambda x: x),
        (2, lambda x: x[:, ::-1]),
        (3, lambda x: x[::-1, ::-1]),
        (4, lambda x: x[::-1]),
        (5, lambda x: x.transpose(1, 0, 2)),
        (6, lambda x: np.rot90(x, -1)),
        (7, lambda x: np.rot90(x.transpose(1, 0, 2), 2)),
        (8, lambda x: np.rot90(x, 1)),
    ],
)
def test_exif_rotation_is_honoured(suffix: str, orientation: int, upright: Any, tmp_path: Path):
    pixels = np.full((16, 16, 3), 255, dtype=np.uint8)
    pixels[:8, :8], pixels[:8, 8:] = RED, BLUE  # top left red, top right blue
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100, "subsampling": 0} if suffix == ".jpg" else {}
    path = save(tmp_path / f"turned{suffix}", pixels, exif=exif, **options)
    found = decode(str(path), canvas=16, channels=3).transpose(1, 2, 0)
    assert np.abs(found.astype(int) - upright(pixels)).max() <= (3 if suffix == ".jpg" else 0)


def test_transparency_is_seen_on_white(tmp_path: Path):
    rgba = np.zeros((2, 2, 4), dtype=np.uint8)
    rgba[0, 0], rgba[0, 1], rgba[1, 0] = (*RED, 255), (*RED, 0), (0, 0, 0, 51)  # opaque, invisible, a fifth of black
    found = decode(str(save(tmp_path / "a.png", rgba)), canvas=2, channels=3)
    assert found[:, 0, 0].tolist() == list(RED)
    assert found[:, 0, 1].tolist() == list(WHITE)
    assert found[:, 1, 0].tolist() == [204, 204, 204]  # 255 · (1 − 51/255)
    grey = np.array([[[0, 255], [0, 0]], [[100, 255], [7, 0]]], dtype=np.uint8)
    found = decode(str(save(tmp_path / "la.png", grey)), canvas=2, channels=1)
    assert found[0].tolist() == [[0, 255], [100, 255]]


def test_a_palette_becomes_its_colours(tmp_path: Path):
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *BLUE])
    image.putdata([0, 1])
    image.save(tmp_path / "p.png")
    image.save(tmp_path / "t.gif", transparency=1)
    found = decode(str(tmp_path / "p.png"), canvas=1, channels=3)
    assert found[:, 0, 0].tolist() == list(RED)  # the central square of 2×1 is the left pixel
    image.resize((4, 4)).save(tmp_path / "whole.gif", transparency=1)
    found = decode(str(tmp_path / "whole.gif"), canvas=4, channels=3)
    assert found[:, 0, 0].tolist() == list(RED)
    assert found[:, 0, 3].tolist() == list(WHITE)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bits_are_scaled_not_clipped(suffix: str, tmp_path: Path):
    deep = np.array([[0, 257], [257 * 128, 65535]], dtype=np.uint16)
    path = save(tmp_path / f"deep{suffix}", deep)
    assert decode(str(path), canvas=2, channels=1)[0].tolist() == [[0, 1], [128, 255]]
    assert decode(str(path), canvas=2, channels=3)[2].tolist() == [[0, 1], [128, 255]]
    assert header(str(path)) == (2, True)


def test_cmyk_one_bit_and_other_spaces_become_rgb(tmp_path: Path):
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "c.tif")
    assert decode(str(tmp_path / "c.tif"), canvas=4, channels=3)[:, 0, 0].tolist() == list(RED)
    Image.new("CMYK", (16, 16), (0, 0, 0, 0)).save(tmp_path / "c.jpg")
    assert decode(str(tmp_path / "c.jpg"), canvas=16, channels=3).min() >= 253
    Image.new("1", (4, 4), 1).save(tmp_path / "b.png")
    assert (decode(str(tmp_path / "b.png"), canvas=4, channels=1) == 255).all()


def test_the_canvas_is_the_central_square_resized_with_antialiasing(tmp_path: Path):
    pixels = noise(40, 60, 3)
    found = decode(str(save(tmp_path / "a.png", pixels)), canvas=17, channels=3)
    expected = resize(torch.from_numpy(pixels).permute(2, 0, 1)[None].float(), size=17)[0]
    assert (torch.from_numpy(found.copy()).float() - expected).abs().max() <= 1.5  # Pillow rounds twice
    same = decode(str(save(tmp_path / "b.png", pixels[:, :40])), canvas=40, channels=3)
    assert np.array_equal(same.transpose(1, 2, 0), pixels[:, :40])


def test_a_large_jpeg_is_decoded_small_to_nearly_the_same_pixels(tmp_path: Path):
    smooth = np.asarray(Image.fromarray(noise(8, 8, 3)).resize((800, 600), Image.Resampling.BICUBIC))
    path = save(tmp_path / "a.jpg", smooth, quality=95)
    found = decode(str(path), canvas=64, channels=3).astype(float)
    with Image.open(path) as image:
        whole = np.asarray(image.crop((100, 0, 700, 600)).resize((64, 64), Image.Resampling.BILINEAR))
    assert np.abs(found - whole.transpose(2, 0, 1)).mean() < 1


# ---- a folder


def test_the_listing_is_sorted_and_leaves_out_what_is_no_image(tmp_path: Path):
    names = ["b/x.PNG", "b/ä ö/z z.jpeg", "a.jpg", "b/日本.webp"]
    for name in [*names, "b/Thumbs.db", ".hidden.png", ".git/x.png", "notes.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    raw = os.fsdecode(b"b/caf\xe9.png")  # not UTF-8
    (tmp_path / raw).touch()
    (tmp_path / "b" / "back").symlink_to(tmp_path)
    found = list_images(tmp_path)
    assert [found[i] for i in range(len(found))] == ["a.jpg", *sorted([*names[:2], names[3], raw])]


def test_a_folder_of_strange_names_is_read(tmp_path: Path):
    for i, name in enumerate(["mit Leer zeichen.png", "ünïcödé.png", "日本語.png", os.fsdecode(b"caf\xe9.png")]):
        save(tmp_path / "Ordner ß" / name, np.full((4, 4), i, dtype=np.uint8))
    data = load(f"folder:{tmp_path}", size=8)
    seen = torch.cat([batch for part in (data.train, data.test) for batch in part.images.split(2)])
    assert sorted(seen[:, 0, 0, 0].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (["a/1.png", "a/2.png", "b/3.png"], ("a", "b")),
        (["1.png", "2.png", "3.png"], ()),
        (["a/1.png", "b/2.png", "3.png"], ()),
        (["a/x/1.png", "b/y/2.png", "b/3.png"], ()),
        (["a/1.png", "a/2.png"], ()),
    ],
)
def test_labels_are_the_subfolders_of_images_and_nothing_else(
    names: list[str], classes: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in names:
        save(tmp_path / name, noise(4, 4))
    data = load(f"folder:{tmp_path}", size=4)
    assert data.classes == classes
    assert (data.train.labels is None) == (classes == ())
    if data.train.labels is not None and isinstance(data.train.images, FolderImages):
        firsts = [name.split("/")[0] for name in data.train.images.names]
        assert [classes[label] for label in data.train.labels] == firsts
    assert ("no labels" in capsys.readouterr().err) == (classes == ())


@pytest.mark.parametrize(
    ("names", "answer"),
    [
        (None, "does not exist"),
        ([], "holds no image; files count by their suffix: .jpg"),
        (["notes.txt"], "holds no image"),
        (["only.png"], "holds one image"),
    ],
)
def test_a_folder_without_enough_images_is_answered(names: list[str] | None, answer: str, tmp_path: Path):
    root = tmp_path / "pictures"
    if names is not None:
        root.mkdir()
    for name in names or []:
        save(root / name, noise(4, 4)) if name.endswith(".png") else (root / name).touch()
    with pytest.raises(UserError, match=answer):
        load(f"folder:{root}")


def test_a_folder_that_is_a_file_is_answered(tmp_path: Path):
    with pytest.raises(UserError, match="is a file: use array:"):
        load(f"folder:{save(tmp_path / 'a.png', noise(4, 4))}")


def test_grey_and_colour_together_are_colour_and_grey_alone_is_grey(tmp_path: Path):
    for i in range(4):
        save(tmp_path / "grey" / f"{i}.png", noise(6, 6))
        save(tmp_path / "mixed" / f"{i}.png", noise(6, 6) if i else noise(6, 6, 3))
    assert load(f"folder:{tmp_path / 'grey'}", size=8).train.images.shape[1:] == (1, 6, 6)
    assert load(f"folder:{tmp_path / 'mixed'}", size=8).train.images.shape[1:] == (3, 6, 6)


@pytest.mark.parametrize(
    ("side", "on_cpu", "on_cuda"), [(8, 32, 32), (28, 32, 32), (47, 32, 32), (50, 64, 64), (96, 64, 96), (500, 64, 224)]
)
def test_views_of_no_given_size_suit_the_images_and_the_device(tmp_path: Path, side: int, on_cpu: int, on_cuda: int):
    for i in range(3):
        save(tmp_path / f"{i}.png", noise(side, side + 7, 3))
    for device, size in (("cpu", on_cpu), ("cuda", on_cuda)):
        config = PretrainConfig(dataset=f"folder:{tmp_path}", image_size=0, holdout=0)
        loaded, suited = load_suiting(config, source="auto", device=device)
        assert suited.image_size == size
        # The images were decoded before the size was chosen, and a resumed run must find the same.
        assert describe(loaded) == describe(load(config.dataset, size=size))


def test_the_canvas_is_larger_than_the_views_and_no_larger_than_the_images(tmp_path: Path):
    for i in range(5):
        save(tmp_path / f"{i}.png", noise(50, 70 + i, 3))
    assert load(f"folder:{tmp_path}", size=20).train.images.shape[2:] == (round(CANVAS * 20),) * 2 == (32, 32)
    assert load(f"folder:{tmp_path}", size=48).train.images.shape[2:] == (50, 50)


def test_mean_and_std_are_those_of_the_training_images(digits: Path):
    data = load(f"folder:{digits}", size=8)
    pixels = torch.cat(list(data.train.images.split(64))).double() / 255
    assert data.mean == pytest.approx([pixels.mean().item()], rel=1e-9)
    assert data.std == pytest.approx([pixels.std(correction=0).item()], rel=1e-9)


@pytest.mark.parametrize("n", [2, 9, 10, 1005])
def test_a_tenth_is_held_out_once_and_for_all(n: int):
    train, test = split_of(n)
    assert sorted(torch.cat((train, test)).tolist()) == list(range(n))
    assert len(test) == max(1, n // 10)
    assert split_of(n)[1].equal(test)


# ---- damaged files


def damaged_folder(root: Path, *, good: int) -> Path:
    """Good files, and four that cannot be read."""
    for i in range(good):
        save(root / f"{i:03}.jpg", noise(12, 12, 3, seed=i))
    (root / "empty.png").touch()
    (root / "text.jpg").write_text("not an image")
    truncate(save(root / "truncated.jpg", noise(64, 64, 3)))
    Image.new("1", (12_000, 12_000)).save(root / "vast.png")  # 144 million pixels in a few kilobytes
    return root


def test_what_cannot_be_read_is_said_with_its_reason_and_replaced(tmp_path: Path):
    images = open_images(damaged_folder(tmp_path, good=96), canvas=12, channels=3)
    first = torch.cat(list(images.batches([torch.arange(100)], workers=0)))
    reasons = sorted(images.bad.values())
    assert [reason.split(":")[0] for reason in reasons] == ["empty.png", "text.jpg", "truncated.jpg", "vast.png"]
    assert "UnidentifiedImageError" in reasons[0]
    assert "truncated" in reasons[2]
    assert "decompression bomb" in reasons[3]
    good = {pixels.numpy().tobytes() for pixels in first[:96]}
    assert len(good) == 96
    assert all(pixels.numpy().tobytes() in good for pixels in first[96:])  # their stand-ins
    fresh = open_images(tmp_path, canvas=12, channels=3)
    again = torch.cat(list(fresh.batches(torch.arange(100).split(7), workers=2)))
    assert again.equal(first)  # the same stand-ins, whichever process reads and however many rows at a time


def test_more_than_five_in_a_hundred_stop_the_run(tmp_path: Path):
    damaged_folder(tmp_path, good=70)
    with pytest.raises(UserError, match=r"4 of 74 images cannot be read, more than the 5% that are skipped"):
        list(open_images(tmp_path, canvas=12, channels=3).split(16))
    with pytest.raises(UserError, match="cannot be read, more than the 5%"):
        pretrain(config(f"folder:{tmp_path}"), out=tmp_path / "run", progress=False)


def test_a_run_over_damaged_files_finishes_and_lists_them(tmp_path: Path):
    damaged_folder(tmp_path / "in", good=96)
    (tmp_path / "in" / "note.txt").touch()
    run = pretrain(config(f"folder:{tmp_path / 'in'}", holdout=0.0), out=tmp_path / "run", progress=False)
    listed = (run.path / "bad-images.txt").read_text().splitlines()
    data = load(f"folder:{tmp_path / 'in'}", size=8)
    assert isinstance(data.train.images, FolderImages)
    trained_on = set(data.train.images.names)
    damaged = {"empty.png", "text.jpg", "truncated.jpg", "vast.png"}
    assert damaged & trained_on <= {line.split(":")[0] for line in listed} <= damaged
    found = embed(run, tmp_path / "in", out=tmp_path / "e.npz")
    assert len(found.h) == 96
    with np.load(tmp_path / "e.npz") as file:
        assert file["path"].tolist() == [f"{i:03}.jpg" for i in range(96)]
    assert len((tmp_path / "e.npz.bad-images.txt").read_text().splitlines()) == 4
    np.save(tmp_path / "pixels.npy", np.zeros((2, 8, 8, 3), np.uint8))
    embed(run, tmp_path / "pixels.npy", out=tmp_path / "e.npz")
    assert not (tmp_path / "e.npz.bad-images.txt").exists()  # those of another folder


# ---- an array


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((5, 8, 8), (5, 1, 8, 8)),
        ((5, 8, 6), (5, 1, 8, 6)),
        ((5, 8, 8, 3), (5, 3, 8, 8)),
        ((5, 3, 8, 8), (5, 3, 8, 8)),
        ((5, 8, 6, 1), (5, 1, 8, 6)),
        ((5, 13, 8, 8), (5, 13, 8, 8)),
        ((5, 8, 8, 13), (5, 13, 8, 8)),
        ((5, 4, 6, 8), (5, 4, 6, 8)),
        ((5, 6, 8, 4), (5, 4, 6, 8)),
    ],
)
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_the_channels_are_found(shape: tuple[int, ...], found: tuple[int, ...], suffix: str, tmp_path: Path):
    pixels = noise(*shape)
    path = tmp_path / f"x{suffix}"
    np.save(path, pixels) if suffix == ".npy" else np.savez(path, images=pixels, labels=np.arange(5) % 2)
    opened = open_array(path)
    assert opened.pixels.shape == found
    channels = pixels[:, None] if len(shape) == 3 else pixels if shape == found else np.moveaxis(pixels, 3, 1)
    assert np.array_equal(opened.pixels, channels)
    assert (opened.labels is None, opened.classes) == ((True, ()) if suffix == ".npy" else (False, ("0", "1")))
    train = load(f"array:{path}").train
    assert torch.cat(list(train.images.split(2))).equal(torch.from_numpy(channels[split_of(5)[0].numpy()].copy()))


@pytest.mark.parametrize("shape", [(5, 4, 4, 4), (5, 3, 8, 3), (5, 8), (5, 1, 2, 3, 4)])
def test_a_shape_that_may_mean_two_things_is_refused(shape: tuple[int, ...]):
    with pytest.raises(UserError, match="has shape"):
        channels_first(noise(*shape), path=Path("x.npy"))


@pytest.mark.parametrize(
    ("entries", "answer"),
    [
        ({"images": np.zeros((4, 8, 8), np.float32)}, "holds float32: needed uint8"),
        ({"a": noise(4, 8, 8), "b": noise(4, 8, 8)}, "has the entries a, b: call the pixels images"),
        ({"images": noise(4, 8, 8), "labels": np.zeros(3, int)}, r"needed \(4,\) whole numbers"),
        ({"images": noise(4, 8, 8), "labels": np.array([0, 1, 2, 3]), "classes": ["a", "b"]}, "2 class names"),
        ({"images": noise(1, 8, 8)}, "holds 1 images"),
    ],
)
def test_an_array_that_cannot_be_used_is_answered(entries: dict[str, np.ndarray], answer: str, tmp_path: Path):
    np.savez(tmp_path / "x.npz", **entries)
    with pytest.raises(UserError, match=answer):
        load(f"array:{tmp_path / 'x.npz'}")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"\x93NUMPY broken"])
@pytest.mark.parametrize("name", ["x.npy", "x.npz", "missing.npy"])
def test_a_damaged_array_file_is_answered(name: str, content: bytes, tmp_path: Path):
    if "missing" not in name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        load(f"array:{tmp_path / name}")


def test_a_pickled_array_is_not_run(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="is no array of numbers"):
        load(f"array:{tmp_path / 'x.npy'}")


def test_thirteen_channels_are_trained_on(tmp_path: Path):
    np.save(tmp_path / "x.npy", noise(64, 8, 8, 13))
    run = pretrain(config(f"array:{tmp_path / 'x.npy'}"), out=tmp_path / "run", progress=False)
    assert embed(run, tmp_path / "x.npy", out=tmp_path / "e.npz").h.shape == (64, 128)
    np.save(tmp_path / "rgb.npy", noise(4, 8, 8, 3))
    with pytest.raises(UserError, match=r"has 3 channels, and .* was trained on 13"):
        embed(run, tmp_path / "rgb.npy", out=tmp_path / "e.npz")


# ---- from training to evaluation


@pytest.fixture(scope="module")
def in_memory(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return pretrain(config(f"folder:{digits}"), out=tmp_path_factory.mktemp("run") / "folder", progress=False)


def test_streamed_images_train_the_same_weights_as_images_in_memory(
    in_memory: Run, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "fits", lambda *_, **__: False)
    streamed = pretrain(config(f"folder:{digits}"), out=tmp_path / "run", progress=False)
    assert [run.read_json("provenance.json")["images_in_memory"] for run in (in_memory, streamed)] == [True, False]
    assert weights(streamed.path) == weights(in_memory.path)
    assert streamed.metrics()[-1]["knn"] == in_memory.metrics()[-1]["knn"]


def test_a_packed_folder_trains_the_same_weights(in_memory: Run, digits: Path, tmp_path: Path):
    out, shape = pack(digits, tmp_path / "packed", size=8, progress=False)
    assert (out.name, shape) == ("packed.npy", (240, 1, 8, 8))
    packed = pretrain(config(f"array:{out}"), out=tmp_path / "run", progress=False)
    assert weights(packed.path) == weights(in_memory.path)
    one, other = load(f"array:{out}"), load(f"folder:{digits}", size=8)
    assert one.classes == other.classes
    assert one.test.labels is not None
    assert one.test.labels.equal(other.test.labels)  # type: ignore[arg-type]


def test_packing_leaves_out_what_cannot_be_read_and_keeps_labels_in_step(tmp_path: Path):
    for i in range(40):
        save(tmp_path / "in" / "ab"[i % 2] / f"{i:02}.png", np.full((6, 6), i, dtype=np.uint8))
    truncate(tmp_path / "in" / "a" / "00.png")
    truncate(tmp_path / "in" / "b" / "21.png")
    out, shape = pack(tmp_path / "in", tmp_path / "out.npy", size=224, progress=False)
    found = open_array(out)
    pixels, labels, classes = found.pixels, found.labels, found.classes
    assert shape == pixels.shape == (38, 1, 6, 6)
    assert isinstance(pixels.base, np.memmap) or isinstance(pixels, np.memmap)
    assert labels is not None
    assert [classes[label] for label in labels] == ["ab"[int(value) % 2] for value in pixels[:, 0, 0, 0]]
    assert [line[:8] for line in (tmp_path / "out.bad-images.txt").read_text().splitlines()] == ["a/00.png", "b/21.png"]
    assert found.files is not None
    names = [found.files[i] for i in range(38)]
    assert names == sorted(f"{'ab'[i % 2]}/{i:02}.png" for i in range(40) if i not in (0, 21))
    assert [int(name[2:4]) for name in names] == pixels[:, 0, 0, 0].tolist()
    beside = ["in", "out.bad-images.txt", "out.labels.npz", "out.manifest.json", "out.npy"]
    assert sorted(file.name for file in tmp_path.iterdir()) == beside


def test_a_pack_never_has_the_labels_of_an_earlier_one(tmp_path: Path):
    for i in range(40):
        save(tmp_path / "sorted" / "ab"[i % 2] / f"{i:02}.png", np.full((6, 6), i, dtype=np.uint8))
        save(tmp_path / "flat" / f"{i:02}.png", np.full((6, 6), 100 + i, dtype=np.uint8))
        save(tmp_path / "broken" / f"{i:02}.png", np.full((6, 6), i, dtype=np.uint8))
    for i in range(20, 40):
        truncate(tmp_path / "broken" / f"{i:02}.png")
    out, _ = pack(tmp_path / "sorted", tmp_path / "out.npy", size=224, progress=False)
    before = out.read_bytes(), out.with_suffix(".labels.npz").read_bytes()
    with pytest.raises(UserError, match="cannot be read"):  # in the middle of it: the earlier pack stays whole
        pack(tmp_path / "broken", out, size=224, progress=False)
    assert (out.read_bytes(), out.with_suffix(".labels.npz").read_bytes()) == before
    pack(tmp_path / "flat", out, size=224, progress=False)
    found = open_array(out)
    pixels, labels = found.pixels, found.labels
    assert sorted(pixels[:, 0, 0, 0]) == list(range(100, 140))
    assert labels is None


def test_embedding_a_runs_own_folder_gives_its_features(in_memory: Run, digits: Path, tmp_path: Path):
    found = embed(in_memory, digits, out=tmp_path / "e.npz")
    data = dataset_of(in_memory)
    test = features_of(in_memory, data, "test")
    assert isinstance(data.test.images, FolderImages)
    torch.testing.assert_close(found.h[data.test.images.rows], test.h)
    with np.load(tmp_path / "e.npz") as file:
        assert file["h"].shape == (240, 128)
        assert file["z"].shape == (240, 16)
        assert file["path"][0] == "class 0/0000.png" or file["path"][0].startswith("class 0/")


def test_one_image_is_embedded_and_what_is_not_there_is_told(in_memory: Run, digits: Path, tmp_path: Path):
    everything = embed(in_memory, digits, out=tmp_path / "all.npz").h
    with np.load(tmp_path / "all.npz") as file:
        name = str(file["path"][7])
    one = embed(in_memory, digits / name, out=tmp_path / "one.npz").h
    torch.testing.assert_close(one, everything[7:8])
    with pytest.raises(UserError, match=r"nothere does not exist: give a folder of images, one image, or an array"):
        embed(in_memory, tmp_path / "nothere", out=tmp_path / "none.npz")
    (tmp_path / "notes.txt").write_text("two words")
    with pytest.raises(UserError, match=r"notes\.txt is no image and no array: give a folder of images, one image, or"):
        embed(in_memory, tmp_path / "notes.txt", out=tmp_path / "none.npz")


def test_probes_read_the_labels_of_the_subfolders(in_memory: Run):
    found = probe(in_memory, seeds=(0,))
    assert {"linear", "knn", "raw pixels", "random encoder"} <= found.keys()
    assert found["raw pixels"]["knn"]["mean"] > 50  # chance is 10


def test_without_labels_probes_say_so_and_maps_show_curvature(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flat = tmp_path / "flat"
    flat.mkdir()
    for file in digits.rglob("*.png"):
        (flat / file.name).symlink_to(file)
    run = pretrain(config(f"folder:{flat}"), out=tmp_path / "run", progress=False)
    assert "knn" not in run.metrics()[-1]
    assert 1 < run.metrics()[-1]["rankme"] < 128
    with pytest.raises(UserError, match=r"has no labels, so that the linear.*knn probes are skipped; curvssl map"):
        probe(run)
    assert draw_map(run).exists()
    assert "no labels: the map is coloured by curvature" in capsys.readouterr().err


def test_a_folder_that_has_changed_is_not_taken_for_the_same(in_memory: Run, digits: Path, tmp_path: Path):
    extra = save(digits / "class 0" / "extra.png", noise(8, 8))
    try:
        with pytest.raises(
            UserError, match=r"changed since .* trained \(listing, .*; 216 training images then, 217 now\)"
        ):
            probe(in_memory)
    finally:
        extra.unlink()


# ---- memory


def test_memory_stays_bounded_whatever_the_size_of_the_folder(tmp_path: Path):
    """600 decoded images are 270 MB; streaming and packing them takes less than 190 MB on top of torch. It takes
    30 MB of these, but the C library sometimes keeps 100 MB more for its threads."""
    photo = Image.fromarray(noise(8, 8, 3)).resize((386, 386), Image.Resampling.NEAREST)  # is decoded fast
    photo.save(tmp_path / "photo.png")
    for i in range(600):
        (tmp_path / "in" / str(i % 3)).mkdir(parents=True, exist_ok=True)
        os.link(tmp_path / "photo.png", tmp_path / "in" / str(i % 3) / f"{i}.png")
    program = textwrap.dedent("""
        import resource, sys, torch
        from pathlib import Path
        torch.set_num_threads(1)
        from curvssl.data import memory
        from curvssl.data.named import load
        from curvssl.data.folders import open_images
        from curvssl.data.pack import pack

        folder, out = sys.argv[1:]
        everything = torch.arange(540).split(25)
        few = open_images(Path(folder), canvas=386, channels=3)[:4]
        list(few.batches([torch.arange(4)], workers=2))  # whatever is loaded or allocated once is so by now
        used = memory._kilobytes("/proc/self/status", "VmData")
        resource.setrlimit(resource.RLIMIT_DATA, (used + 190 * 2**20,) * 2)

        images = load(f"folder:{folder}", size=241).train.images
        assert images.shape == (540, 3, 386, 386)
        assert not memory.fits(images, device=torch.device("cpu"))
        assert sum(len(batch) for batch in images.batches(everything, workers=2)) == 540
        assert pack(Path(folder), Path(out), size=241, progress=False)[1] == (600, 3, 386, 386)
        packed = load(f"array:{out}").train.images
        assert sum(len(batch) for batch in packed.batches(everything, workers=2)) == 540
        try:
            memory.resident(images, device=torch.device("cpu"))
        except RuntimeError as error:
            print("all at once:", error)
        """)
    command = [sys.executable, "-c", program, str(tmp_path / "in"), str(tmp_path / "out.npy")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "can't allocate memory" in done.stdout
