"""`CudaDevice.capture` around torch: the memory that graphs share, the error raised, and the stream afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pagekv.executor.cuda.device import CudaDevice


class FakeGraphs:
    """Stands for torch's graphs: keeps the pool of each recording; `end_fails`: ending a failed one raises too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[int] = []
        self.streams_set: list[str] = []
        self.end_fails = False
        self._handles = 0
        monkeypatch.setattr(torch.cuda, "graph", self._graph)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self._handle)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "own stream")
        monkeypatch.setattr(torch.cuda, "set_stream", self.streams_set.append)

    def _handle(self) -> int:
        self._handles += 1
        return self._handles

    @contextmanager
    def _graph(self, graph: Any, pool: int, capture_error_mode: str) -> Iterator[None]:
        self.pools.append(pool)
        try:
            yield
        except RuntimeError as error:
            if self.end_fails:
                raise RuntimeError("capture_end: the recording is invalid") from error
            raise


class _Graph:
    def replay(self) -> None:
        pass


def _device() -> CudaDevice:
    """Without a GPU: only what `capture` uses."""
    device = object.__new__(CudaDevice)
    device.torch_device = torch.device("cuda")
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
