"""Recomputes every counter and index of the manager from scratch; each function raises InvariantError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.engine.queries import EngineQueries
from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.pins import Pins
from pagekv.kvmanager.kvcache.prefix_table import Blocks, PrefixTable
from pagekv.kvmanager.kvcache.prefix_trie import _ABSENT, _NONE, Node, PrefixTrie
from pagekv.kvmanager.kvcache.tenant_order import TenantOrder
from pagekv.kvmanager.scheduling.decode_batch import DecodeBatch
from pagekv.kvmanager.scheduling.fairness.tenant_caps import RunningRequests
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import HOLDING, NO_BLOCKS, NO_SEQ_ID, Seq, SeqStatus, key


def pin_tables(pins: Pins) -> list[list[int]]:
    """The blocks of each pin."""
    return [pin.blocks.tolist() for pin in pins._pins.values()]


def pending(sequence: Seq) -> int:
    """Sampled tokens promised by steps in flight."""
    return 0 if sequence.batch is None else int(sequence.batch.pending[sequence.seq_id])


def check_engine(queries: EngineQueries) -> None:
    """An engine that serves, between two awaits of its loop."""
    state = queries._state
    sequences = (sequence for request in state.live.all() for sequence in request.sequences)
    check_scheduler(state.serving(), sequences, state.cache.pins)


def check_scheduler(scheduler: Scheduler, live: Iterable[Seq], pins: Pins) -> None:
    """Block counts and queue lengths, from the live sequences and the pins."""
    sequences = list(live)
    held = [s for s in sequences if s.state in HOLDING]
    check_pool(scheduler.pool, [*(s.block_table for s in held), *pin_tables(pins)])
    # Host blocks of an earlier epoch are gone with their pool.
    check_host(scheduler.host, [s.swapped.held() for s in sequences if s.swapped and s.swapped.pool is scheduler.host])
    if sorted(held, key=key) != scheduler.running:
        raise InvariantError(f"{len(held)} sequences hold blocks, the running order has {len(scheduler.running)}")
    _check_waiting(scheduler, sequences)
    _check_running_requests(scheduler._running.requests, held)
    # Beams are at the executor only while they compute, and those that return are not there yet.
    returning = scheduler._running.returning
    here = [s for s in held if s.seq_id != NO_SEQ_ID or (s.request.search is None and s not in returning)]
    check_batch(scheduler._running.batch, here)
    publisher = scheduler._tables.publisher
    marked = np.unique(np.concatenate([NO_BLOCKS, *publisher._being_computed]))
    if marked.tolist() != np.flatnonzero(publisher._marked).tolist():
        raise InvariantError(f"{len(marked)} blocks are being computed, others are marked")
    for s in held:
        covered = -(-max(s.num_tokens, s.num_computed) // scheduler.pool.block_size)
        total = s.num_tokens + pending(s)
        if not s.num_computed <= total <= s.max_total or len(s.block_table) not in (covered, covered - 1):
            raise InvariantError(
                f"sequence {s.key}: {s.num_computed} computed of {total} (at most {s.max_total}) in "
                f"{len(s.block_table)} blocks of {scheduler.pool.block_size}"
            )


def _check_waiting(scheduler: Scheduler, sequences: list[Seq]) -> None:
    queue = scheduler.waiting
    waiting = sum(1 for s in sequences if s.state is SeqStatus.WAITING)
    if waiting != len(queue):
        raise InvariantError(f"{waiting} sequences wait, the waiting queue counts {len(queue)}")
    forking = [s.request.arrival for s in sequences if s.state is SeqStatus.FORKING]
    if queue.num_forking != len(forking):
        raise InvariantError(f"{queue.num_forking} sequences are counted that wait for a fork")
    parents = {request.arrival for request in queue.forking}
    parents |= {s.request.arrival for s in sequences if s.index == 0 and s.state is SeqStatus.WAITING}
    if not parents.issuperset(forking):
        raise InvariantError(f"requests {sorted({*forking} - parents)} wait for a fork that nobody makes")


def _check_running_requests(counted: RunningRequests, held: list[Seq]) -> None:
    """Of each request the sequences that hold blocks, and of each tenant the requests; needs as they were at first."""
    sequences = Counter(sequence.request for sequence in held)
    requests, blocks = Counter[int](), Counter[int]()
    for request in sequences:
        requests[request.tenant] += 1
        blocks[request.tenant] += counted._needs[request]
    if (sequences, requests, blocks) != (counted._sequences, counted._requests, counted._blocks):
        said = counted._sequences, counted._requests, counted._blocks
        raise InvariantError(f"{(sequences, requests, blocks)} sequences, requests and blocks run, counted {said}")
    if counted._needs.keys() != sequences.keys():
        raise InvariantError(f"{len(sequences)} requests run, {len(counted._needs)} have needs")


def check_batch(batch: DecodeBatch, here: list[Seq]) -> None:
    """The rows, from the sequences that are at the executor."""
    for sequence in here:
        seq_id = sequence.seq_id
        if seq_id == NO_SEQ_ID or batch._sequences[seq_id] is not sequence:
            raise InvariantError(f"sequence {sequence.key} has seq_id {seq_id}, which is not its own")
    holders = {sequence.seq_id for sequence in here}
    used = {seq_id for seq_id, sequence in enumerate(batch._sequences) if sequence is not None}
    if used != holders | batch._removed or used & set(batch._free):
        raise InvariantError(f"seq_ids {sorted(used)} are used, {sorted(holders | batch._removed)} should be")
    for seq_id in np.flatnonzero(batch.decoding).tolist():
        known, computed, pending = int(batch.known[seq_id]), int(batch.computed[seq_id]), int(batch.pending[seq_id])
        if seq_id not in holders or computed != known + pending - 1:
            raise InvariantError(f"row {seq_id} decodes with {known} known, {computed} computed, {pending} pending")


def _check_holders(ref_counts: Blocks, tables: Sequence[Sequence[int]], free: list[int], what: str) -> None:
    """Holders and free queue of a pool, from the lists of blocks that its holders have."""
    holders = np.array([*chain.from_iterable(tables)], np.int64)
    expected = np.bincount(holders, minlength=len(ref_counts))
    wrong = np.flatnonzero(expected != ref_counts)
    if len(wrong):
        block = int(wrong[0])
        raise InvariantError(f"{what} {block}: ref_count {ref_counts[block]}, held by {expected[block]}")
    unheld = np.flatnonzero(expected == 0).tolist()
    if sorted(free) != unheld:
        raise InvariantError(f"{what}: {len(unheld)} are held by nobody, {len(free)} are free")


def check_pool(pool: BlockPool, tables: Sequence[Sequence[int]]) -> None:
    """A device pool, from the block tables that hold blocks."""
    for table in tables:
        if len(set(table)) != len(table):
            raise InvariantError(f"a block table names a block twice: {list(table)}")
    free = list(pool._free)
    _check_holders(pool.ref_counts, tables, free, "block")
    if len(free) != pool.num_free:
        raise InvariantError(f"the free queue has {len(free)} blocks, it counts {pool.num_free}")
    check_table(pool.table)
    cached_free = int(np.count_nonzero(pool.table.published[free]))
    if cached_free != pool.num_cached_free:
        raise InvariantError(f"{cached_free} cached free blocks, counter says {pool.num_cached_free}")
    if pool.tenants is not None:
        _check_tenants(pool.tenants, pool.table.published, pool.ref_counts)


def _check_tenants(order: TenantOrder, published: NDArray[np.bool_], ref_counts: Blocks) -> None:
    """Footprints, from the owner of each block."""
    owned = order._owner >= 0
    if not np.array_equal(owned, published | (ref_counts > 0)):
        raise InvariantError("a block has an owner and no holder nor content, or the other way round")
    numbers = len(order._orders)
    footprint = np.bincount(order._owner[owned], minlength=numbers)
    cached = np.bincount(order._owner[owned & (ref_counts == 0)], minlength=numbers)
    if not (np.array_equal(footprint, order._footprint) and np.array_equal(cached, order._cached)):
        raise InvariantError(
            f"footprints {footprint}, {cached} of them free: counted {order._footprint}, {order._cached}"
        )
    queued = [len(each) for each in order._orders]
    if queued != cached.tolist() or order._num_cached != sum(queued):
        raise InvariantError(f"tenants have {queued} free cached blocks, counted {cached}")
    if any(order.num_free_for(tenant, NO_BLOCKS) < 0 for tenant in range(numbers)):
        raise InvariantError("a tenant has less than nothing to take")


def check_host(host: HostPool, held: Sequence[Sequence[int]]) -> None:
    """A host pool, from the blocks that each sequence holds."""
    _check_holders(host.ref_counts, held, list(host._free), "host block")
    keyed = {digest: block for block, digest in enumerate(host._key) if digest is not None}
    if keyed != host._block_of:
        raise InvariantError(f"{len(keyed)} host blocks have keys, the map has {len(host._block_of)}")


def check_table(table: PrefixTable) -> None:
    """A prefix table, from its digests."""
    held = {digest: block for block, digest in enumerate(table._digest) if digest is not None}
    if held != table._block_of:
        raise InvariantError(f"{len(held)} blocks hold digests, the prefix table has {len(table._block_of)}")
    retired = table.map.retired
    if np.count_nonzero(retired.marked[[*held.values()]]) != retired.count:
        raise InvariantError(f"{retired.count} blocks are retired, some of them without a digest")
    batches = Counter(retired._batch_of[retired.marked].tolist())
    if batches != retired._left or batches.keys() != retired._notes.keys():
        raise InvariantError(f"batches {batches} of blocks are retired, counted {retired._left}")
    if retired.count:
        held = {digest: block for digest, block in held.items() if block not in retired}
    blocks = set(held.values())
    if sorted(blocks) != np.flatnonzero(table.published).tolist():
        raise InvariantError(f"{len(held)} blocks hold digests, {int(table.published.sum())} are marked published")
    check_trie(table.trie, blocks)
    trie = table.trie
    media = {block for block in blocks if block in trie._apart or trie.parent(block) in table._media}
    if media != table._media:
        raise InvariantError(f"blocks {sorted(media ^ table._media)[:8]} should, or should not, count as media")
    _check_twins(table, held)


def _check_twins(table: PrefixTable, held: dict[bytes, int]) -> None:
    """Twins, from their digests: held, private, and the block that has their entry is held, too."""
    twins = table._twins
    listed = {twin: digest for digest, blocks in twins._blocks_of.items() for twin in blocks}
    if listed != twins._digest_of or not all(twins._blocks_of.values()):
        raise InvariantError(f"{len(listed)} twins are listed, {len(twins)} have digests")
    for twin, digest in listed.items():
        entry = held.get(digest)
        if entry is None or table.published[twin] or not (table._ref_count[twin] and table._ref_count[entry]):
            raise InvariantError(f"block {twin} is a twin of block {entry}, which one of the two cannot be")


def check_trie(trie: PrefixTrie, blocks: AbstractSet[int]) -> None:
    """Both directions, from parents and from children, for the blocks that should be in the trie."""
    # Under (node,) those that follow the node apart.
    children: dict[Node | tuple[Node], list[int]] = {}
    there = np.flatnonzero(trie._parent != _ABSENT).tolist()
    if wrong := blocks ^ {*there}:
        raise InvariantError(f"blocks {sorted(wrong)[:8]} are in the trie and should not be, or the other way round")
    parents = [trie.parent(block) for block in there]
    for block, parent in zip(there, parents, strict=True):
        if parent is None:
            raise InvariantError(f"block {block} is in the trie and has no parent")
        children.setdefault((parent,) if block in trie._apart else parent, []).append(block)
    if absent := (trie._apart | trie._root_of.keys()) - blocks:
        raise InvariantError(f"blocks {sorted(absent)} stand apart, or have a root, and are not in the trie")
    # All others have no child, neither in the column nor in a list.
    for node in {*np.flatnonzero(trie._child != _NONE).tolist(), *trie._children_of, *children}:
        found = trie._children_of.get(node, ()) if isinstance(node, tuple) else trie._children(node)
        named = children.get(node, [])
        if len(found) == len(named) == 1 and found[0] == named[0]:
            continue
        if list(found) != sorted(found, key=trie._row) or sorted(found) != named:
            raise InvariantError(f"node {node!r} has the children {list(found)}, {named} name it as parent")
    listed = {node for node, named in children.items() if not isinstance(node, int) or len(named) > 1}
    followers = sum(isinstance(parent, bytes) for parent in parents)
    if trie._children_of.keys() != listed or len(trie._root_of) != followers:
        raise InvariantError(f"{len(trie._children_of)} nodes have lists of children, {len(listed)} should have")
