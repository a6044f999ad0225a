"""Large views on a CPU: made one at a time, and by worker processes, they are the views that a step makes itself."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from curvssl.config import AugmentConfig, PretrainConfig, UserError, demo
from curvssl.data import memory
from curvssl.data import views as augment
from curvssl.data.folders import open_images
from curvssl.data.pack import pack
from curvssl.data.viewed import viewed
from curvssl.data.views import Augment, Views
from curvssl.rundir import Run
from curvssl.train import loop

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of any size are made one at a time, so that the tests are fast."""
    monkeypatch.setattr(augment, "LARGE", 1)


def every_kind() -> Views:
    """Two global views with augmentations of their own, local ones, and blends."""

    def made(size: int, **settings: object) -> Augment:
        return Augment(size=size, mean=MEAN, std=STD, **settings)

    return Views(
        made(16, blur=0.5),
        second=made(16, solarize=0.5),
        local=made(8, rotation=20),
        n=2,
        blends=True,
    )


def photographs(folder: Path, *, n: int) -> None:
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for i in range(n):
        Image.fromarray(numbers.integers(0, 256, (24, 30, 3), dtype=np.uint8)).save(folder / f"{i:02}.png")


@pytest.mark.usefixtures("all_large")
def test_workers_make_the_views_of_the_main_process_to_the_last_bit(tmp_path: Path) -> None:
    photographs(tmp_path / "in", n=40)
    (tmp_path / "in" / "07.png").write_bytes(b"damaged")
    images, again = (open_images(tmp_path / "in", canvas=20, channels=3) for _ in range(2))
    views, numbers = every_kind(), torch.Generator().manual_seed(0)
    # Ten images are two whole chunks and a part of one. There are more steps than batches in memory.
    steps = [(torch.randperm(40, generator=numbers)[:10], views.draw(10, generator=numbers)) for _ in range(7)]
    read = again.batches((rows for rows, _ in steps), workers=0)
    count = 0
    for made, pixels, (_, u) in zip(viewed(images, views, steps, b=10, workers=2), read, steps, strict=True):
        expected = views(pixels, u)
        assert [batch.shape for batch in made] == [(30, 3, 16, 16), (20, 3, 8, 8)]
        assert all(one.equal(other) for one, other in zip(made, expected, strict=True))
        assert all(batch.is_contiguous(memory_format=torch.channels_last) for batch in made)
        count += 1
    assert count == 7
    assert images.bad == again.bad
    assert list(images.bad) == [7]


@pytest.mark.usefixtures("all_large")
def test_an_error_of_a_worker_is_one_line(tmp_path: Path) -> None:
    photographs(tmp_path / "in", n=8)
    packed, _ = pack(tmp_path / "in", tmp_path / "packed.npy", size=16, progress=False)
    with packed.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    views = Views(Augment(size=8, mean=MEAN, std=STD))
    steps = [(torch.arange(8), views.draw(8, generator=torch.Generator()))]
    with pytest.raises(UserError, match=r"^image 7 of .* has changed since it was packed"):
        next(viewed(open_images(packed, canvas=16, channels=3), views, steps, b=8, workers=1))


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize(
    ("height", "width", "size"), [(40, 30, 24), (150, 120, 32), (20, 20, 33)], ids=["usual", "shrunk", "enlarged"]
)
@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"rotation": 20, "blur": 0.5},
        {"crop_scale": (1.0, 1.0), "hue": 0},
        {"jitter": 1, "hue": 0.5, "brightness": 1, "contrast": 1, "saturation": 1},
    ],
    ids=["default", "strong", "whole", "colours"],
)
def test_one_at_a_time_gives_the_values_of_the_batch(
    recipe: dict, height: int, width: int, size: int, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = torch.Generator().manual_seed(0)
    images = torch.randint(256, (24, channels, height, width), generator=numbers, dtype=torch.uint8)
    images[:, :, : height // 4] = images[:, :1, : height // 4]  # grey, black and white: without a hue
    images[:, :, :2], images[:, :, 2:4] = 0, 255
    model = Augment(size=size, mean=MEAN[:1] * channels, std=STD[:1] * channels, **recipe)
    u = torch.rand(24, model.draws, generator=numbers)
    monkeypatch.setattr(augment, "LARGE", 1000)
    batched = model(images, u)
    monkeypatch.setattr(augment, "LARGE", 1)
    torch.testing.assert_close(model(images, u), batched, atol=3e-5, rtol=0)


def test_the_bits_of_a_large_view_depend_neither_on_threads_nor_on_the_rest_of_the_batch() -> None:
    numbers = torch.Generator().manual_seed(0)
    model = Augment(size=224, mean=MEAN, std=STD, rotation=20, blur=0.5, solarize=0.4)
    images = torch.randint(256, (6, 3, 260, 250), generator=numbers, dtype=torch.uint8)
    u = torch.rand(6, model.draws, generator=numbers)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = model(images, u)
        torch.set_num_threads(1)
        alone = [model(image[None], row[None]) for image, row in zip(images, u, strict=True)]
    finally:
        torch.set_num_threads(threads)
    assert together.equal(torch.cat(alone))


def trained(data: str, out: Path) -> dict[str, torch.Tensor]:
    small = {"dataset": data, "image_size": 8, "epochs": 2, "batch_size": 16, "k": 5, "d_z": 8, "projector_width": 16}
    many = {"local_views": 1, "local_size": 6, "alpha_chord": 1.0}
    config: PretrainConfig = dataclasses.replace(
        demo(), warmup_epochs=0, monitor_every=0, augment=AugmentConfig(), **(small | many)
    )
    return loop.pretrain(config, out=out, progress=False).load_net().state_dict()


@pytest.mark.usefixtures("all_large")
def test_training_ends_with_the_same_weights_whoever_makes_the_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: Callable[[int], None]
) -> None:
    """In memory or streamed, by workers or by the main process, and after a stop in the middle of an epoch."""
    numbers = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", numbers.integers(0, 256, (72, 10, 10, 3), dtype=np.uint8))
    data = f"array:{tmp_path / 'x.npy'}"
    found = [trained(data, tmp_path / "resident")]
    monkeypatch.setattr(loop, "POSSIBLE", False)
    found.append(trained(data, tmp_path / "by itself"))
    monkeypatch.setattr(loop, "POSSIBLE", True)
    monkeypatch.setattr(memory, "fits", lambda *_, **__: False)
    stop_at(5)
    with pytest.raises(loop.Stopped):
        trained(data, tmp_path / "streamed")
    stop_at(-1)
    found.append(trained(data, tmp_path / "streamed"))
    kept = [
        Run.read(tmp_path / name).read_json("provenance.json")["images_in_memory"] for name in ("resident", "streamed")
    ]
    assert kept == [True, False]
    for weights in found[1:]:
        assert all(weights[name].equal(value) for name, value in found[0].items())
