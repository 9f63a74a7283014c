"""How a fully cached prompt is found: along the prefix trie, by token ids, or by chained digests in a dictionary.

Both are whole lookups as an admission makes them: from a sequence's token ids to its cached blocks and their digests,
with the token ids of every hit compared. One process, in turns; medians. Block size 16.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import numpy as np
from manager_workloads import BLOCK_SIZE, ROOT, make_pool, request

from pagekv.kvmanager.kvcache.block_hash import chain_digests
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.scheduling.sequence import Seq

Lookup = Callable[[BlockPool, Seq, int], tuple[list[int], list[bytes]]]


def by_tokens(pool: BlockPool, sequence: Seq, most: int) -> tuple[list[int], list[bytes]]:
    """Walks the trie, then reads the digests of what it found."""
    blocks = pool.table.trie.match(ROOT, sequence.chunks(BLOCK_SIZE, 0, most))
    return blocks, pool.table.digests(blocks)


def by_digests(pool: BlockPool, sequence: Seq, most: int) -> tuple[list[int], list[bytes]]:
    """Hashes every block, then looks the digests up."""
    tokens = sequence.chunks(BLOCK_SIZE, 0, most)
    digests = chain_digests(ROOT, sequence.token_ids[: most * BLOCK_SIZE].tobytes(), BLOCK_SIZE)
    return pool.match(ROOT, digests, tokens), digests


WAYS: dict[str, Lookup] = {"prefix trie": by_tokens, "chained digests": by_digests}


def cached_prompt(length: int) -> tuple[BlockPool, Seq, int]:
    """A pool that has a prompt of `length` random tokens cached, and the most blocks of it that can be hit: at least
    one token is always computed.
    """
    pool = make_pool(4 * length // BLOCK_SIZE)
    tokens = np.random.default_rng(5).integers(10, 30_000, length).astype(np.uint32)
    full = length // BLOCK_SIZE
    blocks = pool.allocate(full)
    assert blocks is not None
    digests = chain_digests(ROOT, tokens[: full * BLOCK_SIZE].tobytes(), BLOCK_SIZE)
    rows = tokens[: full * BLOCK_SIZE].reshape(-1, BLOCK_SIZE)
    pool.publish_chain(blocks, digests, ROOT, rows, first=True, media=False)
    pool.free(blocks)
    return pool, request(0, tokens.tolist(), 1).sequences[0], (length - 1) // BLOCK_SIZE


def measure(length: int, repeats: int) -> dict[str, float]:
    """Median seconds of each way."""
    pool, sequence, most = cached_prompt(length)
    found = [look_up(pool, sequence, most) for look_up in WAYS.values()]
    assert all(answer == found[0] and len(answer[0]) == most for answer in found)
    samples: dict[str, list[float]] = {name: [] for name in WAYS}
    gc.collect()
    gc.disable()
    for _ in range(repeats):
        for name, look_up in WAYS.items():
            begun = time.perf_counter()
            look_up(pool, sequence, most)
            samples[name].append(time.perf_counter() - begun)
    gc.enable()
    return {name: statistics.median(taken) for name, taken in samples.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument(
        "--repeats", type=int, default=501, help="lookups of each kind per length, 9 of the last (default: 501)"
    )
    args = parser.parse_args()
    print(f"{'prompt tokens':>13}" + "".join(f"{name:>18}" for name in WAYS) + f"{'ratio':>8}")
    for length in (256, 1024, 4096, 2**20):
        # A lookup of a million tokens takes a thousand times as long.
        repeats = args.repeats if length <= 4096 else min(args.repeats, 9)
        walked, hashed = (measured := measure(length, repeats)).values()
        print(f"{length:13}" + "".join(f"{1e6 * taken:15.1f} us" for taken in measured.values()), end="")
        print(f"{hashed / walked:8.2f}")


if __name__ == "__main__":
    main()
