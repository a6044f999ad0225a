"""A user's own criterion, encoder and images in `curvssl.pretrain`: trained, recorded, and resumed or refused."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pipeline import TINY, one_thread, rows, weights
from torch import Tensor, nn

import curvssl
from curvssl.config import UserError
from curvssl.data.named import load
from curvssl.methods import METHODS
from curvssl.train.loop import Stopped, pretrain

FAST = dataclasses.replace(TINY, batch_size=320, monitor_every=0, holdout=0.0)  # four steps per epoch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return load("digits").train.images.pixels


class Bank(nn.Module):
    """Barlow Twins with a learnt gain, a count of the steps, and a memory of the last embeddings."""

    def __init__(self, *, size: int = 8, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("bank", torch.zeros(size, TINY.d_z))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        loss = curvssl.BarlowTwinsLoss(lambda_emb=TINY.lambda_emb)(z0, z1)
        drift = (z0.mean(0) - self.bank.mean(0)).square().sum()
        self.bank.copy_(z0[: len(self.bank)].detach())
        self.steps += 1
        return self.weight * loss + 1e-3 * drift * self.gain


class Flat(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, width), nn.BatchNorm1d(width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Pairs(torch.utils.data.Dataset):
    """Digits with their labels, as PIL images, tensors or arrays."""

    def __init__(self, pixels: Tensor, kind: str) -> None:
        self.pixels, self.kind = pixels, kind

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> Any:
        x = self.pixels[i]
        made = {"pil": lambda: Image.fromarray(x[0].numpy()), "tensor": lambda: x, "array": lambda: x[0].numpy()}
        return made[self.kind]() if self.kind == "array" else (made[self.kind](), i % 10)


def seeded(module: type[nn.Module], **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return module(**settings)


def test_a_criterion_that_is_one_of_ours_trains_as_the_method_does(tmp_path: Path):
    named = pretrain(FAST, out=tmp_path / "named", progress=False)
    given = pretrain(
        FAST, out=tmp_path / "given", progress=False, criterion=METHODS["curvssl"].make(**FAST.loss_settings())
    )
    assert weights(given.path) == weights(named.path)
    assert rows(given.path) == rows(named.path)
    assert (given.config.method, named.config.method) == ("own", "curvssl")


def test_own_images_train_as_the_same_images_by_name(tmp_path: Path, pixels: Tensor):
    named = pretrain(FAST, out=tmp_path / "named", progress=False)
    # A named data set has a fixed mean and deviation; those of other images are computed from a sample.
    for kind, images in {"tensor": pixels, "array": pixels[:, 0].numpy()}.items():
        run = pretrain(FAST, out=tmp_path / kind, progress=False, images=images)
        assert run.read_json("data.json")["mean"] == pytest.approx(named.read_json("data.json")["mean"], abs=0.01)
        assert rows(run.path)[-1]["loss"] == pytest.approx(rows(named.path)[-1]["loss"], rel=0.05)
    assert weights(tmp_path / "tensor") == weights(tmp_path / "array")


def test_a_dataset_gives_the_same_weights_whatever_its_items_are(tmp_path: Path, pixels: Tensor):
    pixels = pixels[:400]  # one step an epoch
    for kind in ("pil", "tensor", "array"):
        pretrain(FAST, out=tmp_path / kind, progress=False, images=Pairs(pixels, kind))
    pretrain(FAST, out=tmp_path / "pixels", progress=False, images=pixels)
    assert weights(tmp_path / "pil") == weights(tmp_path / "tensor") == weights(tmp_path / "array")
    assert weights(tmp_path / "pil") == weights(tmp_path / "pixels")


def test_a_stopped_run_goes_on_with_the_criterions_buffers_and_the_own_encoder(
    tmp_path: Path, pixels: Tensor, stop_at: Callable[[int], None]
):
    parts: dict[str, Any] = {"images": pixels, "progress": False}
    made = lambda: {"criterion": seeded(Bank), "encoder": seeded(Flat)}  # noqa: E731
    pretrain(FAST, out=tmp_path / "whole", **parts, **made())
    stop_at(5)
    given = made()
    before = copy.deepcopy({name: part.state_dict() for name, part in given.items()})
    with pytest.raises(Stopped):
        pretrain(FAST, out=tmp_path / "stopped", **parts, **given)
    for name, part in given.items():  # the given modules are not changed
        torch.testing.assert_close(part.state_dict(), before[name], rtol=0, atol=0)
    stop_at(-1)
    state = curvssl.Run.read(tmp_path / "stopped").load_checkpoint()
    assert state is not None
    assert int(state["criterion"]["steps"]) == 6
    assert float(state["criterion"]["gain"]) != 1  # it is trained
    assert state["criterion"]["bank"].abs().sum() > 0
    run = pretrain(FAST, out=tmp_path / "stopped", **parts, **made())
    assert weights(run.path) == weights(tmp_path / "whole")
    assert rows(run.path) == rows(tmp_path / "whole")
    encoder = curvssl.load_encoder(run.path, encoder=Flat())
    assert not encoder.training
    assert encoder(torch.zeros(2, 3, 8, 8)).shape == (2, 12)
    with pytest.raises(UserError, match=r"was given to curvssl\.pretrain in Python"):
        curvssl.load_encoder(run.path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"criterion": Bank(weight=2.0)}, "another criterion (weight 1.0 → 2.0)"),
        ({"criterion": Bank(size=9)}, "another criterion (shape of bank"),
        ({"criterion": curvssl.BarlowTwinsLoss()}, "another criterion (class"),
        ({"encoder": Flat(width=13)}, "another encoder (layers.1.out_features 12 → 13"),
        ({"criterion": None}, "holds a run with other settings (method own → curvssl)"),
        ({"images": "fewer"}, "own has changed since"),
    ],
)
def test_a_run_refuses_to_go_on_with_something_else(
    change: dict[str, Any], said: str, tmp_path: Path, pixels: Tensor, stop_at: Callable[[int], None]
):
    given: dict[str, Any] = {"criterion": Bank(), "encoder": Flat(), "images": pixels}
    stop_at(0)
    with pytest.raises(Stopped):
        pretrain(FAST, out=tmp_path, progress=False, **given)
    if change.get("images") == "fewer":
        change = {"images": pixels[:-1]}
    with pytest.raises(UserError) as error:
        pretrain(FAST, out=tmp_path, progress=False, **given | change)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


class Vector(nn.Module):
    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        return (z0 - z1).square().sum(1)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"images": torch.zeros(9, 3, 8, 8)}, "the images are float32: needed uint8"),
        ({"images": np.zeros((9, 8), np.uint8)}, "needed (N, H, W), (N, H, W, C) or (N, C, H, W)"),
        ({"images": 7}, "images are int: needed a uint8 tensor or array (N, C, H, W), or a map-style torch Dataset"),
        ({"images": [torch.zeros(3, 8, 8)] * 400}, "item 0 of the Dataset is float32 (8, 8, 3): needed a PIL image"),
        ({"images": torch.zeros(1, 3, 8, 8, dtype=torch.uint8)}, "1 images were given"),
        ({"criterion": Vector()}, "the criterion returned (320,): needed one number"),
        ({"encoder": nn.Conv2d(3, 4, 3)}, "the encoder gives (4, 6, 6) an image"),
    ],
)
def test_what_cannot_be_trained_is_one_clear_line(parts: dict[str, Any], said: str, tmp_path: Path):
    with pytest.raises(UserError) as error:
        pretrain(FAST, out=tmp_path, progress=False, **parts)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["method", "encoder", "dataset"])
def test_own_by_name_says_how_to_give_it(name: str, tmp_path: Path):
    with pytest.raises(UserError, match=r"own is what was given in Python: call curvssl.pretrain\(config, \w+=…\)"):
        pretrain(dataclasses.replace(FAST, **{name: "own"}), out=tmp_path)
