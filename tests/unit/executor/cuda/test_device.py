"""`CudaDevice` around torch: recordings, whether or not they succeed, and memory that cannot be locked."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagekv.executor.cuda.device import CudaDevice


class FakeGraphs:
    """Stands for torch's graphs: keeps the pool of each recording, the pools that its allocator takes to be recorded
    into, and the number of graphs that hold each. Only where CUDA ends a recording does torch 2.11 end it for its
    allocators, of which that of pinned memory has no other way to end it. `end_fails`: ending a failed one raises too.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[int] = []
        self.under_way: list[int] = []
        self.pinned_under_way: list[int] = []
        self.holders: dict[int, int] = {}
        self.streams_set: list[str] = []
        self.sync_modes: list[str] = []
        self.end_fails = False
        self._handles = 0
        monkeypatch.setattr(torch.cuda, "graph", self._graph)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self._handle)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "own stream")
        monkeypatch.setattr(torch.cuda, "set_stream", self.streams_set.append)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self._set_sync_debug_mode)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self._release, raising=False)

    def _handle(self) -> int:
        self._handles += 1
        return self._handles

    @contextmanager
    def _graph(self, graph: Any, pool: int, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "the thread that collects may wait for a mark meanwhile"
        self.pools.append(pool)
        self.under_way.append(pool)
        if pool in self.pinned_under_way:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.pinned_under_way.append(pool)
        self.holders[pool] = self.holders.get(pool, 0) + 1
        try:
            yield
        except RuntimeError as error:
            if self.end_fails:
                raise RuntimeError("capture_end: the recording is invalid") from error
            self._end(0, pool)
            self.pinned_under_way.remove(pool)
            # The graph's destructor.
            self._release(0, pool)
            raise
        self._end(0, pool)
        self.pinned_under_way.remove(pool)

    def _set_sync_debug_mode(self, mode: str) -> None:
        if mode != "default":
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
        self.sync_modes.append(mode)

    def _end(self, index: int, pool: int) -> None:
        assert index == 0
        if pool not in self.under_way:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.under_way.remove(pool)

    def _release(self, index: int, pool: int) -> None:
        assert index == 0
        self.holders[pool] -= 1


class _Graph:
    def replay(self) -> None:
        pass


def _device() -> CudaDevice:
    """Without a GPU: only what `capture` uses."""
    device = object.__new__(CudaDevice)
    device.torch_device = torch.device("cuda:0")
    device._graph_pool = None
    device._replays = weakref.WeakSet()
    return device


def test_graphs_share_a_pool_until_the_last_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, device = FakeGraphs(monkeypatch), _device()
    logits = torch.ones(1)
    held: list[Callable[[], torch.Tensor]] = [device.capture(lambda: logits) for _ in range(2)]
    assert held[0]() is logits
    held.pop(0)
    held.append(device.capture(lambda: logits))
    assert graphs.pools == [1, 1, 1]
    held.clear()
    held.append(device.capture(lambda: logits))
    assert graphs.pools == [1, 1, 1, 2]


@pytest.mark.parametrize("end_fails", [False, True])
def test_a_recording_without_memory_says_so_and_leaves_the_stream(
    monkeypatch: pytest.MonkeyPatch, end_fails: bool
) -> None:
    graphs, device = FakeGraphs(monkeypatch), _device()
    graphs.end_fails = end_fails

    runs = iter(("before the recording", "in it"))

    def full() -> torch.Tensor:
        if next(runs) == "in it":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.ones(1)

    with pytest.raises(torch.OutOfMemoryError):
        device.capture(full)
    assert graphs.streams_set == ["own stream"]
    assert (graphs.under_way, graphs.holders) == ([], {1: 0})


@pytest.mark.parametrize("end_fails", [False, True])
def test_a_recording_that_fails_is_over_for_the_allocator(monkeypatch: pytest.MonkeyPatch, end_fails: bool) -> None:
    """Else no memory could ever be given back to the device, and no manager could attach again. A recording that torch
    ended itself is not ended twice, and graphs recorded before keep their pool.
    """
    graphs, device = FakeGraphs(monkeypatch), _device()
    held = device.capture(lambda: torch.ones(1))
    graphs.end_fails = end_fails
    runs = iter((False, True))

    def waits() -> torch.Tensor:
        if next(runs):
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match=r"not permitted|invalid"):
        device.capture(waits)
    assert (graphs.under_way, graphs.holders) == ([], {1: 1})
    assert held().item() == 1
    device.capture(lambda: torch.ones(1))
    assert graphs.pools == [1, 1, 2]


def test_memory_that_only_cuda_misses_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instantiating a graph takes memory beside torch's allocator."""
    FakeGraphs(monkeypatch)
    runs = iter((False, True))

    def full() -> torch.Tensor:
        if next(runs):
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        return torch.ones(1)

    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA error: out of memory$"):
        _device().capture(full)


def test_what_waits_for_the_device_is_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is asked to refuse it in the run before the recording, and in no run after it."""
    graphs, device = FakeGraphs(monkeypatch), _device()
    with warnings.catch_warnings(action="error"):
        device.capture(lambda: torch.ones(1))
    assert graphs.sync_modes == ["error", "default"]

    def waits() -> torch.Tensor:
        assert graphs.sync_modes[-1] == "error"
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        device.capture(waits)
    assert (len(graphs.pools), graphs.sync_modes[-1]) == (1, "default")


def test_memory_that_cannot_be_locked_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps an error until it is asked for, which torch does behind every launch of a kernel of its own."""
    last_error: list[int] = []

    def register(*_: int) -> int:
        last_error.append(2)
        return 2

    class Launching:
        def fill_(self, _: int) -> None:
            if last_error:
                raise RuntimeError(f"CUDA error {last_error.pop()}: out of memory")

    device = _device()
    locked = torch.zeros(8)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
        patch.setattr(torch, "empty", lambda *_, **__: Launching())
        with pytest.raises(MemoryError, match="32 bytes of host memory cannot be page-locked: CUDA error 2"):
            device.pin(locked)
    assert not last_error


def test_buffers_that_cannot_be_locked_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """At start too, whose first buffer measures the bus."""

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(
            MemoryError, match=r"^host memory \(67108864,\) of torch.uint8 cannot be .*: CUDA error"
        ) as caught:
            _device().bandwidth()
    assert "free memory of the host, or raise the memory limit of the container" in str(caught.value)


def test_a_thread_that_waits_for_a_mark_takes_no_other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would give it the first one, and memory of it."""
    done: list[object] = []
    event = SimpleNamespace(record=lambda: done.append("record"), synchronize=lambda: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    device = _device()
    device.torch_device = torch.device("cuda:1")
    device.mark()()
    assert done == ["record", torch.device("cuda:1"), "wait"]


def test_a_device_computes_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """From before its first kernel on: work of the legacy stream would wait for copies, and copies for it."""
    done: list[object] = []
    stubs: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "get_device_name": lambda _: "a GPU",
        "Stream": lambda *where: ("stream", *where),
        "set_stream": done.append,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr("pagekv.executor.cuda.device.CupyLauncher", lambda say: done.append("launcher"))
    monkeypatch.setattr("pagekv.executor.cuda.device.Streams", lambda: done.append("copy streams"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__version__="14.2.0"))
    device = CudaDevice()
    assert done == [("stream", torch.device("cuda:1")), "launcher", "copy streams"]
    assert device.versions == {"cuda": str(torch.version.cuda), "cupy": "14.2.0", "gpu": "a GPU"}
