"""Weight gradients and optimisers on a second stream give the same numbers as the plain step."""

import copy

import pytest
import torch
from pipeline import in_tritons_interpreter
from torch import nn

from curvssl.lars import Lars
from curvssl.train.step import make_optimizer


def compare_adam(shape: tuple[int, ...], *, device: str) -> None:
    """Three steps, one gradient each, against torch's Adam in float64 with the same rounded gradients. No gradient is
    near zero: where decay cancels a gradient, Adam divides one rounding error by another."""
    from curvssl.gpu import adam

    torch.manual_seed(0)
    weight = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    exact = nn.Parameter(weight.double())
    theirs = torch.optim.Adam([exact], lr=1e-2, weight_decay=1e-2)
    group = theirs.param_groups[0] | {"lr": torch.tensor(1e-2, device=device)}
    state = {name: torch.zeros(shape, device=device) for name in ("exp_avg", "exp_avg_sq")}  # not in channels_last
    state["step"] = torch.zeros((), device=device)
    for i in range(3):
        grad, found = torch.randn(shape, device=device), torch.empty_like(weight)
        grad = (grad + grad.sign()).half()
        parts = (grad,) if i else (grad / 2, grad / 2)  # in the first step the sum of two
        adam.update(weight, *parts, found=found, state=state, group=group)
        state["step"] += 1
        exact.grad = grad.double()
        theirs.step()
        assert found.equal(grad.float())
        torch.testing.assert_close(weight.double(), exact.detach(), rtol=1e-5, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(state[name].double(), theirs.state[exact][name], rtol=1e-5, atol=1e-6)


def compare_lars(shape: tuple[int, ...], *, device: str, size: float = 1.0) -> None:
    """Steps with a rate that is fitted to the layer, with one that is not, and without a gradient, against Lars.step in
    float64 with the same rounded gradients."""
    from curvssl.gpu import lars

    torch.manual_seed(0)
    weight = size * torch.randn(shape, device=device)
    weight = weight.to(memory_format=torch.channels_last) if len(shape) == 4 else weight
    exact = nn.Parameter(weight.double())
    theirs = Lars(nn.ParameterList([exact]), lr=0.0, momentum=0.9, weight_decay=0.1)
    group = next(group for group in theirs.param_groups if group["params"])
    state = {"velocity": torch.zeros(shape, device=device)}  # not in channels_last
    for rate, length in ((0.5, 2.0), (1e-4, 1.0), (0.5, 0.0)):
        parts = [(length * torch.randn(shape, device=device)).half() for _ in range(2 if length == 2 else 1)]
        found = torch.empty_like(weight)
        lars.update(weight, *parts, found=found, state=state, group=group | {"lr": torch.tensor(rate, device=device)})
        exact.grad, group["lr"] = sum(part.double() for part in parts), rate
        theirs.step()
        assert found.equal(sum(part.float() for part in parts))
        torch.testing.assert_close(weight.double(), exact.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["velocity"].double(), theirs.state[exact]["velocity"], rtol=1e-5, atol=1e-6)


def compare_some_lars(*, device: str, large: int) -> None:
    compare_lars((large, 13, 3, 3), device=device)
    compare_lars((6, 300), device=device, size=0.0)  # zeros have no norm to fit the rate to
    compare_lars((1100,), device=device)  # a bias has neither decay nor a rate of its own


def test_updates_of_one_weight_are_the_optimisers_in_tritons_interpreter():
    in_tritons_interpreter(
        """
import test_overlap
from curvssl.gpu import lars
lars.PARTS = 2  # so that a program adds up more than one block
test_overlap.compare_adam((7, 5, 3, 3), device="cpu")
test_overlap.compare_some_lars(device="cpu", large=40)
"""
    )


@pytest.mark.gpu
def test_updates_of_one_weight_are_the_optimisers_on_the_device():
    compare_adam((512, 256, 3, 3), device="cuda")
    compare_some_lars(device="cuda", large=8192)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["adam", "lars", "sgd"])
def test_two_steps_are_those_of_backward_and_then_step(name: str, low: bool, monkeypatch: pytest.MonkeyPatch):
    """The first step makes the optimiser's state, the second is ours. In later steps of Adam a difference in the last
    digit, from rounding to bf16, becomes one in the first digit, because it divides by the gradient's size."""
    from curvssl.gpu.overlap import Uses, backward_and_step, convolve

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, bias=False)]
    plain = nn.Sequential(*layers, nn.Conv2d(32, 600, 1)).cuda().to(memory_format=torch.channels_last)
    net = copy.deepcopy(plain)

    def beside(x: torch.Tensor) -> torch.Tensor:
        """net(x), with weight gradients of the first two convolutions on the second stream."""
        dtype = torch.bfloat16 if low else torch.float32
        first, second = (net[i].weight.detach().to(dtype) for i in (0, 3))
        x = net[2](net[1](convolve(x.to(dtype), net[0].weight, first, Uses(1), [2, 2], [3, 3])))
        return net[4](convolve(x.to(dtype), net[3].weight, second, Uses(1), [1, 1], [0, 0]))

    settings = {"lr": 1e-2, "weight_decay": 1e-2, "momentum": 0.9, "device": torch.device("cuda"), "mode": "captured"}
    usual, ours = (make_optimizer(module, name=name, **settings) for module in (plain, net))
    for _ in range(2):
        x = torch.randn(64, 8, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
        for forward, chosen in ((plain, usual), (beside, ours)):
            chosen.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=low):
                loss = forward(x).float().square().mean()
            if forward is beside:
                backward_and_step(loss.backward, ours)
            else:
                loss.backward()
                usual.step()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    if name == "adam":
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert ours.state[mine]["step"].equal(usual.state[theirs]["step"])


def test_only_lars_and_torchs_adam_in_its_plain_form_are_moved_by_hand() -> None:
    from curvssl.gpu.overlap import moves

    weights = [torch.zeros(3, requires_grad=True)]
    assert moves(torch.optim.Adam(weights))
    assert moves(torch.optim.Adam([{"params": weights, "weight_decay": 0.1}]))
    assert moves(Lars(nn.Linear(3, 2), lr=0.1, momentum=0.9, weight_decay=0.1))
    for other in (
        torch.optim.AdamW(weights),
        torch.optim.Adam(weights, amsgrad=True),
        torch.optim.Adam(weights, maximize=True),
        torch.optim.SGD(weights, lr=0.1),
    ):
        assert not moves(other)
