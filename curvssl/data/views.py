"""Batched augmentation on the device: views as a pure function of (uint8 images, uniform numbers).

The random numbers are drawn outside. So the same numbers give the same views on one process or many, eager, compiled
or captured in a CUDA graph. Each operation is a function of tensors whose parameters have one entry per image, and
equals torchvision's functional of the same name. No operation waits for the device or branches on its values. On a CPU,
large views are made one at a time instead, by the operations of single.py, which give the same values faster.

Shapes: images (b, C, H, W). Colour operations work on planes, one (b, H, W) tensor per channel: they mix channels, and
with planes the compiler fuses the whole chain into one kernel.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvssl.config import AugmentConfig, UserError
from curvssl.data import single
from curvssl.data.single import BRIGHTNESS, CONTRAST, LUMINANCE, SATURATION
from curvssl.losses import GLOBAL
from curvssl.losses import blend as blend_pairs

Planes = tuple[Tensor, ...]

ATTEMPTS = 10  # boxes that torchvision draws before it takes the central one
BLUR_SIGMA = (0.1, 2.0)
CACHED = 700_000  # pixels per block of small images on a CPU: more do not fit into its cache
LARGE = 96  # pixels: views of such images, or of this size, are made one at a time on a CPU; small ones are not faster
SOLARIZE_FROM = 0.5


def uniform(u: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Numbers in [low, high) from numbers in [0, 1)."""
    return low + (high - low) * u


def integers(u: Tensor, count: int | Tensor) -> Tensor:
    """Integers 0 … count − 1, as floats, from u in [0, 1); the largest float below 1 still gives count − 1."""
    return (u * count).floor()


# --- geometry ---------------------------------------------------------------------------------------------------------


def crop_box(
    u: Tensor, *, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(top, left, height, width) of a random box, integers (b,) each, from u (b, 22): torchvision's RandomResizedCrop.

    The area is uniform in `scale` (a share of the image), log(width / height) is uniform in log `ratio`. The first of
    ten attempts that fits is taken; if none fits, the largest central box whose ratio lies in `ratio`.
    """
    u_area, u_ratio, u_top, u_left = u.split([ATTEMPTS, ATTEMPTS, 1, 1], dim=1)
    area = height * width * uniform(u_area, *scale)
    aspect = uniform(u_ratio, math.log(ratio[0]), math.log(ratio[1])).exp()
    w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()  # (b, 10)
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = fits.int().argmax(1, keepdim=True)
    w, h, any_fits = w.gather(1, first), h.gather(1, first), fits.any(1, keepdim=True)

    central_h = min(height, max(1, round(width / ratio[0])))
    central_w = min(width, max(1, round(height * ratio[1])))
    top = torch.where(any_fits, integers(u_top, height - h + 1), (height - central_h) // 2)
    left = torch.where(any_fits, integers(u_left, width - w + 1), (width - central_w) // 2)
    h, w = torch.where(any_fits, h, central_h), torch.where(any_fits, w, central_w)
    return top.squeeze(1), left.squeeze(1), h.squeeze(1), w.squeeze(1)


def resample_weights(start: Tensor, length: Tensor, *, source: int, target: int) -> Tensor:
    """W (b, target, source): row t has the weights of the source pixels in [start, start + length) for target pixel t.

        W[t, s] ∝ max(0, 1 − |s + ½ − c_t| / max(1, r)),   c_t = start + r (t + ½),   r = length / target

    Rows sum to one. This is the bilinear interpolation of a crop; for r > 1 the filter is wider, against aliasing.
    """
    start, length = start[:, None, None], length[:, None, None]
    step = length / target
    centre = start + step * (torch.arange(target, device=start.device)[:, None] + 0.5)  # (b, target, 1)
    pixel = torch.arange(source, device=start.device) + 0.5
    weight = (1 - (pixel - centre).abs() / step.clamp_min(1)).clamp_min(0)
    weight = weight * ((pixel > start) & (pixel < start + length))
    return weight / weight.sum(-1, keepdim=True)


def resample(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows · x · columnsᵀ per image and channel: (b, S, H), (b, C, H, W), (b, S, W) → (b, C, S, S)."""
    x = (x.flatten(1, 2) @ columns.mT).unflatten(1, x.shape[1:3])
    return rows[:, None] @ x


def resize(x: Tensor, *, size: int) -> Tensor:
    """The largest central square, resized to (size, size) if it has another size."""
    side = min(x.shape[-2:])
    top, left = (x.shape[-2] - side) // 2, (x.shape[-1] - side) // 2
    x = x[..., top : top + side, left : left + side]
    return x if side == size else F.interpolate(x, size=(size, size), mode="bilinear", antialias=True)


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """Each image rotated counter-clockwise about its centre by its own angle (b,), bilinear, black outside."""
    height, width = x.shape[-2:]
    cos, sin = degrees.deg2rad().cos()[:, None, None], degrees.deg2rad().sin()[:, None, None]
    right = torch.arange(width, device=x.device) + (0.5 - width / 2)  # pixel centres, origin in the middle
    down = torch.arange(height, device=x.device)[:, None] + (0.5 - height / 2)
    grid = torch.stack([(cos * right - sin * down) * (2 / width), (sin * right + cos * down) * (2 / height)], dim=-1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


# --- colour -----------------------------------------------------------------------------------------------------------


def luminance(planes: Planes) -> Tensor:
    """Grey value (b, H, W): weighted for RGB, the plain mean for any other number of channels."""
    if len(planes) == 3:
        red, green, blue = (share * plane for share, plane in zip(LUMINANCE, planes, strict=True))
        return red + green + blue
    return sum(planes[1:], planes[0]) / len(planes)


def blend(planes: Planes, factor: Tensor, kind: Tensor) -> Planes:
    """factor · x + (1 − factor) · base, clamped to [0, 1], where each image has its own factor (b,) and kind (b,):
    BRIGHTNESS blends with black, CONTRAST with the image's mean grey, SATURATION with its grey version.
    """
    factor, kind = factor[:, None, None], kind[:, None, None]
    grey = luminance(planes)
    mean = grey.mean((1, 2), keepdim=True)
    # Two coefficients per image select the base, which costs less than a selection at every pixel.
    base = (1 - factor) * (kind == CONTRAST) * mean + (1 - factor) * (kind == SATURATION) * grey
    return tuple(torch.addcmul(base, factor, plane).clamp(0, 1) for plane in planes)


def shift_hue(planes: Planes, turns: Tensor) -> Planes:
    """Hue shifted by `turns` (b,) of the full circle; value v and chroma c of HSV do not change.

    With the hue h in sixths of the circle, a channel is v − c · clamp(min(k, 4 − k), 0, 1), k = (n + h) mod 6, and
    n = 5, 3, 1 for red, green, blue.
    """
    r, g, b = planes
    value = torch.maximum(torch.maximum(r, g), b)
    chroma = value - torch.minimum(torch.minimum(r, g), b)
    divisor = torch.where(chroma == 0, 1, chroma)  # grey pixels have no hue; with chroma 0 any hue gives grey
    hue = torch.where(
        value == r, (g - b) / divisor, torch.where(value == g, (b - r) / divisor + 2, (r - g) / divisor + 4)
    )
    hue = hue + 6 * turns[:, None, None]
    offsets = (k - 6 * (k / 6).floor() for k in (hue + 5, hue + 3, hue + 1))  # mod 6; `remainder` is not vectorised
    return tuple(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in offsets)


def blend_in_turn(planes: Planes, factors: Tensor, kinds: Tensor) -> Planes:
    """The blends with factors (b, n) and kinds (b, n), left to right: each image also has its own order."""
    for factor, kind in zip(factors.unbind(1), kinds.unbind(1), strict=True):
        planes = blend(planes, factor, kind)
    return planes


def colour_jitter(planes: Planes, factors: Tensor, kinds: Tensor, turns: Tensor, slot: Tensor) -> Planes:
    """Blends as in `blend_in_turn`, with the hue shifted by `turns` (b,) after the first `slot` (b,) of them.

    The hue shift runs once for the whole batch, between two rounds of blends. A blend that belongs to one round is the
    identity (factor 1) in the other.
    """
    early = torch.arange(kinds.shape[1], device=slot.device) < slot[:, None]  # (b, n)
    planes = blend_in_turn(planes, torch.where(early, factors, 1), kinds)
    planes = shift_hue(planes, turns)
    return blend_in_turn(planes, torch.where(early, 1, factors), kinds)


def grayscale(planes: Planes, on: Tensor) -> Planes:
    """The grey version in every channel where `on` (b,)."""
    grey = luminance(planes)
    return tuple(torch.where(on[:, None, None], grey, plane) for plane in planes)


# --- filters ----------------------------------------------------------------------------------------------------------


def gaussian_blur(x: Tensor, sigma: Tensor, *, kernel: int) -> Tensor:
    """Each image blurred with its own sigma (b,), a window of `kernel` (odd) pixels, borders reflected."""
    reach = kernel // 2
    distance = torch.arange(-reach, reach + 1, device=x.device)
    taps = (-0.5 * (distance / sigma[:, None]).square()).softmax(1)[:, :, None, None, None]  # (b, kernel, 1, 1, 1)
    height, width = x.shape[-2:]
    x = F.pad(x, (reach, reach, reach, reach), mode="reflect")
    # Shifted sums instead of a grouped convolution: each image has its own kernel, and the compiler fuses each line.
    x = sum((taps[:, t] * x[..., t : t + width] for t in range(1, kernel)), taps[:, 0] * x[..., :width])
    return sum((taps[:, t] * x[..., t : t + height, :] for t in range(1, kernel)), taps[:, 0] * x[..., :height, :])


def solarize(x: Tensor, on: Tensor) -> Tensor:
    """Values of one half or more are inverted, where `on` (b,)."""
    return torch.where(on[:, None, None, None] & (x >= SOLARIZE_FROM), 1 - x, x)


def normalise(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(x − mean) / std per channel; grey is repeated to RGB: (b, C, H, W) → (b, 3 or C, H, W)."""
    channels = 3 if x.shape[1] == 1 else x.shape[1]
    if len(mean) not in (1, channels):
        raise UserError(
            f"mean and std have {len(mean)} entries for images of {channels} channels: give 1 or {channels} of each"
        )
    x = x.expand(-1, channels, -1, -1)
    return (x - mean[:, None, None]) / std[:, None, None]


def prepare(images: Tensor, *, size: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """The evaluation transform: central square, resized if needed, grey to RGB, normalised. uint8 in, float32 out."""
    x = resize(images.float() / 255, size=size)
    return normalise(x, torch.tensor(mean, device=x.device), torch.tensor(std, device=x.device))


# --- the recipe -------------------------------------------------------------------------------------------------------


class Augment(nn.Module):
    """One random view per image: crop, flip, rotation, colour jitter, grayscale, blur, solarize, normalise.

    The other keywords are the fields of `AugmentConfig`, with its defaults (the CIFAR recipe) and its checks. An
    operation with probability or strength 0, or the crop with crop_scale (1, 1), is left out and needs no uniform
    numbers.
    """

    mean: Tensor  # (1,) or (C,)
    std: Tensor
    orders: Tensor  # (n!, n): every order of the n blends in use
    kinds: Tensor  # (n,): BRIGHTNESS, CONTRAST or SATURATION
    amounts: Tensor  # (n,): factors are drawn from [1 − amount, 1 + amount)

    def __init__(self, *, size: int, mean: Sequence[float], std: Sequence[float], **settings: Any) -> None:
        super().__init__()
        self.size = size
        self.recipe = recipe = AugmentConfig(**settings)
        self.blur_kernel = max(3, size // 10 | 1)  # SimCLR's tenth of the image, odd
        amounts = (recipe.brightness, recipe.contrast, recipe.saturation)
        kinds = [kind for kind in (BRIGHTNESS, CONTRAST, SATURATION) if amounts[kind] > 0]
        hue = 1 * (recipe.hue > 0)
        self.jitter_columns = [1, 1, len(kinds), hue, hue]  # on or off, order, factors, turns, slot
        uniforms = {
            "crop": (2 * ATTEMPTS + 2) * (tuple(recipe.crop_scale) != (1, 1)),
            "flip": 1 * (recipe.flip > 0),
            "rotation": 1 * (recipe.rotation > 0),
            "jitter": sum(self.jitter_columns) * (recipe.jitter > 0 and len(kinds) + hue > 0),
            "grayscale": 1 * (recipe.grayscale > 0),
            "blur": 2 * (recipe.blur > 0),
            "solarize": 1 * (recipe.solarize > 0),
        }
        self.uniforms = {name: count for name, count in uniforms.items() if count}
        self.draws = sum(self.uniforms.values())
        buffers = {
            "mean": torch.tensor(mean, dtype=torch.float32),
            "std": torch.tensor(std, dtype=torch.float32),
            "orders": torch.tensor(list(itertools.permutations(range(len(kinds)))), dtype=torch.long),
            "kinds": torch.tensor(kinds, dtype=torch.long),
            "amounts": torch.tensor([amounts[kind] for kind in kinds]),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, images: Tensor, u: Tensor) -> Tensor:
        """images uint8 (b, C, H, W), u float32 (b, draws) in [0, 1) → float32 (b, 3 or C, size, size), normalised."""
        if images.dtype != torch.uint8 or u.shape != (len(images), self.draws):
            raise ValueError(
                f"got {images.dtype} images and u {tuple(u.shape)}, need uint8 and ({len(images)}, {self.draws})"
            )
        # bfloat16 has no more digits than a uint8 pixel, so autocast would visibly round the views.
        with torch.autocast(images.device.type, enabled=False):
            portion = len(images)
            if images.device.type == "cpu" and not torch.compiler.is_compiling():
                if self.is_large(images.shape):
                    return self._one_by_one(images, self.named(u))
                portion = max(1, CACHED // (images.shape[1] * self.size**2))
            views = [
                self._views(x.float() / 255, self.named(v))
                for x, v in zip(images.split(portion), u.split(portion), strict=True)
            ]
            return torch.cat(views) if len(views) > 1 else views[0]

    def is_large(self, shape: Sequence[int]) -> bool:
        """Whether a CPU makes the views of images of this shape (b, C, H, W) one at a time."""
        return max(self.size, *shape[2:]) >= LARGE

    def named(self, u: Tensor) -> dict[str, Tensor]:
        """The columns of u that belong to each operation."""
        return dict(zip(self.uniforms, u.split(list(self.uniforms.values()), dim=1), strict=True))

    def _views(self, x: Tensor, u: dict[str, Tensor]) -> Tensor:
        recipe = self.recipe
        x = self._framed(x, u)
        if "rotation" in u:
            x = rotate(x, uniform(u["rotation"][:, 0], -recipe.rotation, recipe.rotation))
        if "jitter" in u or ("grayscale" in u and x.shape[1] == 3):
            x = self._coloured(x, u)
        if "blur" in u:
            on, u_sigma = u["blur"].split(1, dim=1)
            blurred = gaussian_blur(x, uniform(u_sigma[:, 0], *BLUR_SIGMA), kernel=self.blur_kernel)
            x = torch.where(on[:, :, None, None] < recipe.blur, blurred, x)
        if "solarize" in u:
            x = solarize(x, u["solarize"][:, 0] < recipe.solarize)
        return normalise(x, self.mean, self.std)

    @torch.no_grad()
    def _one_by_one(self, images: Tensor, u: dict[str, Tensor]) -> Tensor:
        """`_views` on a CPU, image by image (single.py), in channels_last."""
        recipe, (b, channels, _, _) = self.recipe, images.shape
        jitter = [part.tolist() for part in self.jitter_parameters(u["jitter"])] if "jitter" in u else []
        grey, blurred, solarized = (self._on(name, u, b) for name in ("grayscale", "blur", "solarize"))
        shape = (b, 3 if channels == 1 else channels, self.size, self.size)
        views = torch.empty(shape, memory_format=torch.channels_last)
        for i, x in enumerate(self._framed_one_by_one(images, u)):
            if "rotation" in u:
                x = rotate(x[None], uniform(u["rotation"][i], -recipe.rotation, recipe.rotation))[0]
            if jitter:
                single.colour_jitter_(x, *(part[i] for part in jitter))
            if grey[i] and channels == 3:
                x = single.luminance(x)[None]
            if blurred[i]:
                x = single.blur(x, float(uniform(u["blur"][i, 1], *BLUR_SIGMA)), kernel=self.blur_kernel)
            if solarized[i]:
                x = torch.where(x >= SOLARIZE_FROM, 1 - x, x)
            views[i] = normalise(x[None], self.mean, self.std)[0]
        return views

    def _framed_one_by_one(self, images: Tensor, u: dict[str, Tensor]) -> Iterator[Tensor]:
        """`_framed` on a CPU: float32 images (C, size, size)."""
        flipped = self._on("flip", u, len(images))
        if "crop" not in u:
            for image, flip in zip(images, flipped, strict=True):
                x = resize(image[None].float() / 255, size=self.size)[0]
                yield x.flip(-1) if flip else x
            return
        height, width = images.shape[2:]
        box = crop_box(
            u["crop"], height=height, width=width, scale=self.recipe.crop_scale, ratio=self.recipe.crop_ratio
        )
        rows, columns = (single.taps(length, target=self.size) for length in box[2:])
        for i, (top, left, h, w) in enumerate(zip(*(part.int().tolist() for part in box), strict=True)):
            x = images[i, :, top : top + h, left : left + w].float() / 255
            yield single.resample(x, rows[i], [part.flip(1) for part in columns[i]] if flipped[i] else columns[i])

    def _on(self, name: str, u: dict[str, Tensor], b: int) -> list[bool]:
        """Whether an operation is on, for each image."""
        return (u[name][:, 0] < getattr(self.recipe, name)).tolist() if name in u else [False] * b

    def _framed(self, x: Tensor, u: dict[str, Tensor]) -> Tensor:
        """Crop, resize and flip by two batched matrix products; a flip reverses the weights of the columns."""
        flipped = u["flip"][:, :, None] < self.recipe.flip if "flip" in u else None  # (b, 1, 1)
        if "crop" not in u:
            x = resize(x, size=self.size)
            return x if flipped is None else torch.where(flipped[..., None], x.flip(-1), x)
        height, width = x.shape[-2:]
        top, left, h, w = crop_box(
            u["crop"], height=height, width=width, scale=self.recipe.crop_scale, ratio=self.recipe.crop_ratio
        )
        rows = resample_weights(top, h, source=height, target=self.size)
        columns = resample_weights(left, w, source=width, target=self.size)
        if flipped is not None:
            columns = torch.where(flipped, columns.flip(1), columns)
        return resample(x, rows, columns)

    def _coloured(self, x: Tensor, u: dict[str, Tensor]) -> Tensor:
        """Colour jitter and grayscale."""
        recipe, rgb, planes = self.recipe, x.shape[1] == 3, x.unbind(1)
        grey = u["grayscale"][:, 0] < recipe.grayscale if "grayscale" in u and rgb else None
        if "jitter" in u:
            factors, kinds, turns, slot = self.jitter_parameters(u["jitter"])
            if rgb and recipe.hue > 0 and grey is not None:
                return self.jitter_and_grey(x, factors, kinds, turns, slot, grey)
            if rgb and recipe.hue > 0:
                planes = colour_jitter(planes, factors, kinds, turns, slot)
            else:  # grey images have no saturation
                factors = factors if rgb else torch.where(kinds == SATURATION, 1, factors)
                planes = blend_in_turn(planes, factors, kinds)
        return torch.stack(planes if grey is None else grayscale(planes, grey), dim=1)

    @staticmethod
    def jitter_and_grey(x: Tensor, factors: Tensor, kinds: Tensor, turns: Tensor, slot: Tensor, grey: Tensor) -> Tensor:
        """`colour_jitter` of RGB images (b, 3, H, W), then `grayscale`; a faster function may replace this one."""
        return torch.stack(grayscale(colour_jitter(x.unbind(1), factors, kinds, turns, slot), grey), dim=1)

    def jitter_parameters(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Factors and kinds (b, n) of the blends in order, and turns and slot (b,) of the hue, if hue is in use.

        A random order of the blends and a random slot for the hue give a random order of all, as in torchvision.
        """
        u_on, u_order, u_factors, u_turns, u_slot = u.split(self.jitter_columns, dim=1)
        on = u_on < self.recipe.jitter  # (b, 1)
        order = self.orders[integers(u_order[:, 0], len(self.orders)).long()]
        factors = uniform(u_factors, 1 - self.amounts, 1 + self.amounts).gather(1, order)
        turns = uniform(u_turns, -self.recipe.hue, self.recipe.hue)
        slot = integers(u_slot, 1 + len(self.kinds))
        return torch.where(on, factors, 1), self.kinds[order], torch.where(on, turns, 0).squeeze(1), slot.squeeze(1)


class Views(nn.Module):
    """What a step sees of each image: two global views, n local ones of another size, and perhaps either a blend of the
    first view with that of another image or a view midway between the global ones (`losses.ViewPath`). All views of one
    size are one batch, one view below the other.

    `second` makes the second global view, if it has an augmentation of its own.
    """

    def __init__(
        self,
        augment: Augment,
        *,
        second: Augment | None = None,
        local: Augment | None = None,
        n: int = 0,
        blends: bool = False,
        middle: bool = False,
    ) -> None:
        super().__init__()
        pair = [(GLOBAL, augment)] if second is None else [(1, augment), (1, second)]
        small = [(n, local)] if local is not None and n else []
        self.makers: Any = nn.ModuleList(maker for _, maker in (*pair, *small))
        self.counts = [count for count, _ in (*pair, *small)]  # the views that each of them makes
        self.members = [slice(0, len(pair)), *(slice(len(pair), len(pair) + 1) for _ in small)]  # of each batch
        self.sizes = [augment.size, *(maker.size for _, maker in small)]
        self.blends, self.middle = blends, middle

    @property
    def passes(self) -> tuple[int, ...]:
        """The number of views in each batch."""
        first, *others = (sum(self.counts[members]) for members in self.members)
        return first + self.blends + self.middle, *others

    def draw(self, b: int, *, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The uniform numbers of b images, (views, b, numbers) for each maker; for blends also t (1, b, 1)."""
        shapes = [(n, b, maker.draws) for n, maker in zip(self.counts, self.makers, strict=True)]
        shapes += [(1, b, 1)] * self.blends
        return tuple(torch.rand(shape, generator=generator, device=generator.device) for shape in shapes)

    def are_large(self, shape: Sequence[int]) -> bool:
        """Whether a CPU makes all views of images of this shape (b, C, H, W) one at a time."""
        return all(maker.is_large(shape) for maker in self.makers)

    def t(self, u: Sequence[Tensor]) -> Tensor | None:
        """The share (b,) of each image in its blend, or of the first view in the middle one."""
        if self.middle:
            return u[0].new_full(u[0].shape[1:2], 0.5)
        return u[-1].flatten() if self.blends else None

    def forward(self, images: Tensor, u: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """uint8 images (b, C, H, W) → one batch for each size, (views · b, 3 or C, size, size), in channels_last."""
        return tuple(self.batch(i, images, u) for i in range(len(self.members)))

    def batch(self, i: int, images: Tensor, u: Sequence[Tensor]) -> Tensor:
        """The i-th batch of views."""
        members = self.members[i]
        if self.middle and i == 0:
            u = [torch.cat((u[0], u[0].mean(0, keepdim=True))), *u[1:]]
        made = [
            maker(torch.cat([images] * len(numbers)), numbers.flatten(0, 1))
            for maker, numbers in zip(self.makers[members], u[members], strict=True)
        ]
        if self.blends and i == 0:
            made.append(blend_pairs(made[0][: len(images)], self.t(u))[0])
        views = torch.cat(made) if len(made) > 1 else made[0]
        return views.contiguous(memory_format=torch.channels_last)
