"""Looks into requests and blocks: lists of them, one of them whole, and the map of all blocks.

Every call that is not awaited is a snapshot between two awaits of the engine loop. Answers are messages of the
contract, where it has them, so that each of their fields is written in one place.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from itertools import islice

import numpy as np

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
# In page tokens: the list of requests, and what is added to the place of those that do not run.
_REQUESTS, _WAITING = b"requests", 2**62


class EngineSnapshots:
    """Owned by the engine loop, which shares its state. Methods raise Unavailable before the first attachment unless
    they say otherwise.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state

    @property
    def _cache(self) -> CacheAdmin:
        self._state.serving()
        return self._state.cache

    async def block_tables(self, request_id: str) -> operator_pb.GetBlockTableResponse | None:
        """Block tables of a live request, of the moment of the call, with turns of the event loop while long ones are
        written; None when there is no such request, or no executor yet.
        """
        requests, size = self._state.live.named(request_id), self._state.config.block_size
        if not requests:
            return None
        # Two tenants may use one id; the one that came first is shown.
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
        start = self._first_place(token)
        live = {_place(request): request for request in self._state.live.all()}
        found, answer = _requests_page(live, start, page_size)
        answer.requests.extend(map(_request_info, found))
        return answer

    async def list_requests_in_slices(self, page_size: int, token: str = "") -> operator_pb.ListRequestsResponse:
        """As `list_requests`, with turns of the event loop; a request that ends meanwhile may be left out."""
        start, live = self._first_place(token), dict[int, LiveRequest]()
        async for some in _in_slices(self._state.live.all()):
            live |= {_place(request): request for request in some}
        found, answer = _requests_page(live, start, page_size)
        async for some in _in_slices(found):
            answer.requests.extend(map(_request_info, some))
        return answer

    async def list_tenants(self) -> operator_pb.ListTenantsResponse:
        """The tenants by name, with limits and use; none where callers have no identities."""
        return await tenant_list(self._state)

    def _first_place(self, token: str) -> int:
        self._state.serving()
        return read_page_token(_REQUESTS, token, 2 * _WAITING)

    def list_blocks(
        self, page_size: int, token: str, state: operator_pb.BlockState.ValueType
    ) -> operator_pb.ListBlocksResponse:
        """A page of the blocks by ascending id, those in a state (UNSPECIFIED: all). Raises InvalidRequest."""
        pool, of = self._cache.pool, b"blocks %d" % state
        start = read_page_token(of, token, pool.num_blocks)
        # Vector operations: the engine loop waits meanwhile, and a pool may have millions of blocks.
        pins = self._cache.pins.holders[start:]
        ref_counts, published = pool.ref_counts[start:], pool.table.published[start:]
        if state == operator_pb.BLOCK_STATE_UNSPECIFIED:
            wanted = np.ones(len(ref_counts), np.bool_)
        elif state == operator_pb.BLOCK_STATE_ACTIVE:
            wanted = ref_counts > pins
        elif state == operator_pb.BLOCK_STATE_PINNED:
            wanted = (ref_counts == pins) & (pins > 0)
        else:
            wanted = (ref_counts == 0) & (published == (state == operator_pb.BLOCK_STATE_CACHED))
        blocks: list[int] = (start + np.flatnonzero(wanted)[: page_size + 1]).tolist()
        return operator_pb.ListBlocksResponse(
            blocks=map(self._block_info, blocks[:page_size]),
            next_page_token=page_token(of, blocks[page_size]) if len(blocks) > page_size else "",
        )

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
        """Every block of both pools, as arrays of which only `host_keyed` is a copy; None before the first
        attachment.
        """
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
        holders = (
            request.command.request_id
            for request in self._state.live.all()
            if any((sequence.blocks() == block).any() for sequence in request.sequences)
        )
        return BlockDetail(
            block=self._block_info(block),
            cached_s=pool.table.age_s(block),
            token_ids=pool.table.token_ids(block) if pool.table.published[block] else None,
            chain=chain,
            chain_complete=complete,
            requests=list(islice(holders, MAX_HOLDERS_NAMED)),
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


def _place(request: LiveRequest) -> int:
    """Its place in the list of requests, unlike that of any other: running ones first, by arrival."""
    running = _request_state(request) == types_pb2.SEQUENCE_STATE_RUNNING
    return request.arrival + (0 if running else _WAITING)


async def _in_slices(requests: list[LiveRequest]) -> AsyncIterator[list[LiveRequest]]:
    """The requests that are live, some at a time, with a turn of the event loop between them."""
    for start in range(0, len(requests), REQUESTS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        # A request that has ended has no sequences.
        yield [request for request in requests[start : start + REQUESTS_AT_ONCE] if request.sequences]


def _requests_page(
    live: dict[int, LiveRequest], start: int, page_size: int
) -> tuple[list[LiveRequest], operator_pb.ListRequestsResponse]:
    """The requests of the page that begins at a place, and its answer without them."""
    found = sorted(place for place in live if place >= start)
    # Behind the last of this page, wherever those before it have gone by then.
    behind = page_token(_REQUESTS, found[page_size - 1] + 1) if len(found) > page_size else ""
    answer = operator_pb.ListRequestsResponse(total=len(live), next_page_token=behind)
    return [live[place] for place in found[:page_size]], answer


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
