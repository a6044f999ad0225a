"""Weight gradients and Adam on a second stream give the same numbers as torch."""

import copy

import pytest
import torch
from pipeline import in_tritons_interpreter
from torch import nn


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


def test_adam_of_one_weight_is_torchs_in_tritons_interpreter():
    in_tritons_interpreter("import test_overlap; test_overlap.compare_adam((7, 5, 3, 3), device='cpu')")


@pytest.mark.gpu
def test_adam_of_one_weight_is_torchs_on_the_device():
    compare_adam((512, 256, 3, 3), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("low", [True, False], ids=["bf16", "fp32"])
def test_two_steps_are_those_of_backward_and_then_step(low: bool, monkeypatch: pytest.MonkeyPatch):
    """The first step makes Adam's state, the second is ours. In later steps a difference in the last digit, from
    rounding to bf16, becomes one in the first digit, because Adam divides by the gradient's size."""
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

    def optimizer(module: nn.Module) -> torch.optim.Adam:
        rate = torch.tensor(1e-2, device="cuda")
        return torch.optim.Adam(module.parameters(), lr=rate, weight_decay=1e-2, fused=True, capturable=True)

    usual, ours = optimizer(plain), optimizer(net)
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
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.state[mine]["step"].equal(usual.state[theirs]["step"])


def test_only_torchs_adam_in_its_plain_form_is_moved_by_hand() -> None:
    from curvssl.gpu.overlap import moves

    weights = [torch.zeros(3, requires_grad=True)]
    assert moves(torch.optim.Adam(weights))
    assert moves(torch.optim.Adam([{"params": weights, "weight_decay": 0.1}]))
    for other in (
        torch.optim.AdamW(weights),
        torch.optim.Adam(weights, amsgrad=True),
        torch.optim.Adam(weights, maximize=True),
        torch.optim.SGD(weights, lr=0.1),
    ):
        assert not moves(other)
