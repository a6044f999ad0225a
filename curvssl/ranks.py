"""Runs over several processes (ranks): how ranks connect, exchange values, average gradients and share BatchNorm.

With one process, nothing here has an effect.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from curvssl.collectives import gather, rank, total, world_size
from curvssl.config import UserError

T = TypeVar("T")


@contextmanager
def ranks(device: torch.device) -> Iterator[torch.device]:
    """This process's device. Under torchrun the process is also one of the ranks, for as long as the block lasts."""
    launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if device.type == "cuda" and launched:
        index, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if index >= count:
            raise UserError(f"{ranks_here()} ranks on a machine with {count} CUDA devices: lower --nproc-per-node")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if not launched or dist.is_initialized():  # the caller's group stays the caller's
        yield device
        return
    # Host values (whether to stop, what was read) always use gloo, so that no rank waits for its device.
    store, rank, size = next(rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and size == int(os.environ["LOCAL_WORLD_SIZE"]):
        # torchrun keeps one store across restarts, with the addresses of ranks that have ended. On several machines
        # the restart counts may differ: docs/scaling.md has the setting that gives every start its own store.
        store = dist.PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    yield device
    # Not after an error: the other ranks may wait in a collective until this process ends.
    wait()
    dist.destroy_process_group()


def is_main() -> bool:
    """Whether this is rank 0, the only process that writes."""
    return rank() == 0


def ranks_here() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if world_size() > 1 else 1


def shares(n: int) -> list[slice]:
    """One part of 0 … n − 1 for each rank, in order, without gaps; if W does not divide n, sizes differ by one."""
    w = world_size()
    return [slice(r * n // w, (r + 1) * n // w) for r in range(w)]


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any rank. Every rank gets the same answer."""
    if world_size() == 1:
        return flag
    seen = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return bool(seen)


def wait() -> None:
    """Wait until every rank calls this."""
    any_rank(False)


def from_main(value: T) -> T:
    """Rank 0's value, on every rank; the other ranks' values are ignored."""
    if world_size() == 1:
        return value
    box: list[Any] = [value if is_main() else None]
    dist.broadcast_object_list(box, device=torch.device("cpu"))
    return box[0]


def from_all(value: T) -> list[T]:
    """Every rank's value, in the order of the ranks, on every rank."""
    if world_size() == 1:
        return [value]
    box: list[Any] = [None] * world_size()
    dist.all_gather_object(box, value)
    return box


def broadcast(x: Tensor | None, *, source: int) -> None:
    """Fill x on every rank with rank `source`'s x; nothing to do for None."""
    if world_size() > 1 and x is not None:
        dist.broadcast(x, src=source)


# ---- networks over ranks


def averaged(net: nn.Module, *, device: torch.device) -> nn.Module:
    """The network with its gradients averaged over the ranks."""
    place = [device] if device.type == "cuda" else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        # Running statistics are those of the global batch, so they are equal on all ranks without being sent.
        return nn.parallel.DistributedDataParallel(net, device_ids=place, broadcast_buffers=False)


def synchronise(net: nn.Module, *, device: torch.device) -> None:
    """Make every BatchNorm of the network use the global batch; names and shapes of its weights do not change."""
    if device.type == "cuda":
        if "timm" in sys.modules:  # some of its layers combine BatchNorm and activation
            from timm.layers import convert_sync_batchnorm

            convert_sync_batchnorm(net)
        else:
            nn.SyncBatchNorm.convert_sync_batchnorm(net)
        return
    for name, child in net.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            setattr(net, name, BatchNorm(child))
        else:
            synchronise(child, device=device)


def global_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance per channel over all ranks, (b, C, …) → (C,) each."""
    own = torch.batch_norm_update_stats(x, None, None, 0.0)  # what BatchNorm itself calls; var_mean is 20 times slower
    means, variances = gather(torch.stack(own)[None]).unbind(1)  # (W, C) each
    mean = means.mean(0)
    # All ranks have equally many values: the variance is the mean of the variances plus the variance of the means.
    return mean, variances.mean(0) + (means - mean).square().mean(0)


class _Normalise(torch.autograd.Function):
    """y = γ x̂ + β, x̂ = (x − μ) / √(σ² + ε), and with averages ⟨·⟩ over the n values of a channel on all ranks

        ∂x = γ / √(σ² + ε) · (∂y − ⟨∂y⟩ − x̂ ⟨∂y x̂⟩)

    It uses torch's own kernels: as tensor arithmetic it would make a training step twice as long.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps = eps
        return nn.functional.batch_norm(x, mean, variance, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, mean, variance = ctx.saved_tensors
        dy = grads[0]
        _, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        n = world_size() * x.numel() // x.shape[1]
        mean_dy_x, mean_dy = total(torch.stack((d_weight, d_bias))) / n
        scale = weight * (variance + ctx.eps).rsqrt()
        slope = -scale * (variance + ctx.eps).rsqrt() * mean_dy_x
        shape = [1, -1] + [1] * (x.ndim - 2)
        offset = (-scale * mean_dy - slope * mean).view(shape)
        dx = torch.addcmul(torch.addcmul(offset, x, slope.view(shape)), dy, scale.view(shape))
        return dx, d_weight, d_bias, None, None, None


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """y = γ (x − μ) / √(σ² + ε) + β with μ and σ² of the global batch; torch's SyncBatchNorm is for CUDA only.

    It takes over the weights and running statistics of `norm`, and timm's dropout and activation if it has any.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.after = [layer for layer in (getattr(norm, "drop", None), getattr(norm, "act", None)) if layer is not None]
        self.training = norm.training

    def forward(self, x: Tensor) -> Tensor:
        """(b, C) or (b, C, H, W)."""
        y = self._over_ranks(x) if self.training else super().forward(x)
        for layer in self.after:
            y = layer(y)
        return y

    def _over_ranks(self, x: Tensor) -> Tensor:
        n = world_size() * x.numel() // x.shape[1]
        mean, variance = global_statistics(x.detach())
        if (
            self.track_running_stats
            and self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        ):
            self.num_batches_tracked += 1
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance * (n / (n - 1)), share)
        weight, bias = (
            (torch.ones_like(mean), torch.zeros_like(mean)) if self.weight is None else (self.weight, self.bias)
        )
        return _Normalise.apply(x, weight, bias, mean, variance, self.eps)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim not in (2, 4):
            raise ValueError(f"expected (b, C) or (b, C, H, W), got {tuple(input.shape)}")
