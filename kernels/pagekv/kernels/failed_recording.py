"""Ends the failed recording of a CUDA graph for torch's allocator. Other state of torch, such as that of its random
numbers, stays as the recording left it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

# The name of the function, and its name before torch 2.8.
NAMES = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")


def end_failed_recording(device_index: int, pool: Any) -> None:
    """Tells torch's allocator that a recording has ended which CUDA did not end. Otherwise the allocator would take it
    for still under way, and every later attempt to give memory back to the device would be an error. `pool`: the memory
    pool that was recorded into.
    """
    import torch

    end = next(getattr(torch._C, name) for name in NAMES if hasattr(torch._C, name))
    # If the recording has ended already, the first call raises RuntimeError, and the second must not be made.
    with suppress(RuntimeError):
        end(device_index, pool)
        torch._C._cuda_releasePool(device_index, pool)
