"""Compiled and captured steps train as the plain step does."""

import copy
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline import nothing_waits
from steps import BATCH, draw, make_step, small_net, take
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import curvssl
from curvssl.config import demo
from curvssl.gpu.steps import keep_compile_cache
from curvssl.losses import BarlowTwinsLoss
from curvssl.models import Net
from curvssl.paper import arms
from curvssl.train.loop import Stopped, pretrain
from curvssl.train.step import Step


def test_what_was_compiled_is_kept_for_a_month_after_its_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")  # so that monkeypatch restores it afterwards
    keep_compile_cache()
    ours = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    now = time.time()
    for name, days in ((ours.name, 40), ("old", 31), ("recent", 29)):
        (ours.parent / name).mkdir(exist_ok=True)
        os.utime(ours.parent / name, (now, now - days * 24 * 3600))
    keep_compile_cache()
    assert {folder.name for folder in ours.parent.iterdir()} == {ours.name, "recent"}


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
    ("method", "mode", "bf16", "encoder", "many"),
    [
        ("barlow-twins", "captured", False, "resnet-mini", {}),
        ("vicreg", "captured", False, "resnet18", {"local": 1}),
        ("curvssl", "captured", False, "resnet18", {}),
        ("curvssl", "compiled", False, "resnet-mini", {"local": 2, "alpha_chord": 2.0}),
        ("kernel-curvssl", "captured", False, "resnet18", {"alpha_chord": 2.0}),
        ("curvssl", "captured", True, "resnet-mini", {"local": 2, "alpha_chord": 2.0}),
        ("curvssl", "captured", True, "resnet18", {}),
        ("curvssl", "captured", True, "resnet18", {"local": 3, "alpha_chord": 2.0}),
        ("barlow-twins", "captured", False, "resnet18", {"local": 3}),
        ("barlow-twins", "captured", False, "resnet18", {"local": 1, "alpha_path": 20.0}),
        ("barlow-twins", "captured", False, "resnet18", {"local": 2, "average": 0.9, "teacher": True}),
        ("curvssl", "captured", True, "resnet18", {"local": 2, "alpha_chord": 2.0, "average": 0.9, "teacher": True}),
        ("kernel-curvssl", "captured", False, "resnet-mini", {"average": 0.9, "teacher": True}),
        ("vicreg", "compiled", False, "resnet-mini", {"average": 0.9}),
    ],
)
def test_compiled_and_captured_steps_train_as_eager_ones_do(
    method: str, mode: str, bf16: bool, encoder: str, many: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device = torch.device("cuda")
    eager, step = (
        make_step(method, kind, device, bf16=bf16, net=small_net(encoder), **many) for kind in ("eager", mode)
    )
    check_agreement(step, eager, start=small_net(encoder), bf16=bf16)
    assert step.mode == mode
    rows, u = torch.arange(BATCH, device="cuda"), draw(step, BATCH)
    with nothing_waits() if mode == "captured" else nullcontext():
        for _ in range(3):
            step(rows, u, 1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("optimizer", "local"), [("sgd", 0), ("lars", 0), ("lars", 3)])
def test_a_captured_step_takes_another_optimiser(optimizer: str, local: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    settings = {"optimizer": optimizer, "bf16": True, "local": local}
    eager, step = (
        make_step("curvssl", mode, torch.device("cuda"), net=small_net("resnet18"), **settings)
        for mode in ("eager", "captured")
    )
    check_agreement(step, eager, start=small_net("resnet18"), bf16=True)
    assert step.mode == "captured"


def check_agreement(step: Step, eager: Step, *, start: Net, bf16: bool) -> None:
    """Ten small steps: with a usual rate, initial weights that differ by 1e-7 give losses that differ by percents.

    The updates of all weights together must agree. Rounding may flip a step of Adam where a gradient is near zero, so
    in bfloat16 a ResNet's updates differ by two fifths (unrelated ones would differ by 1.4, doubled ones by 1)."""
    for one in (eager, step):
        take(one, 10, lr=1e-5)
    for name, value in eager.means().items():
        assert step.means()[name] == pytest.approx(value, rel=2e-2 if bf16 else 2e-3, abs=3e-2), name
    assert float(step.gradient_norm()) == pytest.approx(float(eager.gradient_norm()), rel=0.1 if bf16 else 0.02)
    first = parameters_to_vector(start.parameters()).detach().to(step.device)
    nets = [(step.net, eager.net)]
    if step.average is not None and eager.average is not None:
        nets.append((step.average.net, eager.average.net))
    for pair in nets:
        ours, theirs = (parameters_to_vector(net.parameters()).detach() - first for net in pair)
        assert float((ours - theirs).norm()) <= (0.6 if bf16 else 0.1) * float(theirs.norm())


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("encoder", ["resnet-mini", "resnet18"])
def test_what_cannot_be_captured_goes_on_compiled_with_one_line(encoder: str, capfd: pytest.CaptureFixture[str]):
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1.0 if float(x.detach().sum()) > 0 else 2.0)  # makes the host wait for a value

    step = make_step("barlow-twins", "captured", torch.device("cuda"), net=small_net(encoder))
    step.net.projector.append(Asks())
    take(step, 6)
    assert step.mode == "compiled"
    torch.rand(1, device="cuda")  # after a failed capture torch's generator still works
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


# ---- weights at every step ----


def flat_net() -> nn.Module:
    """A network that takes a compiler no time; where the weights of a loss are read does not depend on it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 16))


def take_with_a_schedule(step: Step, steps: int, change: Callable[[Any, float], None]) -> None:
    """Each step has other numbers as the weights."""
    for s in range(steps):
        change(step.criterion, s / steps)
        numbers = torch.Generator().manual_seed(s)
        rows = torch.randperm(1437, generator=numbers)[:BATCH].to(step.device)
        step(rows, draw(step, BATCH, numbers), 1e-5)


@pytest.mark.filterwarnings("default")
def test_a_schedule_of_weights_is_followed_by_a_compiled_step_without_compiling_again():
    def change(criterion: Any, share: float) -> None:
        criterion.schedule(share)
        criterion.loss.lambda_emb = 4 * share

    eager, step = (
        make_step(
            "own",
            mode,
            torch.device("cpu"),
            net=flat_net(),
            criterion=arms.Late(BarlowTwinsLoss(), (3.0, arms.NTXent())),
        )
        for mode in ("eager", "compiled")
    )
    take_with_a_schedule(eager, 4, change)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        take_with_a_schedule(step, 4, change)
    assert step.mode == "compiled"
    assert step.means() == pytest.approx(eager.means(), rel=1e-3, abs=1e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("method", ["curvssl", "kernel-curvssl"])
def test_a_schedule_of_alpha_is_followed_by_a_captured_step(method: str):
    eager, step = (make_step(method, mode, torch.device("cuda")) for mode in ("eager", "captured"))
    for one in (eager, step):
        take_with_a_schedule(one, 8, lambda criterion, share: setattr(criterion, "alpha_curv", 8 * share))
    assert step.mode == "captured"
    assert step.means() == pytest.approx(eager.means(), rel=5e-3, abs=5e-2)
    assert float(step.gradient_norm()) == pytest.approx(float(eager.gradient_norm()), rel=0.05)  # α is 7 by then


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kernel", [None, "rbf"])
def test_the_arms_of_the_study_of_curvature_are_captured_with_their_schedule_and_their_bank(kernel: str | None):
    def criterion() -> arms.Late:
        bank = arms.Bank(d=16, size=3 * BATCH, k=5, kernel=kernel)
        return arms.Late(arms.NTXent(), (3.0, bank), (2.0, arms.Profile(k=5))).cuda()

    eager, step = (
        make_step("own", mode, torch.device("cuda"), net=small_net(), criterion=criterion())
        for mode in ("eager", "captured")
    )
    for one in (eager, step):
        take_with_a_schedule(one, 8, lambda criterion, share: criterion.schedule(share))
    assert step.mode == "captured"
    assert step.means() == pytest.approx(eager.means(), rel=5e-3, abs=5e-2)
    for name, expected in eager.criterion.state_dict().items():  # bf16 rounds single embeddings by more than 1 %
        off = step.criterion.state_dict()[name] - expected
        assert float(off.norm(dtype=torch.float64)) <= 0.01 * float(expected.norm(dtype=torch.float64)), name
    rows, u = torch.arange(BATCH, device="cuda"), draw(step, BATCH)
    with nothing_waits():  # for a new weight neither
        for share in (0.7, 0.8):
            step.criterion.schedule(share)
            step(rows, u, 1e-5)


@pytest.mark.gpu
def test_a_flow_of_a_teachers_targets_is_captured_with_its_bank():
    eager, step = (
        make_step("own", mode, torch.device("cuda"), net=small_net(), local=2, average=0.9, teacher=True,
                  criterion=arms.Flow(d=16, share=0.5, size=3 * BATCH, lambda_emb=0.1).cuda())
        for mode in ("eager", "captured")
    )  # fmt: skip
    for one in (eager, step):
        take(one, 8)
    assert step.mode == "captured"
    assert step.means() == pytest.approx(eager.means(), rel=2e-2, abs=5e-2)  # other neighbours where two are as near
    assert int(step.criterion.filled) == 3 * BATCH


# ---- a user's own criterion ----


class Bank(nn.Module):
    """Invariance, a learnt gain, and a distance to the mean of the last batch's embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        loss = curvssl.BarlowTwinsLoss(lambda_emb=0.1)(z0, z1) + self.gain * (z0.mean(0) - self.mean).square().sum()
        self.mean.copy_(z0.mean(0).detach())
        self.steps += 1
        return loss


class Counts(Bank):
    """Keeps a number on the host; a captured step would never see it change."""

    seen = 0

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(z0, z1) * (1 + self.seen)


def with_criterion(criterion: nn.Module, mode: str, device: str) -> Step:
    criterion, net = criterion.to(device), small_net() if device == "cuda" else flat_net()
    step = make_step("own", mode, torch.device(device), net=net, criterion=criterion)
    step.optimizer.add_param_group({"params": list(criterion.parameters())})
    return step


@pytest.mark.filterwarnings("default")
def test_a_compiled_step_takes_a_criterion_from_outside():
    eager, step = (with_criterion(Bank(), mode, "cpu") for mode in ("eager", "compiled"))
    for one in (eager, step):
        take(one, 3, lr=1e-4)
    assert step.mode == "compiled"
    assert step.means() == pytest.approx(eager.means(), rel=1e-3)
    torch.testing.assert_close(step.criterion.state_dict(), eager.criterion.state_dict(), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_captured_step_moves_a_criterions_buffers_and_parameters():
    eager, step = (with_criterion(Bank(), mode, "cuda") for mode in ("eager", "captured"))
    for one in (eager, step):
        take(one, 10, lr=1e-5)
    assert step.mode == "captured"
    assert float(step.criterion.steps) == 10
    assert step.means() == pytest.approx(eager.means(), rel=5e-3)
    torch.testing.assert_close(step.criterion.state_dict(), eager.criterion.state_dict(), rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_criterion_that_counts_on_the_host_is_not_captured_and_one_line_says_so(capfd: pytest.CaptureFixture[str]):
    eager, step = (with_criterion(Counts(), mode, "cuda") for mode in ("eager", "captured"))
    for one in (eager, step):
        take(one, 6, lr=1e-5)
    assert step.mode == "compiled"
    assert step.criterion.seen == eager.criterion.seen == 6
    assert step.means() == pytest.approx(eager.means(), rel=5e-3)
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot be captured" in line]
    assert said == [
        "this step cannot be captured in a CUDA graph (the criterion's seen changes on the host from step to step): "
        "going on compiled"
    ]
