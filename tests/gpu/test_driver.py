"""The two CUDA driver settings: a graph zeroes memory by kernels, and kernels leave shared memory to others."""

import ctypes

import pytest
import torch

from curvssl.gpu.driver import CARVEOUT, zero_by_kernels

pytestmark = pytest.mark.gpu


def test_memory_that_a_graph_zeroes_is_zeroed_by_kernels_in_its_turn_at_each_replay() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    x = torch.ones(64, dtype=torch.uint8, device="cuda")
    seen, first, last = torch.empty_like(x), torch.ones_like(x), torch.ones_like(x)

    def zero(memory: torch.Tensor, start: int, length: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        address = ctypes.c_uint64(memory.data_ptr() + start)
        assert driver.cuMemsetD8Async(address, 0, ctypes.c_size_t(length), stream) == 0

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        zero(first, 2, 4)
        x.add_(first)
        zero(x, 3, 5)
        x.add_(1)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert driver.cuMemsetD32Async(ctypes.c_uint64(x.data_ptr() + 16), 0, ctypes.c_size_t(2), stream) == 0
        assert driver.cuMemsetD8Async(ctypes.c_uint64(x.data_ptr() + 60), 9, ctypes.c_size_t(1), stream) == 0
        seen.copy_(x)
        zero(last, 0, 64)
    assert zero_by_kernels(graph) == 4  # the memset to 9 stays
    assert zero_by_kernels(graph) == 0
    graph.instantiate()
    for replay in (1, 2):
        first.fill_(1)
        last.fill_(1)
        graph.replay()
        expected = torch.full((64,), 1 + 2 * replay, dtype=torch.uint8)
        expected[2], expected[3:8], expected[16:24], expected[60] = 1 + replay, 1, 0, 9
        assert seen.cpu().equal(expected)
        assert not last.any()


def test_a_kernel_that_was_launched_prefers_shared_memory_to_cache() -> None:
    from curvssl.gpu import adam

    driver = ctypes.CDLL("libcuda.so.1")
    w, found = torch.ones(1024, device="cuda"), torch.empty(1024, device="cuda")
    state = {"exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w), "step": torch.zeros((), device="cuda")}
    group = {"betas": (0.9, 0.999), "weight_decay": 0.0, "eps": 1e-8, "lr": torch.tensor(0.1, device="cuda")}
    adam.update(w, torch.ones_like(w), found=found, state=state, group=group)
    ((kernels, *_),) = adam._adam.device_caches.values()
    for kernel in kernels.values():
        percent = ctypes.c_int()
        assert driver.cuFuncGetAttribute(ctypes.byref(percent), CARVEOUT, ctypes.c_void_p(kernel.function)) == 0
        assert percent.value == 100
