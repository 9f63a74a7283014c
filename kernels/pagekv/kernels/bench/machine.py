"""The GPU as the bench sees it: how long something takes, how much memory there is, how much time is left."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from pagekv.kernels.bench.workload import GIB, MIB
from pagekv.kernels.launcher import Launcher
from pagekv.kernels.loader import CupyLauncher, GpuUnavailable, Say
from pagekv.kernels.swap import CudaStreams, Streams

COLD_BYTES = 256 * MIB
"""Memory that rounds of a measurement walk over before they come back: several times the largest L2 cache."""
TARGET_SECONDS = 0.06
MOST_REPEATS = 20


class Machine(Protocol):
    """Where the bench runs: a GPU, or in the tests the emulated kernels with a made-up clock."""

    device: torch.device

    @property
    def launcher(self) -> Launcher: ...

    def seconds(self, run: Callable[[int], object], rounds: int = 1, *, capture: bool = True) -> float:
        """Median seconds of one `run(i)`, i in [0, rounds), among repeats of all of them."""
        ...

    def memory(self) -> int:
        """Bytes of device memory that the bench may take."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Host memory that the device copies from and to at full speed: uint8 [size]."""
        ...

    def streams(self) -> Streams:
        """What blocks are swapped on."""
        ...


class CudaMachine:
    """The current CUDA device. Raises GpuUnavailable, in one sentence, where there is none."""

    def __init__(self, say: Say) -> None:
        if not torch.cuda.is_available():
            cuda = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a CPU build"
            raise GpuUnavailable(f"torch {torch.__version__} {cuda} and sees no GPU")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.launcher = CupyLauncher(say=say)
        self._stream: Any = torch.cuda.Stream()

    def versions(self) -> dict[str, str]:
        """The card and what drives it."""
        cupy = importlib.import_module("cupy")
        return {
            "gpu": torch.cuda.get_device_name(self.device),
            "arch": self.launcher.arch,
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "cupy": str(cupy.__version__),
        }

    def memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return min(int(free * 0.6), 24 * GIB)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def streams(self) -> Streams:
        return CudaStreams()

    def seconds(self, run: Callable[[int], object], rounds: int = 1, *, capture: bool = True) -> float:
        """See `Machine.seconds`. With `capture` the rounds are one CUDA graph, which leaves out the host's part."""
        # What `run` reads was made on the caller's stream, which this one knows nothing of.
        callers = torch.cuda.current_stream()
        self._stream.wait_stream(callers)
        try:
            with torch.cuda.stream(self._stream):
                run(0)  # compiles, allocates
                self._stream.synchronize()
                play = self._graph(run, rounds) if capture else lambda: [run(i) for i in range(rounds)]
                once = self._timed(play)
                repeats = max(3, min(MOST_REPEATS, int(TARGET_SECONDS / max(once, 1e-6))))
                return statistics.median(self._timed(play) for _ in range(repeats)) / rounds
        finally:
            callers.wait_stream(self._stream)

    def _graph(self, run: Callable[[int], object], rounds: int) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for index in range(rounds):
                run(index)
        graph.replay()
        return graph.replay

    def _timed(self, play: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._stream)
        play()
        end.record(self._stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


class Arena:
    """One allocation that every case cuts its tensors from, filled with random numbers once."""

    def __init__(self, machine: Machine, size: int) -> None:
        self.size = size
        self._bytes = torch.empty(size, dtype=torch.uint8, device=machine.device)
        elements = self._bytes[: size // 2 * 2].view(torch.bfloat16)
        for chunk in torch.split(elements, 64 * MIB):
            chunk.normal_()

    def view(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The first elements as a tensor. Every view shares the same memory."""
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        if size > self.size:
            raise ValueError(f"size: {size} bytes do not fit the arena of {self.size}")
        return self._bytes[:size].view(dtype).view(shape)


class Clock:
    """The time that the bench may take."""

    def __init__(self, total: float, now: Callable[[], float] = time.monotonic) -> None:
        self.total, self._now = total, now
        self._started = now()

    @property
    def spent(self) -> float:
        return self._now() - self._started

    @property
    def left(self) -> float:
        return self.total - self.spent

    def until(self, share: float) -> Callable[[], bool]:
        """Whether there is time left before `share` of the total is spent."""
        return lambda: self.spent < self.total * share
