"""The end of a CUDA graph's recording that failed: of what torch keeps of it, nothing else is reset."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

# By another name before torch 2.8.
NAMES = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")


def end_failed_recording(device_index: int, pool: Any) -> None:
    """Ends for torch's allocator a recording that CUDA did not end: else it counts as under way for good, and every
    later attempt to give memory back to the device is an error. `pool`: the one it was recorded into.
    """
    import torch

    end = next(getattr(torch._C, name) for name in NAMES if hasattr(torch._C, name))
    # Where it has ended the first call says so, and then the second one would be wrong.
    with suppress(RuntimeError):
        end(device_index, pool)
        torch._C._cuda_releasePool(device_index, pool)
