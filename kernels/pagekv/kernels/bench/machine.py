"""The GPU under test: its clock and its memory."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pagekv.kernels.bench.workload import GIB, MIB
from pagekv.kernels.cupy_launcher import CupyLauncher, GpuUnavailable, Say
from pagekv.kernels.failed_recording import end_failed_recording

MOST_MEMORY = 72 * GIB
"""Room for a pool of 64 GiB."""
MOST_ROUNDS = 256
TARGET_SECONDS = 0.06
MOST_REPEATS = 20
HEAD_START_CYCLES = 1_000_000
"""Sleep of the device before the clock starts, about 0.5 ms: the host hands over the graph meanwhile, so that the
graph's launch is not measured."""


@dataclass(frozen=True)
class KernelTiming:
    """Seconds of one round, over several repeats of all rounds."""

    seconds: float
    """The median."""
    least: float
    most: float
    state: dict[str, float]
    """Figures of the GPU while it ran, by the name of their column."""

    def columns(self) -> dict[str, float]:
        times = {"microseconds": self.seconds, "microseconds_least": self.least, "microseconds_most": self.most}
        return {**{name: value * 1e6 for name, value in times.items()}, **self.state}


class CudaMachine:
    """The current CUDA device. The tests have a subclass on emulated kernels with a made-up clock."""

    def __init__(self, say: Say) -> None:
        """Raises GpuUnavailable, in one sentence, where there is no usable device."""
        if not torch.cuda.is_available():
            cuda = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a CPU build"
            raise GpuUnavailable(f"torch {torch.__version__} {cuda} and sees no GPU")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.most_rounds = MOST_ROUNDS
        self.launcher = CupyLauncher(say=say)
        self._stream: Any = torch.cuda.Stream()

    def versions(self) -> dict[str, str]:
        cupy = importlib.import_module("cupy")
        return {
            "gpu": torch.cuda.get_device_name(self.device),
            "arch": self.launcher.arch,
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "cupy": str(cupy.__version__),
        }

    def memory(self) -> int:
        """Bytes of device memory that the bench may take."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return min(int(free * 0.6), MOST_MEMORY)

    def state(self) -> dict[str, float]:
        """The clock of the multiprocessors now, where NVML is installed."""
        try:
            return {"sm_mhz": float(torch.cuda.clock_rate(self.device))}
        except Exception:  # a failing gauge must not cost a measurement
            return {}

    def synchronize(self) -> None:
        """Waits for everything enqueued. Raises RuntimeError where a kernel failed."""
        torch.cuda.synchronize(self.device)

    def timed(self, run: Callable[[int], object], rounds: int = 1, *, capture: bool = True) -> KernelTiming:
        """Time of one `run(i)`, i in [0, rounds), over repeats of all rounds. With `capture` the rounds are one CUDA
        graph, started while the device sleeps, so that the host's part is not measured.
        """
        # Inputs of `run` were made on the caller's stream.
        callers = torch.cuda.current_stream()
        self._stream.wait_stream(callers)
        try:
            with torch.cuda.stream(self._stream):
                run(0)  # compiles, allocates
                self._stream.synchronize()
                play = self._graph(run, rounds) if capture else lambda: [run(i) for i in range(rounds)]
                once = self._clocked(play, capture)
                repeats = max(3, min(MOST_REPEATS, int(TARGET_SECONDS / max(once, 1e-6))))
                took = sorted(self._clocked(play, capture) / rounds for _ in range(repeats))
                play()
                state = self.state()  # while it runs
                self._stream.synchronize()
                return KernelTiming(statistics.median(took), took[0], took[-1], state)
        finally:
            callers.wait_stream(self._stream)

    def _graph(self, run: Callable[[int], object], rounds: int) -> Callable[[], object]:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                for index in range(rounds):
                    run(index)
        except RuntimeError:
            # A peer that cannot be recorded must cost its own figure alone.
            end_failed_recording(self.device.index, pool)
            # torch's random numbers count as recorded, and are refused, until a recording ends well.
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
                torch.zeros(1, device=self.device)
            raise
        graph.replay()
        return graph.replay

    def _clocked(self, play: Callable[[], object], head_start: bool) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if head_start:
            torch.cuda._sleep(HEAD_START_CYCLES)
        start.record(self._stream)
        play()
        end.record(self._stream)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


class Arena:
    """One allocation for the tensors of every case, filled with random numbers once."""

    def __init__(self, machine: CudaMachine, size: int) -> None:
        self.size = size
        self._bytes = torch.empty(size, dtype=torch.uint8, device=machine.device)
        elements = self._bytes[: size // 2 * 2].view(torch.bfloat16)
        for chunk in torch.split(elements, 64 * MIB):
            chunk.normal_()

    def view(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The first elements as a tensor. Every view shares the same memory."""
        size = dtype.itemsize * math.prod(shape)
        if size > self.size:
            raise ValueError(f"size: {size} bytes do not fit the arena of {self.size}")
        if dtype == torch.float8_e4m3fn:
            self._bytes[:size].bitwise_and_(0xFE)  # the one NaN of either sign is all ones
        return self._bytes[:size].view(dtype).view(shape)
