"""Two CUDA driver settings that torch and Triton do not offer. Without libcuda.so.1 (on Windows) they do nothing."""

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
    """Make a Triton kernel, given as its launch returns it, leave shared memory to others from its next launch on.

    A multiprocessor splits its memory into cache and shared memory as the running kernel prefers. A kernel that needs
    more shared memory has to wait until that kernel has ended: Adam beside a backward pass kept the convolutions out.
    """
    function = getattr(launched, "function", None)  # Triton's interpreter has none
    if function is not None and _driver() is not None:
        _give_up_cache(function)


@cache
def _give_up_cache(function: int) -> None:
    _driver().cuFuncSetAttribute(Handle(function), CARVEOUT, 100)  # a hint, which the driver may refuse


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("start", ctypes.c_uint64),
        ("pitch", Size),
        ("value", ctypes.c_uint),
        ("bytes", ctypes.c_uint),  # per element
        ("width", Size),  # in elements
        ("height", Size),
    )


class _Memory:
    """The memory that a memset sets, in the form in which torch reads foreign memory."""

    def __init__(self, at: _Memset) -> None:
        form = {"shape": (at.width * at.bytes,), "typestr": "|u1", "data": (at.start, False), "version": 3}
        self.__cuda_array_interface__ = form


def zero_by_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Replace memsets to zero by kernels in a graph captured with keep_graph=True; return how many there were.

    cuDNN zeroes a counter before many of its convolutions. In a CUDA graph a memset is another kind of node than a
    kernel, and switching from one kind to the other and back takes several µs.
    """
    driver = _driver()
    if not hasattr(driver, "cuGraphNodeGetDependencies_v2"):  # no driver, or one from before 2024
        return 0
    whole, stream, replaced = Handle(graph.raw_cuda_graph()), torch.cuda.Stream(priority=-1), 0
    for node in _nodes(driver.cuGraphGetNodes, whole):
        kind, memset = ctypes.c_int(), _Memset()
        _check(driver.cuGraphNodeGetType(node, ctypes.byref(kind)))
        if kind.value != MEMSET:
            continue
        _check(driver.cuGraphMemsetNodeGetParams(node, ctypes.byref(memset)))
        if memset.height != 1 or memset.value != 0:
            continue
        memory, fill = torch.as_tensor(_Memory(memset), device="cuda"), torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(stream):
            fill.capture_begin()
            memory.fill_(0)
            fill.capture_end()
        before, _ = _around(driver.cuGraphNodeGetDependencies_v2, node)
        after, edges = _around(driver.cuGraphNodeGetDependentNodes_v2, node)
        new, inner = Handle(), Handle(fill.raw_cuda_graph())  # the driver copies it
        _check(driver.cuGraphAddChildGraphNode(ctypes.byref(new), whole, before, Size(len(before)), inner))
        origin = (Handle * len(after))(*[new.value] * len(after))
        _check(driver.cuGraphAddDependencies_v2(whole, origin, after, edges, Size(len(after))))
        _check(driver.cuGraphDestroyNode(node))
        replaced += 1
    return replaced


def _nodes(ask: Callable[..., int], graph: Handle) -> list[Handle]:
    count = Size()
    _check(ask(graph, None, ctypes.byref(count)))
    nodes = (Handle * count.value)()
    _check(ask(graph, nodes, ctypes.byref(count)))
    return [Handle(node) for node in nodes]


def _around(ask: Callable[..., int], node: Handle) -> tuple[Any, Any]:
    """The nodes before or after one, and the data of the edges between them, eight bytes each."""
    count = Size()
    _check(ask(node, None, None, ctypes.byref(count)))
    nodes, edges = (Handle * count.value)(), (ctypes.c_uint64 * count.value)()
    if count.value:  # the driver refuses an empty list
        _check(ask(node, nodes, edges, ctypes.byref(count)))
    return nodes, edges


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refused (error {code})")
