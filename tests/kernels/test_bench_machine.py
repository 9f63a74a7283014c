"""The bench's gauge, memory and recordings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench import machine as bench_machine
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


def test_a_recording_that_fails_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that cannot be recorded must not stop what is timed after it: random numbers and memory."""
    log: list[str] = []

    @contextmanager
    def record(graph: object, stream: str, pool: Any = None) -> Iterator[None]:
        log.append(f"recording on {stream}")
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError("capture_end: operation failed due to a previous error during capture") from error
        log.append("recorded")

    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 3))
    monkeypatch.setattr(torch, "zeros", lambda *_, device: log.append(f"something on {device}"))
    monkeypatch.setattr(bench_machine, "end_failed_recording", lambda *given: log.append(f"end {given}"))
    made = object.__new__(CudaMachine)
    made.device, made._stream = torch.device("cuda:1"), "own stream"

    def waits(_: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="capture_end"):
        made._graph(waits, 2)
    ended = ["end (1, (0, 3))", "recording on own stream", "something on cuda:1", "recorded"]
    assert log == ["recording on own stream", *ended]
