"""Checks of the first half hour over the emulated kernels: they pass there, and they find faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_first.kernel_checks import replay_checks, rope_checks, smallest_checks, swap_checks
from support.kernels.bench_machine import FakeStreams, HostMachine

from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.bench.scene import Setup
from pagekv.kernels.variants import Variant

HALF = Variant("float16", "float16", 64)


@pytest.fixture(scope="module")
def machine() -> HostMachine:
    return HostMachine()


def test_replays_swaps_and_smallest_launches_pass_on_the_emulated_kernels(machine: HostMachine) -> None:
    found = [*replay_checks(machine, Setup(HALF, (1, 300)), 3), *swap_checks(machine, HALF, (1, 17, 40))]
    assert [check.name for check in found if not check.passed] == []
    assert len(found) == 3
    found = list(smallest_checks(machine, HALF))
    assert [check.name for check in found if not check.passed] == []
    assert len(found) == 6


@pytest.mark.parametrize(("rotary_dim", "normed"), [(64, ""), (32, ""), (64, "each"), (64, "all")])
def test_rope_in_the_cache_write_passes_and_a_wrong_angle_is_found(
    machine: HostMachine, monkeypatch: pytest.MonkeyPatch, rotary_dim: int, normed: str
) -> None:
    setup = Setup(HALF, (1, 17, 40))
    assert [c.passed for c in rope_checks(machine, setup, rotary_dim, normed=normed)] == [True] * 3
    write = PagedAttention.write

    def write_turned(self: PagedAttention, *args: Any, rope: torch.Tensor | None = None, **kwargs: Any) -> None:
        write(self, *args, rope=None if rope is None else rope * 1.1, **kwargs)

    monkeypatch.setattr(PagedAttention, "write", write_turned)
    found = [c.passed for c in rope_checks(machine, setup, rotary_dim, normed=normed)]
    assert found == [False, False, True]


def test_a_replay_that_differs_is_found(machine: HostMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMachine, "recorded", lambda self, run: lambda: None)  # the output stays NaN
    (check,) = replay_checks(machine, Setup(HALF, (1, 17)), 2)
    assert not check.passed


def test_a_swap_that_loses_blocks_is_found(machine: HostMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStreams, "copy", lambda self, stream, destination, source: None)
    assert [check.passed for check in swap_checks(machine, HALF, (1, 17, 40))] == [True, False]
