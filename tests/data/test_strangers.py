"""Files of unknown origin: they run no code, start no program, hang nothing, and are never read twice."""

import dataclasses
import io
import os
import pickle
import signal
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pipeline import TINY, one_thread

from curvssl.cli import main
from curvssl.config import UserError
from curvssl.data.arrays import arrays_in, open_array, read_arrays
from curvssl.data.decode import FORMATS, decode, header
from curvssl.data.folders import classes_of, list_images, open_images
from curvssl.data.named import load
from curvssl.data.pack import pack
from curvssl.evaluate import features
from curvssl.evaluate.runs import embed
from curvssl.rundir import Run
from curvssl.train.loop import pretrain


@pytest.fixture(autouse=True)
def _a_hang_is_a_failure() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def square(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), value, dtype=np.uint8)).save(path)
    return path


def listed(root: Path) -> list[str]:
    names = list_images(root)
    return [names[i] for i in range(len(names))]


# ---- images


def test_a_postscript_file_called_png_is_unreadable_and_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{tmp_path}/started'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    for i in range(39):
        square(tmp_path / "in" / f"{i}.png", i)
    Image.new("RGB", (8, 8)).save(tmp_path / "in" / "holiday.png", "EPS")
    out, shape = pack(tmp_path / "in", tmp_path / "out", size=8, progress=False)
    assert shape[0] == 39
    assert out.with_suffix(".bad-images.txt").read_text().startswith("holiday.png: UnidentifiedImageError")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_that_we_name_is_read_whatever_its_suffix(format: str, tmp_path: Path):
    pixels = np.full((16, 16, 3), 200, dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png", format)
    assert np.abs(decode(str(tmp_path / "x.png"), canvas=16, channels=3).astype(int) - 200).max() <= 2
    assert header(str(tmp_path / "x.png")) == (16, False)


def test_a_camera_file_with_several_pictures_is_its_first(tmp_path: Path):
    first, second = Image.new("RGB", (16, 16), "white"), Image.new("RGB", (16, 16))
    first.save(tmp_path / "x.jpg", "MPO", save_all=True, append_images=[second])
    assert decode(str(tmp_path / "x.jpg"), canvas=16, channels=3).min() >= 253


def png(width: int, height: int) -> bytes:
    """A PNG of one kilobyte or less that declares any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "content",
    [
        png(2**31 - 1, 2**31 - 1),
        b"P6 999999 999999 255\n",
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 2**30, 2**30, 1, 24, 0, 0, 0, 0, 0, 0),
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\0\0\0," + struct.pack("<HHHH", 0, 0, 65535, 65535) + b"\0\2",
        bytes([0, 0, 2, *bytes(9)]) + struct.pack("<HH", 65535, 65535) + bytes([24, 0]),
    ],
    ids=["png", "ppm", "bmp", "gif", "tga"],
)
@pytest.mark.parametrize("read", [header, lambda path: decode(path, canvas=8, channels=3)], ids=["header", "decode"])
def test_an_image_bomb_is_refused_by_the_size_that_it_declares(
    content: bytes, read: Callable[[str], object], tmp_path: Path
):
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(Image.DecompressionBombError, match=r"Image size \(\d+ pixels\) exceeds limit"):
        read(str(tmp_path / "x.png"))


@pytest.mark.parametrize(("width", "height"), [(0, 8), (8, 0), (0, 0)])
def test_an_image_without_pixels_is_unreadable(width: int, height: int, tmp_path: Path):
    (tmp_path / "x.png").write_bytes(png(width, height))
    with pytest.raises(Exception, match=r"\w+"):
        decode(str(tmp_path / "x.png"), canvas=8, channels=3)


# ---- what is no file


def odd_files(root: Path) -> dict[str, str]:
    """What a folder can hold under an image's name that is no file, each with the reason that is given."""
    os.mkfifo(root / "pipe.png")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(root)  # a socket's path has at most 108 bytes
        server.bind("socket.png")
        os.chdir(here)
    (root / "endless.png").symlink_to("/dev/zero")
    (root / "itself.png").symlink_to("itself.png")
    (root / "lost.png").symlink_to("nowhere")
    return {
        "pipe.png": "is a named pipe, not a file",
        "socket.png": "is a socket, not a file",
        "endless.png": "is a device, not a file",
        "itself.png": "Too many levels of symbolic links",
        "lost.png": "No such file or directory",
    }


def test_what_is_no_file_is_listed_with_its_reason_and_hangs_nothing(tmp_path: Path):
    for i in range(200):
        square(tmp_path / "in" / "folder.png" / f"{i:03}.png", i)  # a folder may be called so
    reasons = odd_files(tmp_path / "in")
    out, shape = pack(tmp_path / "in", tmp_path / "out", size=8, progress=False)
    assert shape[0] == 200
    said = dict(line.split(": ", 1) for line in out.with_suffix(".bad-images.txt").read_text().splitlines())
    assert said.keys() == reasons.keys()
    assert all(reason in said[name] for name, reason in reasons.items())
    data = load(f"folder:{tmp_path / 'in'}", size=8)
    assert sum(len(batch) for batch in data.train.images.batches([torch.arange(180)], workers=0)) == 180


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_an_array_that_is_no_file_is_answered(name: str, tmp_path: Path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name} is a named pipe, not a file"):
        open_images(tmp_path / name, canvas=8, channels=3)
    np.save(tmp_path / "y.npy", np.zeros((4, 8, 8), dtype=np.uint8))
    os.mkfifo(tmp_path / "y.labels.npz")
    with pytest.raises(UserError, match=r"y\.labels\.npz is a named pipe"):
        open_array(tmp_path / "y.npy")


# ---- folders that are linked to each other


def test_eight_folders_linked_to_each_other_hold_each_file_once_and_keep_their_classes(tmp_path: Path):
    folders = [tmp_path / f"f{i}" for i in range(8)]
    for folder in folders:
        square(folder / "x.png")
    for folder in folders:
        for other in folders:
            (folder / f"a link to {other.name}").symlink_to(other)
    assert listed(tmp_path) == [f"f{i}/x.png" for i in range(8)]
    assert classes_of(list_images(tmp_path))[0] == tuple(f"f{i}" for i in range(8))


def test_a_link_out_of_the_folder_is_followed_once_at_its_place(tmp_path: Path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    square(root / "a" / "1.png")
    square(root / "c" / "3.png")
    square(elsewhere / "deep" / "2.png")
    (root / "b").symlink_to(elsewhere)
    (root / "d").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(root)
    (elsewhere / "up").symlink_to(tmp_path)
    assert listed(root) == ["a/1.png", "b/deep/2.png", "c/3.png"]


def test_a_link_into_a_hidden_folder_is_followed(tmp_path: Path):
    square(tmp_path / ".store" / "cats" / "1.png")
    (tmp_path / "cats").symlink_to(tmp_path / ".store" / "cats")
    assert listed(tmp_path) == ["cats/1.png"]


def test_folders_nested_deeper_than_pythons_calls_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    deep = 1100
    for _ in range(deep):
        os.mkdir("d")
        os.chdir("d")
    Path("x.png").touch()
    try:
        assert listed(tmp_path) == [f"{'d/' * deep}x.png"]
    finally:  # pytest could not clean up: shutil.rmtree recurses
        Path("x.png").unlink()
        for _ in range(deep):
            os.chdir("..")
            os.rmdir("d")


# ---- names

NOT_UTF8 = os.fsdecode(b"caf\xe9")
ODD_NAMES = (
    *(NOT_UTF8, "two\nlines", "-rf", "$\\frac$", "_hidden from legends", "<b>&\"'", "\x1b[31mred", "%s{}\\", "a: b"),
    *("\u00e9", "e\u0301", "日本", "\u202eright to left", "x" * 200),  # é as one letter and as two
)


def odd_folder(root: Path) -> Path:
    """Twelve images and a damaged one under each odd name, in classes of odd names."""
    for name in ODD_NAMES:
        for i, file in enumerate(ODD_NAMES[:12]):
            square(root / name / f"{file}.png", i)
    (root / NOT_UTF8 / "bad\n\x1b.png").write_bytes(b"no image")
    (root / NOT_UTF8 / f"bad {NOT_UTF8}.png").write_bytes(b"no image")
    return root


def test_every_odd_name_survives_training_packing_and_embedding(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    root = odd_folder(tmp_path / NOT_UTF8)
    config = dataclasses.replace(TINY, dataset=f"folder:{root}", epochs=1, warmup_epochs=0, batch_size=64, holdout=0.0)
    with one_thread():
        run = pretrain(config, out=tmp_path / f"run {NOT_UTF8}", progress=False)
        embed(run, root, out=tmp_path / "e.npz")
    assert Run.read(run.path).config == config
    assert run.read_json("data.json")["classes"] == sorted(ODD_NAMES)
    found = read_arrays(tmp_path / "e.npz")["path"].tolist()
    assert found == sorted(f"{name}/{file}.png" for name in ODD_NAMES for file in ODD_NAMES[:12])
    assert all((root / name).exists() for name in found)
    out, shape = pack(root, tmp_path / "packed", size=8, progress=False)
    assert shape[0] == 12 * len(ODD_NAMES)
    assert open_array(out).classes == tuple(sorted(ODD_NAMES))
    for listing in (out.with_suffix(".bad-images.txt"), tmp_path / "e.npz.bad-images.txt"):
        lines = listing.read_bytes().split(b"\n")
        assert lines[0].startswith(rb"caf" + b"\xe9" + rb"/bad\n\x1b.png: UnidentifiedImageError")
        assert lines[1].startswith(b"caf\xe9/bad caf\xe9.png: UnidentifiedImageError")
        assert lines[2:] == [b""]
    assert "\x1b" not in capfd.readouterr().err


def test_bad_images_are_said_and_listed_and_the_list_goes_when_there_are_none_any_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for i in range(40):
        square(tmp_path / "in" / f"{i}.png", i)
    (tmp_path / "in" / "0.png").write_bytes(b"no image")
    main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--image-size", "8"])
    listing = tmp_path / "out.bad-images.txt"
    assert listing.exists()
    assert f"1 image could not be read and took no part: {listing}" in capsys.readouterr().err
    square(tmp_path / "in" / "0.png")
    pack(tmp_path / "in", tmp_path / "out", size=8, progress=False)
    assert not listing.exists()


def test_a_run_that_begins_again_has_no_list_of_an_earlier_one(tmp_path: Path):
    run = Run.create(tmp_path, TINY)
    (tmp_path / "bad-images.txt").write_text("x.png: damaged")
    run.append_metrics({"step": 10})
    run.rewind_metrics(10)
    assert (tmp_path / "bad-images.txt").exists()  # a resumed run may read only images that come after it
    run.rewind_metrics(0)
    assert not (tmp_path / "bad-images.txt").exists()


# ---- arrays


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.file,))


def declared(shape: tuple[int, ...], kind: str = "|u1") -> bytes:
    """The header of a .npy file of this shape, and a few bytes."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue() + bytes(640)


def archive(path: Path, **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(name.replace("_", "."), content)
    return path


def test_no_pickle_is_run_wherever_an_array_is_read(tmp_path: Path):
    trap, good = np.array([Trap(tmp_path / "sprung")] * 4, dtype=object), np.zeros((4, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "a.npy", trap, allow_pickle=True)
    np.savez(tmp_path / "b.npz", images=trap, allow_pickle=True)
    np.savez(tmp_path / "c.npz", images=good, labels=trap, allow_pickle=True)
    np.save(tmp_path / "d.npy", good)
    np.savez(tmp_path / "d.labels.npz", labels=trap, allow_pickle=True)
    for name in ("e.npy", "e.npz"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    (tmp_path / "f.npz").write_bytes((tmp_path / "a.npy").read_bytes())
    for file in ("a.npy", "b.npz", "c.npz", "d.npy", "e.npy", "e.npz", "f.npz"):
        with pytest.raises(UserError, match="is no array of numbers") as error:
            open_images(tmp_path / file, canvas=8, channels=3)
        assert "\n" not in str(error.value)
    np.savez(tmp_path / "features.npz", h=trap, allow_pickle=True)
    run = Run.create(tmp_path / "run", TINY)
    for file in ("features.npz", "e.npz", "f.npz"):
        run.keep("features-test.npz", lambda opened, file=file: opened.write((tmp_path / file).read_bytes()), by="")
        with pytest.raises(UserError, match=r"features-test\.npz is no array of numbers") as error:
            features.load(run, "features-test.npz")
        assert "\n" not in str(error.value)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("shape", [(10**13, 8, 8), (2**70, 8, 8), (-1, 8, 8), (2 * 10**8, 8, 8)])
def test_an_array_that_declares_more_than_it_holds_is_one_line(shape: tuple[int, ...], tmp_path: Path):
    (tmp_path / "x.npy").write_bytes(declared(shape))
    archive(tmp_path / "x.npz", images_npy=declared(shape))
    for read in (lambda: open_array(tmp_path / "x.npy"), lambda: open_array(tmp_path / "x.npz")):
        with pytest.raises(UserError, match=r"x\.np. is no array of numbers") as error:
            read()
        assert "\n" not in str(error.value)
    archive(tmp_path / "h.npz", h_npy=declared(shape, "<f4"))
    with pytest.raises(UserError, match=r"h\.npz is no array of numbers"):
        arrays_in((tmp_path / "h.npz").read_bytes(), path=tmp_path / "h.npz")


def test_an_archive_that_unpacks_to_more_than_the_memory_is_refused_before_it_is_read(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "many.npz", "w") as file:  # one small entry, listed ten thousand times
        file.writestr("images.npy", declared((10, 8, 8)))
        file.filelist[0].file_size = 2**32 - 2
        file.filelist *= 10_000
    with pytest.raises(UserError, match=r"many\.npz unpacks to 42,949\.7 GB, and [\d,.]+ GB are free"):
        read_arrays(tmp_path / "many.npz")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"labels": np.array([0, 1, 2, 10**13])}, "has a label 10000000000000 and 1,000,000 class names"),
        ({"labels": np.array([0, 1, 2, 2**64 - 1], dtype=np.uint64)}, "number the classes from 0"),
        ({"labels": np.arange(4), "classes": np.array("cat")}, "name them all in one list"),
        ({"labels": np.arange(4), "classes": np.array([["cat"]] * 4)}, "name them all in one list"),
        ({"labels": np.zeros(0, dtype=int)}, r"needed \(4,\) whole numbers"),
    ],
)
def test_labels_that_cannot_be_are_one_line(entries: dict[str, np.ndarray], said: str, tmp_path: Path):
    np.savez(tmp_path / "x.npz", images=np.zeros((4, 8, 8), dtype=np.uint8), **entries)
    with pytest.raises(UserError, match=said):
        open_array(tmp_path / "x.npz")


def test_no_images_with_no_labels_are_answered(tmp_path: Path):
    np.savez(tmp_path / "x.npz", images=np.zeros((0, 8, 8), dtype=np.uint8), labels=np.zeros(0, dtype=int))
    with pytest.raises(UserError, match="holds 0 images"):
        load(f"array:{tmp_path / 'x.npz'}")


def test_an_entry_that_is_no_array_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match=r"the entry images\.txt is no array"):
        open_array(archive(tmp_path / "x.npz", images_txt=b"hello"))
    with pytest.raises(UserError, match="has the entries none"):
        open_array(archive(tmp_path / "y.npz"))
