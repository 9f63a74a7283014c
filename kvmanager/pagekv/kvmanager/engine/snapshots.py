"""Snapshots of requests and blocks: lists of them, details of one of them, and the map of all blocks.

Every call that is not awaited is a snapshot between two awaits of the engine loop. Answers are messages of the
contract, if it has them, so each field of an answer is written in one place.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from itertools import islice
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.paging import page_token, read_page_token
from pagekv.kvmanager.engine.state import EngineState
from pagekv.kvmanager.engine.tenant_list import tenant_list
from pagekv.kvmanager.engine.views import BlockDetail, BlockMap
from pagekv.kvmanager.kvcache.prefix_table import PrefixTable
from pagekv.kvmanager.scheduling.sequence import HOLDING, LiveRequest, Seq, SeqStatus
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2

# Bounds of a block's detail: blocks of its chain, and requests that hold it.
MAX_CHAIN = 256
MAX_HOLDERS_NAMED = 20
# Blocks of a table, and requests, that are written at once: some milliseconds' work.
TABLE_AT_ONCE, REQUESTS_AT_ONCE = 4096, 256
# In page tokens: the identity of the list of requests, and the offset of requests that do not run.
_REQUESTS, _WAITING = b"requests", 2**62
_arrival = attrgetter("arrival")


class EngineSnapshots:
    """Owned by the engine loop. Methods raise Unavailable before the first attachment unless they say otherwise."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    @property
    def _cache(self) -> CacheAdmin:
        self._state.serving()
        return self._state.cache

    async def block_tables(self, request_id: str) -> operator_pb.GetBlockTableResponse | None:
        """Block tables of a live request at the moment of the call, with turns of the event loop while long tables are
        written; None if there is no such request, or no executor yet.
        """
        requests, size = self._state.live.named(request_id), self._state.config.block_size
        if not requests:
            return None
        # Two tenants may use one id; the request that came first is shown.
        request, answer = requests[0], operator_pb.GetBlockTableResponse()
        parts: list[tuple[operator_pb.SequenceBlocks, array[int], list[bytes]]] = []
        for sequence in request.sequences:
            if sequence.state is SeqStatus.FINISHED:
                continue
            table = answer.sequences.add(
                index=sequence.index,
                state=_sequence_state(sequence),
                num_tokens=sequence.num_tokens,
                computed_tokens=sequence.num_computed,
            )
            num_full = min(len(sequence.block_table), sequence.num_computed // size)
            parts.append((table, sequence.block_table[:], sequence.digests[:num_full]))
        await asyncio.sleep(0)
        for table, blocks, digests in parts:
            for start in range(0, len(blocks), TABLE_AT_ONCE):
                table.block_ids.extend(blocks[start : start + TABLE_AT_ONCE])
                table.block_hashes.extend(digest.hex() for digest in digests[start : start + TABLE_AT_ONCE])
                await asyncio.sleep(0)
        return answer

    def list_requests(self, page_size: int, token: str = "") -> operator_pb.ListRequestsResponse:
        """A page of the live requests, running ones first, by arrival; and how many are live. Raises InvalidRequest."""
        found, answer = self._requests_page(page_size, token)
        answer.requests.extend(map(_request_info, found))
        return answer

    async def list_requests_in_slices(self, page_size: int, token: str = "") -> operator_pb.ListRequestsResponse:
        """As `list_requests`, with turns of the event loop; a request that ends meanwhile is left out."""
        found, answer = self._requests_page(page_size, token)
        for start in range(0, len(found), REQUESTS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            # A request that has ended has no sequences.
            some = (request for request in found[start : start + REQUESTS_AT_ONCE] if request.sequences)
            answer.requests.extend(map(_request_info, some))
        return answer

    def _requests_page(self, page_size: int, token: str) -> tuple[list[LiveRequest], operator_pb.ListRequestsResponse]:
        """The requests of a page, and the answer without them. Only running requests, and as many others as the page
        has, are looked at, because very many may wait.
        """
        running = {sequence.request for sequence in self._state.serving().running}
        start = read_page_token(_REQUESTS, token, 2 * _WAITING)
        # By arrival.
        live, holding = self._state.live.all(), sorted(running, key=_arrival)
        found = holding[bisect_left(holding, start, key=_arrival) :][: page_size + 1]
        others = islice(live, bisect_left(live, start - _WAITING, key=_arrival), None)
        found += islice((each for each in others if each not in running), page_size + 1 - len(found))
        answer = operator_pb.ListRequestsResponse(total=len(live))
        if len(found) > page_size:
            # The next page begins after the last request of this page, even if requests before it have ended by then.
            last = found[page_size - 1]
            answer.next_page_token = page_token(_REQUESTS, last.arrival + (0 if last in running else _WAITING) + 1)
        return found[:page_size], answer

    async def list_tenants(self) -> operator_pb.ListTenantsResponse:
        """The tenants by name, with limits and use; none where callers have no identities."""
        return await tenant_list(self._state)

    def list_blocks(
        self, page_size: int, token: str, state: operator_pb.BlockState.ValueType
    ) -> operator_pb.ListBlocksResponse:
        """A page of the blocks in a state (UNSPECIFIED: all blocks), by ascending id. Raises InvalidRequest."""
        pool, of = self._cache.pool, b"blocks %d" % state
        start = read_page_token(of, token, pool.num_blocks)
        blocks: list[int] = []
        # Examines twice as many blocks each time until the page is full. Examining all remaining blocks for each page
        # would take quadratic time for the whole list.
        width = page_size + 1
        while start < pool.num_blocks and len(blocks) <= page_size:
            wanted = np.flatnonzero(self._are_in(state, slice(start, start + width)))
            blocks += (start + wanted[: page_size + 1 - len(blocks)]).tolist()
            start, width = start + width, 2 * width
        return operator_pb.ListBlocksResponse(
            blocks=map(self._block_info, blocks[:page_size]),
            next_page_token=page_token(of, blocks[page_size]) if len(blocks) > page_size else "",
        )

    def _are_in(self, state: operator_pb.BlockState.ValueType, places: slice) -> NDArray[np.bool_]:
        """Whether each of these blocks is in a state. Vector operations only, as the engine loop waits meanwhile."""
        pool, pins = self._cache.pool, self._cache.pins.holders[places]
        ref_counts, published = pool.ref_counts[places], pool.table.published[places]
        found: NDArray[np.bool_]
        if state == operator_pb.BLOCK_STATE_UNSPECIFIED:
            found = np.ones(len(ref_counts), np.bool_)
        elif state == operator_pb.BLOCK_STATE_ACTIVE:
            found = ref_counts > pins
        elif state == operator_pb.BLOCK_STATE_PINNED:
            found = (ref_counts == pins) & (pins > 0)
        else:
            found = (ref_counts == 0) & (published == (state == operator_pb.BLOCK_STATE_CACHED))
        return found

    def _block_info(self, block: int) -> operator_pb.BlockInfo:
        cache = self._state.cache
        table, ref_count, pins = cache.pool.table, cache.pool.ref_count(block), int(cache.pins.holders[block])
        digest, parent = table.digest(block) or b"", table.parent(block) or b""
        if ref_count:
            state = operator_pb.BLOCK_STATE_ACTIVE if ref_count > pins else operator_pb.BLOCK_STATE_PINNED
        else:
            state = operator_pb.BLOCK_STATE_CACHED if digest else operator_pb.BLOCK_STATE_FREE
        return operator_pb.BlockInfo(
            block_id=block,
            ref_count=ref_count,
            state=state,
            block_hash=digest.hex(),
            parent_hash=parent.hex(),
            pins=pins,
        )

    def block_map(self) -> BlockMap | None:
        """Every block of both pools; live memory except `host_keyed`. None before the first attachment."""
        state, cache = self._state, self._state.cache
        if state.scheduler is None:
            return None
        pool, host = state.scheduler.pool, state.scheduler.host
        return BlockMap(
            epoch=state.epochs,
            step=state.totals.steps_total,
            ref_counts=pool.ref_counts,
            pins=cache.pins.holders,
            published=pool.table.published,
            evictions=pool.evictions,
            host_ref_counts=host.ref_counts,
            host_keyed=host.keyed_blocks(),
        )

    def block_detail(self, block: int) -> BlockDetail:
        """A device block and its place in the prefix table and in live requests. Raises InvalidRequest."""
        pool = self._cache.pool
        _check_block_id(block, pool.num_blocks)
        chain, complete = _chain(pool.table, block)
        # Only running sequences hold blocks; very many requests may wait.
        running = self._state.serving().running if pool.ref_count(block) else []
        holders = {sequence.request for sequence in running if (sequence.blocks() == block).any()}
        return BlockDetail(
            block=self._block_info(block),
            cached_s=pool.table.age_s(block),
            token_ids=pool.table.token_ids(block) if pool.table.published[block] else None,
            chain=chain,
            chain_complete=complete,
            requests=[each.command.request_id for each in sorted(holders, key=_arrival)[:MAX_HOLDERS_NAMED]],
        )

    def host_block(self, block: int) -> operator_pb.BlockInfo:
        """Id, holders and hash of a block of the host pool. Raises InvalidRequest."""
        host = self._state.serving().host
        _check_block_id(block, host.num_blocks)
        return operator_pb.BlockInfo(
            block_id=block, ref_count=int(host.ref_counts[block]), block_hash=(host.key(block) or b"").hex()
        )


def _sequence_state(sequence: Seq) -> types_pb2.SequenceState.ValueType:
    if sequence.state in HOLDING:
        return types_pb2.SEQUENCE_STATE_RUNNING
    return types_pb2.SEQUENCE_STATE_WAITING if sequence.swapped is None else types_pb2.SEQUENCE_STATE_SWAPPED


def _request_state(request: LiveRequest) -> types_pb2.SequenceState.ValueType:
    found = {_sequence_state(sequence) for sequence in request.sequences}
    by_progress = (types_pb2.SEQUENCE_STATE_RUNNING, types_pb2.SEQUENCE_STATE_SWAPPED)
    return next((state for state in by_progress if state in found), types_pb2.SEQUENCE_STATE_WAITING)


def _request_info(request: LiveRequest) -> operator_pb.RequestInfo:
    sequences, first = request.sequences, request.sequences[0]
    info = operator_pb.RequestInfo(
        request_id=request.command.request_id,
        state=_request_state(request),
        priority=request.command.priority,
        num_sequences=len(sequences),
        prompt_tokens=first.num_prompt,
        cached_tokens=first.cached_tokens or 0,
        computed_tokens=first.num_computed,
        generated_tokens=sum(sequence.num_output for sequence in sequences),
        max_total_tokens=first.max_total,
        num_blocks=sum(len(sequence.block_table) for sequence in sequences),
        preemptions=sum(sequence.preemptions for sequence in sequences),
        namespace=request.command.identity.namespace,
        adapter=request.command.identity.adapter_id,
    )
    info.create_time.FromNanoseconds(int(request.created * 1e9))
    return info


def _check_block_id(block: int, num_blocks: int) -> None:
    if block >= num_blocks:
        raise InvalidRequest("block_id", f"must be from 0 to {num_blocks - 1} (the pool), got {block}")


def _chain(table: PrefixTable, block: int) -> tuple[list[int], bool]:
    """The blocks before a block, parent first, and whether the last of them begins a prompt."""
    chain: list[int] = []
    while len(chain) < MAX_CHAIN:
        parent = table.parent(block)
        before = table.lookup(parent) if parent is not None else None
        if before is None:
            return chain, parent is not None
        chain.append(before)
        block = before
    return chain, False
