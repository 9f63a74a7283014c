"""A block that followed a void one outlives it in the host pool, and is never hit again under the same digest."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine.tables_alone import ROOT, cache, complete, drain, request_of, sequence_of, tables_of

from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, chain_digests, token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import NO_BLOCK
from pagekv.kvmanager.scheduling.block_tables import Arrival, BlockTables
from pagekv.kvmanager.scheduling.sequence import Seq, Swapped

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def make_void(tables: BlockTables) -> None:
    """The first block of the prompt fails, and leaves both tiers."""
    broken = sequence_of([1, 2, 9])
    assert tables.admit([Arrival(broken)], 0) == 0
    drain(tables)
    tables.invalidate(broken, 0)
    tables.discard(broken)


def compute(tables: BlockTables, sequence: Seq, count: int) -> None:
    """The sequence comes in, finds nothing, and computes so many tokens."""
    assert tables.admit([Arrival(sequence)], 0) == 0
    assert sequence.num_computed == 0
    sequence.num_computed = count
    tables.publisher.publish(sequence)


@pytest.mark.parametrize("way", ["at once", "prepared", "refused before", "preempted"])
def test_what_followed_a_void_block_is_not_hit(way: str) -> None:
    """The prefix is computed anew, and written back, before the request comes, which knew the void one's digest object
    or did not.
    """
    pool = BlockPool(8, 2)
    tables = tables_of(pool, 6)
    cache(pool, PROMPT)
    request = sequence_of(PROMPT, complete(pool.table, PROMPT) if way == "prepared" else None)
    if way == "refused before":
        assert tables.admit([Arrival(request)], 9) > 0
    elif way == "preempted":
        assert tables.admit([Arrival(request)], 0) == 0
        tables.free(request)
    make_void(tables)
    cache(pool, PROMPT[:2])
    drain(tables)
    assert tables.admit([Arrival(request)], 0) == 0
    assert request.num_computed == 2


@pytest.mark.parametrize("way", ["preempted", "reads nothing", "prepared sibling", "branch", "refused on the host"])
def test_the_object_of_a_void_block_is_not_published_again(way: str) -> None:
    """A sequence that knows it computes the block anew; others then hit that block alone."""
    pool = BlockPool(8, 2)
    tables = tables_of(pool, 6)
    prepared = complete(pool.table, PROMPT) if way == "prepared sibling" else None
    identity = CacheIdentity(read=way != "reads nothing")
    request = request_of(PROMPT, prepared, n=2 if prepared else 1, identity=identity)
    first = again = request.sequences[0]
    if way == "refused on the host":
        cache(pool, PROMPT)
        drain(tables)
        assert tables.admit([Arrival(first)], 9) > 0
    else:
        compute(tables, first, 7)
        if way == "branch":
            again = first.branch(1)
        tables.free(first)
    if prepared is not None:
        again = request.sequences[1]
    make_void(tables)
    compute(tables, again, 2)
    other = sequence_of(PROMPT)
    assert tables.admit([Arrival(other)], 0) == 0
    assert other.num_computed == 2


def test_a_block_by_digest_follows_the_one_kept_for_the_sequence() -> None:
    """The sequence has objects of its own by now; the host pool knows the second block by that of the first."""
    tables = tables_of(BlockPool(8, 2), 6)
    host, sequence = tables.host, sequence_of(PROMPT)
    objects = chain_digests(ROOT, token_bytes(PROMPT), 2)
    blocks, _ = host.keep(objects[:2], sequence.chunks(2, 0, 2), [sequence.request.root, objects[0]])
    host.release(blocks[1:])
    sequence.swapped = Swapped(host, [blocks[0], NO_BLOCK], 4)
    assert tables.admit([Arrival(sequence)], 0) == 0
    assert sequence.num_computed == 4


@pytest.mark.parametrize("read", [False, True])
def test_what_was_kept_for_a_sequence_stays_findable_when_it_is_back(read: bool) -> None:
    """It publishes under the objects by which the host pool knows what follows, so others find that there."""
    pool = BlockPool(8, 2)
    tables = tables_of(pool, 12)
    sequence = request_of(PROMPT, identity=CacheIdentity(read=read)).sequences[0]
    compute(tables, sequence, 7)
    tables.swapper.swap_out([sequence])
    tables.free(sequence)
    drain(tables)
    assert tables.admit([Arrival(sequence)], 0) == 0
    assert sequence.num_computed >= 6
    tables.publisher.publish(sequence)
    first = np.array([sequence.block_table[0]], np.int32)
    pool.share(first)
    tables.free(sequence)
    drain(tables)
    other = Arrival(sequence_of([*PROMPT, 8]))
    assert tables.admit([other], 0) == 0
    assert (len(other.hits), len(other.host_blocks)) == (1, 2)
