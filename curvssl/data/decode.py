"""Decode one image file to uint8 pixels on a square canvas, as an image viewer would show it.

It is rotated as its EXIF data says. Transparency becomes white. 16 bits are scaled to 8 (65535 is white), never
clipped. Palettes, CMYK and other colour spaces become RGB. The canvas is the largest central square, resized with
antialiasing.
"""

import os
import warnings
from typing import Any

import numpy as np

from curvssl.files import check_regular

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".jp2", ".avif", ".tga"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
# Pillow's names of the formats that are decoded, whatever a file's suffix says. Pillow knows more, and hands one of
# them, PostScript, to another program.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "JPEG2000", "PPM", "TGA", "AVIF")
GREY = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"})
DEEP = frozenset({"I", "I;16", "I;16L", "I;16B", "I;16N"})  # 16-bit grey


def is_image(name: str) -> bool:
    """By its suffix alone: other files are ignored, and files with such a suffix that cannot be read are reported."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def header(path: str) -> tuple[int, bool]:
    """The shorter side in pixels and whether the image is grey, without decoding it."""
    with _strict(), _opened(path) as image:
        return min(image.size), image.mode in GREY


def decode(path: str, *, canvas: int, channels: int) -> np.ndarray:
    """uint8 (channels, canvas, canvas), with 1 or 3 channels. Raises any error that a damaged file causes."""
    from PIL import Image, ImageOps

    with _strict(), _opened(path) as image:
        # A JPEG decoder can halve the size at almost no cost; the last halving is left to resize, which is better.
        image.draft("L" if channels == 1 else None, (2 * canvas, 2 * canvas))
        ImageOps.exif_transpose(image, in_place=True)
        square = central_square(flattened(image, mode="L" if channels == 1 else "RGB"))
        square = square.resize((canvas, canvas), Image.Resampling.BILINEAR)
    pixels = np.asarray(square)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def central_square(image: Any) -> Any:
    """The largest square in the middle of an image."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))


def flattened(image: Any, *, mode: str) -> Any:
    """The image in mode L or RGB."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed white: save it with 8 or 16 bits, or as an array")
    if image.mode in DEEP:
        # Pillow would clip at 255. Mode I holds 32 bits, but the values of 16-bit files stay below 65536.
        scaled = np.rint(np.asarray(image).astype(np.float32) / 257).clip(0, 255)
        image = Image.fromarray(scaled.astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def _opened(path: str) -> Any:
    from PIL import Image

    check_regular(path)
    return Image.open(path, formats=FORMATS)


class _strict(warnings.catch_warnings):
    """A decompression bomb (above Pillow's limit of 89 million pixels) is an error; Pillow's other warnings are not."""

    def __enter__(self) -> None:
        from PIL import Image

        super().__enter__()
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
