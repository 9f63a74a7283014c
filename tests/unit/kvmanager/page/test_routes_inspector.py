"""Blocks and block tables as the inspector shows them."""

from __future__ import annotations

import pytest
from support.engine import engine_harness
from support.engine.engine_harness import Bench, command, read, until
from support.event_loop import run_by

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.page.routes import block_detail, sequence_detail
from pagekv.v1 import operator_service_pb2 as pb
from pagekv.v1 import types_pb2

PROMPT = list(range(20))


@run_by(engine_harness.run, num_device_blocks=40, block_ages=True)
async def test_a_block_has_its_hash_chain_and_age_but_no_text(engine: EngineLoop) -> None:
    await read(engine.submit(command("first", PROMPT)))
    blocks = engine.snapshots.list_blocks(40, "", pb.BLOCK_STATE_CACHED).blocks
    by_hash = {block.block_hash: block for block in blocks}
    for block in blocks:
        shown = block_detail(engine.snapshots.block_detail(block.block_id), None, with_tokens=False)
        assert (shown["block_hash"], shown["parent_hash"]) == (block.block_hash, block.parent_hash)
        assert (shown["ref_count"], shown["requests"]) == (0, [])
        assert shown["cached_s"] >= 0
        chain, parent = [], by_hash.get(block.parent_hash)
        while parent is not None:
            chain.append(parent.block_id)
            parent = by_hash.get(parent.parent_hash)
        assert (shown["chain"], shown["chain_complete"]) == (chain, True)
        assert not {"token_ids", "text"} & set(shown)
    (free, *_) = engine.snapshots.list_blocks(40, "", pb.BLOCK_STATE_FREE).blocks
    shown = block_detail(engine.snapshots.block_detail(free.block_id), None, with_tokens=True)
    assert (shown["cached_s"], "token_ids" in shown) == (None, False)
    with pytest.raises(InvalidRequest, match=r"must be from 0 to 39 \(the pool\), got 40"):
        engine.snapshots.block_detail(40)
    with pytest.raises(InvalidRequest, match="block_id"):
        engine.snapshots.host_block(0)


@run_by(engine_harness.run, num_device_blocks=64)
async def test_a_held_block_names_its_requests_and_where_allowed_its_tokens(engine: EngineLoop, bench: Bench) -> None:
    # However fast the machine is, both run when they are looked for.
    bench.step_s = 0.01
    streams = [engine.submit(command(name, PROMPT, 100)) for name in ("one", "two")]
    await until(lambda: engine.statistics.stats().running_sequences == 2)
    tables = await engine.snapshots.block_tables("one")
    assert tables is not None
    (table,) = tables.sequences
    shown = block_detail(engine.snapshots.block_detail(table.block_ids[0]), None, with_tokens=True)
    assert (shown["requests"], shown["ref_count"]) == (["one", "two"], 2)
    assert (shown["token_ids"], shown["text"]) == (PROMPT[:4], None)
    for stream in streams:
        engine.release(stream)
    await until(lambda: not engine.statistics.stats().active_blocks)


def test_block_tables() -> None:
    table = pb.SequenceBlocks(
        state=types_pb2.SEQUENCE_STATE_RUNNING, num_tokens=9, computed_tokens=8, block_ids=[7, 3, 1]
    )
    shown = {"index": 0, "state": "running", "tokens": 9, "computed": 8, "block_ids": [7, 3, 1]}
    assert sequence_detail(table) == shown
