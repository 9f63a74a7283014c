"""Cache mode: replays only prompts, one at a time in file order, on the real block pool and its digests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import chain_digests, root_digest
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.replay.options import NO_CACHE, ReplayOptions
from pagekv.kvmanager.replay.report import Row
from pagekv.kvmanager.replay.trace import TraceRecord, distinct_prefixes, prompt_tokens


def replay_cache(
    records: Sequence[TraceRecord],
    options: ReplayOptions,
    policy: str,
    num_blocks: int | None,
    progress: Callable[[int], None],
) -> Row:
    """One row of cache mode. Records must have hash ids; `num_blocks` None: unbounded. `progress` gets the number of
    finished records. The rule for counting hits was found by comparing all candidates with published figures of the
    Mooncake trace:

    - a prompt of n tokens has ceil(n / block_size) blocks; the last one counts, and is cached, even if it is not full
      (the trace has a hash id for it, too); with `partial_blocks` off a prompt has floor(n / block_size) blocks;
    - hits are the leading run of cached blocks, which may be the whole prompt: nothing is sampled here, while a real
      request always computes at least one token;
    - then the whole prompt becomes most recently used, its last block first, so its deepest block is its oldest one;
    - the block hit rate is hits / all prompt blocks; for the token hit rate each hit counts the prompt tokens in it.
    """
    begun = time.perf_counter()
    size, unbounded = options.block_size, num_blocks is None
    # A pool with a block for every distinct block of the trace never evicts.
    num_blocks = num_blocks or -(-options.tokens_per_id // size) * distinct_prefixes(records)
    pool = BlockPool(num_blocks, size, options.order(policy, num_blocks))
    root = root_digest("replay", "", "")
    hit_blocks = hit_tokens = all_blocks = all_tokens = 0
    for done, record in enumerate(records):
        length = record.input_length
        blocks = -(-length // size) if options.partial_blocks else length // size
        all_blocks += blocks
        all_tokens += length
        if policy != NO_CACHE:
            hits = _use(pool, root, prompt_tokens(record, done, options.tokens_per_id, blocks * size))
            hit_blocks += hits
            hit_tokens += min(hits * size, length)
        if done % 64 == 0:
            progress(done)
    return Row(
        policy=policy,
        blocks=pool.num_blocks,
        unbounded=unbounded,
        requests=len(records),
        hit_blocks=hit_blocks,
        prompt_blocks=all_blocks,
        hit_tokens=hit_tokens,
        prompt_tokens=all_tokens,
        evictions=pool.evictions,
        timing=None,
        wall_s=time.perf_counter() - begun,
    )


def _use(pool: BlockPool, root: bytes, tokens: NDArray[np.uint32]) -> int:
    """Allocates the blocks of one prompt, as many as the pool has, and frees them again; returns the number of hits."""
    chunks = tokens.reshape(-1, pool.block_size)
    hits = pool.table.trie.match(root, chunks)
    parent = pool.table.digest(hits[-1]) if hits else root
    assert parent is not None
    left = chunks[len(hits) :]
    digests = chain_digests(parent, left.tobytes(), pool.block_size)
    held = np.array(hits, np.int32)
    pool.touch(held)
    fresh = pool.allocate(min(len(chunks) - len(hits), pool.num_free))
    if fresh is None:
        raise InvariantError(f"{pool.num_free} blocks were free and could not be allocated")
    if len(fresh):
        count = len(fresh)
        pool.publish_chain(fresh, digests[:count], parent, left[:count], first=not hits, media=False)
    pool.free(np.concatenate([held, fresh]))
    return len(hits)
