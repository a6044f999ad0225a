"""Images that are passed to `curvssl.pretrain`: a uint8 tensor or array, or a map-style torch Dataset."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from curvssl.config import UserError
from curvssl.data.arrays import channels_first
from curvssl.data.decode import GREY, central_square, flattened
from curvssl.data.folders import CANVAS, spread, statistics
from curvssl.data.images import DecodedImages, Images, TensorImages, check_share, why
from curvssl.data.named import Dataset, Split
from curvssl.files import say
from curvssl.methods import OWN


def own_images(images: Any, *, size: int) -> Dataset:
    """The images as a data set without labels and without a test split, for views of `size` pixels."""
    own = as_images(images, size=size)
    if len(own) < 2:
        raise UserError(f"{len(own)} images were given: pretraining compares images, so give it many")
    mean, std, digest = statistics(own)
    shape = "×".join(map(str, own.shape[1:]))
    say(f"{type(images).__name__} from Python: {len(own):,} images of {shape} to pretrain on, without labels")
    described = {"kind": type(images).__name__, "sample": digest}
    if own.pixels is not None:
        described["pixels"] = own.here()
    return Dataset(OWN, Split(own, None), Split(own[:0], None), (), mean, std, described)


def as_images(images: Any, *, size: int = 224) -> Images:
    """A tensor, an array or a Dataset as `Images`; `Images` are returned unchanged."""
    if isinstance(images, Images):
        return images
    if isinstance(images, Tensor | np.ndarray):
        array = images.detach().cpu().numpy() if isinstance(images, Tensor) else images
        if array.dtype != np.uint8:
            raise UserError(f"the images are {array.dtype}: needed uint8, 0 … 255; scale and convert them first")
        return TensorImages.of(torch.from_numpy(np.ascontiguousarray(channels_first(array, path="the images given"))))
    if hasattr(images, "__getitem__") and hasattr(images, "__len__"):
        return _framed(images, size=size)
    raise UserError(
        f"images are {type(images).__name__}: needed a uint8 tensor or array (N, C, H, W), or a map-style torch Dataset"
    )


@dataclass(frozen=True)
class DatasetImages(DecodedImages):
    """Items of a map-style Dataset. An item is an image, or a tuple whose first entry is one."""

    dataset: Any

    @property
    def source_size(self) -> int:
        return len(self.dataset)

    def name(self, image: int) -> str:
        return f"item {image}"

    def decode(self, image: int) -> np.ndarray:
        square = central_square(flattened(self.picture(image), mode="L" if self.channels == 1 else "RGB"))
        pixels = np.asarray(square.resize((self.canvas, self.canvas), Image.Resampling.BILINEAR))
        return pixels[None] if self.channels == 1 else pixels.transpose(2, 0, 1)

    def here(self) -> str:
        return f"a {type(self.dataset).__name__} of {len(self.dataset):,} items"

    def picture(self, image: int) -> Any:
        """The item as a PIL image."""
        item = self.dataset[image]
        item = item[0] if isinstance(item, tuple | list) else item
        if isinstance(item, Image.Image):
            return item
        if isinstance(item, Tensor) and item.ndim == 3:
            item = item.permute(1, 2, 0)
        pixels = np.asarray(item)
        if (
            pixels.dtype != np.uint8
            or pixels.ndim not in (2, 3)
            or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3))
        ):
            raise UserError(
                f"item {image} of the Dataset is {pixels.dtype} {pixels.shape}: needed a PIL image, or uint8 pixels "
                "of 1 or 3 channels; leave out what turns images into floats"
            )
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels)


def _framed(dataset: Any, *, size: int) -> DatasetImages:
    """All items, on a canvas larger than the views, but no larger than the median image. One channel if all
    are grey."""
    if len(dataset) == 0:
        raise UserError("the Dataset is empty: give it images")
    images = DatasetImages(torch.arange(len(dataset)), 3, round(CANVAS * size), dataset)
    sides, greys = [], []
    sample = spread(len(dataset)).tolist()
    for i in sample:
        try:
            picture = images.picture(i)
            sides.append(min(picture.size))
            greys.append(picture.mode in GREY)
        except UserError:
            raise
        except Exception as error:  # a Dataset can raise any error
            images.bad[i] = f"item {i}: {why(error)}"
    if images.bad:
        check_share(len(images.bad), len(sample), example=next(iter(images.bad.values())))
    canvas = min(images.canvas, int(np.median(sides)))
    return DatasetImages(images.rows, 1 if all(greys) else 3, canvas, dataset, bad=images.bad)
