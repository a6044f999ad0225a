"""One training step: gather, two views, forward, loss, backward, optimiser; run eagerly, compiled, or as a CUDA graph.

All three do the same arithmetic. What a step needs comes in as tensors (which images, which uniform numbers, which
learning rate), so nothing in it waits for the host and a captured step can be replayed with new ones.
"""

import hashlib
import os
import shutil
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvssl.data.views import Augment
from curvssl.gpu.driver import zero_by_kernels
from curvssl.losses import Loss, Part
from curvssl.models import Net, per_view

# What makes the gradients, the terms to log of each part of the loss, and both views' embeddings.
Forward = tuple[Callable[[], None], list[Tensor], Tensor]
KEEP_DAYS = 30  # after the last run of a state of the code, what was compiled for it goes
WARM_STEPS = 3  # real steps taken before a capture: they compile, and they make the optimiser's state


class Step:
    """Call with (batch, u, lr); read `sums` (the loss's terms, added up), `count` and `z` when you like.

    `batch` holds row numbers of `images` (b,) if these live on the device, else uint8 images (b, C, H, W). (2, b, P)
    are the uniform numbers of the two views.
    """

    def __init__(
        self,
        *,
        net: nn.Module,
        criterion: Loss,
        augment: Augment,
        optimizer: torch.optim.Optimizer,
        images: Tensor | None,
        device: torch.device,
        bf16: bool,
        mode: str,
    ) -> None:
        per_view(net)  # both views pass in one batch, and BatchNorm still sees one at a time, as the paper has it
        self.net, self.criterion, self.augment, self.optimizer = net, criterion, augment, optimizer
        self.images, self.device, self.bf16 = images, device, bf16
        self.sums = torch.zeros(0, device=device)
        self.names: tuple[str, ...] = ()
        self.count = 0
        self.z = self.sums
        self.mode = mode
        self._loss: Callable[..., Any] = self.loss
        self._forward: Callable[[Tensor, Tensor], Forward] = self._whole
        self._by_hand = False  # the encoder's pass
        if mode != "eager":
            keep_compile_cache()
            # Many kernels of a small network last a few µs; launched together, a 7×7-stem step takes an eighth less.
            options: dict[str, Any] = {"combo_kernels": True} if device.type == "cuda" else {}

            def compiled(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
                return torch.compile(with_own_code(function), dynamic=False, options=options | more or None)

            if mode == "captured":
                self._forward = self.side_by_side(compiled)
            else:
                self._loss = compiled(self.loss)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: tuple[Tensor, Tensor] | None = None
        self._taken = 0  # steps, since this object was made

    def __call__(self, batch: Tensor, u: Tensor, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        try:
            (self._captured if self.mode == "captured" else self._plain)(batch, u)
        except Exception as error:
            if self._taken or not is_from_a_compiler(error):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"this step cannot be compiled ({reason}): going on eagerly", file=sys.stderr)
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # with what had begun on other streams
            self.mode, self._loss, self._forward, self._by_hand = "eager", self.loss, self._whole, False
            self._plain(batch, u)
        self._taken += 1
        self.count += 1

    def loss(self, batch: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to differentiate, its terms as one vector to log, and the two views' embeddings."""
        (z,) = self.embed(batch, u)
        terms = self.criterion.terms(*z.chunk(2))
        self.names = tuple(terms)
        return self.criterion.weigh(terms), torch.stack(tuple(terms.values())).detach(), z.detach()

    def embed(self, batch: Tensor, u: Tensor, *, readers: int = 1) -> tuple[Tensor, ...]:
        """The two views' embeddings, one under the other, (2b, d), once for each reader."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return self.copies(self.net(self.views(batch, u)), readers)

    def views(self, batch: Tensor, u: Tensor) -> Tensor:
        """Both views, one under the other, (2b, C, H, W)."""
        x = batch if self.images is None else self.images.index_select(0, batch)
        return self.augment(torch.cat((x, x)), u.flatten(0, 1)).contiguous(memory_format=torch.channels_last)

    def copies(self, z: Tensor, readers: int) -> tuple[Tensor, ...]:
        """In float32 at least. Copies, so that the compiler adds the readers' gradients where it next touches them."""
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return (z, *(z.clone() for _ in range(readers - 1)))

    def embed_by_hand(self, compiled: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        """`embed` with an encoder that the compiler does not look into."""
        from curvssl.gpu import layers

        low, net = torch.bfloat16 if self.bf16 else torch.float32, self.net
        assert isinstance(net, Net)  # see `side_by_side`

        def projected(h: Tensor, readers: int) -> tuple[Tensor, ...]:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                return self.copies(net.projector(h), readers)

        views, project = compiled(lambda batch, u: self.views(batch, u).to(low)), compiled(projected)

        def embed(batch: Tensor, u: Tensor, readers: int) -> tuple[Tensor, ...]:
            if self._taken or not batch.is_cuda:
                x = views(batch, u)
            else:  # the encoder's kernels are compiled while the compiler is at the views
                with ThreadPoolExecutor(1) as beside:
                    shape = (2 * len(batch), self.augment.size, low, torch.cuda.current_stream())
                    done = beside.submit(layers.rehearse, net.encoder, *shape)
                    x = views(batch, u)
                    done.result()
            return project(layers.encode(net.encoder, x), readers)

        return embed

    def _whole(self, batch: Tensor, u: Tensor) -> Forward:
        loss, logged, z = self._loss(batch, u)
        return loss.backward, [logged], z

    def side_by_side(self, compiled: Callable[..., Any]) -> Callable[[Tensor, Tensor], Forward]:
        """The same, compiled in pieces: each part of the criterion goes from embeddings to its share of their gradient
        without waiting for the others, all but the first on the second stream."""
        from curvssl.gpu import layers, overlap

        self._by_hand = isinstance(self.net, Net) and layers.takes(self.net.encoder)
        self.names = tuple(name for part in self.criterion.parts() for name in part.names)

        def both_of(part: Part) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
            """Terms, and the gradient of their share of the loss, which is a weighted sum."""
            weigh: Any = self.criterion.weigh
            weights = torch.tensor([weigh(defaultdict(float, {name: 1.0})) for name in part.names], device=self.device)

            def terms(z: Tensor) -> Tensor:
                return self.criterion.terms_of(z.unflatten(0, (2, -1)), part)

            plain = compiled(terms, split_reductions=False)  # one launch costs more here than what a second gains

            def both(z: Tensor) -> tuple[Tensor, Tensor]:
                z = z.detach().requires_grad_()
                found = (terms if part.by_hand(z.unflatten(0, (2, -1))) else plain)(z)
                return found.detach(), torch.autograd.grad(found, z, weights)[0]

            return both

        embed = self.embed_by_hand(compiled) if self._by_hand else compiled(self.embed)
        parts = [both_of(part) for part in self.criterion.parts()]

        def forward(batch: Tensor, u: Tensor) -> Forward:
            here, beside = torch.cuda.current_stream(), overlap.second_stream()
            copies = embed(batch, u, readers=len(parts))
            gradients, logged = [*copies], [*copies]
            beside.wait_stream(here)
            for i in reversed(range(len(parts))):
                with torch.cuda.stream(beside if i else here):
                    logged[i], gradients[i] = parts[i](copies[i])
            here.wait_stream(beside)
            return lambda: torch.autograd.backward(copies, gradients), logged, copies[0].detach()

        return forward

    def _plain(self, batch: Tensor, u: Tensor) -> None:
        self.optimizer.zero_grad()
        backward, logged, z = self._forward(batch, u)
        if self._by_hand and isinstance(self.optimizer, torch.optim.Adam):
            from curvssl.gpu import overlap

            overlap.backward_and_step(backward, self.optimizer)
        else:
            backward()
            self.optimizer.step()
        self.z = z
        if len(self.sums) != len(self.names):
            self.sums = torch.zeros(len(self.names), dtype=logged[0].dtype, device=self.device)
        torch._foreach_add_(list(self.sums.split([len(terms) for terms in logged])), logged)

    def _captured(self, batch: Tensor, u: Tensor) -> None:
        if self._static is None:
            self._static = (batch.clone(), u.clone())
        self._static[0].copy_(batch)
        self._static[1].copy_(u)
        if self._taken < WARM_STEPS:
            from curvssl.gpu import overlap

            # The steps before the capture are real ones, on another stream, as capture asks.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), nullcontext() if self._taken else overlap.one_stream():
                self._plain(*self._static)
            torch.cuda.current_stream().wait_stream(stream)
            return None
        if self._graph is None:
            try:
                graph = torch.cuda.CUDAGraph(keep_graph=True)
                self.optimizer.zero_grad()
                # What the rest of the step waits for goes before what runs beside it.
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=-1)):
                    self._plain(*self._static)
                zero_by_kernels(graph)
                graph.instantiate()
                self._graph = graph
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                print(f"this step cannot be captured in a CUDA graph ({reason}): going on compiled", file=sys.stderr)
                self.mode = "compiled"
                torch.cuda.synchronize()
                # torch's own random numbers still believe in the capture; a copy of their state does not.
                numbers = torch.cuda.default_generators[torch.cuda.current_device()]
                numbers.graphsafe_set_state(numbers.clone_state())
                return self._plain(batch, u)
        self._graph.replay()
        return None

    def means(self) -> dict[str, float]:
        """Mean of the loss and each term over the steps since the last reset; waits for the device."""
        terms: dict[str, Any] = dict(zip(self.names, (self.sums / self.count).tolist(), strict=True))
        return {"loss": float(self.criterion.weigh(terms))} | terms

    def reset(self) -> None:
        self.sums.zero_()
        self.count = 0

    def gradient_norm(self) -> float:
        """Norm of the gradient of the step that ran last; waits for the device."""
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))


def is_from_a_compiler(error: Exception) -> bool:
    """Whether torch's compiler or Triton's gave up."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException) or type(error).__module__.startswith("triton.")


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: torch.compile gives up on one that it has compiled eight times,
    and a process may train more often than that."""
    if isinstance(function, types.MethodType):
        return types.MethodType(with_own_code(function.__func__), function.__self__)
    assert isinstance(function, types.FunctionType)
    code, name = function.__code__.replace(), function.__name__
    own = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def keep_compile_cache() -> None:
    """What was compiled once is found again by the next run of the same code. (torch does not see that the gradient of
    an operation was rewritten, hence a folder for each state of the code; and hence it keeps graphs with an
    autograd.Function only if asked to.)"""
    import torch._functorch.config

    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    folder = Path.home() / ".cache" / "curvssl" / "compiled" / digest[:16]
    if os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder)) == str(folder):
        with suppress(OSError):  # a full or read-only disk is no reason not to train
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)  # used today
            for other in folder.parent.iterdir():
                if time.time() - other.stat().st_mtime > KEEP_DAYS * 24 * 3600:
                    shutil.rmtree(other, ignore_errors=True)  # another process may be at it too


def make_optimizer(
    net: nn.Module, *, name: str, lr: float, weight_decay: float, momentum: float, device: torch.device, mode: str
) -> torch.optim.Optimizer:
    """adam and sgd are torch's, fused on CUDA; lars is timm's. A captured step reads its rate from a tensor."""
    captured = mode == "captured"
    rate = torch.tensor(lr, device=device) if captured else lr
    fused = True if device.type == "cuda" else None
    if name == "adam":
        return torch.optim.Adam(net.parameters(), lr=rate, weight_decay=weight_decay, fused=fused, capturable=captured)
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), lr=rate, weight_decay=weight_decay, momentum=momentum, fused=fused)
    try:
        from timm.optim import Lars
    except ModuleNotFoundError:
        from curvssl.config import UserError

        raise UserError("optimizer lars needs timm: pip install 'curvssl[timm]'") from None
    # Gains and biases take no part in weight decay or in the layer-wise rate.
    plain = [p for p in net.parameters() if p.ndim < 2]
    layers = [p for p in net.parameters() if p.ndim >= 2]
    groups = [{"params": layers, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return Lars(groups, lr=lr, momentum=momentum)
