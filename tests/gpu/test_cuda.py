"""Runs on CUDA: two ranks on one GPU train like one process, one rank uses NCCL, and images are streamed."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda_ranks
import numpy as np
import pytest
import ranks
import torch
from cuda_ranks import CUDA, SMALL_LR, config
from pipeline import TINY, flags, rows
from ranks import assert_same_run, free_port
from torch import Tensor, nn

from curvssl.config import AugmentConfig, UserError
from curvssl.data import memory
from curvssl.data.arrays import ArrayImages, read_arrays
from curvssl.data.images import CHUNK
from curvssl.evaluate.features import load
from curvssl.evaluate.probes import PROBES
from curvssl.evaluate.runs import embed, probe
from curvssl.rundir import Run
from curvssl.train.loop import pretrain

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

HERE = Path(__file__).parents[1]
FLAGS = flags(dataclasses.replace(TINY, lr=SMALL_LR, device=CUDA.type, precision="fp32"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "1"]
IMAGES = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cuda")
    ranks.prepare(place)
    np.save(place / "many.npy", np.random.default_rng(1).integers(0, 256, (IMAGES, 3, 10, 10), dtype=np.uint8))
    return place


class Jobs:
    """The processes beside this one, all started at once: most of their time is spent on starting and compiling."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.deadline = folder, time.monotonic() + 240
        self.running: dict[str, list[subprocess.Popen[bytes]]] = {}
        for job, launcher in (("plain", []), ("torchrun", TORCHRUN)):
            command = [*launcher, "-m", "curvssl", "pretrain", *FLAGS, "--out", str(folder / job)]
            self.start(job, command)
        for job, size in (("eager", 2), ("compiled", 2), ("nccl", 1)):
            world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
            world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            for rank in range(size):
                self.start(job, [str(HERE / "cuda_ranks.py"), job, str(folder)], RANK=str(rank), **world)

    def start(self, job: str, command: list[str], **variables: str) -> None:
        # With TF32, rounding would make two equal runs differ so much that it hides any other difference.
        fixed = {"NVIDIA_TF32_OVERRIDE": "0", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        fixed["PYTHONPATH"] = os.pathsep.join(sys.path)  # they import the same files as this process
        with open(self.folder / f"{job}.log", "a") as log:
            process = subprocess.Popen(
                [sys.executable, *command], env=os.environ | fixed | variables, stdout=log, stderr=log
            )
        self.running.setdefault(job, []).append(process)

    def log(self, job: str) -> str:
        """What a job printed, after it ended without an error."""
        while None in (codes := [process.poll() for process in self.running[job]]):
            if any(codes) or time.monotonic() > self.deadline:  # a rank whose partner failed would wait for long
                break
            time.sleep(0.05)
        printed = (self.folder / f"{job}.log").read_text()
        assert codes == [0] * len(codes), printed
        return printed

    def said(self, job: str) -> list[dict[str, Any]]:
        """The results that each rank of a job wrote, after it ended without an error."""
        self.log(job)
        return [json.loads((self.folder / f"{job}-{rank}.json").read_text()) for rank in range(len(self.running[job]))]


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Iterator[Jobs]:
    started = Jobs(folder)
    yield started
    for process in (process for processes in started.running.values() for process in processes):
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Run]:
    """The runs that two ranks train, trained in one process."""
    with ranks.double_precision():
        return {
            method: pretrain(config(folder, method=method), out=folder / f"one-{method}", progress=False)
            for method in cuda_ranks.METHODS
        }


# ---- two ranks on one GPU, over gloo


@pytest.mark.parametrize("method", cuda_ranks.METHODS)
def test_two_ranks_over_twenty_steps_give_the_losses_and_weights_of_one(
    method: str, folder: Path, jobs: Jobs, alone: dict[str, Run]
):
    jobs.log("eager")
    two = Run.read(folder / f"two-{method}")
    assert two.read_json("provenance.json")["ranks"] == 2
    assert len(two.metrics()) == 20
    assert_same_run(alone[method].path, two.path)
    for name in ("rho", "z_std", "effective_rank", "grad_norm", "knn"):  # metrics of the global batch, too
        assert two.metrics()[-1][name] == pytest.approx(alone[method].metrics()[-1][name], rel=1e-4, abs=1e-4), name


def test_streamed_images_reach_the_right_rank(folder: Path, jobs: Jobs):
    jobs.log("eager")
    with ranks.double_precision():
        one = pretrain(config(folder, epochs=3), out=folder / "one-short", progress=False)
    assert Run.read(folder / "two-streamed").read_json("provenance.json")["images_in_memory"] is False
    assert_same_run(one.path, folder / "two-streamed")


def test_a_checkpoint_of_two_ranks_goes_on_with_one(folder: Path, jobs: Jobs, alone: dict[str, Run]):
    assert [result["stopped"] for result in jobs.said("eager")] == ["stopped by SIGTERM"] * 2
    assert len(Run.read(folder / "two-then-one").metrics()) == ranks.STOP_AT + 1
    with ranks.double_precision():
        pretrain(config(folder), out=folder / "two-then-one", progress=False)
    assert_same_run(alone["curvssl"].path, folder / "two-then-one")


def test_embeddings_made_by_two_ranks_are_those_of_one(folder: Path, jobs: Jobs):
    jobs.log("eager")
    with ranks.double_precision():
        one = embed(Run.read(folder / "two-curvssl"), folder / "seven.npy", out=folder / "seven.npz")
    two = read_arrays(folder / "two-seven.npz")
    assert one.h.shape == (7, 128)  # 7 is odd: the ranks' shares differ
    for made, expected in ((two["h"], one.h), (two["z"], one.z)):
        torch.testing.assert_close(torch.from_numpy(made), expected, rtol=1e-5, atol=1e-6)


def test_probes_made_by_two_ranks_are_those_of_one(folder: Path, jobs: Jobs):
    first, second = (result["probes"] for result in jobs.said("eager"))
    assert first == second
    run = Run.read(folder / "two-curvssl")
    files = [f"features-{split}.npz" for split in ("train", "test")]
    by_two = [load(run, file) for file in files]
    for file in files:
        (run.path / file).unlink()
    with ranks.double_precision():
        by_one = probe(run, seeds=(0,))
    assert sum(len(features.h) for features in by_two) == 30
    for two, one in zip(by_two, [load(run, file) for file in files], strict=True):
        torch.testing.assert_close((two.h, two.z, two.y), (one.h, one.z, one.y), rtol=1e-5, atol=1e-6)
    assert first.keys() == by_one.keys()
    for name in PROBES:
        assert first[name]["accuracy"] == pytest.approx(by_one[name]["accuracy"]), name


# ---- images that are not on the device, and runs that leave it


def test_a_stream_brings_the_pixels_of_the_rows_to_the_device(folder: Path):
    path = folder / "many.npy"
    images = ArrayImages(torch.arange(IMAGES), path, np.load(path, mmap_mode="r"))
    asked = torch.randint(IMAGES, (5, 2 * CHUNK + 1), generator=torch.Generator().manual_seed(0))
    streamed = list(images.batches(asked, device=CUDA, workers=2))  # all are kept: none may be overwritten
    assert {batch.device.type for batch in streamed} == {CUDA.type}
    torch.testing.assert_close(torch.stack(streamed).cpu(), torch.from_numpy(np.load(path))[asked], rtol=0, atol=0)


@pytest.fixture(scope="module")
def resident(folder: Path) -> Run:
    """Ten steps with the images on the device. Without curvature: its part of the loss is mostly the constant b."""
    many = {"dataset": f"array:{folder / 'many.npy'}", "batch_size": 2 * CHUNK, "epochs": 10}
    with ranks.double_precision():
        return pretrain(
            config(folder, method="barlow-twins", lr=SMALL_LR, **many), out=folder / "resident", progress=False
        )


def assert_streamed_losses(step: str, resident: Run, out: Path, *, tolerance: float) -> None:
    streamed = pretrain(dataclasses.replace(resident.config, step=step), out=out, progress=False)
    assert resident.read_json("provenance.json")["images_in_memory"] is True
    assert streamed.read_json("provenance.json")["images_in_memory"] is False
    torch.testing.assert_close(ranks.loss_curve(out), ranks.loss_curve(resident.path), rtol=tolerance, atol=0)


def test_streamed_images_train_as_those_on_the_device_do(
    resident: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "fits", lambda *_, **__: False)
    with ranks.double_precision():
        assert_streamed_losses("eager", resident, tmp_path / "run", tolerance=1e-9)


def test_a_captured_step_takes_streamed_images(
    resident: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """In float32, for which it is made. A chunk of another step's images would change the loss by several percent."""
    monkeypatch.setattr(memory, "fits", lambda *_, **__: False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert_streamed_losses("captured", resident, tmp_path / "run", tolerance=1e-2)
    assert "cannot be captured" not in capfd.readouterr().err


def test_a_run_begun_on_cuda_goes_on_on_the_cpu(folder: Path):
    """With views that do not depend on random numbers, because the two devices draw different ones."""
    sure = AugmentConfig(crop_scale=(1, 1), flip=1, jitter=0, grayscale=0)
    settings = config(folder, method="barlow-twins", lr=SMALL_LR, image_size=10, augment=sure)
    on_cpu = dataclasses.replace(settings, device="cpu")
    with ranks.double_precision():
        whole = pretrain(on_cpu, out=folder / "on-cpu", progress=False)
        assert ranks.interrupted(settings, folder / "moved", here=True) == "stopped by SIGTERM"
        begun = rows(folder / "moved")
        moved = pretrain(on_cpu, out=folder / "moved", progress=False)
    assert len(begun) == ranks.STOP_AT + 1
    assert rows(moved.path)[: len(begun)] == begun
    # One device divides a pixel by 255, the other multiplies it by 1/255, in float32.
    torch.testing.assert_close(ranks.loss_curve(moved.path), ranks.loss_curve(whole.path), rtol=5e-3, atol=0)


class Breaks(nn.Module):
    """A loss that is infinite from its seventh step on; the device counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        self.steps += 1
        return (z0 - z1).square().mean() / (self.steps < 7)


@pytest.mark.parametrize("step", ["eager", "captured"])
def test_a_loss_that_breaks_on_the_device_is_named_with_its_step_and_the_checkpoint_is_from_before(
    step: str, folder: Path, tmp_path: Path
):
    settings = config(folder, step=step, checkpoint_seconds=0)
    with pytest.raises(UserError, match="the loss is not a number in step 7, epoch 7"):
        pretrain(settings, criterion=Breaks(), out=tmp_path / "run", progress=False)
    state = Run.read(tmp_path / "run").load_checkpoint()
    assert state is not None
    assert state["step"] == state["criterion"]["steps"] == 6
    assert all(bool(tensor.isfinite().all()) for tensor in state["net"].values())


# ---- compiled, and one rank over NCCL


def test_two_ranks_with_a_compiled_step_train_as_eager_ones_do(folder: Path, jobs: Jobs):
    for result in jobs.said("compiled"):
        assert result["compiled"] >= 2  # the views and the network
    eager, compiled = (Run.read(folder / f"two-{step}").metrics() for step in ("eager", "compiled"))
    for one, two in zip(eager, compiled, strict=True):
        for name in ("loss", "invariance", "redundancy", "rho"):
            assert two[name] == pytest.approx(one[name], rel=2e-2, abs=5e-2), name


def test_one_rank_under_torchrun_trains_as_the_plain_command_does(folder: Path, jobs: Jobs):
    assert "cannot be captured" not in jobs.log("plain") + jobs.log("torchrun")
    plain, launched = rows(folder / "plain"), rows(folder / "torchrun")
    assert [row["epoch"] for row in plain] == [1, 2]
    for one, two in zip(plain, launched, strict=True):
        assert two["lr"] == one["lr"]
        for name in ("loss", "invariance", "redundancy", "rho"):
            assert two[name] == pytest.approx(one[name], rel=1e-2, abs=1e-2), name


def test_one_rank_over_nccl_sums_and_gathers_its_own_and_lets_the_gradient_through(jobs: Jobs):
    (result,) = jobs.said("nccl")
    assert result["backends"] == "cpu:gloo,cuda:nccl"
    x = [[0, 1], [2, 3], [4, 5]]
    for name in ("total", "gather"):
        assert result[name] == [x, [[2 * value for value in row] for row in x]]  # Σx² has the gradient 2x
    assert result["host"] == [[1], [{"step": 7}], ["here"]]
    assert result["left"]


def test_one_rank_over_nccl_takes_the_step_of_the_bare_network(jobs: Jobs):
    (result,) = jobs.said("nccl")
    assert len(result["bare"]) == 6
    for ours, theirs in zip(result["averaged"], result["bare"], strict=True):
        torch.testing.assert_close(*([torch.tensor(values) for values in pair] for pair in (ours, theirs)))
