"""Whether the backend's device is as good as before once a recording or a page-lock has failed: torch and CUDA keep
state of their own, which only a GPU shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from pagekv.executor.cuda.device import CudaDevice


def checked_failures(device: CudaDevice) -> dict[str, bool]:
    """By check, whether it passed."""
    where = device.torch_device
    runs = 0

    def waits() -> torch.Tensor:
        return torch.ones(4, device=where).nonzero()

    def waits_when_recorded() -> torch.Tensor:
        nonlocal runs
        runs += 1
        made = torch.ones(4, device=where)
        return made if runs == 1 else made * made.sum().item()

    found = {
        "what waits for the device is not recorded": _raises(RuntimeError, lambda: device.capture(waits)),
        "a recording that fails says so": _raises(RuntimeError, lambda: device.capture(waits_when_recorded)),
        "memory is given back after it": not _raises(RuntimeError, device.available_bytes),
    }
    total = torch.zeros(1, device=where)
    with suppress(RuntimeError):
        replay = device.capture(lambda: total.add_(1))
        before = total.item()
        found["what can be recorded is recorded after it"] = replay().item() == before + 1
    found.setdefault("what can be recorded is recorded after it", False)
    host = torch.zeros(2**20, dtype=torch.uint8)
    device.pin(host)
    found["memory is not locked twice"] = _raises(MemoryError, lambda: device.pin(host))
    found["kernels start after it"] = not _raises(RuntimeError, lambda: torch.ones(1, device=where).add_(1))
    device.unpin(host)
    return found


def _raises(kind: type[Exception], function: Callable[[], object]) -> bool:
    try:
        function()
    except kind:
        return True
    return False
