"""Real processes over gloo: ranks train like one process, share the work, and survive failures."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from generators.speed import exchanged
from PIL import Image
from pipeline import flags, one_thread
from torch import nn

from curvssl.config import demo
from curvssl.data import views
from curvssl.evaluate.runs import embed, probe
from curvssl.models import make_net
from curvssl.ranks import BatchNorm, shares, synchronise
from curvssl.rundir import Run
from curvssl.train.loop import pretrain

CPU = torch.device("cpu")
HERE = Path(__file__).parents[1]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two ranks, all from one launch, and of one process that ran before them."""
    place = tmp_path_factory.mktemp("ranks")
    ranks.prepare(place)
    np.save(place / "one.npy", np.load(place / "seven.npy")[:1])
    for rank, n in enumerate((40, 30)):
        pictures = place / f"machine-{rank}" / "pictures"
        pictures.mkdir(parents=True)
        for i in range(n):
            Image.fromarray(np.full((9, 9), i, dtype=np.uint8)).save(pictures / f"{i}.png")
    with ranks.double_precision():
        assert ranks.interrupted(ranks.config(place), place / "one-then-two", here=True) == "stopped by SIGTERM"
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ranks.free_port()),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "ranks.py"), str(place)],
            env=os.environ | world | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return place


def said(folder: Path, what: str) -> list[Any]:
    """The entry `what` of each rank's results."""
    return [json.loads((folder / f"rank-{rank}.json").read_text())[what] for rank in (0, 1)]


# ---- the same as one process


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Run]:
    """The four methods in one process."""
    with ranks.double_precision():
        return {
            method: pretrain(ranks.config(folder, method=method), out=folder / f"one-{method}", progress=False)
            for method in ranks.METHODS
        }


@pytest.mark.parametrize("method", ranks.METHODS)
def test_two_ranks_over_twenty_steps_give_the_losses_and_weights_of_one(
    method: str, folder: Path, alone: dict[str, Run]
):
    assert len(ranks.loss_curve(alone[method].path)) == 20
    ranks.assert_same_run(alone[method].path, folder / f"two-{method}")
    one, two = (run.metrics()[-1] for run in (alone[method], Run.read(folder / f"two-{method}")))
    for name in ("rho", "z_std", "effective_rank", "grad_norm", "knn", "rankme"):  # metrics of the global batch, too
        assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-5), name


def test_streamed_images_local_views_and_blends_reach_the_right_rank(folder: Path):
    with ranks.double_precision():
        one = pretrain(ranks.config(folder, epochs=3, **ranks.MANY), out=folder / "one-short", progress=False)
    assert Run.read(folder / "two-streamed").read_json("provenance.json")["images_in_memory"] is False
    ranks.assert_same_run(one.path, folder / "two-streamed")


def test_views_made_by_workers_reach_the_right_rank(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(views, "LARGE", 1)
    with ranks.double_precision():
        one = pretrain(ranks.config(folder, epochs=3, **ranks.MANY), out=folder / "one-viewed", progress=False)
    ranks.assert_same_run(one.path, folder / "two-viewed")


def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_the_other_way_round(folder: Path, alone: dict[str, Run]):
    left = Run.read(folder / "two-then-one").checkpoints()
    assert [file.name for file in left] == [f"checkpoint-{ranks.STOP_AT + 1}.pt"]
    with ranks.double_precision():
        pretrain(ranks.config(folder), out=folder / "two-then-one", progress=False)
    ranks.assert_same_run(alone["curvssl"].path, folder / "two-then-one")
    ranks.assert_same_run(alone["curvssl"].path, folder / "one-then-two")


def test_only_rank_0_writes(folder: Path):
    names = {file.name.split(".tfevents")[0] for file in (folder / "two-curvssl").iterdir()}
    assert len([file for file in (folder / "two-curvssl").iterdir() if "tfevents" in file.name]) == 1
    assert {"config.json", "data.json", "metrics.jsonl", "provenance.json", "encoder.safetensors"} <= names
    assert Run.read(folder / "two-curvssl").read_json("provenance.json")["ranks"] == 2


# ---- failures


def test_a_signal_to_one_rank_stops_all_after_the_same_step(folder: Path):
    assert said(folder, "stopped") == ["stopped by SIGTERM"] * 2


def test_a_batch_that_ranks_cannot_share_is_refused(folder: Path):
    for answer in said(folder, "odd batch"):
        assert answer == "--batch-size 25 is the global batch, and 2 ranks cannot share it evenly: use 24 or 26"


def test_pairs_to_blend_that_would_span_two_ranks_are_refused(folder: Path):
    for answer in said(folder, "odd pairs"):
        assert answer == "--batch-size 22 over 2 ranks leaves no pairs to blend for --alpha-chord: use a multiple of 4"


def test_a_machine_with_less_data_is_named_before_anything_hangs(folder: Path):
    for answer in said(folder, "less data"):
        assert "rank 1 sees 30 of 40 files looked for, rank 0 40 of 40" in answer


def children(parent: int) -> dict[str, int]:
    """{RANK: process id} of the processes that a torchrun started."""
    processes = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                variables = dict(v.split("=", 1) for v in (entry / "environ").read_text().split("\0") if "=" in v)
                processes[variables["RANK"]] = int(entry.name)
        except (OSError, KeyError):
            continue
    return processes


def test_a_killed_rank_is_started_again_and_the_run_finishes(tmp_path: Path):
    run = tmp_path / "run"
    long = ranks.dataclasses.replace(
        demo(), image_size=8, epochs=5, batch_size=256, monitor_every=0, checkpoint_seconds=0
    )
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{ranks.free_port()}"]
    command = [sys.executable, *launch, *rendezvous, "-m", "curvssl", "pretrain", *flags(long), "--out", str(run)]
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    process = subprocess.Popen(
        command, env=os.environ | quiet, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or len(Run.read(run).metrics()) < 2:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = Run.read(run).metrics()[0]
        os.kill(children(process.pid)["1"], signal.SIGKILL)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "5 epochs" in out
    metrics = Run.read(run).metrics()
    assert [row["epoch"] for row in metrics] == list(range(1, 6))
    assert metrics[0] == before  # it resumed and did not start again: even the columns of the clock are equal
    assert "(exitcode: -9) local_rank: 1" in err


# ---- shared work


def test_embeddings_made_by_two_ranks_are_those_of_one(folder: Path, alone: dict[str, Run]):
    run = Run.read(folder / "two-curvssl")
    with ranks.double_precision():
        for name, n in (("seven", 7), ("one", 1)):  # 7 is odd, and 1 leaves a rank without any
            embed(run, folder / f"{name}.npy", out=folder / f"{name}.npz")
            with np.load(folder / f"{name}.npz") as one, np.load(folder / f"two-{name}.npz") as two:
                assert one["h"].shape == (n, 128)
                np.testing.assert_allclose(two["h"], one["h"], rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(two["z"], one["z"], rtol=1e-5, atol=1e-6)


def test_probes_made_by_two_ranks_are_those_of_one(folder: Path):
    first, second = said(folder, "probes")
    assert first == second
    run = Run.read(folder / "two-curvssl")
    for file in run.path.glob("features-*"):
        file.unlink()
    with ranks.double_precision():
        assert json.loads(json.dumps(probe(run, seeds=(0,)))) == first


@pytest.mark.parametrize("n", [0, 1, 5, 6])
def test_shares_leave_nothing_out(n: int, monkeypatch: pytest.MonkeyPatch):
    from curvssl import ranks as distributed

    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    parts = [list(range(n))[part] for part in shares(n)]
    assert [i for part in parts for i in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("method", ranks.METHODS)
def test_the_loss_exchanges_as_much_as_the_document_says(method: str, folder: Path):
    for numbers in said(folder, "exchanged"):
        assert tuple(numbers[method]) == exchanged(method, batch=24, d=8)


# ---- batch normalisation


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(6, 5), (4, 5, 3, 2)])
def test_batch_norm_over_ranks_is_torchs_when_there_is_one(
    shape: tuple[int, ...], affine: bool, momentum: float | None
):
    torch.manual_seed(0)
    kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    theirs = kind(5, affine=affine, momentum=momentum, dtype=torch.float64)
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours = BatchNorm(kind(5, affine=affine, momentum=momentum, dtype=torch.float64))
    ours.load_state_dict(theirs.state_dict())
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64).requires_grad_()
        twin = x.detach().clone().requires_grad_()
        y, expected = ours(x), theirs(twin)
        torch.testing.assert_close(y, expected)
        weight = torch.randn_like(y)
        (y * weight).sum().backward()
        (expected * weight).sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("encoder", ["resnet-mini", "resnet18", "timm:resnetv2_50"])
def test_a_synchronised_network_has_the_same_weights_under_the_same_names(encoder: str):
    shape: dict[str, Any] = {
        "stem": "small",
        "channels": 3,
        "size": 32,
        "width": 16,
        "depth": 2,
        "d_z": 8,
        "norm": True,
    }
    net, plain = (make_net(encoder=encoder, seed=0, **shape) for _ in range(2))
    synchronise(net, device=CPU)
    assert not any(type(m) in (nn.BatchNorm1d, nn.BatchNorm2d) for m in net.modules())
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=0, atol=0)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(net.eval()(x), plain.eval()(x))
