"""What torch and Triton do not ask of the CUDA driver; where there is none (Windows has another), nothing is asked."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET
Handle = ctypes.c_void_p
Size = ctypes.c_size_t


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def leave_room(launched: Any) -> None:
    """From its next launch on, a Triton kernel, as its launch returns it, leaves shared memory to others.

    A multiprocessor divides its memory between cache and shared memory as the kernel it runs likes it, and takes none
    that needs more shared memory before that one has left: Adam beside a backward pass so kept the convolutions out.
    """
    function = getattr(launched, "function", None)  # Triton's interpreter has none
    if function is not None and _driver() is not None:
        _give_up_cache(function)


@cache
def _give_up_cache(function: int) -> None:
    _driver().cuFuncSetAttribute(Handle(function), CARVEOUT, 100)  # a wish: if it is refused, nothing is lost


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("start", ctypes.c_uint64),
        ("pitch", Size),
        ("value", ctypes.c_uint),
        ("bytes", ctypes.c_uint),  # of a word
        ("width", Size),  # in words
        ("height", Size),
    )


class _Memory:
    """What a memset sets, as torch reads others' memory."""

    def __init__(self, at: _Memset) -> None:
        form = {"shape": (at.width * at.bytes,), "typestr": "|u1", "data": (at.start, False), "version": 3}
        self.__cuda_array_interface__ = form


def zero_by_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Let kernels zero what memsets zero in a graph captured with keep_graph=True; says how many memsets these were.

    cuDNN zeroes a counter before many of its convolutions. In a CUDA graph that is a node of another kind than a
    kernel, and the way there and back takes several µs.
    """
    driver = _driver()
    if not hasattr(driver, "cuGraphNodeGetDependencies_v2"):  # nor has a driver of before 2024
        return 0
    whole, stream, replaced = Handle(graph.raw_cuda_graph()), torch.cuda.Stream(priority=-1), 0
    for node in _nodes(driver.cuGraphGetNodes, whole):
        kind, at = ctypes.c_int(), _Memset()
        _check(driver.cuGraphNodeGetType(node, ctypes.byref(kind)))
        if kind.value != MEMSET:
            continue
        _check(driver.cuGraphMemsetNodeGetParams(node, ctypes.byref(at)))
        if at.height != 1 or at.value != 0:
            continue
        memory, fill = torch.as_tensor(_Memory(at), device="cuda"), torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(stream):
            fill.capture_begin()
            memory.fill_(0)
            fill.capture_end()
        before, _ = _around(driver.cuGraphNodeGetDependencies_v2, node)
        after, edges = _around(driver.cuGraphNodeGetDependentNodes_v2, node)
        new, inner = Handle(), Handle(fill.raw_cuda_graph())  # which is copied
        _check(driver.cuGraphAddChildGraphNode(ctypes.byref(new), whole, before, Size(len(before)), inner))
        origin = (Handle * len(after))(*[new.value] * len(after))
        _check(driver.cuGraphAddDependencies_v2(whole, origin, after, edges, Size(len(after))))
        _check(driver.cuGraphDestroyNode(node))
        replaced += 1
    return replaced


def _nodes(ask: Callable[..., int], graph: Handle) -> list[Handle]:
    count = Size()
    _check(ask(graph, None, ctypes.byref(count)))
    found = (Handle * count.value)()
    _check(ask(graph, found, ctypes.byref(count)))
    return [Handle(node) for node in found]


def _around(ask: Callable[..., int], node: Handle) -> tuple[Any, Any]:
    """The nodes before or after one, and what kind of edges lie between, each in eight bytes."""
    count = Size()
    _check(ask(node, None, None, ctypes.byref(count)))
    found, edges = (Handle * count.value)(), (ctypes.c_uint64 * count.value)()
    if count.value:  # the driver refuses to list none
        _check(ask(node, found, edges, ctypes.byref(count)))
    return found, edges


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refused (error {code})")
