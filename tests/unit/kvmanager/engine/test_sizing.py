"""Pools and limits: flags and executor together."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.engine.engine_harness import Bench, Link, command, config, described, expect, read, run, until

from pagekv.kvmanager.engine import loop as engine_loop
from pagekv.kvmanager.engine.executor_client import AttachRefused
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.sizing import size_limits, size_model
from pagekv.kvmanager.scheduling.swapping import SwapPolicy
from pagekv.steps.v1 import executor_service_pb2 as pb


def test_the_host_pool_is_as_large_as_flag_and_executor_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    with_host = described(host_kv_bytes=24)
    without = described(host_kv_bytes=24, features=[pb.EXECUTOR_FEATURE_LOGPROBS])
    swap = replace(config().limits, swap=SwapPolicy("swap"))
    assert size_model(with_host, config(limits=swap)).num_host_blocks == 24
    assert size_model(with_host, config(limits=swap, num_host_blocks=9)).num_host_blocks == 9
    assert size_model(with_host, config(limits=replace(swap, swap=SwapPolicy("recompute")))).num_host_blocks == 0
    assert "host_pool" in size_model(with_host, config(limits=swap)).features
    recompute = size_model(with_host, config(limits=replace(swap, swap=SwapPolicy("recompute"))))
    assert "host_pool" not in recompute.features
    assert size_model(without, config(limits=swap)).num_host_blocks == 0
    with pytest.raises(AttachRefused, match="allows 0: at most 0 blocks"):
        size_model(without, config(limits=swap, num_host_blocks=1))
    with pytest.raises(AttachRefused, match=r"--num-host-blocks 25 needs 25 bytes .* allows 24: at most 24 blocks"):
        size_model(with_host, config(limits=swap, num_host_blocks=25))


def test_a_step_is_as_large_as_the_longest_sequence_that_is_served_needs() -> None:
    """The executor takes larger ones, of which nothing would be sent but longer silences."""
    long = described(max_model_len=10**7)
    assert size_limits(long, config(max_model_len=8192)).max_step_bytes == 2**22
    assert size_limits(long, config(max_model_len=2**20)).max_step_bytes == 2**25
    assert size_limits(long, config()).max_step_bytes == 2**28
    assert size_limits(described(max_model_len=2**18), config(max_model_len=10**7)).max_step_bytes == 2**23


def test_an_executor_that_comes_back_smaller_gets_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: EngineLoop, bench: Bench) -> None:
        bench.step_s = 0.01
        streams = [engine.submit(command(f"r{i}", [i, 1, 2])) for i in range(6)]
        await until(lambda: len(bench.plans) >= 3)
        bench.description = described(max_sequences=2)
        assert bench.link is not None
        bench.link.lose()
        assert [await read(stream) for stream in streams] == [expect([i, 1, 2]) for i in range(6)]
        assert len(bench.attaches) == 2

    run(monkeypatch, body)


def test_the_first_executor_must_go_with_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(engine_loop, "ExecutorLink", lambda target, wake: Link(bench, wake))
    with pytest.raises(AttachRefused, match="at most 64 blocks"):
        asyncio.run(EngineLoop(config(num_device_blocks=65)).run())
