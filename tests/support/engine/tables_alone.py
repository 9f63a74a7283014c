"""Block tables without a scheduler: prompts in the prefix cache, prepared or not, and sequences of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from pagekv.common.message_sizes import MAX_RECEIVE_BYTES
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaSpan, chain_digests, root_digest, token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import PrefixTable
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.block_tables import BlockTables
from pagekv.kvmanager.scheduling.counters import SchedulerCounters
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq, live_request

ROOT = root_digest("model", "", "")


def cache(pool: BlockPool, prompt: list[int]) -> list[int]:
    """Enters the full blocks of a prompt, which nobody holds afterwards; returns their ids."""
    size = pool.block_size
    digests = chain_digests(ROOT, token_bytes(prompt), size)
    blocks = pool.allocate(len(digests))
    assert blocks is not None
    rows = np.array(prompt, np.uint32)[: len(digests) * size].reshape(-1, size)
    pool.publish_chain(blocks, digests, ROOT, rows, first=True, media=False)
    pool.free(blocks)
    ids: list[int] = blocks.tolist()
    return ids


def complete(table: PrefixTable, prompt: list[int], media: Sequence[MediaSpan] = ()) -> PreparedPrompt:
    prepared = PreparedPrompt(ROOT)
    for _ in prepared.slices(array("I", prompt), media, table, array.tobytes):
        pass
    return prepared


def request_of(
    prompt: list[int], prepared: PreparedPrompt | None = None, n: int = 1, identity: CacheIdentity | None = None
) -> LiveRequest:
    command = GenerateCommand("r", prompt, SamplingParams(max_tokens=2), n, identity=identity or CacheIdentity())
    return live_request(command, RequestStream("r", n), 0, ROOT, 0, prepared)


def sequence_of(prompt: list[int], prepared: PreparedPrompt | None = None) -> Seq:
    return request_of(prompt, prepared).sequences[0]


def tables_of(
    pool: BlockPool,
    host_blocks: int,
    *,
    write_back: bool = True,
    max_step_bytes: int = MAX_RECEIVE_BYTES,
    fork_sharing: bool = True,
) -> BlockTables:
    limits = SchedulerLimits(
        64, 4, watermark=0, write_back=write_back, max_step_bytes=max_step_bytes, fork_sharing=fork_sharing
    )
    return BlockTables(pool, HostPool(host_blocks, 2), limits, SchedulerCounters())


def drain(tables: BlockTables) -> None:
    """Evicts every free block, which is written back."""
    taken = tables.allocate(tables.pool.num_free)
    assert taken is not None
    tables.pool.free(taken)
