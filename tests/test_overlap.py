"""Weight gradients and Adam on a second stream: the same numbers, sooner."""

import copy

import pytest
import torch
from torch import nn

from curvssl.overlap import backward_and_step, beside


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, bias=False)]
    return nn.Sequential(*layers, nn.Conv2d(32, 8, 1)).to(memory_format=torch.channels_last)


def test_plain_convolutions_are_taken_and_others_left():
    net = network()
    net.append(nn.Conv2d(8, 8, 3, groups=2, bias=False))
    taken = beside(net)
    assert [id(weight) for weight in taken] == [id(net[0].weight), id(net[3].weight)]
    x = torch.randn(2, 3, 16, 16)
    assert net.eval()(x).equal(net(x))


@pytest.mark.gpu
@pytest.mark.parametrize("low", [True, False], ids=["bf16", "fp32"])
def test_six_steps_are_those_of_backward_and_then_step(low: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    plain = network().cuda()
    net = copy.deepcopy(plain)
    weights = beside(net)

    def optimizer(module: nn.Module) -> torch.optim.Adam:
        rate = torch.tensor(1e-2, device="cuda")
        return torch.optim.Adam(module.parameters(), lr=rate, weight_decay=1e-2, fused=True, capturable=True)

    usual, ours = optimizer(plain), optimizer(net)
    for _ in range(6):
        x = torch.randn(64, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
        for module, chosen in ((plain, usual), (net, ours)):
            chosen.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=low):
                loss = module(x).float().square().mean()
            if module is net:
                backward_and_step(loss, ours, weights)
            else:
                loss.backward()
                usual.step()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.state[mine]["step"].equal(usual.state[theirs]["step"])
