"""The step of train/step.py compiled, or in pieces as one CUDA graph, with hand-written kernels where they exist."""

import hashlib
import os
import shutil
import sys
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvssl.losses import GLOBAL, Loss, at_least_float32
from curvssl.models import Net

if TYPE_CHECKING:
    from curvssl.train.step import Step

KEEP_DAYS = 30  # from the last run with the same source code until its compiled code is deleted
WARM_STEPS = 3  # real steps taken before a capture: they compile, and they make the optimiser's state

# Embeddings (V · b, d), the teacher's (2, b, d), and t of the blends, if there are any → some terms, and their share of
# the gradient.
Piece = Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
Embedded = tuple[tuple[Tensor, ...], Tensor | None]  # a copy of the embeddings for each piece, and the teacher's


class FastStep:
    """Takes the steps of a plain `Step` in mode "compiled" or "captured"; falls back to the plain step if need be."""

    def __init__(self, step: "Step", mode: str) -> None:
        keep_compile_cache()
        self.step = step
        cuda = step.device.type == "cuda"
        # Many kernels of a small network take a few µs. Launched together, they save an eighth of a 7×7-stem step.
        self._options: dict[str, Any] = {"combo_kernels": True} if cuda else {}
        if cuda:
            seek_fastest_convolutions()
            from curvssl.gpu import colour

            for maker in step.views.makers:
                colour.speed_up(maker)
        # A user's own criterion is not compiled: it may do anything.
        self._sum = isinstance(step.criterion, Loss) and not any(True for _ in step.criterion.parameters())
        self._parts = [part for _, part in step.parts()]  # without their weights, which may change
        self._by_hand = False  # whether the encoder's pass is the one of layers.py
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: tuple[Tensor, list[Tensor]] | None = None  # inputs of the captured step
        self._taken = 0  # steps so far
        self._plain_state = plain_state(step.criterion)
        step.mode, step.take = mode, self.take
        if mode == "captured":
            self._pieces = self._in_pieces()
        else:
            self._whole = self._compiled(self._terms if self._sum else step.embed)

    def take(self, batch: Tensor, u: Sequence[Tensor]) -> None:
        """One step. If the first one cannot be compiled, the plain step is used from then on."""
        step = self.step
        try:
            (self._take_captured if step.mode == "captured" else self._take_compiled)(batch, u)
        except Exception as error:
            if self._taken or not is_from_a_compiler(error):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"this step cannot be compiled ({reason}): going on eagerly", file=sys.stderr)
            if step.device.type == "cuda":
                torch.cuda.synchronize()  # for the work begun on other streams
            step.mode, step.take = "eager", step.plainly
            step.plainly(batch, u)
        self._taken += 1

    def _compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(with_own_code(function), dynamic=False, options=self._options | options or None)

    # ---- compiled ----

    def _terms(self, batch: Tensor, u: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        step = self.step
        z, targets = step.embed(batch, u)
        terms = [part.exactly(step.by_view(z), targets=targets, t=step.views.t(u)) for part in self._parts]
        return torch.cat(terms), z

    def _take_compiled(self, batch: Tensor, u: Sequence[Tensor]) -> None:
        """Weights are applied outside the compiled part: otherwise a new weight would mean a new compilation."""
        step = self.step
        step.optimizer.zero_grad()
        if self._sum:
            terms, z = self._whole(batch, u)
            loss = step.criterion.weigh(dict(zip(step.names, terms.unbind(), strict=True)))  # type: ignore[operator]
        else:
            z, targets = self._whole(batch, u)
            loss, terms = step.judge(z, targets=targets, t=step.views.t(u))
        loss.backward()
        step.finish([terms.detach()], [step.weights], z)

    # ---- captured ----

    def _take_captured(self, batch: Tensor, u: Sequence[Tensor]) -> None:
        if self._static is None:
            self._static = (batch.clone(), [part.clone() for part in u])
        for kept, given in zip((self._static[0], *self._static[1]), (batch, *u), strict=True):
            kept.copy_(given)
        if self._taken < WARM_STEPS:
            from curvssl.gpu import overlap

            # The steps before the capture are real ones, on another stream, as CUDA graphs require.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), nullcontext() if self._taken else overlap.one_stream():
                self._take_pieces(*self._static)
            torch.cuda.current_stream().wait_stream(stream)
            return
        if self._graph is None and not self._capture(*self._static):
            self._take_pieces(batch, u)
            return
        assert self._graph is not None
        self._graph.replay()

    def _capture(self, batch: Tensor, u: Sequence[Tensor]) -> bool:
        """Record the step. If that fails, one line says why, and the next steps are taken piece by piece."""
        changed = [
            name for name, value in plain_state(self.step.criterion).items() if value != self._plain_state.get(name)
        ]
        try:
            if changed:
                raise RuntimeError(f"the criterion's {', '.join(changed)} changes on the host from step to step")
            from curvssl.gpu.driver import zero_by_kernels

            graph = torch.cuda.CUDAGraph(keep_graph=True)
            self.step.optimizer.zero_grad()
            # The main stream has priority over the second one: the rest of the step waits for it.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=-1)):
                self._take_pieces(batch, u)
            zero_by_kernels(graph)
            graph.instantiate()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            print(f"this step cannot be captured in a CUDA graph ({reason}): going on compiled", file=sys.stderr)
            self.step.mode, self.step.take = "compiled", self._take_pieces
            torch.cuda.synchronize()
            # torch's generator still behaves as if it were being captured; a copy of its state does not.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            return False
        self._graph = graph
        return True

    def _take_pieces(self, batch: Tensor, u: Sequence[Tensor]) -> None:
        """The step in pieces, compiled or hand-written. Each term computes its share of the embeddings' gradient
        without waiting for the others; all but the first do so on the second stream."""
        from curvssl.gpu import overlap

        step = self.step
        step.optimizer.zero_grad()
        embed, pieces, weights = self._pieces
        here, beside = torch.cuda.current_stream(), overlap.stream(overlap.SECOND)
        copies, targets = embed(batch, u, readers=len(pieces))
        gradients, terms = [*copies], [*copies]
        beside.wait_stream(here)
        for i in reversed(range(len(pieces))):
            with torch.cuda.stream(beside if i else here):
                terms[i], gradients[i] = pieces[i](copies[i], targets, step.views.t(u))
        here.wait_stream(beside)

        def backward() -> None:
            torch.autograd.backward(copies, gradients)

        if self._by_hand:
            overlap.backward_and_step(backward, step.optimizer)
            step.keep(terms, weights, copies[0])
        else:
            backward()
            step.finish(terms, weights, copies[0])

    def _in_pieces(self) -> tuple[Callable[..., Embedded], list[Piece], list[Tensor]]:
        """The function that embeds, the pieces of the loss, and their weights, which are read at every step."""
        from curvssl.gpu import layers

        step = self.step
        self._by_hand = isinstance(step.net, Net) and layers.takes(step.net.encoder)
        embed = self._embed_by_hand() if self._by_hand else self._compiled(self._embed)
        if not self._sum:
            return embed, [self._own], [step.weights]
        weights = list(step.weights.split([len(part.names) for part in self._parts]))
        return embed, [self._piece(part, weight) for part, weight in zip(self._parts, weights, strict=True)], weights

    def _piece(self, part: Loss, weights: Tensor) -> Piece:
        from curvssl.gpu import fused

        step = self.step

        def terms(z: Tensor, targets: Tensor | None, t: Tensor | None) -> Tensor:
            return part.exactly(step.by_view(z), targets=targets, t=t)

        plain = self._compiled(terms, split_reductions=False)  # a second launch costs more here than it gains

        def piece(z: Tensor, targets: Tensor | None, t: Tensor | None) -> tuple[Tensor, Tensor]:
            z = z.detach().requires_grad_()
            fast = fused.numbers(part, step.by_view(z)[:GLOBAL]) if targets is None else None
            values = plain(z, targets, t) if fast is None else fast
            return values.detach(), torch.autograd.grad(values, z, weights)[0]

        return piece

    def _own(self, z: Tensor, targets: Tensor | None, t: Tensor | None) -> tuple[Tensor, Tensor]:
        """The piece of a user's own criterion, which may have parameters."""
        z = z.detach().requires_grad_()
        loss, terms = self.step.judge(z, targets=targets, t=t)
        loss.backward()
        assert z.grad is not None
        return terms, z.grad

    def _embed(self, batch: Tensor, u: Sequence[Tensor], readers: int) -> Embedded:
        z, targets = self.step.embed(batch, u)
        return copies_of(z, readers), targets

    def _embed_by_hand(self) -> Callable[..., Embedded]:
        """`_embed` with the encoder's pass of layers.py, which is not compiled."""
        from curvssl.gpu import layers

        step, net, teacher = self.step, self.step.net, self.step.teacher
        low = torch.bfloat16 if step.bf16 else torch.float32
        assert isinstance(net, Net)

        passes = step.views.passes

        def projected(features: list[Tensor], readers: int) -> tuple[Tensor, ...]:
            with torch.autocast(step.device.type, torch.bfloat16, enabled=step.bf16):
                z = net.project(features)
            return copies_of(at_least_float32(z), readers)

        def targets_of(features: list[Tensor]) -> Tensor:
            assert teacher is not None
            with torch.autocast(step.device.type, torch.bfloat16, enabled=step.bf16):
                return at_least_float32(teacher.project(features)).unflatten(0, (GLOBAL, -1))

        if len(passes) > 1:  # the gradients of BatchNorm's parameters come from two streams, of which torch would warn
            getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", bool)(False)
        # Each batch of views is made on its own, so that local views can be made while the global ones are encoded.
        makers = [self._compiled(partial_view(step, i, low)) for i in range(len(passes))]
        project, teach = self._compiled(projected), self._compiled(targets_of)

        def embed(batch: Tensor, u: Sequence[Tensor], readers: int) -> Embedded:
            if not self._taken and batch.is_cuda:  # the encoder's kernels are compiled while torch compiles the views
                with ThreadPoolExecutor(1) as thread:
                    shapes = (len(batch), step.views.sizes, passes, low, torch.cuda.current_stream())
                    done = thread.submit(layers.rehearse, net.encoder, *shapes)
                    for make in makers:
                        make(batch, u)
                    done.result()
            views: list[Any] = [partial(make, batch, u) for make in makers]
            targets = None
            if teacher is not None:
                first = views[0]()  # both networks see it
                views[0] = lambda: first
                with torch.no_grad():
                    targets = teach(layers.encode(teacher.encoder, lambda: step.global_of(first), dtype=low))
            return project(layers.encode(net.encoder, *views, passes=passes, dtype=low), readers), targets

        return embed


def partial_view(step: "Step", i: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The function that makes the i-th batch of views."""

    def make(batch: Tensor, u: Sequence[Tensor]) -> Tensor:
        return step.views.batch(i, step.pixels(batch), u).to(dtype)

    return make


def copies_of(z: Tensor, readers: int) -> tuple[Tensor, ...]:
    """One copy per reader, so that the compiler adds the readers' gradients in the kernel that uses them next."""
    return (z, *(z.clone() for _ in range(readers - 1)))


def plain_state(criterion: Any) -> dict[str, Any]:
    """The numbers and strings that a module keeps beside its tensors: a captured step would not see them change."""
    kinds = (bool, int, float, str, tuple)
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in criterion.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, kinds) and not isinstance(module, Loss)  # its weights are read at every step
    }


def seek_fastest_convolutions() -> None:
    """Make cuDNN time all its algorithms, not only the first ten: training repeats the same shapes."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0


def is_from_a_compiler(error: Exception) -> bool:
    """Whether the error comes from torch's compiler or Triton's."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException) or type(error).__module__.startswith("triton.")


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with its own code object: torch.compile gives up on a code object after eight compilations, and
    a process may train more often than that."""
    if isinstance(function, types.MethodType):
        return types.MethodType(with_own_code(function.__func__), function.__self__)
    assert isinstance(function, types.FunctionType)
    code, name = function.__code__.replace(), function.__name__
    own = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def keep_compile_cache() -> None:
    """Keep compiled code for the next run of the same source code.

    torch does not notice that the gradient of an operation was rewritten. Hence each state of the source code has its
    own folder, and hence torch keeps graphs with an autograd.Function only if asked to.
    """
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
                    shutil.rmtree(other, ignore_errors=True)  # another process may delete it, too
