"""The end of a failed recording for torch's allocator, by whichever name torch has for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagekv.kernels.failed_recording import NAMES, end_failed_recording

POOL = (0, 7)


def installed(monkeypatch: pytest.MonkeyPatch, name: str, *, under_way: bool) -> list[Any]:
    """The calls that torch gets, of a release that has `name`."""
    calls: list[Any] = []

    def end(index: int, pool: object) -> None:
        calls.append(("end", index, pool))
        if not under_way:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    for each in NAMES:
        monkeypatch.delattr(torch._C, each, raising=False)
    monkeypatch.setattr(torch._C, name, end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: calls.append(("release", *given)), raising=False)
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_what_cuda_did_not_end_is_ended_and_its_pool_released(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = installed(monkeypatch, name, under_way=True)
    end_failed_recording(1, POOL)
    assert calls == [("end", 1, POOL), ("release", 1, POOL)]


def test_a_recording_that_torch_ended_keeps_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph releases it, and a second time would take it from graphs that share it."""
    calls = installed(monkeypatch, NAMES[0], under_way=False)
    end_failed_recording(0, POOL)
    assert calls == [("end", 0, POOL)]
