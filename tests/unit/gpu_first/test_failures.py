"""The checks of what a failure leaves behind, over emulated devices: good ones, and one for each mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_first.failures import checked_failures
from support.executor.cuda_host import HostDevice


class Device(HostDevice):
    """Refuses memory that is locked already. `keeps` says what of a failure stays behind."""

    def __init__(self, keeps: str = "") -> None:
        super().__init__(tries_capture=True)
        self._keeps, self._failed, self._locked = keeps, False, False

    def capture(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if self._keeps == "no recording" and self._failed:
            raise RuntimeError("already recording to mempool_id")
        try:
            return super().capture(function)
        except RuntimeError:
            self._failed = True
            raise

    def available_bytes(self) -> int:
        if self._keeps == "no memory" and self._failed:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        return super().available_bytes()

    def pin(self, tensor: torch.Tensor) -> None:
        if self._locked and self._keeps != "locks twice":
            raise MemoryError("CUDA error 712")
        self._locked = True


def test_a_device_that_keeps_nothing_passes() -> None:
    assert len(checked_failures(Device())) == 6
    assert all(checked_failures(Device()).values())


@pytest.mark.parametrize(
    ("keeps", "missed"),
    [
        ("no memory", "memory is given back after it"),
        ("no recording", "what can be recorded is recorded after it"),
        ("locks twice", "memory is not locked twice"),
    ],
)
def test_each_mistake_is_noticed(keeps: str, missed: str) -> None:
    assert [name for name, passed in checked_failures(Device(keeps)).items() if not passed] == [missed]


def test_a_device_that_records_what_waits_is_noticed() -> None:
    found = checked_failures(HostDevice())
    assert not found["what waits for the device is not recorded"]
    assert not found["a recording that fails says so"]
