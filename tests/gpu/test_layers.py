"""The hand-written layers against torch's: in Triton's interpreter, and on a GPU if there is one."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from pipeline import in_tritons_interpreter
from torch import Tensor, nn

from curvssl.models import make_encoder, per_view

SHAPES = [((6, 70, 5, 5), 2), ((6, 32, 8, 6), 3), ((16, 192, 1, 1), 4)]  # of a batch, and the views in it

COMPARE = """
import test_layers
from curvssl.gpu import norm
norm.PROGRAMS = 4  # so that a program adds up several tiles, of which some may lie behind the end
for shape, views in test_layers.SHAPES:
    test_layers.compare_norm(shape, views, device="cpu")
test_layers.compare_pool((2, 5, 8, 6), device="cpu")
"""

# The code above tests several tiles. Here tiles are large, so that the interpreter runs few programs.
COMPARE_NETWORK = """
import test_layers
from curvssl.gpu import norm
norm.COLUMNS = norm.TILE["COLUMNS"] = norm.SUMS["COLUMNS"] = 512
norm.TILE["ROWS"] = norm.SUMS["ROWS"] = 128
norm.LEAST = 1
test_layers.compare_network(stem="imagenet", batch=8, size=20, device="cpu")
test_layers.compare_network(stem="imagenet", batch=8, size=18, device="cpu")  # an odd number of pixels to pool
test_layers.compare_network(stem="small", batch=8, size=8, device="cpu", bf16=True)
test_layers.compare_embedding()
"""


def channels_last(*shape: int, device: str, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(device).contiguous(memory_format=torch.channels_last)


def compare_norm(shape: tuple[int, int, int, int], views: int, *, device: str) -> None:
    """Outputs, gradients and statistics in float32 against torch's in float64, one view at a time."""
    from curvssl.gpu.norm import normalise

    torch.manual_seed(0)
    kinds = itertools.product((False, True), (False, True))
    for (residual, relu), fork in itertools.product(kinds, (False, True)):
        ours = nn.BatchNorm2d(shape[1]).to(device)
        nn.init.uniform_(ours.weight, -1, 2)
        nn.init.normal_(ours.bias)
        oracle = copy.deepcopy(ours).double()
        x = (channels_last(*shape, device=device) * 2 + 5).requires_grad_()
        r = (channels_last(*shape, device=device, seed=1) * 0.5).requires_grad_()
        exact, exact_r = (t.detach().double().requires_grad_() for t in (x, r))
        zeros = torch.zeros(2, views, 2, shape[1], device=device)
        settings = (zeros, ours.eps, relu, fork)
        statistics, *pair = normalise(x, r if residual else None, ours.weight, ours.bias, *settings)
        expected = torch.cat([oracle(view) for view in exact.chunk(views)])
        expected = expected + exact_r if residual else expected
        expected = F.relu(expected) if relu else expected
        assert len(pair) == 1 + fork
        gradients = [channels_last(*shape, device=device, seed=2 + reader) for reader in range(len(pair))]
        for one in pair:
            torch.testing.assert_close(one.double(), expected, rtol=1e-4, atol=1e-4)
        torch.autograd.backward(pair, gradients)
        expected.backward(torch.stack(gradients).double().sum(0))
        for mine, theirs in ((x, exact), (r, exact_r), *zip(ours.parameters(), oracle.parameters(), strict=True)):
            if theirs.grad is None:
                assert mine.grad is None
            else:
                # Rounding may move a value across the ReLU's zero, which switches its gradient on or off.
                assert float((mine.grad - theirs.grad).norm()) <= 1e-3 * float(theirs.grad.norm()) + 1e-5
        for view, measured in zip(exact.detach().chunk(views), statistics.double(), strict=True):
            moments = torch.stack((view.mean((0, 2, 3)), view.var((0, 2, 3))))
            torch.testing.assert_close(measured, moments, rtol=1e-4, atol=1e-4)


def compare_pool(shape: tuple[int, int, int, int], *, device: str) -> None:
    """Values are rounded to halves, so that many are equal: the gradient must go to the same one as in torch."""
    from curvssl.gpu.stem import pool

    x = ((channels_last(*shape, device=device) * 2).round() / 2).requires_grad_()
    expected = F.max_pool2d(x, 3, 2, 1)
    gradients = torch.randn_like(expected), torch.randn_like(expected)
    pair = pool(x)
    assert all(y.equal(expected) for y in pair)
    (gradient,) = torch.autograd.grad(pair, x, gradients)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, x, sum(gradients))[0])


def compare_network(*, stem: str, batch: int, size: int, device: str, bf16: bool = False, slack: float = 1e-3) -> None:
    """Outputs, gradients and running statistics of the hand-written pass against the plain pass, and float64."""
    from curvssl.gpu import layers

    torch.manual_seed(0)
    plain = make_encoder("resnet18", stem=stem).to(device).to(memory_format=torch.channels_last)
    quick, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    for net in (plain, quick, exact):
        per_view(net)
    assert layers.takes(quick)
    x = channels_last(batch, 3, size, size, device=device)
    g = torch.randn(batch, 512, device=device)
    low = x.bfloat16() if bf16 else x
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        usual = plain(x)
    outputs = [usual, layers.encode(quick, lambda: low, dtype=low.dtype)[0], exact(x.double())]
    for y in outputs:
        y.backward(g.to(y.dtype))

    def error(found: Tensor, right: Tensor) -> float:
        return float((found - right).detach().norm() / (right.detach().norm() + 1e-6))

    # Compared with float64, no output and no layer's gradient is much worse than the plain pass, which rounds, too.
    assert error(outputs[1], outputs[2]) < 2 * error(outputs[0], outputs[2]) + 1e-4
    for mine, theirs, right in zip(quick.parameters(), plain.parameters(), exact.parameters(), strict=True):
        assert error(mine.grad, right.grad) < 2 * error(theirs.grad, right.grad) + slack
    for mine, theirs in zip(quick.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(
            mine, theirs, **({"rtol": 5e-2, "atol": 5e-2} if bf16 else {"rtol": 1e-3, "atol": 1e-3})
        )


def compare_embedding() -> None:
    """The embeddings of views of two sizes and of blends, their gradient from two readers, the teacher's embeddings and
    the running statistics, with and without the hand-written encoder pass."""
    from steps import draw, make_step, small_net

    from curvssl.gpu.steps import FastStep

    many = {"local": 1, "alpha_chord": 1.0, "average": 0.9, "teacher": True}
    plain, quick = (
        make_step("curvssl", "eager", torch.device("cpu"), net=small_net("resnet18"), **many) for _ in range(2)
    )
    rows, u = torch.arange(4), draw(plain, 4)
    fast = FastStep(quick, "captured")
    fast._compiled = lambda function, **_: function  # type: ignore[method-assign]
    z, expected = plain.embed(rows, u)
    copies, targets = fast._embed_by_hand()(rows, u, 2)
    torch.testing.assert_close((*copies, targets), (z, z, expected), rtol=1e-3, atol=1e-3)
    torch.autograd.backward(copies, [torch.ones_like(z), copies[1].detach()])
    z.backward(1 + z.detach())
    for mine, theirs in zip(quick.net.parameters(), plain.net.parameters(), strict=True):
        assert float((mine.grad - theirs.grad).norm()) <= 1e-2 * float(theirs.grad.norm()) + 1e-3
    for one, other in ((quick.net, plain.net), (quick.teacher, plain.teacher)):
        for mine, theirs in zip(one.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_kernels_equal_torchs_layers_in_tritons_interpreter() -> None:
    in_tritons_interpreter(COMPARE)


def test_a_pass_by_hand_equals_the_plain_one_in_tritons_interpreter() -> None:
    in_tritons_interpreter(COMPARE_NETWORK)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "views"), [*SHAPES, ((8, 512, 1, 1), 2), ((512, 64, 32, 32), 2), ((1024, 256, 2, 2), 4)]
)
def test_norm_equals_torchs_on_the_device(shape: tuple[int, int, int, int], views: int) -> None:
    compare_norm(shape, views, device="cuda")


@pytest.mark.gpu
def test_pool_equals_torchs_on_the_device() -> None:
    compare_pool((64, 64, 16, 16), device="cuda")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_a_pass_by_hand_equals_the_plain_one_on_the_device(stem: str, bf16: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    # Rounding that moves one of the last layer's 64 · 512 values across the ReLU's zero is 1/√32768 of the gradient.
    compare_network(stem=stem, batch=64, size=32, device="cuda", bf16=bf16, slack=1e-2)


def test_other_networks_are_left_to_the_compiler() -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton, which this platform does not have")
    from torchvision.models import resnet18, resnet34, resnet50

    from curvssl.gpu import layers

    headless = make_encoder("resnet18")
    assert layers.takes(headless)
    bigger = resnet34()
    bigger.fc = nn.Identity()
    assert layers.takes(bigger)
    for other in (resnet18(), resnet50(), make_encoder("resnet-mini"), nn.Linear(2, 2)):
        assert not layers.takes(other)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("conv1", nn.Conv2d(3, 64, 7, 2, 3)),
        ("conv1", nn.Conv2d(3, 64, 7, 1, "same", bias=False)),
        ("conv1", nn.Conv2d(3, 64, 7, 2, 3, dilation=2, bias=False)),
        ("layer1.0.conv2", nn.Conv2d(64, 64, 3, 1, 1, groups=2, bias=False)),
        ("layer1.1.conv1", nn.Conv2d(64, 64, 3, 1, 1, bias=False, padding_mode="reflect")),
        ("bn1", nn.BatchNorm2d(64, track_running_stats=False)),
        ("bn1", nn.BatchNorm2d(64).eval()),
        ("layer3.0.bn1", nn.BatchNorm2d(256, momentum=0.2)),
        ("layer4.1.bn2", nn.GroupNorm(32, 512)),
        ("layer2.0.downsample", nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(64, 128, 1, bias=False), nn.BatchNorm2d(128))),
        ("layer2.0.relu", nn.GELU()),
        ("maxpool", nn.MaxPool2d(2)),
        ("avgpool", nn.AdaptiveMaxPool2d((1, 1))),
    ],
)
def test_a_resnet_with_another_layer_is_left_to_the_compiler(name: str, module: nn.Module) -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton, which this platform does not have")
    from curvssl.gpu import layers

    net = make_encoder("resnet18")
    assert layers.takes(net)
    parent, _, last = name.rpartition(".")
    setattr(net.get_submodule(parent), last, module)
    assert not layers.takes(net)
