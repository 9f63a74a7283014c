"""The bench's gauge and memory."""

from __future__ import annotations

import pytest
import torch
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench.machine import Arena, CudaMachine


def test_every_view_is_of_the_arenas_first_bytes(machine: HostMachine) -> None:
    arena = Arena(machine, 1024)
    whole = arena.view(torch.uint8, 1024)
    arena.view(torch.float16, 2, 3).fill_(1.0)
    assert whole[:12].tolist() == [0x00, 0x3C] * 6
    with pytest.raises(ValueError, match="2048 bytes do not fit the arena of 1024"):
        arena.view(torch.bfloat16, 1024)


def test_an_arena_of_fp8_holds_numbers(machine: HostMachine) -> None:
    arena = Arena(machine, 1024)
    arena.view(torch.uint8, 1024).fill_(0xFF)
    assert not arena.view(torch.float8_e4m3fn, 1024).float().isnan().any()


def test_a_gauge_that_fails_gives_no_figure(machine: HostMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    assert CudaMachine.state(machine) == {"sm_mhz": 1980.0}

    def fail(device: object) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "clock_rate", fail)
    assert CudaMachine.state(machine) == {}
