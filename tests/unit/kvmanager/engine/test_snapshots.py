"""Lists of blocks and requests at moments of a history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest
from support.engine.scheduler_driver import Driver
from support.engine.states import state_of

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine import snapshots as snapshots_module
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.snapshots import EngineSnapshots
from pagekv.kvmanager.kvcache.block_hash import chain_digests, root_digest, token_bytes
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.scheduling.sequence import Seq
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
    cache.pins.pin(driver.pool.table.trie.match(driver.requests[0].root, np.array([[1, 2]], np.uint32)), 60, 0)
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


@pytest.mark.parametrize("state", [pb.BLOCK_STATE_UNSPECIFIED, pb.BLOCK_STATE_FREE, pb.BLOCK_STATE_PINNED])
def test_all_pages_together_look_at_each_block_a_few_times(
    monkeypatch: pytest.MonkeyPatch, state: pb.BlockState.ValueType
) -> None:
    """A page that looked at all blocks behind it would make the whole list of a large pool take its square."""
    num_blocks, looked_at = 5000, 0
    asked = snapshots(Driver(num_blocks=num_blocks), CacheAdmin(True, 1.0, lambda: None))
    find = np.flatnonzero

    def counted(wanted: np.ndarray) -> np.ndarray:
        nonlocal looked_at
        looked_at += len(wanted)
        return find(wanted)

    monkeypatch.setattr(np, "flatnonzero", counted)
    found, token = 0, ""
    while True:
        page = asked.list_blocks(50, token, state)
        found, token = found + len(page.blocks), page.next_page_token
        if not token:
            break
    assert found == (0 if state == pb.BLOCK_STATE_PINNED else num_blocks)
    assert num_blocks <= looked_at <= 2 * num_blocks


def test_a_host_block_has_its_holders_and_the_hash_of_what_can_be_hit() -> None:
    driver = Driver(block_size=2, host_blocks=8, preemption="swap", depth=1)
    request = driver.submit([1, 2, 3, 4, 5], max_tokens=4)
    driver.step()
    driver.scheduler.preempt_all()
    swapped = request.sequences[0].swapped
    assert swapped is not None
    asked = snapshots(driver, CacheAdmin(True, 1.0, lambda: None))
    hashes = [digest.hex() for digest in chain_digests(request.root, token_bytes([1, 2, 3, 4]), 2)]
    assert [asked.host_block(block) for block in swapped.blocks] == [
        pb.BlockInfo(block_id=block, ref_count=1, block_hash=block_hash)
        for block, block_hash in zip(swapped.blocks, [*hashes, ""], strict=True)
    ]
    with pytest.raises(InvalidRequest, match=r"block_id: must be from 0 to 7 \(the pool\), got 8"):
        asked.host_block(8)


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


def test_many_requests_are_listed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert turns >= 4

    def end_one() -> None:
        if (gone := live.get("r5")) is not None:
            driver.scheduler.finish(gone.sequences[0])
            live.remove_if_finished(gone)
            driver.scheduler.remove(gone)

    answer, _ = asyncio.run(turns_of(asked.list_requests_in_slices(8), end_one))
    # The page is known, so no other request takes the place.
    assert [info.request_id for info in answer.requests] == [f"r{n}" for n in range(8) if n != 5]


def test_no_more_requests_are_looked_at_than_run_and_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue may be long, and the page asks twice a second."""
    driver = Driver(num_blocks=64, block_size=4, depth=1, max_running=3)
    asked = snapshots(driver, CacheAdmin(True, 1.0, lambda: None))
    for number in range(200):
        command = GenerateCommand(f"r{number}", [number] * 6, SamplingParams(max_tokens=9))
        driver.scheduler.add(asked._state.live.add(command, b"root"))
    driver.plan()
    looked_at: list[object] = []
    table, states = Seq.blocks, snapshots_module._sequence_state

    def counted_table(sequence: Seq) -> np.ndarray:
        looked_at.append(sequence)
        return table(sequence)

    def counted_state(sequence: Seq) -> types_pb2.SequenceState.ValueType:
        looked_at.append(sequence)
        return states(sequence)

    monkeypatch.setattr(Seq, "blocks", counted_table)
    monkeypatch.setattr(snapshots_module, "_sequence_state", counted_state)
    page = asked.list_requests(5)
    assert [info.request_id for info in page.requests] == [f"r{n}" for n in range(5)]
    assert (page.total, len(looked_at)) == (200, 5)
    page = asked.list_requests(5, page.next_page_token)
    assert [info.request_id for info in page.requests] == [f"r{n}" for n in range(5, 10)]
    looked_at.clear()
    held = driver.scheduler.running[1].block_table[0]
    assert asked.block_detail(held).requests == ["r1"]
    assert len(looked_at) == 3
    assert asked.block_detail(63).requests == []
