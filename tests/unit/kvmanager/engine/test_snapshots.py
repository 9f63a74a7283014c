"""Lists of blocks and requests at moments of a history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest
from support.engine.scheduler_driver import Driver
from support.engine.states import state_of

from pagekv.kvmanager.engine import snapshots as snapshots_module
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.snapshots import EngineSnapshots
from pagekv.kvmanager.kvcache.block_hash import chain_digests, root_digest, token_bytes
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.v1 import operator_service_pb2 as pb
from pagekv.v1 import types_pb2

Answer = TypeVar("Answer")


def snapshots(driver: Driver, cache: CacheAdmin) -> EngineSnapshots:
    return EngineSnapshots(state_of(driver, cache))


def test_blocks_are_listed_by_state_in_pages() -> None:
    """Each block is in one state, pages of a state name every block in it once, and the last page says so."""
    driver = Driver(num_blocks=12, block_size=2, depth=1)
    driver.submit([1, 2, 3, 4, 5], max_tokens=1)
    driver.drain()
    cache = CacheAdmin(True, 1.0, lambda: None)
    asked = snapshots(driver, cache)
    cache.pins.pin(driver.pool.table.match_tokens(driver.requests[0].root, np.array([[1, 2]], np.uint32)), 60, 0)
    driver.submit([1, 2, 9], max_tokens=4)
    driver.plan()
    states = {}
    for state in (
        pb.BLOCK_STATE_FREE,
        pb.BLOCK_STATE_CACHED,
        pb.BLOCK_STATE_ACTIVE,
        pb.BLOCK_STATE_PINNED,
        pb.BLOCK_STATE_UNSPECIFIED,
    ):
        found: list[int] = []
        token: str | None = None
        while token != "":
            page = asked.list_blocks(2, token or "", state)
            assert 1 <= len(page.blocks) <= 2
            assert state == pb.BLOCK_STATE_UNSPECIFIED or {block.state for block in page.blocks} == {state}
            found += [block.block_id for block in page.blocks]
            token = page.next_page_token
        states[state] = found
        if state == pb.BLOCK_STATE_ACTIVE:
            driver.abort(driver.requests[1])
    free, cached, active, pinned, everything = states.values()
    assert (everything, active, cached, pinned) == (list(range(12)), [0, 3], [1], [0])
    assert sorted(free + cached + active) == list(range(12))
    assert asked.list_blocks(2, "", pb.BLOCK_STATE_ACTIVE) == pb.ListBlocksResponse()


def test_a_request_leads_from_logical_blocks_to_hashes_and_physical_ones() -> None:
    """Of eleven tokens in blocks of four two are full and have a hash; the first is held by another request too."""
    driver = Driver(num_blocks=9, block_size=4, depth=1)
    asked = snapshots(driver, CacheAdmin(True, 1.0, lambda: None))
    prompt, root = [*range(1, 12)], root_digest("model", "", "")
    for name, token_ids in (("first", prompt), ("second", [1, 2, 3, 4, 99])):
        command = GenerateCommand(name, token_ids, SamplingParams(max_tokens=3))
        driver.scheduler.add(asked._state.live.add(command, root))
    driver.plan()
    hashes = [digest.hex() for digest in chain_digests(root, token_bytes(prompt), 4)]
    tables = asyncio.run(asked.block_tables("first"))
    assert tables is not None
    (sequence,) = tables.sequences
    assert (list(sequence.block_ids), list(sequence.block_hashes)) == ([0, 1, 2], hashes)
    blocks = {block.block_id: block for block in asked.list_blocks(9, "", pb.BLOCK_STATE_UNSPECIFIED).blocks}
    shown = [blocks[block] for block in sequence.block_ids]
    assert [(block.block_hash, block.ref_count) for block in shown] == [(hashes[0], 2), (hashes[1], 1), ("", 1)]
    assert shown[1].parent_hash == hashes[0]
    assert asyncio.run(asked.block_tables("unknown")) is None


def test_requests_are_listed_in_pages_running_ones_first() -> None:
    """A request that ends, or begins to run, between two pages hides none that stays where it was."""
    driver = Driver(num_blocks=64, block_size=4, depth=1, max_running=3)
    asked = snapshots(driver, CacheAdmin(True, 1.0, lambda: None))
    live = asked._state.live
    for number in range(6):
        request = live.add(GenerateCommand(f"r{number}", [number] * 6, SamplingParams(max_tokens=9)), b"root")
        driver.scheduler.add(request)
    driver.plan()
    first = asked.list_requests(2)
    assert [info.request_id for info in first.requests] == ["r0", "r1"]
    assert [info.state for info in first.requests] == [types_pb2.SEQUENCE_STATE_RUNNING] * 2
    gone = live.get("r0")
    assert gone is not None
    driver.scheduler.finish(gone.sequences[0])
    live.remove_if_finished(gone)
    second = asked.list_requests(2, first.next_page_token)
    assert [info.request_id for info in second.requests] == ["r2", "r3"]
    assert [info.state for info in second.requests] == [
        types_pb2.SEQUENCE_STATE_RUNNING,
        types_pb2.SEQUENCE_STATE_WAITING,
    ]
    last = asked.list_requests(2, second.next_page_token)
    assert ([info.request_id for info in last.requests], last.total, last.next_page_token) == (["r4", "r5"], 5, "")
    assert last.requests[0].create_time.seconds > 0


async def turns_of(answer: Coroutine[Any, Any, Answer], each: Callable[[], None]) -> tuple[Answer, int]:
    """The answer, and how many turns of the event loop there were meanwhile; `each` runs in every one."""
    asked, turns = asyncio.create_task(answer), 0
    while not asked.done():
        await asyncio.sleep(0)
        turns += 1
        each()
    return asked.result(), turns


def test_long_tables_are_written_in_slices_as_they_were_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "TABLE_AT_ONCE", 2)
    driver = Driver(num_blocks=64, block_size=4, depth=1)
    asked = snapshots(driver, CacheAdmin(True, 1.0, lambda: None))
    command = GenerateCommand("long", [*range(1, 42)], SamplingParams(max_tokens=50))
    request = asked._state.live.add(command, root_digest("model", "", ""))
    driver.scheduler.add(request)
    driver.plan()
    whole = asyncio.run(asked.block_tables("long"))
    assert whole is not None
    assert len(whole.sequences[0].block_ids) == 11

    def finish() -> None:
        driver.scheduler.finish(request.sequences[0])

    answer, turns = asyncio.run(turns_of(asked.block_tables("long"), finish))
    assert answer == whole
    assert turns > 6
    assert not request.sequences[0].block_table


@pytest.mark.parametrize("ends_in_turn", [1, 6], ids=["while they are put in order", "while they are written"])
def test_many_requests_are_listed_in_slices(ends_in_turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends meanwhile is left out, and no other."""
    monkeypatch.setattr(snapshots_module, "REQUESTS_AT_ONCE", 2)
    driver = Driver(num_blocks=64, block_size=4, depth=1, max_running=3)
    asked = snapshots(driver, CacheAdmin(True, 1.0, lambda: None))
    live = asked._state.live
    for number in range(9):
        request = live.add(GenerateCommand(f"r{number}", [number] * 6, SamplingParams(max_tokens=9)), b"root")
        driver.scheduler.add(request)
    whole = asked.list_requests(8)
    answer, turns = asyncio.run(turns_of(asked.list_requests_in_slices(8), lambda: None))
    assert (answer, len(answer.requests), bool(answer.next_page_token)) == (whole, 8, True)
    assert turns >= 8
    calls = 0

    def end_one() -> None:
        nonlocal calls
        calls += 1
        if calls >= ends_in_turn and (gone := live.get("r5")) is not None:
            driver.scheduler.finish(gone.sequences[0])
            live.remove_if_finished(gone)
            driver.scheduler.remove(gone)

    answer, _ = asyncio.run(turns_of(asked.list_requests_in_slices(8), end_one))
    last = 9 if ends_in_turn == 1 else 8  # once the page is known, no other request takes the place
    assert [info.request_id for info in answer.requests] == [f"r{n}" for n in range(last) if n != 5]
