"""The training loop: seeds, the run directory, stopping and resuming, the order of batches, and single steps."""

import dataclasses
import json
import math
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pipeline import TINY, one_thread, rows, weights
from torch import Tensor, nn

from curvssl.config import PretrainConfig, UserError
from curvssl.data import memory
from curvssl.data import named as data
from curvssl.data.images import TensorImages
from curvssl.data.order import batches, hold_out, mix
from curvssl.data.views import Augment, Views
from curvssl.evaluate.quality import MEASURES
from curvssl.files import lock
from curvssl.lars import Lars
from curvssl.losses import BarlowTwinsLoss
from curvssl.rundir import Run
from curvssl.train import loop as train
from curvssl.train.loop import Stopped, learning_rate, pretrain
from curvssl.train.step import Step, make_optimizer

CPU = torch.device("cpu")
MONITORED = {"knn", *MEASURES}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without an interruption."""
    return pretrain(TINY, out=tmp_path_factory.mktemp("whole"), progress=False).path


# ---- the same seed, the same weights ----


def test_the_same_seed_gives_the_same_weights_to_the_last_bit(whole: Path, tmp_path: Path):
    torch.manual_seed(123)  # torch's global state must not matter
    pretrain(TINY, out=tmp_path, progress=False)
    assert weights(tmp_path) == weights(whole)
    assert rows(tmp_path) == rows(whole)


def test_another_seed_gives_other_weights(whole: Path, tmp_path: Path):
    pretrain(dataclasses.replace(TINY, seed=1, epochs=1), out=tmp_path, progress=False)
    assert weights(tmp_path)[0] != weights(whole)[0]
    assert rows(tmp_path)[0]["loss"] != rows(whole)[0]["loss"]


def test_pretraining_reads_neither_the_test_split_nor_a_label(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = data.load("digits")
    nothing: Any = object()  # has neither images nor labels: any access fails
    blind = dataclasses.replace(real, train=dataclasses.replace(real.train, labels=None), test=nothing)
    monkeypatch.setitem(data.DATASETS, "digits", lambda **_: blind)
    pretrain(TINY, out=tmp_path, progress=False)
    assert weights(tmp_path) == weights(whole)
    assert rows(tmp_path) == [{name: value for name, value in row.items() if name != "knn"} for row in rows(whole)]


# ---- the run directory ----


def test_a_row_of_metrics_has_every_promised_column(whole: Path):
    terms = {"invariance", "redundancy", "curvature_alignment", "curvature_decorrelation"}
    promised = {"epoch", "step", "loss", "rho", "z_std", "effective_rank", "grad_norm", "lr", "views_per_s", "seconds"}
    metrics = Run.read(whole).metrics()
    assert [row["epoch"] for row in metrics] == [1, 2]
    assert [row["step"] for row in metrics] == [10, 20]
    for row in metrics:
        assert row.keys() == promised | terms | MONITORED
        assert all(math.isfinite(value) for value in row.values())
        weighed = row["invariance"] + TINY.lambda_emb * row["redundancy"]
        weighed += row["curvature_alignment"] + row["curvature_decorrelation"]
        assert row["loss"] == pytest.approx(weighed, rel=1e-5)
        assert -1 <= row["rho"] <= 1


def test_provenance_lies_beside_the_weights(whole: Path):
    facts = Run.read(whole).read_json("provenance.json")
    assert facts["device"] == "cpu"
    assert facts["data_sha256"] == data.load("digits").sha256
    assert facts["images"] == 1437 - 718
    assert facts["seconds"] > 0


def test_tensorboard_shows_the_metrics(whole: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(whole)).Reload()
    for name in ("loss", "rho", "effective_rank", "knn", "rankme"):
        assert [event.step for event in shown.Scalars(name)] == [10, 20]
        assert [event.value for event in shown.Scalars(name)] == pytest.approx([row[name] for row in rows(whole)])


def test_without_tensorboard_the_metrics_are_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    pretrain(dataclasses.replace(TINY, epochs=1, batch_size=640), out=tmp_path, progress=False)
    assert len(rows(tmp_path)) == 1
    assert not list(tmp_path.glob("events*"))


def test_weights_and_biases_gets_the_metrics_offline_if_its_variable_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    monkeypatch.setenv("WANDB_MODE", "offline")
    for what in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{what}_DIR", str(tmp_path / "elsewhere"))
    run, short = tmp_path / "run", dataclasses.replace(TINY, epochs=1, batch_size=640)
    pretrain(short, out=run, progress=False)
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    store, history = DataStore(), []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            history.append({item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
        if record.WhichOneof("record_type") == "run":
            settings = {item.key: json.loads(item.value_json) for item in record.run.config.update}
    store.close()
    (row,) = Run.read(run).metrics()
    (kept,) = history
    assert {name: kept[name] for name in row} == pytest.approx(row)
    assert kept["_step"] == row["step"]
    assert settings["batch_size"] == 640
    file.parent.rename(run / "wandb" / f"offline-run-20260101_000000-{file.stem.removeprefix('run-')}")  # long ago
    (run / "encoder.safetensors").unlink()  # so that the same command goes on
    pretrain(short, out=run, progress=False)
    assert [other.stem for other in run.glob("wandb/offline-run-*/*.wandb")] == [file.stem, file.stem]


def test_a_finished_run_is_left_as_it_is(whole: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "DATASETS", {})  # not even the data is loaded
    before = {file.name: file.stat().st_mtime_ns for file in whole.iterdir() if file.name != "lock"}
    assert pretrain(TINY, out=whole).path == whole
    assert {file.name: file.stat().st_mtime_ns for file in whole.iterdir() if file.name != "lock"} == before
    with pytest.raises(UserError, match="holds a run with other settings"):
        pretrain(dataclasses.replace(TINY, d_z=32), out=whole)


# ---- stopping and going on ----


@pytest.mark.parametrize("stops", [[0], [4, 9], [10], [18, 19]], ids=str)
def test_a_run_stopped_at_any_step_goes_on_to_the_same_weights(
    stops: list[int], whole: Path, tmp_path: Path, stop_at: Callable[[int], None]
):
    for s in stops:  # in the first step, in the middle, at the end of an epoch, at the start of one, at the very end
        stop_at(s)
        with pytest.raises(Stopped, match="SIGINT"):
            pretrain(TINY, out=tmp_path, progress=False)
        assert Run.read(tmp_path).checkpoints()[-1].name == f"checkpoint-{s + 1}.pt"
    stop_at(-1)
    pretrain(TINY, out=tmp_path, progress=False)
    assert weights(tmp_path) == weights(whole)
    assert rows(tmp_path) == rows(whole)


def test_a_run_with_local_views_and_blends_goes_on_to_the_same_weights(tmp_path: Path, stop_at: Callable[[int], None]):
    many = dataclasses.replace(TINY, local_views=2, local_size=6, alpha_chord=3.0, epochs=1)
    pretrain(many, out=tmp_path / "whole", progress=False)
    stop_at(4)
    with pytest.raises(Stopped, match="SIGINT"):
        pretrain(many, out=tmp_path / "stopped", progress=False)
    stop_at(-1)
    pretrain(many, out=tmp_path / "stopped", progress=False)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
    assert "chord" in rows(tmp_path / "whole")[0]


class Sizes(nn.Module):
    """An encoder that remembers which sizes of images it has seen, in training and in evaluation."""

    seen: ClassVar[set[tuple[bool, int]]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((self.training, x.shape[-1]))
        return self.convolution(x).mean((2, 3))


def test_global_views_may_be_smaller_than_the_whole_images_that_are_judged(tmp_path: Path):
    small = dataclasses.replace(TINY, global_size=6, local_views=1, local_size=5, epochs=1, monitor_every=1)
    Sizes.seen.clear()
    made = pretrain(small, out=tmp_path, encoder=Sizes(), progress=False)
    training, judged = ({size for mode, size in Sizes.seen if mode is kind} for kind in (True, False))
    assert training == {6, 5}
    assert judged >= {TINY.image_size, 6}  # kNN; LiDAR is measured on views
    assert made.load_parts(encoder=Sizes())[0].prepare(torch.zeros(2, 1, 9, 9, dtype=torch.uint8)).shape[-1] == 8


def test_a_run_with_a_teacher_goes_on_to_the_same_weights_which_are_the_average(
    tmp_path: Path, stop_at: Callable[[int], None]
):
    taught = dataclasses.replace(TINY, average=0.8, teacher=True, epochs=1, checkpoint_seconds=0.0)
    whole = pretrain(taught, out=tmp_path / "whole", progress=False)
    stop_at(4)
    with pytest.raises(Stopped, match="SIGINT"):
        pretrain(taught, out=tmp_path / "stopped", progress=False)
    stop_at(-1)
    pretrain(taught, out=tmp_path / "stopped", progress=False)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    last = whole.load_checkpoint()
    assert last is not None
    kept = whole.load_net().state_dict()
    torch.testing.assert_close(kept, last["average"], rtol=0, atol=0)
    assert not torch.equal(kept["encoder.stem.0.weight"], last["net"]["encoder.stem.0.weight"])


@pytest.mark.parametrize("lag", [1, 9, 10, 15])
def test_rows_that_are_read_some_steps_later_are_the_same_rows(
    lag: int, whole: Path, tmp_path: Path, stop_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
):
    """As on CUDA. The stop comes before the first row has been read; the last row is read when the run ends."""
    monkeypatch.setattr(train, "steps_behind", lambda device: lag)
    often = dataclasses.replace(TINY, monitor_every=2)
    for path, stops in ((tmp_path / "whole", []), (tmp_path / "stopped", [11])):
        for s in stops:
            stop_at(s)
            with pytest.raises(Stopped):
                pretrain(often, out=path, progress=False)
            stop_at(-1)
        pretrain(often, out=path, progress=False)
        assert weights(path) == weights(whole)
        assert [row.keys() & MONITORED for row in rows(path)] == [set(), MONITORED]
        for row, other in zip(rows(path), rows(whole), strict=True):
            assert row == {name: value for name, value in other.items() if name in row}


def test_tensorboard_shows_a_resumed_run_once(tmp_path: Path, whole: Path, stop_at: Callable[[int], None]):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    often = dataclasses.replace(TINY, checkpoint_seconds=0)
    stop_at(12)
    with pytest.raises(Stopped):
        pretrain(often, out=tmp_path, progress=False)
    for file in Run.read(tmp_path).checkpoints():  # as after a SIGKILL before the first checkpoint
        file.unlink()
    stop_at(-1)
    pretrain(often, out=tmp_path, progress=False)
    assert [event.step for event in EventAccumulator(str(tmp_path)).Reload().Scalars("loss")] == [10, 20]
    assert weights(tmp_path) == weights(whole)


@pytest.mark.parametrize("broken", [1, 2])
def test_a_truncated_checkpoint_and_a_half_written_line_change_nothing(
    broken: int, whole: Path, tmp_path: Path, stop_at: Callable[[int], None], capsys: pytest.CaptureFixture[str]
):
    often = dataclasses.replace(TINY, checkpoint_seconds=0)
    stop_at(12)
    with pytest.raises(Stopped):
        pretrain(often, out=tmp_path, progress=False)
    kept = Run.read(tmp_path).checkpoints()
    assert [file.name for file in kept] == ["checkpoint-12.pt", "checkpoint-13.pt"]
    for file in kept[-broken:]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with open(tmp_path / "metrics.jsonl", "a") as metrics:
        metrics.write('{"epoch": 2, "st')
    stop_at(-1)
    pretrain(often, out=tmp_path, progress=False)
    assert capsys.readouterr().err.count("has changed since it was written") == broken
    assert weights(tmp_path) == weights(whole)
    assert rows(tmp_path) == rows(whole)


@pytest.mark.parametrize(("name", "left"), [("encoder", 0), ("encoder", 3000), ("projector", 5)])
def test_a_finished_run_whose_weights_were_cut_off_is_mended_by_the_same_command(
    name: str, left: int, whole: Path, tmp_path: Path
):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    file = run / f"{name}.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    assert not Run.read(run).finished
    pretrain(TINY, out=run, progress=False)
    assert weights(run) == weights(whole)
    assert rows(run) == rows(whole)


def test_a_second_process_is_refused(tmp_path: Path):
    with lock(tmp_path), pytest.raises(UserError, match="another process trains in"):
        pretrain(TINY, out=tmp_path)


def test_a_batch_that_the_images_do_not_fill_is_refused_and_stands_in_nobodys_way(tmp_path: Path):
    with pytest.raises(UserError, match="719 training images do not fill one batch of 2000: lower --batch-size"):
        pretrain(dataclasses.replace(TINY, batch_size=2000), out=tmp_path)
    assert pretrain(dataclasses.replace(TINY, batch_size=640, epochs=1), out=tmp_path, progress=False).finished


def test_what_a_folder_of_twelve_images_is_told_to_do_works(tmp_path: Path):
    few = torch.randint(256, (12, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "few.npy", few.numpy())
    asked = dataclasses.replace(TINY, dataset=f"array:{tmp_path / 'few.npy'}", holdout=0.1, k=10, batch_size=0)
    with pytest.raises(UserError, match=r"10 training .* to 10 or less, and --k below that, 10 now") as told:
        pretrain(asked, out=tmp_path / "run", progress=False)
    assert "batch of 16" in str(told.value)
    mended = dataclasses.replace(asked, batch_size=10, k=9)
    assert pretrain(mended, out=tmp_path / "run", progress=False).finished


def test_sizes_that_the_images_chose_stay_when_the_run_goes_on(tmp_path: Path, stop_at: Callable[[int], None]):
    open_size = dataclasses.replace(TINY, batch_size=0, stem="auto", epochs=2)
    chosen = dataclasses.replace(TINY, batch_size=64, stem="imagenet", epochs=2)  # 719 images, a CPU
    pretrain(chosen, out=tmp_path / "given", progress=False)
    stop_at(5)
    with pytest.raises(KeyboardInterrupt):
        pretrain(open_size, out=tmp_path / "chosen", progress=False)
    stop_at(-1)
    run = pretrain(open_size, out=tmp_path / "chosen", progress=False)
    assert run.config == Run.read(tmp_path / "chosen").config == chosen
    names = ("encoder.safetensors", "projector.safetensors")
    assert all((run.path / name).read_bytes() == (tmp_path / "given" / name).read_bytes() for name in names)


# ---- a loss that breaks ----


def test_a_broken_loss_is_named_with_its_step_and_the_weights_are_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    last = 0  # the step that a signal precedes

    def rate(s: int, *_: Any, **__: Any) -> float:
        if s + 1 == last:
            signal.raise_signal(signal.SIGINT)
        return 1e-3 if s < 14 else 1e36

    monkeypatch.setattr(train, "learning_rate", rate)
    with pytest.raises(UserError) as error:
        pretrain(TINY, out=tmp_path / "broken", progress=False)
    named = re.fullmatch(r"the loss is not a number in step (\d+), epoch 2 \(.*\): .* --lr, .*", str(error.value))
    assert named is not None
    step = int(named[1])
    assert step in (15, 16)  # of step 15 the gradient, if not the loss of the step after it
    assert not Run.read(tmp_path / "broken").finished
    assert [row["epoch"] for row in rows(tmp_path / "broken")] == [1]
    last = step - 1
    with pytest.raises(KeyboardInterrupt):
        pretrain(TINY, out=tmp_path / "stopped", progress=False)
    broken, stopped = (Run.read(tmp_path / name).load_checkpoint() for name in ("broken", "stopped"))
    assert broken is not None
    assert stopped is not None
    assert broken["step"] == stopped["step"] == step - 1
    for part, value in stopped["net"].items():
        torch.testing.assert_close(broken["net"][part], value, rtol=0, atol=0)


# ---- the order of things ----


def test_an_epoch_shows_every_image_at_most_once_and_each_in_a_new_order():
    epochs = torch.stack(list(batches(37, size=10, seed=0, first=0, last=9, device=CPU))).view(3, 30)
    for epoch in epochs:
        assert len(epoch.unique()) == 30
        assert int(epoch.min()) >= 0
        assert int(epoch.max()) < 37
    assert not torch.equal(epochs[0], epochs[1])
    left_out = [set(range(37)) - set(epoch.tolist()) for epoch in epochs]
    assert left_out[0] != left_out[1]


def test_batches_go_on_where_they_are_asked_to():
    ask: dict[str, Any] = {"size": 10, "seed": 3, "last": 9, "device": CPU}
    everything = list(batches(37, first=0, **ask))
    for first in range(10):
        assert all(map(torch.equal, batches(37, first=first, **ask), everything[first:]))


@pytest.mark.parametrize(("share", "held"), [(0.1, 143), (0.5, 718), (0.0, 143)])
def test_the_held_out_images_are_none_of_those_trained_on(share: float, held: int):
    fit, out, known = hold_out(1437, share=share, seed=3)
    assert len(out) == held
    assert sorted(torch.cat((known, out)).tolist()) == list(range(1437))
    if share:
        assert sorted(torch.cat((fit, out)).tolist()) == list(range(1437))
    else:  # all are trained on; a tenth are also held out for the monitor
        assert sorted(fit.tolist()) == list(range(1437))
        assert set(out.tolist()) <= set(fit.tolist())
    again, other = hold_out(1437, share=share, seed=3)[1], hold_out(1437, share=share, seed=4)[1]
    assert torch.equal(out, again)
    assert not torch.equal(out, other)


def test_a_limit_draws_some_of_the_images_to_train_on_and_changes_nothing_else():
    ask: dict[str, Any] = {"share": 0.1, "seed": 3, "unlabelled": 1437}
    everything, few, more = (hold_out(1437, limit=limit, **ask) for limit in (0, 200, 800))
    assert (len(few.fit), len(more.fit), len({*few.fit.tolist()})) == (200, 800, 200)
    assert {*few.fit.tolist()} <= {*more.fit.tolist()} <= {*everything.fit.tolist()}
    assert 80 < int((few.fit >= 1437).sum()) < 130  # with and without labels alike: 1437 of 2731
    for part in ("held", "known"):
        assert torch.equal(getattr(few, part), getattr(everything, part))
    assert len(hold_out(1437, limit=9999, **ask).fit) == len(everything.fit)


def test_a_run_with_a_limit_trains_on_these_images_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    few = dataclasses.replace(TINY, limit=100, batch_size=50, epochs=1)
    digits = data.load("digits")
    fit = train.chosen(few, digits).fit
    assert len(fit) == 100
    pixels = torch.zeros_like(digits.train.images.pixels)
    pixels[fit] = digits.train.images.pixels[fit]
    blank = dataclasses.replace(digits, train=data.Split(TensorImages.of(pixels), digits.train.labels))
    run = pretrain(few, out=tmp_path / "all", progress=False)
    assert run.read_json("provenance.json")["images"] == 100
    assert rows(run.path)[-1]["step"] == 2
    monkeypatch.setattr(train, "load_on_ranks", lambda *_, **__: blank)
    again = pretrain(few, out=tmp_path / "blank", progress=False)
    monkeypatch.setattr(memory, "fits", lambda *_, **__: False)
    streamed = pretrain(few, out=tmp_path / "streamed", progress=False)
    assert weights(run.path) == weights(again.path) == weights(streamed.path)
    assert rows(run.path)[-1]["knn"] != rows(again.path)[-1]["knn"]  # the monitor still asks for held-out images


def test_near_seeds_and_steps_give_unrelated_numbers():
    seen = {mix(seed, number) for seed in range(30) for number in range(-30, 30)}
    assert len(seen) == 1800
    assert all(0 <= value < 2**63 for value in seen)
    ones = [bin(mix(0, n) ^ mix(0, n + 1)).count("1") for n in range(100)]
    assert 25 < sum(ones) / len(ones) < 38  # half of the 63 bits differ


def test_warm_up_rises_to_the_rate_and_a_cosine_takes_it_to_zero():
    config = PretrainConfig(lr=2.0, epochs=4, warmup_epochs=1, schedule="cosine")
    rates = [learning_rate(s, config, steps_per_epoch=4) for s in range(16)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    # After the warm-up 12 steps: cos 60° = 1/2, cos 90° = 0, cos 120° = −1/2 at a third, a half and two thirds.
    assert (rates[8], rates[10], rates[12]) == pytest.approx((1.5, 1.0, 0.5))
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] < 0.05


def test_without_warm_up_or_schedule_the_rate_is_the_one_written():
    config = PretrainConfig(lr=0.3, epochs=4)
    assert {learning_rate(s, config, steps_per_epoch=4) for s in range(16)} == {0.3}
    half = dataclasses.replace(config, warmup_epochs=0.5)
    assert [learning_rate(s, half, steps_per_epoch=4) for s in range(3)] == pytest.approx([0.15, 0.3, 0.3])


# ---- one step ----


def one_step(optimizer: str, *, lr: float, weight_decay: float) -> tuple[nn.Module, list[Tensor], list[Tensor], Step]:
    """A network after one step; its weights before; the gradient that the step should use, by autograd; the step."""
    torch.manual_seed(0)
    images = data.load("digits").train.images.pixels[:32]
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    twin = deepcopy(net)
    augment = Augment(size=8, mean=(0.5,), std=(0.5,), **vars(TINY.augment))
    criterion = BarlowTwinsLoss(lambda_emb=0.1)
    settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": 0.9, "device": CPU, "mode": "eager"}
    step = Step(
        net=net,
        criterion=criterion,
        views=Views(augment),
        optimizer=make_optimizer(net, name=optimizer, **settings),
        images=images,
        device=CPU,
        bf16=False,
    )
    before = [p.detach().clone() for p in net.parameters()]
    batch, u = torch.arange(31, -1, -1), torch.rand(2, 32, augment.draws)
    loss = criterion(*(twin(augment(images[batch], half)) for half in u))  # two passes, one per view
    gradient = list(torch.autograd.grad(loss, list(twin.parameters())))
    step(batch, [u], lr)
    assert step.means()["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, buffer in twin.named_buffers():  # BatchNorm used one view after the other
        assert torch.allclose(net.get_buffer(name), buffer)
    return net, before, gradient, step


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-6)


def test_a_step_of_sgd_goes_down_the_gradient():
    net, before, gradient, step = one_step("sgd", lr=0.1, weight_decay=0.01)
    for p, w, g in zip(net.parameters(), before, gradient, strict=True):
        assert close(p.detach(), w - 0.1 * (g + 0.01 * w))
    assert float(step.gradient_norm()) == pytest.approx(
        float(torch.cat([g.flatten() for g in gradient]).norm()), rel=1e-4
    )


def test_a_first_step_of_adam_has_the_length_of_the_rate():
    net, before, gradient, _ = one_step("adam", lr=0.1, weight_decay=0.01)
    for p, w, g in zip(net.parameters(), before, gradient, strict=True):
        decayed = g + 0.01 * w  # Adam's weight decay is part of the gradient, as in the paper
        big = decayed.abs() > 1e-3  # for smaller ones rounding decides the sign
        assert close((p.detach() - w)[big], -0.1 * decayed.sign()[big])


def test_a_step_of_lars_is_scaled_layer_by_layer_and_spares_gains_and_biases():
    net, before, gradient, _ = one_step("lars", lr=0.1, weight_decay=0.01)
    for p, w, g in zip(net.parameters(), before, gradient, strict=True):
        if w.ndim == 1:
            assert close(p.detach(), w - 0.1 * g)
        else:  # η ‖w‖ / (‖g‖ + β ‖w‖), You et al. 2017, Eq. (6), but no more than the rate
            local = min(0.1, float(0.02 * w.norm() / (g.norm() + 0.01 * w.norm())))
            assert close(p.detach(), w - local * (g + 0.01 * w))


@pytest.mark.parametrize("rate", [1e-3, 0.3, torch.tensor(0.3)], ids=["clipped", "fitted", "as a tensor"])
def test_steps_of_lars_are_timms(rate: Any):
    timm = pytest.importorskip("timm.optim")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 4)).double()
    twin = deepcopy(net)
    ours = Lars(net, lr=rate, momentum=0.9, weight_decay=1e-2)
    groups = [{"params": [p for p in twin.parameters() if (p.ndim > 1) == layers]} for layers in (True, False)]
    groups[0]["weight_decay"] = 1e-2  # type: ignore[assignment]
    theirs = timm.Lars(groups, lr=float(rate), momentum=0.9, trust_coeff=0.02, trust_clip=True)
    for _ in range(4):
        x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
        for module, optimizer in ((net, ours), (twin, theirs)):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(dict(net.named_parameters()), dict(twin.named_parameters()))


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_the_other_optimisers_train_and_resume(optimizer: str, tmp_path: Path, stop_at: Callable[[int], None]):
    config = dataclasses.replace(TINY, optimizer=optimizer, lr=0.1, batch_size=160, method="barlow-twins")
    stop_at(5)
    with pytest.raises(Stopped):
        pretrain(config, out=tmp_path / "stopped", progress=False)
    stop_at(-1)
    pretrain(config, out=tmp_path / "stopped", progress=False)
    pretrain(config, out=tmp_path / "whole", progress=False)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    assert rows(tmp_path / "whole")[1]["loss"] < rows(tmp_path / "whole")[0]["loss"]


# ---- devices ----


def test_what_this_machine_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="there is no CUDA device here: use --device cpu"):
        train.pick_device("cuda")
    with pytest.raises(UserError, match="step captured needs a CUDA device"):
        train.pick_mode("captured", device=CPU)
    assert train.pick_device("auto") == CPU
    assert train.pick_mode("auto", device=CPU) == "eager"
