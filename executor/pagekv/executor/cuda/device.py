"""The GPU apart from tensors and kernels: pinned memory, marks in its stream, graphs, measurements.

The rest of this package runs on any torch device. Tests run it on the CPU, with a device class that overrides all
methods and a launcher that emulates the kernels.
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
    """torch's current GPU, with a new stream.

    The stream is current only in the thread that constructs the device, so the same thread must use the device.
    """

    def __init__(self) -> None:
        """Raises GpuUnavailable, saying what is missing."""
        if not torch.cuda.is_available():
            raise GpuUnavailable(f"torch {torch.__version__} finds no GPU: it needs a CUDA build of torch and a driver")
        # The device of the backend's tensors.
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_stream(torch.cuda.Stream(self.torch_device))
        self._cupy_launcher = CupyLauncher(say=log.info)
        import cupy

        self.launcher: Launcher = self._cupy_launcher
        # Copy streams for swaps, in addition to the compute stream.
        self.streams = Streams()
        # The device's name and the versions of its software, for `Describe`.
        self.versions = {
            "cuda": str(torch.version.cuda),
            "cupy": cupy.__version__,
            "gpu": torch.cuda.get_device_name(self.torch_device),
        }
        # All graphs share one memory pool, because they run one after the other and the result of each is used before
        # the next runs. A new pool begins with the first graph after all others were discarded, since torch then frees
        # the pool, and with the first graph after a failed recording.
        self._graph_pool: Any = None
        self._replays: weakref.WeakSet[Callable[[], torch.Tensor]] = weakref.WeakSet()
        self._held_before = 0

    def prepare(self, variant: Variant, *, wgmma_prefill: bool = False) -> None:
        """Compiles the kernels of a variant, so that no step waits for the compiler. `wgmma_prefill`: also compiles the
        warpgroup kernel.
        """
        self._cupy_launcher.prepare(variant, (*EVERYWHERE, "pagekv_prefill_wgmma") if wgmma_prefill else EVERYWHERE)

    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.torch_device)

    def check_wgmma(self) -> None:
        """Raises ValueError if the GPU has no warpgroup matrix instructions."""
        capability = self.capability()
        if capability != divmod(WGMMA_CAPABILITY, 10):
            raise ValueError(
                "--wgmma-prefill: needs a GPU of compute capability 9.0, this one has "
                f"{'.'.join(map(str, capability))} ({self.versions['gpu']}); leave the flag out"
            )

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A small pinned tensor, which the device can copy while the host continues. Raises MemoryError.

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
        """Pins host memory in place until `unpin`. Raises MemoryError.

        For pools of gigabytes (`host_memory`): torch's own pinned memory is rounded up to a power of two.
        """
        if error := int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
            # CUDA keeps the error until it is read. torch reads it after its next kernel launch, so one is made here.
            with suppress(RuntimeError):
                torch.empty(1, device=self.torch_device).fill_(0)
            raise MemoryError(f"{tensor.nbytes} bytes of host memory cannot be page-locked: CUDA error {error}")

    def unpin(self, tensor: torch.Tensor) -> None:
        """Undoes `pin`. No copy of the tensor may be under way."""
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())

    def mark(self) -> Callable[[], None]:
        """Marks the end of the work enqueued so far. Any thread may wait for it by calling the returned function."""
        # blocking: a thread that waits sleeps instead of spinning.
        event = torch.cuda.Event(blocking=True)
        event.record()

        def wait() -> None:
            # A thread's current GPU is GPU 0 at first. A rank on another GPU would create a context there, which takes
            # half a GiB of another rank's GPU.
            torch.cuda.set_device(self.torch_device)
            event.synchronize()

        return wait

    def synchronize(self) -> None:
        """Waits for all enqueued work. Raises RuntimeError if some of it failed, and from then on at every call: the
        device is lost to this process.
        """
        torch.cuda.synchronize(self.torch_device)

    def available_bytes(self) -> int:
        """Device memory that this process can still get."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def reset_peak(self) -> None:
        """Starts a measurement of `peak_bytes`."""
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._held_before = torch.cuda.memory_reserved(self.torch_device)

    def peak_bytes(self) -> int:
        """Peak bytes that torch reserved since `reset_peak`, beyond those reserved then: memory that the pool cannot
        use.
        """
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
        """Records the work that `function` enqueues as a CUDA graph. Calling the returned function enqueues the same
        work again, on the same memory, and returns the same tensor, which the next call overwrites. Waits for the
        device. Runs `function` once before the recording, because the setup in a first call cannot be recorded; this
        run also finds a function that waits for the device.

        Raises torch.OutOfMemoryError if memory is short, another RuntimeError if `function` does something that cannot
        be recorded.
        """
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # torch warns that this mode does not know every operator that waits. The recording finds the others.
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
            # thread_local: the thread that collects steps may wait for a mark during the recording.
            with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
                result = function()
        except RuntimeError as error:
            end_failed_recording(self.torch_device.index, self._graph_pool)
            # torch's allocator of pinned memory believes that this recording is still under way, and refuses another
            # one with the same pool.
            self._graph_pool = None
            # Ending a recording that ran out of memory may fail too, and its error then hides the first one.
            if (short := _out_of_memory(error.__context__) or _out_of_memory(error)) is not None:
                raise short from None
            raise
        finally:
            # If the recording could not be ended, its stream is still current.
            torch.cuda.set_stream(stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        self._replays.add(replay)
        return replay


def _out_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """The error as torch.OutOfMemoryError if it means that device memory is short; None otherwise. CUDA itself reports
    this with another type than torch's allocator.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return error
    if isinstance(error, RuntimeError) and "out of memory" in str(error):
        return torch.OutOfMemoryError(str(error).partition("\n")[0])
    return None
