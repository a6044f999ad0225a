"""What a run is: frozen dataclasses, checked when they are made; a preset is a function that returns one.

A wrong value is answered here, before anything heavy is imported.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from curvssl import names
from curvssl.methods import METHODS, OWN, SETTINGS


class UserError(ValueError):
    """Something the user can mend; the command line prints it as one line and exits with 2."""


def unknown(what: str, name: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a list, with the nearest one that is."""
    return UserError(names.unknown(what, name, known))


CHOICES = {
    "method": tuple(METHODS),
    "stem": ("auto", "imagenet", "small"),
    "optimizer": ("adam", "sgd", "lars"),
    "schedule": ("constant", "cosine"),
    "precision": ("auto", "fp32", "bf16"),
    "device": ("auto", "cpu", "cuda"),
    "step": ("auto", "eager", "compiled", "captured"),
}


@dataclass(frozen=True)
class AugmentConfig:
    """How one view is made from one image; a probability or extent of 0 leaves the operation out."""

    crop_scale: tuple[float, float] = (0.2, 1.0)  # share of the image's area that the crop covers
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width over height of the crop
    flip: float = 0.5  # probability of a horizontal flip
    rotation: float = 0.0  # degrees, drawn uniformly from ± this
    jitter: float = 0.8  # probability of colour jitter
    brightness: float = 0.4  # jitter's factor is drawn from 1 ± this
    contrast: float = 0.4  # as brightness
    saturation: float = 0.4  # as brightness; RGB images only
    hue: float = 0.1  # jitter's shift of the hue, in turns, drawn from ± this; RGB images only
    grayscale: float = 0.2  # probability of dropping colour; RGB images only
    blur: float = 0.0  # probability of a Gaussian blur
    solarize: float = 0.0  # probability of inverting the bright half

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "grayscale", "blur", "solarize"):
            _within(name, getattr(self, name), 0, 1)
        for name in ("brightness", "contrast", "saturation"):
            _within(name, getattr(self, name), 0, 1)
        _within("hue", self.hue, 0, 0.5)
        _within("rotation", self.rotation, 0, 180)
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise UserError(f"crop_scale={self.crop_scale} needs 0 < low ≤ high ≤ 1")
        low, high = self.crop_ratio
        if not 1e-3 <= low <= high <= 1e3:
            raise UserError(f"crop_ratio={self.crop_ratio} needs 0.001 ≤ low ≤ high ≤ 1000")


# How the colours of some views differ from those of the first global one; what is not given is the same.
COLOURS = ("jitter", "brightness", "contrast", "saturation", "hue", "grayscale", "blur", "solarize")
Colours: Any = make_dataclass("Colours", [(name, float | None, None) for name in COLOURS], frozen=True, kw_only=True)
Colours.__doc__ = "Colours of the second global view (second) and of the local views (local).\n\nArgs:\n" + "".join(
    f"    {name}: as augment.{name}, which it replaces for these views\n" for name in COLOURS
)


# One field for each setting of any method. The docstring is what --help shows.
LossSettings: Any = make_dataclass(
    "LossSettings",
    [(name, setting.kind or type(setting.default), setting.default) for name, setting in SETTINGS.items()],
    frozen=True,
    kw_only=True,
)
LossSettings.__doc__ = f"The objective.\n\nArgs:\n    method: the objective: {', '.join(METHODS)}\n" + "".join(
    f"    {name}: {setting.help}\n" for name, setting in SETTINGS.items()
)


@dataclass(frozen=True)
class PretrainConfig(LossSettings):
    """Everything that decides what one pretraining run learns."""

    method: str = "curvssl"
    dataset: str = "digits"  # a named set (curvssl data lists them), folder:PATH or array:FILE
    seed: int = 0  # on CPU the same seed and number of threads give the same weights to the last bit
    epochs: int = 100  # passes over the training images
    batch_size: int = 256  # the global batch, over all devices; neighbours are sought inside it; 0: suits the images
    image_size: int = 32  # whole images are this many pixels wide and high; 0: suits the images and the device
    limit: int = 0  # train on at most so many of the images, drawn with the seed, for a quick try; 0: on all of them
    holdout: float = 0.1  # share of the training images kept out of pretraining, for the kNN monitor
    monitor_every: int = 5  # epochs between two runs of the monitor: kNN, and measures without labels; 0 never

    encoder: str = "resnet18"  # resnet18, resnet50, resnet-mini or timm:NAME
    stem: str = "imagenet"  # the ResNets' first layers: imagenet (7×7, stride 2, maxpool), small (3×3) or auto
    projector_width: int = 512  # width of the projector's hidden layers
    projector_depth: int = 2  # linear layers in the projector
    projector_norm: bool = False  # a BatchNorm without parameters behind the projector's last layer
    d_z: int = 128  # dimension of the embedding that the loss sees

    optimizer: str = "adam"  # adam, sgd or lars
    lr: float = 1e-3  # used as written; never rescaled by the batch size
    weight_decay: float = 1e-4  # pulls the weights towards 0; with lars not biases and norms
    momentum: float = 0.9  # for sgd and lars
    warmup_epochs: float = 0.0  # epochs over which the learning rate rises linearly from 0
    schedule: str = "constant"  # after the warm-up: constant, or cosine to 0

    average: float = 0.0  # decay, a step, of an average of the weights that is kept as the encoder; 0: the last weights
    teacher: bool = False  # whether that average embeds the global views, and all other views are compared with these

    precision: str = "auto"  # auto, fp32 or bf16; auto is bf16 (autocast) on CUDA and fp32 on CPU
    device: str = "auto"  # auto, cpu or cuda; auto is CUDA where there is one
    step: str = "auto"  # auto is captured on one CUDA device, compiled with several, eager on CPU
    checkpoint_seconds: float = 60.0  # a checkpoint is written when this much time has passed

    global_size: int = 0  # the two global views are this many pixels wide and high; 0: as image_size
    local_views: int = 0  # small views beside the two global ones, each compared with both
    local_size: int = 16  # local views are this many pixels wide and high
    local_crop_scale: tuple[float, float] = (0.05, 0.25)  # share of the image's area that a local view covers
    alpha_chord: float = 0.0  # weight of the chord, for which a blend of two images is one more view; 0 leaves it out
    alpha_path: float = 0.0  # weight of the path, for which a view midway between the global ones is one more; 0: none

    augment: AugmentConfig = field(default_factory=AugmentConfig)
    second: Colours = field(default_factory=Colours)
    local: Colours = field(default_factory=Colours)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and value >= 2**63:  # torch's integers have 64 bits
                raise UserError(f"{name}={value} needs to be below 2^63")
            if isinstance(value, float) and 3.4e38 < value < math.inf:  # and its floats here 32
                raise UserError(f"{name}={value} needs to be below 3.4e38")
        for name, known in CHOICES.items():
            if getattr(self, name) not in (*known, OWN if name == "method" else None):
                raise unknown(name, getattr(self, name), known)
        for name in ("epochs", "local_size", "projector_width", "projector_depth", "d_z"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} needs to be 1 or more")
        for name in ("lr", "eps"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise UserError(f"{name}={getattr(self, name)} needs to be a positive number")
        weights = [name for name, setting in SETTINGS.items() if isinstance(setting.default, float)]
        counts = ("limit", "batch_size", "image_size", "global_size", "local_views", "monitor_every", "seed")
        durations = ("warmup_epochs", "checkpoint_seconds")
        for name in (*weights, "alpha_chord", "alpha_path", "weight_decay", *durations, *counts):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise UserError(f"{name}={getattr(self, name)} needs to be 0 or more")
        _within("momentum", self.momentum, 0, 1)
        if not 0 <= self.average < 1:
            raise UserError(f"average={self.average} needs to be 0 or more, and below 1")
        if self.teacher and not self.average:
            raise UserError("the teacher is an average of the weights: give average=0.99, say")
        _within("holdout", self.holdout, 0, 0.5)
        if self.k < 2:
            raise UserError(f"k={self.k} has no pair of neighbours: use 2 or more")
        if 0 < self.batch_size <= self.k:
            raise UserError(f"batch_size={self.batch_size} needs more than k={self.k}: lower k or raise batch_size")
        if self.alpha_chord and self.batch_size % 2:
            raise UserError(f"batch_size={self.batch_size} has no pairs to blend for alpha_chord: use an even number")
        for name, seen in (("alpha_chord", "blends"), ("alpha_path", "middle view")):
            if getattr(self, name) and self.method == OWN:
                raise UserError(f"{name}={getattr(self, name)} is for a named method: an own criterion sees no {seen}")
        if self.alpha_path and self.alpha_chord:
            raise UserError(
                "alpha_path and alpha_chord have one more view each, and a step has room for one: set one to 0"
            )
        if self.second_augment() != self.augment and self.alpha_path:  # their settings are checked
            raise UserError("alpha_path needs two global views that are made alike: leave out what `second` changes")
        if self.local_views:
            self.local_augment()
        if self.warmup_epochs > self.epochs:
            raise UserError(f"warmup_epochs={self.warmup_epochs} is longer than the run's epochs={self.epochs}")
        for name, setting in SETTINGS.items():
            if isinstance(setting.default, str) and getattr(self, name) != setting.default:
                _accepted(name, getattr(self, name))

    @property
    def left_open(self) -> tuple[str, ...]:
        """The settings that are chosen when the images are known."""
        return tuple(name for name in OPEN if getattr(self, name) == OPEN[name])

    def suited(self, *, images: int, image_size: int, device: str) -> "PretrainConfig":
        """The same, with all that was left open chosen for so many images, whose views should have this size.

        batch_size: a power of two with which an epoch has 8 steps or more: with fewer, a small folder hardly moves the
            weights. At most 256, and at least 16, because k = 10 needs more than 10.
        stem: small for small views, where the other one throws pixels away; on a CPU it would take too long.
        """
        batch_size = min(256, max(16, 2 ** int(math.log2(max(1, images / 8)))))
        small = device == "cuda" and (self.image_size or image_size) <= 64
        chosen = {"batch_size": batch_size, "image_size": image_size, "stem": "small" if small else "imagenet"}
        return dataclasses.replace(self, **{name: chosen[name] for name in self.left_open})

    def loss_settings(self) -> dict[str, Any]:
        """What the run's own method is told."""
        return {name: getattr(self, name) for name in METHODS[self.method].settings}

    @property
    def view_size(self) -> int:
        """Of the global views."""
        return self.global_size or self.image_size

    def second_augment(self) -> AugmentConfig:
        """How the second global view is made: as the first, but for what `second` says."""
        return _changed(self.augment, self.second, what="second view")

    def local_augment(self) -> AugmentConfig:
        """How a local view is made: as the first global one, but for its crop and what `local` says."""
        return _changed(self.augment, self.local, what="local views", crop_scale=self.local_crop_scale)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PretrainConfig":
        """The inverse of `to_dict`, through JSON, where tuples have become lists."""
        values = _with_tuples(values)
        augment = _with_tuples(values.pop("augment", {}))
        second, local = (values.pop(name, {}) for name in ("second", "local"))
        known = {f.name for kind in (cls, AugmentConfig, Colours) for f in dataclasses.fields(kind)}
        for name in (*values, *augment, *second, *local):
            if name not in known:
                raise UserError(f"setting {name!r} is unknown, so it was written by a newer version: update curvssl")
        views = {"augment": AugmentConfig(**augment), "second": Colours(**second), "local": Colours(**local)}
        return cls(**values, **views)


OPEN: dict[str, Any] = {"batch_size": 0, "image_size": 0, "stem": "auto"}  # such a value is chosen for the images

# What may differ between two commands that continue the same run: none of it decides what is learned.
FREE = ("device", "step", "checkpoint_seconds")


def differences(old: PretrainConfig, new: PretrainConfig) -> str:
    """The settings that decide what is learned and differ, each with both values; empty if there are none."""
    then, now = _flat(old.to_dict()), _flat(new.to_dict())
    return "; ".join(f"{n} {then[n]} → {now[n]}" for n in now if then[n] != now[n] and n not in FREE)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def all_but_the_seed(config: dict[str, Any]) -> str:
    """A key that two configurations share if nothing that decides what is learned differs but the seed."""
    same = {name: value for name, value in config.items() if name not in ("seed", *FREE)}
    return json.dumps(same, sort_keys=True, default=str)


def _accepted(name: str, value: Any) -> None:
    """What is not a plain number is judged by the loss that it is for."""
    method = next(method for method in METHODS.values() if name in method.settings)
    try:
        method.make(**{name: value})
    except ValueError as error:
        raise UserError(str(error)) from None


def _changed(augment: AugmentConfig, colours: Any, *, what: str, **changes: Any) -> AugmentConfig:
    changes |= {name: value for name, value in vars(colours).items() if value is not None}
    try:
        return dataclasses.replace(augment, **changes)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UserError(f"{name}={value} needs to be between {low} and {high}")


def default() -> PretrainConfig:
    """What `curvssl pretrain` takes without a preset, for any images: the usual settings of Barlow Twins. The paper's
    own, λ_emb = 1 at a constant rate from the first step on, may end in a trap (docs/reproduction.md)."""
    return PretrainConfig(
        batch_size=0,
        image_size=0,
        stem="auto",
        projector_width=2048,
        projector_depth=3,
        d_z=1024,
        lambda_emb=0.0051,  # Barlow Twins' own: with 1 the off-diagonal drowns the diagonal
        warmup_epochs=10,
        schedule="cosine",
    )


def demo() -> PretrainConfig:
    """scikit-learn's digits in about half a minute a method on two cores."""
    return PretrainConfig(
        dataset="digits",
        encoder="resnet-mini",
        image_size=16,
        epochs=16,
        batch_size=128,
        projector_width=128,
        d_z=64,
        lambda_emb=1 / 64,  # with 1 and so few steps the off-diagonal drowns the diagonal
        lr=2e-3,
        warmup_epochs=2,
        schedule="cosine",
        augment=AugmentConfig(crop_scale=(0.6, 1.0), flip=0, rotation=10, jitter=0, grayscale=0),
    )


def paper_mnist() -> PretrainConfig:
    """The paper's MNIST run; a line with a reason is a setting that the paper does not state."""
    return PretrainConfig(
        dataset="mnist",
        epochs=100,
        batch_size=256,
        k=10,
        d_z=128,
        optimizer="adam",
        lr=1e-3,
        weight_decay=1e-4,
        lambda_emb=1,
        lambda_curv=1,
        alpha_curv=1,
        encoder="resnet18",
        stem="imagenet",  # the paper says ResNet-18; its authors' other code takes torchvision's as it is
        image_size=28,  # MNIST's own size
        projector_width=512,  # "a two-layer MLP": the encoder's width is the usual choice
        projector_depth=2,
        # Not in the paper either: the BatchNorm between the two layers, which is Barlow Twins's; ε, VICReg's weights
        # (methods.py).
        gamma="median",  # "RBF": no width is given; a median of medians (kernel_width) needs no tuning
        schedule="constant",  # none is mentioned; on CIFAR-10 cosine is no better (docs/reproduction.md)
        warmup_epochs=10,  # not in the paper: a tenth of the run; CIFAR-10 needs one to keep out of a trap
        holdout=0.0,  # the paper pretrains on the whole training split
        monitor_every=25,  # not in the paper, and changes nothing of what is learned
        augment=AugmentConfig(
            crop_scale=(0.3, 1.0),  # "random resized crops": the best of three on held-out images
            rotation=10,  # "small rotations"
            flip=0,  # a mirrored digit is another sign
            jitter=0,
            grayscale=0,
        ),
    )


def paper_cifar10() -> PretrainConfig:
    """The paper's CIFAR-10 run; a line with a reason is a setting that the paper does not state."""
    return dataclasses.replace(
        paper_mnist(),
        dataset="cifar10",
        epochs=500,
        image_size=32,  # CIFAR-10's own size
        warmup_epochs=80,  # not in the paper: with λ_emb = 1 and small crops, after ten it falls into a trap
        augment=AugmentConfig(
            crop_scale=(0.08, 1.0),  # "random resized crops": the best of four on held-out images
            flip=0.5,
            jitter=0.8,  # "color jitter": the usual strengths
            brightness=0.4,
            contrast=0.4,
            saturation=0.4,
            hue=0.1,
            grayscale=0.2,  # "random grayscale": the usual probability
        ),
    )


def fast_cifar10() -> PretrainConfig:
    """A good CIFAR-10 encoder in a few minutes on one fast GPU, with what the study `strong` found (docs/notebook.md,
    section 9). The curvature term is not in it: nothing that we measured says that it would help."""
    return dataclasses.replace(
        default(),
        method="barlow-twins",
        dataset="cifar10",
        epochs=110,
        warmup_epochs=8,
        batch_size=256,
        image_size=32,
        stem="small",
        optimizer="lars",  # better than Adam
        lr=0.03,  # LARS takes at most this; solo-learn's 0.3 is for a tenth of the loss
        weight_decay=1e-3,
        local_views=4,  # better than two views alone
        local_crop_scale=(0.1, 0.4),  # better than 0.05 to 0.25
        holdout=0.0,
        monitor_every=25,
    )


def strong_cifar10() -> PretrainConfig:
    """The recipe of `fast_cifar10` with smaller global views, for 17 minutes of an H200."""
    return dataclasses.replace(
        fast_cifar10(),
        epochs=780,
        warmup_epochs=10,
        global_size=24,  # better than 32, and faster
        monitor_every=50,
    )


def strong_mnist() -> PretrainConfig:
    """The recipe of `fast_cifar10` for MNIST. Not run yet."""
    return dataclasses.replace(
        fast_cifar10(),
        dataset="mnist",
        epochs=60,  # digits need fewer
        warmup_epochs=4,
        image_size=28,
        local_size=14,
        local_crop_scale=(0.2, 0.5),  # less of a digit is a stroke that all digits have
        augment=paper_mnist().augment,  # no flip, no colours, small rotations
    )


def strong_fashion_mnist() -> PretrainConfig:
    """The recipe of `strong_mnist` for Fashion-MNIST. Not run yet."""
    digits = strong_mnist()
    augment = dataclasses.replace(digits.augment, flip=0.5, rotation=0)  # clothes can be mirrored, and hang straight
    return dataclasses.replace(digits, dataset="fashion-mnist", epochs=100, warmup_epochs=8, augment=augment)


def strong_cifar100() -> PretrainConfig:
    """The recipe of `fast_cifar10` for CIFAR-100. Not run yet."""
    return dataclasses.replace(fast_cifar10(), dataset="cifar100", epochs=200, warmup_epochs=10)


def strong_svhn() -> PretrainConfig:
    """The recipe of `fast_cifar10` for SVHN. Not run yet."""
    augment = AugmentConfig(flip=0, rotation=10)  # they are digits
    return dataclasses.replace(fast_cifar10(), dataset="svhn", augment=augment)


def strong_stl10() -> PretrainConfig:
    """The recipe of `fast_cifar10` for STL-10, with its images without labels. Not run yet."""
    return dataclasses.replace(
        fast_cifar10(),
        dataset="stl10",
        image_size=96,
        local_size=48,
        stem="imagenet",  # the 3×3 stem on nine times the pixels would take nine times as long
    )


PRESETS: dict[str, Callable[[], PretrainConfig]] = {
    "default": default,
    "demo": demo,
    "paper-mnist": paper_mnist,
    "paper-cifar10": paper_cifar10,
    "fast-cifar10": fast_cifar10,
    "strong-cifar10": strong_cifar10,
    "strong-mnist": strong_mnist,
    "strong-fashion-mnist": strong_fashion_mnist,
    "strong-cifar100": strong_cifar100,
    "strong-svhn": strong_svhn,
    "strong-stl10": strong_stl10,
}
