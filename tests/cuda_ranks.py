"""What each process of test_cuda.py does; they all share one GPU.

    RANK=… WORLD_SIZE=… python cuda_ranks.py JOB FOLDER

NCCL refuses two ranks on one device: two ranks use gloo, and one rank alone uses NCCL.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch import nn

from curvssl import collectives
from curvssl import ranks as distributed
from curvssl.config import AugmentConfig, PretrainConfig
from curvssl.data import memory
from curvssl.evaluate.runs import embed, probe
from curvssl.rundir import Run
from curvssl.train import loop as train

CUDA = torch.device("cuda")
METHODS = ("barlow-twins", "curvssl")
SMALL_LR = 1e-4  # where float32 is compared: at the demo's 2e-3, ten steps turn the last digit into a percent

# Views are made in float32. These compute every pixel on its own, so that rounding does not depend on a rank's share of
# the batch. It might with the matrix products of a crop and the mean of a contrast.
STEADY = AugmentConfig(crop_scale=(1, 1), rotation=10, contrast=0)


def config(folder: Path, **changes: Any) -> PretrainConfig:
    fixed = {"device": CUDA.type, "step": "eager", "precision": "fp32", "augment": STEADY}
    return ranks.config(folder, **(fixed | changes))


def eager(folder: Path) -> dict[str, Any]:
    """Two ranks: the results compared with one process, in double precision for the reason given in ranks.py."""
    dist.init_process_group("gloo")
    result: dict[str, Any] = {}
    with ranks.double_precision():
        for method in METHODS:
            train.pretrain(config(folder, method=method), out=folder / f"two-{method}", progress=False)
        fits, memory.fits = memory.fits, lambda *_, **__: False
        train.pretrain(config(folder, epochs=3), out=folder / "two-streamed", progress=False)
        memory.fits = fits
        result["stopped"] = ranks.interrupted(config(folder), folder / "two-then-one", here=distributed.rank() == 1)
        run = Run.read(folder / "two-curvssl")
        embed(run, folder / "seven.npy", out=folder / "two-seven.npz")
        result["probes"] = probe(run, seeds=(0,))
    return result


def compiled(folder: Path) -> dict[str, Any]:
    """Two ranks: a few steps eagerly and compiled."""
    from torch._dynamo.utils import counters

    dist.init_process_group("gloo")
    for step in ("eager", "compiled"):
        train.pretrain(config(folder, step=step, epochs=5, lr=SMALL_LR), out=folder / f"two-{step}", progress=False)
    return {"compiled": counters["frames"]["ok"]}


def nccl(folder: Path) -> dict[str, Any]:
    """One rank, in the group that distributed.ranks makes: its collectives, and a step of SGD."""
    result: dict[str, Any] = {}
    with distributed.ranks(CUDA) as device:
        result["backends"] = dist.get_backend_config()
        x = torch.arange(6.0, device=device).view(3, 2).requires_grad_()
        for name, function in (("total", collectives._Total), ("gather", collectives._Gather)):
            y = function.apply(x)
            (gradient,) = torch.autograd.grad(y.square().sum(), x)
            result[name] = y.tolist(), gradient.tolist()

        torch.manual_seed(0)
        images = torch.randn(8, 2, device=device)
        bare = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(device)
        twin = copy.deepcopy(bare)
        distributed.synchronise(twin, device=device)
        for name, net in (("bare", bare), ("averaged", distributed.averaged(twin, device=device))):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(images).square().sum().backward()
            optimizer.step()
            result[name] = [[p.grad.tolist(), p.tolist()] for p in net.parameters()]

        # The calls of any_rank, from_main and from_all, which these skip for a single rank.
        flag, box, everyone = torch.tensor([1], dtype=torch.int32), [{"step": 7}], [None]
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        dist.broadcast_object_list(box, device=torch.device("cpu"))
        dist.all_gather_object(everyone, "here")
        result["host"] = flag.tolist(), box, everyone
    result["left"] = not dist.is_initialized()
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    job, place = sys.argv[1], Path(sys.argv[2])
    results = {"eager": eager, "compiled": compiled, "nccl": nccl}[job](place)
    rank = distributed.rank()
    (place / f"{job}-{rank}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        distributed.wait()
        dist.destroy_process_group()
