"""Pools and limits: flags and executor together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.engine.engine_harness import Bench, Link, command, config, described, expect, read, run, until
from support.event_loop import run_by

from pagekv.kvmanager.engine import loop as engine_loop
from pagekv.kvmanager.engine import sizing
from pagekv.kvmanager.engine.executor_client import AttachRefused
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.sizing import size_limits, size_model
from pagekv.kvmanager.kvcache.eviction_policy import EvictionOrder
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.replay import cli as replay_cli
from pagekv.kvmanager.scheduling.encoded_sizes import IdBytes
from pagekv.kvmanager.scheduling.swapping import SwapPolicy
from pagekv.steps.v1 import executor_service_pb2 as pb


def test_the_host_pool_is_as_large_as_flag_and_executor_allow() -> None:
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
    with pytest.raises(AttachRefused, match="allows 0 bytes: at most 0 blocks"):
        size_model(without, config(limits=swap, num_host_blocks=1))
    with pytest.raises(
        AttachRefused, match=r"--num-host-blocks 25 needs 25 bytes .* allows 24 bytes: at most 24 blocks"
    ):
        size_model(with_host, config(limits=swap, num_host_blocks=25))


@pytest.mark.parametrize(
    ("block_size", "host_blocks", "max_running", "longest"),
    [(16, 0, 256, 1_307_000), (16, 2**20, 256, 1_052_000), (1, 2**20, 256, 230_000), (16, 0, 65536, 485_000)],
)
def test_no_sequence_is_longer_than_a_step_has_room_for(
    block_size: int, host_blocks: int, max_running: int, longest: int
) -> None:
    """A vocabulary of 128 k ids; the context of the model is longer, or shorter."""
    swap = replace(config().limits, max_running=max_running, swap=SwapPolicy("swap"))
    flags = config(limits=swap, block_size=block_size, num_host_blocks=host_blocks, num_device_blocks=2**20)
    room: dict[str, Any] = {"vocab_size": 128_000, "max_sequences": 65536, "device_kv_bytes": 2**20}
    if host_blocks:
        room["host_kv_bytes"] = host_blocks
    else:
        room["features"] = [pb.EXECUTOR_FEATURE_LOGPROBS]
    model = size_model(described(max_model_len=10**7, **room), flags)
    assert longest <= model.max_model_len < 1.01 * longest
    assert size_model(described(max_model_len=8192, **room), flags).max_model_len == 8192
    assert size_model(described(max_model_len=10**7, **room), replace(flags, max_model_len=99)).max_model_len == 99
    ids = size_limits(described(max_model_len=10**7, **room), flags, model).id_bytes
    assert ids == IdBytes(3, 3, 3 if host_blocks else 1)


@run_by(run)
async def test_an_executor_that_comes_back_smaller_gets_what_it_holds(engine: EngineLoop, bench: Bench) -> None:
    bench.step_s = 0.01
    streams = [engine.submit(command(f"r{i}", [i, 1, 2])) for i in range(6)]
    await until(lambda: len(bench.plans) >= 3)
    bench.description = described(max_sequences=2)
    assert bench.link is not None
    bench.link.lose()
    assert [await read(stream) for stream in streams] == [expect([i, 1, 2]) for i in range(6)]
    assert len(bench.attaches) == 2


def test_a_context_that_a_step_cuts_short_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    served: list[int] = []

    async def body(engine: EngineLoop, bench: Bench) -> None:
        for max_sequences in (32, 32, 2, 2):
            bench.description = described(max_model_len=10**7, max_sequences=max_sequences)
            epochs = engine._state.epochs
            assert bench.link is not None
            bench.link.lose()
            while engine._state.epochs == epochs:  # noqa: ASYNC110  # sets no event
                await asyncio.sleep(0.005)
            assert engine.model is not None
            served.append(engine.model.max_model_len)

    run(body)
    told = [vars(record)["fields"] for record in caplog.records if record.getMessage().startswith("longer sequences")]
    assert served[0] == served[1] < served[2] == served[3]
    assert [fields["tokens"] for fields in told] == served[::2]
    assert {fields["wanted"] for fields in told} == {10**7}


def test_the_first_executor_must_go_with_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(engine_loop, "ExecutorLink", lambda target, wake, credentials: Link(bench, wake))
    with pytest.raises(AttachRefused, match="at most 64 blocks"):
        asyncio.run(EngineLoop(config(num_device_blocks=65)).run())


def test_no_pool_has_more_blocks_than_its_columns_can_tell_apart() -> None:
    """Bounds of single fields leave room for 2**62 blocks of one byte."""
    swap = replace(config().limits, swap=SwapPolicy("swap"))
    model = size_model(described(device_kv_bytes=2**62, host_kv_bytes=2**62), config(limits=swap, num_device_blocks=0))
    assert (model.num_device_blocks, model.num_host_blocks) == (2**30, 2**30)


@pytest.mark.parametrize(
    ("most", "protected_share"), [(sizing.MAX_BLOCKS, config().protected_share), (replay_cli._MAX_BLOCKS, 1.0)]
)
def test_positions_in_the_free_queues_of_the_largest_pool_fit_their_column(most: int, protected_share: float) -> None:
    """The queues grow in proportion to the pool."""
    order = EvictionOrder(1000, "slru", protected_share)
    last = order._protected._offset + len(order._protected._entries)
    assert order._probation._position.dtype == np.int32
    assert last * most // 1000 < 2**31


def _full(*_: object) -> None:
    raise MemoryError


def test_pools_that_the_managers_memory_does_not_hold_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(engine_loop, "ExecutorLink", lambda target, wake, credentials: Link(bench, wake))
    monkeypatch.setattr(sizing, "HostPool", _full)
    words = "pools of 9 and 0 blocks do not fit into the manager's memory: fewer with --num-device-blocks"
    with pytest.raises(AttachRefused, match=words):
        asyncio.run(EngineLoop(config(num_device_blocks=9)).run())


@run_by(run)
async def test_an_executor_that_comes_back_with_too_many_blocks_is_waited_out(
    engine: EngineLoop, bench: Bench, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "HostPool", _full)
    assert bench.link is not None
    bench.link.lose()
    await until(lambda: not engine.statistics.stats().executor_attached)
    await asyncio.sleep(0.1)
    monkeypatch.setattr(sizing, "HostPool", HostPool)
    stream = engine.submit(command("a", [1, 2, 3]))
    assert await read(stream) == expect([1, 2, 3])
