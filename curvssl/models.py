"""The encoder f and the projector g."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from curvssl.config import UserError, unknown


class ResNetMini(nn.Module):
    """A three-stage ResNet for the demo's 16×16 digits: 32, 64, 128 channels, one block a stage."""

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


def seek_fastest_convolutions() -> None:
    """For training, which meets the same shapes again and again: cuDNN times all its algorithms, not the first ten."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0


@contextmanager
def no_search() -> Iterator[None]:
    """Without the search for the fastest convolutions that training turns on: for shapes that are met for a moment."""
    searches = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = searches


def make_encoder(name: str, *, stem: str = "imagenet", channels: int = 3) -> nn.Module:
    """A backbone that maps (b, channels, H, W) to (b, d_h): resnet18, resnet-mini or timm:NAME."""
    if name.startswith("timm:"):
        return _timm(name.removeprefix("timm:"), channels=channels)
    if name == "resnet-mini":
        return ResNetMini(channels=channels)
    if name != "resnet18":
        raise unknown("encoder", name, ("resnet18", "resnet-mini", "timm:NAME"))
    from torchvision.models import resnet18

    net = resnet18(weights=None)
    net.fc = nn.Identity()  # h is what the average pool gives
    if stem == "small":
        net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    elif channels != 3:
        net.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return net


def _timm(name: str, *, channels: int) -> nn.Module:
    try:
        import timm
    except ModuleNotFoundError:
        raise UserError(f"encoder timm:{name} needs timm: pip install 'curvssl[timm]'") from None
    if name not in timm.list_models():
        known = timm.list_models()  # more than a thousand: the nearest will do
        raise unknown("timm backbone", name, [*difflib.get_close_matches(name, known, n=5, cutoff=0), "…"])
    return timm.create_model(name, pretrained=False, num_classes=0, in_chans=channels)


def make_projector(d_h: int, *, width: int, depth: int, d_z: int, norm: bool) -> nn.Module:
    """Linear – BatchNorm – ReLU, depth − 1 times, then Linear to d_z; `norm` adds a BatchNorm without parameters."""
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(d_h, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
        d_h = width
    layers.append(nn.Linear(d_h, d_z))
    if norm:
        layers.append(nn.BatchNorm1d(d_z, affine=False))
    return nn.Sequential(*layers)


class Net(nn.Module):
    """z = g(f(x)); what pretraining trains."""

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projector = encoder, projector

    def forward(self, x: Tensor) -> Tensor:
        return self.projector(self.encoder(x))


class PerView:
    """Mixed into a BatchNorm: of two views in one batch, (2b, …), each is normalised by its own statistics.

    One pass over both views is faster than two, and this keeps what two would do, the running statistics included.
    """

    training: bool

    def forward(self, x: Tensor) -> Tensor:
        normalise = super().forward  # type: ignore[misc]
        return torch.cat([normalise(view) for view in x.chunk(2)]) if self.training else normalise(x)


def per_view(net: nn.Module) -> None:
    """Make every BatchNorm of a network normalise the two halves of a batch apart while it trains."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, PerView):
            kind = type(module)
            module.__class__ = type(f"PerView{kind.__name__}", (PerView, kind), {})


def make_net(
    *, encoder: str, stem: str, channels: int, size: int, width: int, depth: int, d_z: int, norm: bool, seed: int
) -> Net:
    """Encoder and projector with the weights that the seed gives; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        f = make_encoder(encoder, stem=stem, channels=channels)
        d_h = feature_dim(f, channels=channels, size=size)
        g = make_projector(d_h, width=width, depth=depth, d_z=d_z, norm=norm)
    return Net(f, g)


@torch.no_grad()
def feature_dim(encoder: nn.Module, *, channels: int, size: int) -> int:
    """d_h, seen from one blank image."""
    training = encoder.training
    try:
        return encoder.eval()(torch.zeros(1, channels, size, size)).shape[1]
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"the encoder does not take images of {size}×{size}: {str(error).splitlines()[0]}") from None
    finally:
        encoder.train(training)
