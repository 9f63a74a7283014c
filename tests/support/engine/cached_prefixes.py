"""A block pool with prefixes in its table, put there as the scheduler would, for tests of what looks into it."""

from __future__ import annotations

import numpy as np

from pagekv.kvmanager.kvcache.block_hash import MediaSpan, chain_digests, root_digest, token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks

FINGERPRINT = "model"


def root_of(namespace: str = "", adapter_id: str = "") -> bytes:
    return root_digest(FINGERPRINT, namespace, adapter_id)


ROOT = root_of()


def hold(pool: BlockPool, prompt: list[int], root: bytes = ROOT, media: tuple[MediaSpan, ...] = ()) -> Blocks:
    """Computes a prompt: hits what is cached, allocates and publishes the other full blocks, and holds them all."""
    size = pool.block_size
    digests = chain_digests(root, token_bytes(prompt), size, media)
    chunks = np.array(prompt[: len(digests) * size], np.uint32).reshape(-1, size)
    hits = np.array(pool.match(root, digests, chunks), np.int32)
    pool.touch(hits)
    count = len(hits)
    fresh = pool.allocate(len(digests) - count)
    assert fresh is not None
    # As the manager does: what comes before the media is text like any other.
    border = max(count, min((span.position for span in media), default=len(prompt)) // size)
    for begin, end, is_media in ((count, border, False), (border, len(digests), True)):
        if begin < min(end, len(digests)):
            blocks, part = fresh[begin - count : end - count], chunks[begin:end]
            before = digests[begin - 1] if begin else root
            pool.publish_chain(blocks, digests[begin:end], before, part, first=begin == 0, media=is_media)
    return np.concatenate((hits, fresh))


def cache(pool: BlockPool, prompt: list[int], root: bytes = ROOT, media: tuple[MediaSpan, ...] = ()) -> list[int]:
    """As `hold`, and lets go again: the blocks are cached. Returns them."""
    blocks = hold(pool, prompt, root, media)
    pool.free(blocks)
    ids: list[int] = blocks.tolist()
    return ids


def evict_all(pool: BlockPool) -> None:
    """Takes every free block for something else, and gives it back."""
    blocks = pool.allocate(pool.num_free)
    assert blocks is not None
    pool.free(blocks)
