"""One step of training: two views in one pass, and the same training however it is run."""

import copy
import dataclasses
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline import nothing_waits
from torch import nn
from torch.nn.utils import parameters_to_vector

from curvssl import losses
from curvssl.config import demo
from curvssl.data.named import load
from curvssl.data.views import Augment
from curvssl.gpu.steps import keep_compile_cache
from curvssl.methods import METHODS
from curvssl.models import Net, make_net, per_view
from curvssl.train.loop import Stopped, pretrain
from curvssl.train.loop import make_step as step_of
from curvssl.train.step import Step, make_optimizer

BATCH = 64


def small_net(encoder: str = "resnet-mini") -> Net:
    shape = {"channels": 3, "size": 16, "width": 32, "depth": 2, "d_z": 16, "norm": True, "seed": 0}
    return make_net(encoder=encoder, stem="small", **shape)


def make_step(
    method: str, mode: str, device: torch.device, *, optimizer: str = "adam", bf16: bool = False, net: Any = None
) -> Step:
    net = (net or small_net()).to(device)
    data = load("digits")
    settings = {"lr": 1e-3, "weight_decay": 1e-4, "momentum": 0.9, "device": device, "mode": mode}
    config = dataclasses.replace(demo(), method=method, d_z=16)
    return step_of(
        mode,
        net=net,
        criterion=METHODS[method].make(**config.loss_settings()),
        augment=Augment(size=16, mean=data.mean, std=data.std, **vars(demo().augment)).to(device),
        optimizer=make_optimizer(net, name=optimizer, **settings),
        images=data.train.images.pixels.to(device),
        device=device,
        bf16=bf16,
    )


def take(step: Step, steps: int, *, lr: float = 1e-3) -> None:
    """Some steps, each with its own images, numbers and learning rate."""
    for s in range(steps):
        numbers = torch.Generator().manual_seed(s)
        rows = torch.randperm(1437, generator=numbers)[:BATCH].to(step.device)
        u = torch.rand(2, BATCH, step.augment.draws, generator=numbers).to(step.device)
        step(rows, u, lr * (s + 1) / steps)


def test_what_was_compiled_is_kept_for_a_month_after_its_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")  # and so it comes back as it was
    keep_compile_cache()
    ours = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    now = time.time()
    for name, days in ((ours.name, 40), ("old", 31), ("recent", 29)):
        (ours.parent / name).mkdir(exist_ok=True)
        os.utime(ours.parent / name, (now, now - days * 24 * 3600))
    keep_compile_cache()
    assert {folder.name for folder in ours.parent.iterdir()} == {ours.name, "recent"}


def test_two_views_in_one_pass_are_what_two_passes_would_be():
    apart = small_net().double()
    together = copy.deepcopy(apart)
    per_view(together)
    views = torch.randn(2 * 9, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(together(views), torch.cat([apart(view) for view in views.chunk(2)]))
    for name, value in apart.state_dict().items():  # running means and variances too
        torch.testing.assert_close(together.state_dict()[name], value)
    torch.testing.assert_close(together.eval()(views), apart.eval()(views))


def test_a_batchnorm_with_its_own_forward_keeps_it():
    timm = pytest.importorskip("timm.layers")
    layer = timm.BatchNormAct2d(4)
    together = copy.deepcopy(layer)
    per_view(together)
    x = torch.randn(6, 4, 5, 5)
    torch.testing.assert_close(together(x), torch.cat([layer(view) for view in x.chunk(2)]))


def test_a_step_is_the_textbook_step():
    """Loss by hand from the same views, gradient by autograd, Adam by torch."""
    step = make_step("barlow-twins", "eager", torch.device("cpu"))
    oracle = small_net()
    optimizer = torch.optim.Adam(oracle.parameters(), lr=1e-3, weight_decay=1e-4)
    rows, u = torch.arange(BATCH), torch.rand(2, BATCH, step.augment.draws, generator=torch.Generator().manual_seed(0))
    step(rows, u, 1e-3)
    images = load("digits").train.images.pixels[rows]
    z0, z1 = (oracle(step.augment(images, numbers)) for numbers in u)
    loss = losses.BarlowTwinsLoss(lambda_emb=demo().lambda_emb)(z0, z1)
    loss.backward()
    assert step.means()["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(step.net.parameters(), oracle.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) < 1e-2 * float(theirs.grad.norm()) + 1e-3
        theirs.grad = ours.grad  # Adam turns the rounding of a small gradient into a whole step: give it the same
    assert step.gradient_norm() == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in oracle.parameters()])))
    optimizer.step()
    for ours, theirs in zip(step.net.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_means_are_those_of_the_steps_since_the_last_reset():
    step = make_step("vicreg", "eager", torch.device("cpu"))
    take(step, 1)
    first = step.means()["loss"]
    step.reset()
    take(step, 2)
    both = step.means()["loss"]
    assert both != first
    again = make_step("vicreg", "eager", torch.device("cpu"))
    take(again, 1)
    assert again.means()["loss"] == first


def test_what_cannot_be_compiled_goes_on_eagerly_with_one_line(capfd: pytest.CaptureFixture[str]):
    @torch.library.custom_op("curvssl_test::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @opaque.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("nobody knows its shape")

    class Opaque(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + opaque(x.detach()) * 0

    eager, step = (make_step("barlow-twins", mode, torch.device("cpu")) for mode in ("eager", "compiled"))
    step.net.projector.append(Opaque())
    for one in (eager, step):
        take(one, 2)
    assert step.mode == "eager"
    assert step.means() == pytest.approx(eager.means(), rel=1e-5)
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot be compiled" in line]
    assert len(said) == 1


@pytest.mark.filterwarnings("default")
def test_the_second_step_of_a_process_is_compiled_even_if_a_function_may_be_compiled_only_once():
    for width in (16, 12):  # two shapes, so the second cannot use what was compiled for the first
        net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, width))
        eager = make_step("vicreg", "eager", torch.device("cpu"), net=copy.deepcopy(net))
        step = make_step("vicreg", "compiled", torch.device("cpu"), net=net)
        take(eager, 1)
        with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
            take(step, 1)
        assert step.mode == "compiled"
        assert step.means() == pytest.approx(eager.means(), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("method", "mode", "bf16", "encoder"),
    [
        ("barlow-twins", "captured", False, "resnet-mini"),
        ("vicreg", "captured", False, "resnet18"),
        ("curvssl", "captured", False, "resnet18"),
        ("curvssl", "compiled", False, "resnet-mini"),
        ("kernel-curvssl", "captured", False, "resnet18"),
        ("curvssl", "captured", True, "resnet-mini"),
        ("curvssl", "captured", True, "resnet18"),
    ],
)
def test_compiled_and_captured_steps_train_as_eager_ones_do(
    method: str, mode: str, bf16: bool, encoder: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device = torch.device("cuda")
    eager, step = (make_step(method, kind, device, bf16=bf16, net=small_net(encoder)) for kind in ("eager", mode))
    check_agreement(step, eager, start=small_net(encoder), bf16=bf16)
    assert step.mode == mode
    rows, u = torch.arange(BATCH, device="cuda"), torch.rand(2, BATCH, step.augment.draws, device="cuda")
    with nothing_waits() if mode == "captured" else nullcontext():
        for _ in range(3):
            step(rows, u, 1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_captured_step_takes_another_optimiser(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    settings = {"optimizer": "sgd", "bf16": True}
    eager, step = (
        make_step("curvssl", mode, torch.device("cuda"), net=small_net("resnet18"), **settings)
        for mode in ("eager", "captured")
    )
    check_agreement(step, eager, start=small_net("resnet18"), bf16=True)
    assert step.mode == "captured"


def check_agreement(step: Step, eager: Step, *, start: Net, bf16: bool) -> None:
    """Ten small steps: with a usual rate, initial weights that differ by 1e-7 are percents apart in their loss by then.

    Weights as a whole must have moved alike: rounding may turn a step of Adam where a gradient is near zero, so in
    bfloat16 a ResNet's moves differ by two fifths (of unrelated ones it would be 1.4, of the double 1)."""
    for one in (eager, step):
        take(one, 10, lr=1e-5)
    for name, value in eager.means().items():
        assert step.means()[name] == pytest.approx(value, rel=2e-2 if bf16 else 2e-3, abs=3e-2), name
    assert step.gradient_norm() == pytest.approx(eager.gradient_norm(), rel=0.1 if bf16 else 0.02)
    first = parameters_to_vector(start.parameters()).detach().to(step.device)
    ours, theirs = (parameters_to_vector(one.net.parameters()).detach() - first for one in (step, eager))
    assert float((ours - theirs).norm()) <= (0.6 if bf16 else 0.1) * float(theirs.norm())


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("encoder", ["resnet-mini", "resnet18"])
def test_what_cannot_be_captured_goes_on_compiled_with_one_line(encoder: str, capfd: pytest.CaptureFixture[str]):
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1.0 if float(x.detach().sum()) > 0 else 2.0)  # a question to the host

    step = make_step("barlow-twins", "captured", torch.device("cuda"), net=small_net(encoder))
    step.net.projector.append(Asks())
    take(step, 6)
    assert step.mode == "compiled"
    torch.rand(1, device="cuda")  # a capture that failed leaves torch's generator usable
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot be captured" in line]
    assert len(said) == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_captured_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path):
    config = dataclasses.replace(demo(), epochs=3, device="cuda", step="captured", precision="fp32", monitor_every=1)
    whole = pretrain(config, out=tmp_path / "whole", progress=False)
    signal.setitimer(signal.ITIMER_REAL, 0)
    from curvssl.train import loop as train

    real = train.watch.alarm
    try:
        train.watch.alarm = lambda row, **_: signal.raise_signal(signal.SIGTERM) if row["epoch"] == 1 else None
        with pytest.raises(Stopped):
            pretrain(config, out=tmp_path / "stopped", progress=False)
    finally:
        train.watch.alarm = real
    resumed = pretrain(config, out=tmp_path / "stopped", progress=False)
    for ours, theirs in zip(resumed.metrics(), whole.metrics(), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2)
        assert ours["lr"] == theirs["lr"]
        assert "knn" in ours
