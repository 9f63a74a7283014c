"""The GPU as the backend uses it besides tensors and kernels: pinned memory, marks in its stream, graphs, measuring.

The rest of this package runs on any device of torch; tests run it on the CPU, with a device that overrides all methods
and a launcher that emulates the kernels.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from pagekv.common.logs import Log
from pagekv.kernels.cupy_launcher import CupyLauncher, GpuUnavailable
from pagekv.kernels.failed_recording import end_failed_recording
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.swap import Streams
from pagekv.kernels.variants import EVERYWHERE, WGMMA_CAPABILITY, Variant

log = Log(__name__)

COPY_BYTES = 64 * 2**20
COPY_ROUNDS = 4


class CudaDevice:
    """The GPU that torch calls current, with a new stream.

    A stream is current for one thread, so the thread that constructs the device must be the one that uses it.
    """

    def __init__(self) -> None:
        """Raises GpuUnavailable, saying what is missing."""
        if not torch.cuda.is_available():
            raise GpuUnavailable(f"torch {torch.__version__} finds no GPU: it needs a CUDA build of torch and a driver")
        # Where tensors go.
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_stream(torch.cuda.Stream(self.torch_device))
        self._cupy_launcher = CupyLauncher(say=log.info)
        import cupy

        self.launcher: Launcher = self._cupy_launcher
        # For swapping: copy streams beside the one that computes.
        self.streams = Streams()
        # The device's name and what drives it, for `Describe`.
        self.versions = {
            "cuda": str(torch.version.cuda),
            "cupy": cupy.__version__,
            "gpu": torch.cuda.get_device_name(self.torch_device),
        }
        # Graphs run one after the other and their results are used before the next runs, so all share one memory pool.
        # The first graph after all were discarded begins a new pool, since torch frees the old one; so does the first
        # after a recording that failed.
        self._graph_pool: Any = None
        self._replays: weakref.WeakSet[Callable[[], torch.Tensor]] = weakref.WeakSet()
        self._held_before = 0

    def prepare(self, variant: Variant, *, wgmma_prefill: bool = False) -> None:
        """Compiles the kernels of a variant, so that no step waits for it. `wgmma_prefill`: the one by warpgroups
        too.
        """
        self._cupy_launcher.prepare(variant, (*EVERYWHERE, "pagekv_prefill_wgmma") if wgmma_prefill else EVERYWHERE)

    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.torch_device)

    def check_wgmma(self) -> None:
        """Raises ValueError where the GPU cannot multiply matrices by warpgroups."""
        capability = self.capability()
        if capability != divmod(WGMMA_CAPABILITY, 10):
            raise ValueError(
                "--wgmma-prefill: needs a GPU of compute capability 9.0, this one has "
                f"{'.'.join(map(str, capability))} ({self.versions['gpu']}); leave the flag out"
            )

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A small page-locked tensor: copies with the device run while the host goes on. Raises MemoryError.

        torch keeps freed pinned memory and reuses it once copies with it are done, so buffers of a step cost no system
        call.
        """
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            raise MemoryError(
                f"host memory {shape} of {dtype} cannot be page-locked: {error}; free memory of the host, or raise the "
                "memory limit of the container"
            ) from error

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-locks host memory in place until `unpin`. Raises MemoryError.

        For pools of gigabytes (`host_memory`): torch's own pinned memory is rounded up to a power of two.
        """
        if error := int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
            # The runtime keeps the error for whoever asks next, which is torch behind its next launch of a kernel.
            with suppress(RuntimeError):
                torch.empty(1, device=self.torch_device).fill_(0)
            raise MemoryError(f"{tensor.nbytes} bytes of host memory cannot be page-locked: CUDA error {error}")

    def unpin(self, tensor: torch.Tensor) -> None:
        """Unlocks what `pin` locked; copies of it must have ended."""
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

    def mark(self) -> Callable[[], None]:
        """Marks the end of what is enqueued so far. Any thread may wait for it, by calling the result."""
        # Blocking: a thread that waits sleeps instead of spinning.
        event = torch.cuda.Event(blocking=True)
        event.record()

        def wait() -> None:
            # CUDA gives a thread the first GPU until it takes another one, and a context there takes half a GiB: of the
            # GPU of another rank, where this is none of the first.
            torch.cuda.set_device(self.torch_device)
            event.synchronize()

        return wait

    def synchronize(self) -> None:
        """Waits for everything enqueued. Raises RuntimeError when something of it failed, and each time from then on:
        the device is lost to this process.
        """
        torch.cuda.synchronize(self.torch_device)

    def available_bytes(self) -> int:
        """Device memory that this process can still get."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def reset_peak(self) -> None:
        """Begins measuring `peak_bytes`."""
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._held_before = torch.cuda.memory_reserved(self.torch_device)

    def peak_bytes(self) -> int:
        """The most that torch reserved since `reset_peak`, beyond what it held then: the pool cannot have it."""
        return max(0, torch.cuda.max_memory_reserved(self.torch_device) - self._held_before)

    def bandwidth(self) -> tuple[int, int]:
        """Bytes per second (device to host, host to device), measured with pinned memory."""
        host = self.pinned((COPY_BYTES,), torch.uint8)
        device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.torch_device)
        return self._copy_rate(host, device), self._copy_rate(device, host)

    def _copy_rate(self, destination: torch.Tensor, source: torch.Tensor) -> int:
        best = float("inf")
        for _ in range(COPY_ROUNDS):
            self.synchronize()
            begin = time.perf_counter()
            destination.copy_(source, non_blocking=True)
            self.synchronize()
            best = min(best, time.perf_counter() - begin)
        return int(COPY_BYTES / best)

    def capture(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Records what `function` enqueues, on a stream of torch's for recordings. Calling the result enqueues it all
        again, on the very same memory, and returns the same tensor, which the next call overwrites. Waits for the
        device. Runs `function` once before, because what a first call sets up cannot be recorded.

        Raises torch.OutOfMemoryError when memory for it is short, another RuntimeError when `function` does what
        cannot be recorded. A function that waits for the device is found out by the run before.
        """
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # Said once: torch does not know every operator that waits. A recording finds out about the others.
            torch.cuda.set_sync_debug_mode("error")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if self._graph_pool is None or not self._replays:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.torch_device)
        try:
            # Thread-local: the thread that collects steps may wait for a mark meanwhile.
            with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
                result = function()
        except RuntimeError as error:
            end_failed_recording(self.torch_device.index, self._graph_pool)
            # torch's allocator of pinned memory still takes it to be under way, and refuses another one into this pool.
            self._graph_pool = None
            # Ending a recording that ran out of memory may fail too, with an error that hides the first one.
            if (short := _out_of_memory(error.__context__) or _out_of_memory(error)) is not None:
                raise short from None
            raise
        finally:
            # After a recording that cannot be ended, its stream is still current.
            torch.cuda.set_stream(stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        self._replays.add(replay)
        return replay


def _out_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The error, where it says that memory of the device is short; CUDA itself says so by another type than torch's
    allocator.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return error
    if isinstance(error, RuntimeError) and "out of memory" in str(error):
        return torch.OutOfMemoryError(str(error).partition("\n")[0])
    return None
