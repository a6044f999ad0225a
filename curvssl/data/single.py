"""Augmentation of one large image at a time, on a CPU: the values of views.py up to rounding, several times faster.

A CPU can look at the numbers, so a crop touches only its own pixels and an operation that is off costs nothing, and one
image stays in the cache. Every operation rounds each pixel once, and sums are numpy's. So the bits of a view depend
neither on the number of threads nor on the other images of the batch: worker processes and the main process make the
same views.

Shapes: images (C, H, W), float32 in 0..1. Functions whose name ends in an underscore change their image.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION = range(3)
LUMINANCE = (0.2989, 0.587, 0.114)  # ITU-R 601, rounded as in torchvision
FAINT = 1e-8  # weight of a pixel in a blur that changes no float32


def taps(length: Tensor, *, target: int) -> list[tuple[Tensor, Tensor]]:
    """What `views.resample_weights` gives for boxes of `length` (b,) pixels, without its zeros. For each box: the
    numbers of K source pixels for every target pixel, counted from the start of the box, and their weights, both
    (K, target)."""
    step = length[:, None] / target
    reach = step.clamp_min(1)
    centre = step * (torch.arange(target) + 0.5)
    first = (centre - reach - 0.5).floor() + 1
    needed = [int(count) for count in (2 * reach[:, 0]).ceil().tolist()]
    pixel = first[:, None] + torch.arange(max(needed, default=1))[:, None]  # (b, K, target), with the largest K
    last = length[:, None, None] - 1
    weight = (1 - (pixel + 0.5 - centre[:, None]).abs() / reach[:, None]).clamp_min(0)
    weight = weight * ((pixel >= 0) & (pixel <= last))
    total = sum(weight.unbind(1)[1:], weight[:, 0])  # term by term: zeros at the end do not change it
    pixel, weight = torch.minimum(pixel.clamp_min(0), last).long(), weight / total[:, None]
    return [(numbers[:k], weights[:k]) for numbers, weights, k in zip(pixel, weight, needed, strict=True)]


def pick(x: Tensor, pixels: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of rows: (C, H, W), (K, S), (K, S) → (C, S, W)."""
    first, *others = (x.index_select(1, rows).mul_(share[:, None]) for rows, share in zip(pixels, weights, strict=True))
    for other in others:
        first.add_(other)
    return first


def resample(x: Tensor, rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
    """A box (C, h, w) resized to (C, S, S) with the `taps` of its rows and columns."""
    # Whole rows are copied fast, single pixels are not: the columns are picked as rows of the transposed image.
    return pick(pick(x, *rows).mT.contiguous(), *columns).mT.contiguous()


def luminance(x: Tensor) -> Tensor:
    """Grey value (H, W) of an RGB image."""
    red, green, blue = (share * plane for share, plane in zip(LUMINANCE, x, strict=True))
    return red.add_(green).add_(blue)


def blend_(x: Tensor, factor: float, kind: int) -> None:
    """`views.blend` of one image."""
    if kind == CONTRAST:
        means = x.flatten(1).numpy().mean(1).tolist()
        shares = LUMINANCE if len(x) == 3 else [1 / len(x)] * len(x)
        x.mul_(factor).add_((1 - factor) * sum(share * mean for share, mean in zip(shares, means, strict=True)))
    elif kind == SATURATION:
        grey = luminance(x).mul_(1 - factor)
        x.mul_(factor).add_(grey)
    else:
        x.mul_(factor)
    x.clamp_(0, 1)


def shift_hue_(x: Tensor, turns: float) -> None:
    """`views.shift_hue` of one image.

    With the hue h in sixths of the circle, a channel is m + c · clamp(2 − d, 0, 1): m is the least channel, c the
    chroma, and d in [0, 3] the distance of h from the channel's own hue: 0, 2, −2 for red, green, blue. Hence the
    distance from red is 1 + (g + b − r − m) / c, and h has the sign of g − b.
    """
    red, green, blue = x
    least = torch.minimum(torch.minimum(red, green), blue)
    chroma = torch.maximum(torch.maximum(red, green), blue).sub_(least)
    side = green - blue
    x.sub_(least)
    hue = chroma.add(green).add_(blue).sub_(red).div_(chroma.clamp_min(1e-20))  # grey has chroma 0 and any hue
    hue = hue.copysign_(side).add_(6 * turns)
    for plane, own in zip(x, (0, 2, -2), strict=True):
        torch.sub(hue, own, out=plane)
    x.sub_(x.mul(1 / 6).round_().mul_(6)).abs_().neg_().add_(2).clamp_(0, 1).mul_(chroma).add_(least)


def colour_jitter_(
    x: Tensor, factors: Sequence[float], kinds: Sequence[int], turns: float = 0.0, slot: float = 0.0
) -> None:
    """`views.colour_jitter` of one image: blends in turn, and the hue shifted after the first `slot` of them. Only RGB
    has saturation and hue. What would change nothing is left out."""
    rgb = len(x) == 3
    for n in range(len(kinds) + 1):
        if n == slot and turns and rgb:
            shift_hue_(x, turns)
        if n < len(kinds) and factors[n] != 1 and (rgb or kinds[n] != SATURATION):
            blend_(x, factors[n], kinds[n])


def blur(x: Tensor, sigma: float, *, kernel: int) -> Tensor:
    """`views.gaussian_blur` of one image, without the pixels that are too far away to count."""
    reach = kernel // 2
    bell = [math.exp(-0.5 * (d / sigma) ** 2) for d in range(reach + 1)]
    weights = [weight for weight in (height / (2 * sum(bell) - 1) for height in bell) if weight > FAINT]
    reach = len(weights) - 1
    x = F.pad(x, (reach,) * 4, mode="reflect")
    for axis in (2, 1):
        size = x.shape[axis] - 2 * reach
        total = x.narrow(axis, reach, size) * weights[0]
        for d, weight in enumerate(weights[1:], 1):
            total.add_((x.narrow(axis, reach - d, size) + x.narrow(axis, reach + d, size)).mul_(weight))
        x = total
    return x
