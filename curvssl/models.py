"""The networks: the encoder f and the projector g."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvssl.config import UserError, unknown
from curvssl.losses import GLOBAL


class ResNetMini(nn.Module):
    """A three-stage ResNet for the demo's 16×16 digits: 32, 64, 128 channels, one block per stage."""

    def __init__(self, *, channels: int) -> None:
        super().__init__()
        from torchvision.models.resnet import BasicBlock

        def block(wide_in: int, wide_out: int) -> nn.Module:
            shortcut = nn.Sequential(nn.Conv2d(wide_in, wide_out, 1, 2, bias=False), nn.BatchNorm2d(wide_out))
            return BasicBlock(wide_in, wide_out, 2, shortcut)

        self.stem = nn.Sequential(nn.Conv2d(channels, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.stages = nn.Sequential(BasicBlock(32, 32), block(32, 64), block(64, 128))

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x)).mean((2, 3))


@contextmanager
def no_search() -> Iterator[None]:
    """Turn off cuDNN's search for the fastest convolutions, which training turns on: for shapes that are used once."""
    searches = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = searches


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute in full float32: by default torch lets convolutions on CUDA round to TF32."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    kinds: list[Any] = [cudnn.conv, cudnn.rnn, matmul]  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32 = before[0] == "tf32"  # torch raises an error where it disagrees with conv and rnn
        for kind, precision in zip(kinds, before, strict=True):
            if kind.fp32_precision != precision:
                kind.fp32_precision = precision


def make_encoder(
    name: str, *, stem: str = "imagenet", channels: int = 3, size: int = 224, any_size: bool = False
) -> nn.Module:
    """A backbone that maps (b, channels, size, size) to (b, d_h): one of ENCODERS, or timm:NAME. With `any_size` it
    takes images of other sizes as well, if it can."""
    if name.startswith("timm:"):
        return _timm(name.removeprefix("timm:"), channels=channels, size=size, any_size=any_size)
    if name not in ENCODERS:
        raise unknown("encoder", name, (*ENCODERS, "timm:NAME"))
    return ENCODERS[name](stem=stem, channels=channels)


def _resnet(name: str, *, stem: str, channels: int) -> nn.Module:
    """torchvision's ResNet without its classifier; the stem `small` does not lower the resolution."""
    from torchvision import models

    net = getattr(models, name)(weights=None)
    net.fc = nn.Identity()  # h is the output of the average pool
    if stem == "small":
        net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    elif channels != 3:
        net.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return net


ENCODERS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": partial(_resnet, "resnet18"),
    "resnet50": partial(_resnet, "resnet50"),
    "resnet-mini": lambda *, stem, channels: ResNetMini(channels=channels),  # it has only one stem
}


def _timm(name: str, *, channels: int, size: int, any_size: bool) -> nn.Module:
    try:
        import timm
    except ModuleNotFoundError:
        raise UserError(f"encoder timm:{name} needs timm: pip install 'curvssl[timm]'") from None
    known = timm.list_models()
    if name not in known:  # timm knows more than a thousand, so the message lists only the most similar ones
        raise unknown("timm backbone", name, [*difflib.get_close_matches(name, known, n=5, cutoff=0), "…"])
    make = partial(timm.create_model, name, pretrained=False, num_classes=0, in_chans=channels)
    numbers = torch.get_rng_state()
    attempts: list[dict[str, Any]] = [{"img_size": size, "dynamic_img_size": True}] if any_size else []
    # Networks that take any size, like ResNets, have no parameter img_size.
    for sizes in (*attempts, {"img_size": size}, {}):
        with _taking(size):
            try:
                net = make(**sizes)
                break
            except TypeError as error:
                if "img_size" not in str(error):
                    raise
                torch.set_rng_state(numbers)  # as if the failed attempt had drawn nothing
    for part in net.modules():
        if isinstance(part, timm.layers.PatchEmbed) and not part.dynamic_img_pad:
            _check_patches(name, known, patch=max(part.patch_size), size=size)
            break  # later PatchEmbeds divide features, not images
    return net


def _check_patches(name: str, known: Sequence[str], *, patch: int, size: int) -> None:
    """An error if patches do not fill the image: timm would silently ignore the pixels after the last whole patch."""
    if size % patch == 0:
        return
    below = size // patch * patch
    advice = "use --image-size " + " or ".join(str(near) for near in (below, below + patch) if near)
    names = {p: re.sub(r"patch\d+", f"patch{p}", name) for p in range(1, size + 1) if size % p == 0}
    others = [p for p in names if names[p] != name and names[p] in known]
    if others:
        advice += f", or --encoder timm:{names[min(others, key=lambda p: abs(p - patch))]}"
    raise UserError(
        f"timm:{name} cuts images into patches of {patch}×{patch}, which do not fill {size}×{size}: {advice}"
    )


@contextmanager
def _taking(size: int, *, flag: str = "--image-size") -> Iterator[None]:
    """Turn a network's error about the image size into one line."""
    try:
        yield
    except (RuntimeError, AssertionError, ValueError, ArithmeticError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"the encoder does not take images of {size}×{size} ({reason}): use another {flag} or --encoder"
        ) from None


def make_projector(d_h: int, *, width: int, depth: int, d_z: int, norm: bool) -> nn.Module:
    """(Linear – BatchNorm – ReLU) × (depth − 1), then Linear to d_z; `norm` adds a BatchNorm without parameters."""
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(d_h, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
        d_h = width
    layers.append(nn.Linear(d_h, d_z))
    if norm:
        layers.append(nn.BatchNorm1d(d_z, affine=False))
    return nn.Sequential(*layers)


class Seen:
    """What the batch holds that a network sees; its BatchNorms read it."""

    views = GLOBAL
    counted = GLOBAL  # the first of the views, which move the running statistics


class Net(nn.Module):
    """z = g(f(x)), the network that is pretrained."""

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projector = encoder, projector
        self.passes: tuple[int, ...]
        self.seen, self.passes = Seen(), (GLOBAL,)

    def forward(self, x: Tensor, *smaller: Tensor) -> Tensor:
        """Views of another size are a batch of their own. The encoder sees one batch at a time, the projector all.

        Running statistics are those of the two global views, because the encoder will be used on whole images.
        """
        features = []
        for i, views in enumerate((x, *smaller)):
            self.seen.views, self.seen.counted = self.passes[i], 0 if i else GLOBAL
            features.append(self.encoder(views))
        return self.project(features)

    def project(self, features: Sequence[Tensor]) -> Tensor:
        """z of all views: the two global ones, the local ones, then blends, which come in the first batch."""
        first, *local = features
        both = GLOBAL * len(first) // self.passes[0]
        self.seen.views, self.seen.counted = sum(self.passes), GLOBAL
        return self.projector(torch.cat((first[:both], *local, first[both:])) if local else first)


class PerView:
    """Mixin for a BatchNorm: a batch (V · b, …) holds V views, and each is normalised by its own statistics.

    One pass over all views is faster than many. The result is that of one pass for each view, including the running
    statistics, which only the first views move (`Seen`).
    """

    training: bool
    track_running_stats: bool
    seen: Seen

    def forward(self, x: Tensor) -> Tensor:
        normalise = super().forward  # type: ignore[misc]
        if not self.training:
            return normalise(x)
        views = x.chunk(self.seen.views)
        y = [normalise(view) for view in views[: self.seen.counted]]
        if others := views[self.seen.counted :]:
            tracks, self.track_running_stats = self.track_running_stats, False
            y += [normalise(view) for view in others]
            self.track_running_stats = tracks
        return torch.cat(y)


def per_view(net: nn.Module, *, passes: tuple[int, ...] = (GLOBAL,)) -> None:
    """Make every BatchNorm of a network normalise the views in a batch separately in training mode. `passes` are the
    numbers of views in the batches that the network sees in one step."""
    seen = Seen()
    for module in net.modules():
        if isinstance(module, Net):
            module.seen, module.passes = seen, passes
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if not isinstance(module, PerView):
                kind = type(module)
                module.__class__ = type(f"PerView{kind.__name__}", (PerView, kind), {})
            module.seen = seen  # type: ignore[assignment]


def make_net(
    *,
    encoder: str | nn.Module,
    stem: str,
    channels: int,
    size: int,
    width: int,
    depth: int,
    d_z: int,
    norm: bool,
    seed: int,
    views: Mapping[str, int] | None = None,
) -> Net:
    """Encoder and projector with weights drawn from the seed; the caller's random state does not change.

    An encoder that is given as a module keeps its weights. `views` are other sizes that it must take, with the flags
    that they came from; 0 is none.
    """
    others = {flag: other for flag, other in (views or {}).items() if other}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        f = encoder
        if not isinstance(f, nn.Module):
            f = make_encoder(f, stem=stem, channels=channels, size=size, any_size=bool(others))
        d_h = feature_dim(f, channels=channels, size=size)
        for flag, other in others.items():
            feature_dim(f, channels=channels, size=other, flag=flag)
        g = make_projector(d_h, width=width, depth=depth, d_z=d_z, norm=norm)
    return Net(f, g)


@torch.no_grad()
def feature_dim(encoder: nn.Module, *, channels: int, size: int, flag: str = "--image-size") -> int:
    """d_h, measured with one blank image; `flag` is where the size came from."""
    training = encoder.training
    try:
        with _taking(size, flag=flag):
            h = encoder.eval()(torch.zeros(1, channels, size, size))
    finally:
        encoder.train(training)
    if h.ndim != 2:
        raise UserError(f"the encoder gives {tuple(h.shape[1:])} an image, not one vector: use another --encoder")
    return h.shape[1]
