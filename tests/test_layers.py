"""The hand-written layers against torch's: in Triton's interpreter anywhere, on the device where there is one."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from pipeline import in_tritons_interpreter
from torch import Tensor, nn

from curvssl.models import make_net, per_view

SHAPES = [(6, 70, 5, 5), (4, 32, 8, 6), (8, 512, 1, 1)]

COMPARE = """
import test_layers
from curvssl import norm
norm.PROGRAMS = 4  # so that a program adds up several tiles, of which some may lie behind the end
for shape in test_layers.SHAPES:
    test_layers.compare_norm(shape, device="cpu")
test_layers.compare_pool((2, 5, 8, 6), device="cpu")
"""

# Of the activations (8, 64, 8, 8), (8, 128, 4, 4), (8, 256, 2, 2) and (8, 512, 1, 1) the last is small.
COMPARE_NETWORK = """
import test_layers
from curvssl import layers
layers.LARGE = 8192
test_layers.compare_network("resnet18", stem="small", batch=8, size=8, device="cpu")
"""


def channels_last(*shape: int, device: str, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(device).contiguous(memory_format=torch.channels_last)


def compare_norm(shape: tuple[int, int, int, int], *, device: str) -> None:
    """Outputs, gradients and running statistics in float32 against torch's in float64, one view at a time."""
    from curvssl.norm import norm

    kinds = ((False, False), (False, True), (True, True))
    for (residual, relu), fork in itertools.product(kinds, (False, True)):
        ours = nn.BatchNorm2d(shape[1]).to(device)
        nn.init.uniform_(ours.weight, -1, 2)
        nn.init.normal_(ours.bias)
        oracle = copy.deepcopy(ours).double()
        x = (channels_last(*shape, device=device) * 2 + 5).requires_grad_()
        r = (channels_last(*shape, device=device, seed=1) * 0.5).requires_grad_()
        exact, exact_r = (t.detach().double().requires_grad_() for t in (x, r))
        y = norm(ours, x, residual=r if residual else None, relu=relu, fork=fork)
        expected = torch.cat([oracle(view) for view in exact.chunk(2)])
        expected = expected + exact_r if residual else expected
        expected = F.relu(expected) if relu else expected
        pair = y if fork else (y,)
        gradients = [channels_last(*shape, device=device, seed=2 + reader) for reader in range(len(pair))]
        for one in pair:
            torch.testing.assert_close(one.double(), expected, rtol=1e-4, atol=1e-4)
        torch.autograd.backward(pair, gradients)
        expected.backward(torch.stack(gradients).double().sum(0))
        for mine, theirs in ((x, exact), (r, exact_r), *zip(ours.parameters(), oracle.parameters(), strict=True)):
            if theirs.grad is None:
                assert mine.grad is None
            else:
                # A value that rounding lifts over the ReLU's edge passes its gradient on, or not.
                assert float((mine.grad - theirs.grad).norm()) <= 1e-3 * float(theirs.grad.norm()) + 1e-5
        for mine, theirs in zip(ours.buffers(), oracle.buffers(), strict=True):
            torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-4, atol=1e-4)


def compare_pool(shape: tuple[int, int, int, int], *, device: str) -> None:
    """Values rounded to halves, so that many are equal: the same one of equals gets the gradient."""
    from curvssl.stem import pool

    x = ((channels_last(*shape, device=device) * 2).round() / 2).requires_grad_()
    expected = F.max_pool2d(x, 3, 2, 1)
    g = torch.randn_like(expected)
    y = pool(x)[0]
    assert y.equal(expected)
    torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(expected, x, g))


def compare_network(encoder: str, *, stem: str, batch: int, size: int, device: str) -> None:
    """Outputs, gradients and running statistics of a quickened network against the plain one's, and float64."""
    from curvssl import layers

    shape = {"channels": 3, "size": size, "width": 64, "depth": 2, "d_z": 16, "norm": False, "seed": 0}
    plain = make_net(encoder=encoder, stem=stem, **shape).to(device).to(memory_format=torch.channels_last)
    quick, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    for net in (plain, quick, exact):
        per_view(net)
    layers.quicken(quick)
    x = channels_last(batch, 3, size, size, device=device)
    g = torch.randn(batch, 16, device=device)
    outputs = [net(x.to(next(net.parameters()).dtype)) for net in (plain, quick, exact)]
    for y in outputs:
        y.backward(g.to(y.dtype))

    def error(net: nn.Module) -> float:
        """How far the gradients are from those in float64, relative, the worst of all layers."""
        pairs = zip(net.parameters(), exact.parameters(), strict=True)
        return max(float((p.grad - q.grad).norm() / (q.grad.norm() + 1e-6)) for p, q in pairs)

    torch.testing.assert_close(outputs[1].double(), outputs[2], rtol=1e-2, atol=1e-2)
    assert error(quick) < 3 * error(plain) + 1e-4
    for mine, theirs in zip(quick.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    quick.eval(), plain.eval()
    torch.testing.assert_close(quick(x), plain(x), rtol=1e-2, atol=1e-2)


def test_kernels_equal_torchs_layers_in_tritons_interpreter() -> None:
    in_tritons_interpreter(COMPARE)


def test_a_network_of_large_and_small_blocks_equals_the_plain_one_in_tritons_interpreter() -> None:
    in_tritons_interpreter(COMPARE_NETWORK)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (512, 64, 32, 32), (512, 256, 2, 2)])
def test_norm_equals_torchs_on_the_device(shape: tuple[int, int, int, int]) -> None:
    compare_norm(shape, device="cuda")


@pytest.mark.gpu
def test_pool_equals_torchs_on_the_device() -> None:
    compare_pool((64, 64, 16, 16), device="cuda")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("stem", ["imagenet", "small"])
@pytest.mark.parametrize("encoder", ["resnet18", "resnet-mini"])
def test_a_quickened_network_has_the_outputs_and_gradients_of_the_plain_one(
    encoder: str, stem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from curvssl import layers

    monkeypatch.setattr(layers, "LARGE", 0)
    compare_network(encoder, stem=stem, batch=64, size=32, device="cuda")
