"""What the network sees: the views in a picture are those of the first step, pixel for pixel."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from curvssl.cli import main
from curvssl.config import AugmentConfig, PretrainConfig, UserError, demo
from curvssl.data.named import Dataset, load
from curvssl.data.own import own_images
from curvssl.report.seen import columns, draw, first_step, summary
from curvssl.train.loop import make_views, pretrain

PLAIN = AugmentConfig(crop_scale=(1, 1), flip=0, jitter=0, grayscale=0)
MANY: dict[str, Any] = {"local_views": 3, "local_size": 8, "alpha_chord": 1.0}
NAMES = ["image", "global 1", "global 2", "local 1", "local 2", "local 3", "blend"]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def noise(*shape: int) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


class Recorder(nn.Module):
    """An encoder that remembers what it is given in training."""

    given: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.given.append(x.detach().clone())
        return self.layers(x)


def test_the_columns_are_what_the_encoder_is_given_in_the_first_step(digits: Dataset, tmp_path: Path) -> None:
    config = dataclasses.replace(
        demo(), epochs=1, warmup_epochs=0, batch_size=64, device="cpu", monitor_every=0, **MANY
    )
    pretrain(config, encoder=Recorder(), out=tmp_path / "run", progress=False)
    whole = next(x for x in Recorder.given if len(x) == 3 * 64).unflatten(0, (3, 64))
    local = next(x for x in Recorder.given if len(x) == 3 * 64 and x.shape[-1] == 8).unflatten(0, (3, 64))
    shown = first_step(config, digits, images=5)  # the fifth is blended with the sixth, which is not shown
    assert list(shown) == NAMES
    for name, view in zip(NAMES[1:], [whole[0], whole[1], *local, whole[2]], strict=True):
        expected = (view[:5] * digits.std[0] + digits.mean[0]) * 255
        assert np.abs(shown[name] - expected[:, :1].numpy()).max() <= 0.51, name
    pixels = {image.tobytes() for image in digits.train.images.pixels.numpy()}
    assert all(image.tobytes() in pixels for image in shown["image"])
    assert summary(shown) == "5 images with 2 global views of 16×16, 3 local of 8×8, a blend"


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_without_augmentation_every_view_is_the_image(channels: int) -> None:
    images = noise(12, channels, 8, 8)
    config = PretrainConfig(image_size=8, augment=PLAIN, local_crop_scale=(1, 1), batch_size=12, **MANY)
    views = make_views(config, own_images(images, size=8))
    *u, _ = views.draw(12, generator=torch.Generator().manual_seed(0))
    whole = columns(views, images, [*u, torch.ones(1, 12, 1)])
    mean = images.double().mean(1, keepdim=True).round() if channels == 5 else images
    for name in NAMES:
        np.testing.assert_array_equal(whole[name], mean.numpy())
    # A blend by halves is the mean of the two images.
    halves = columns(views, images, [*u, torch.full((1, 12, 1), 0.5)])["blend"]
    exchanged = images[[1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10]]
    expected = ((images.double() + exchanged.double()) / 2).numpy()
    assert np.abs(halves - (expected.mean(1, keepdims=True) if channels == 5 else expected)).max() <= 1


def test_local_views_have_their_own_size(digits: Dataset) -> None:
    config = dataclasses.replace(demo(), local_views=2, local_size=5)
    shown = first_step(config, digits)
    assert [column.shape for column in shown.values()] == [(8, 1, n, n) for n in (8, 16, 16, 5, 5)]
    assert list(shown) == ["image", "global 1", "global 2", "local 1", "local 2"]


def test_too_few_images_to_blend_are_refused() -> None:
    data = own_images(noise(2, 1, 8, 8), size=8)
    config = PretrainConfig(image_size=8, holdout=0.5, alpha_chord=1)
    with pytest.raises(UserError, match="1 images to pretrain on: a blend needs two"):
        first_step(config, data)


def test_the_command_writes_the_pixels_of_an_array_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = noise(30, 5, 8, 16).numpy()  # five channels, and wider than high
    np.save(tmp_path / "pixels.npy", pixels)
    plain = "--augment.crop-scale 1 1 --augment.flip 0 --augment.jitter 0 --local-crop-scale 1 1 --image-size 8"
    words = f"{plain} --local-views 2 --local-size 8 --images 3".split()
    main(["views", f"array:{tmp_path / 'pixels.npy'}", *words, "--out", str(tmp_path / "views.png")])
    said = f"{tmp_path / 'views.png'}: 3 images with 2 global views of 8×8, 2 local of 8×8\n"
    assert capsys.readouterr().out == said
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["pixels.npy", "views.png"]
    with Image.open(tmp_path / "views.png") as image:
        picture = np.asarray(image.convert("RGB")).astype(int)
    assert picture.shape == (108 + 3 * 170 - 10 + 30, 30 + 5 * 170 - 10 + 20 + 30, 3)
    greys = {grey.tobytes() for grey in np.rint(pixels.astype(np.float64).mean(1)).astype(np.uint8)}
    for row in range(3):
        top = 108 + 170 * row
        whole = picture[top + 40 : top + 120, 30:190][5::10, 5::10]  # every pixel is a square of 10×10
        assert whole[..., 0].astype(np.uint8).tobytes() in greys
        assert (picture[top : top + 40, 30:190] == 255).all()  # paper above and below a wide image
        for left in (220, 390, 560, 730):
            square = picture[top : top + 160, left : left + 160]
            expected = whole[:, 4:12].repeat(20, 0).repeat(20, 1)  # the central square
            np.testing.assert_array_equal(square, expected)


def test_a_folder_with_a_long_name_gives_a_pdf(tmp_path: Path, digits: Dataset) -> None:
    folder = tmp_path / ("a-long-name-" * 12)
    folder.mkdir()
    for i in range(12):
        Image.fromarray(digits.train.images.pixels[i, 0].numpy()).save(folder / f"{i}.png")
    main(["views", f"folder:{folder}", "--image-size", "8", "--images", "2", "--out", str(tmp_path / "seen" / "v.PDF")])
    assert (tmp_path / "seen" / "v.PDF").read_bytes().startswith(b"%PDF")


def test_views_larger_than_a_cell_are_shrunk(tmp_path: Path) -> None:
    shown = {
        name: np.full((1, 3, n, n), 100, np.uint8) for name, n in (("image", 600), ("global 1", 512), ("global 2", 9))
    }
    draw(shown, title="large", out=tmp_path / "views.png")
    with Image.open(tmp_path / "views.png") as image:
        assert image.size == (30 + 3 * 266 - 10 + 20 + 30, 108 + 256 + 30)
        assert all(image.convert("RGB").getpixel((x, 200)) == (100, 100, 100) for x in (31, 400, 800))


def test_the_view_midway_between_the_global_ones_is_shown_and_named(digits: Dataset):
    shown = first_step(dataclasses.replace(demo(), alpha_path=1.0, device="cpu"), digits, images=2)
    assert list(shown) == ["image", "global 1", "global 2", "middle"]
    assert summary(shown) == "2 images with 2 global views of 16×16, one midway between the global ones"
