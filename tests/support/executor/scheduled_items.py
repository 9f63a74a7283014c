"""Scheduled positions of sequences, for plans of the CPU backend."""

from __future__ import annotations

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState

BLOCK_SIZE = 4
COMMON_BLOCKS = list(range(100, 132))


def scheduled(seq_id: int, table: list[int], start: int, count: int, known: int | None = None) -> Scheduled:
    """`count` positions from `start` on of a sequence that knows its tokens up to there, or `known` of them; tokens
    differ between sequences.
    """
    tokens = [100 * seq_id + position for position in range(start + count if known is None else known)]
    return Scheduled(SequenceState(seq_id, tokens, 1, table, start, Sampling()), start, count)


def next_decodes(items: list[Scheduled]) -> list[Scheduled]:
    """The decodes of the sequences of a step of decodes, after it: each has one more token, and a block if it needs
    one.
    """
    for item in items:
        state = item.state
        state.token_ids.append(100 * state.seq_id + len(state.token_ids))
        state.computed_tokens = item.start + 1
        if state.computed_tokens == len(state.block_table) * BLOCK_SIZE:
            state.block_table.append(1000 * state.seq_id + len(state.block_table))
    return [Scheduled(item.state, item.start + 1, 1) for item in items]


def behind_common_blocks() -> list[Scheduled]:
    """Two chunks and a decode behind COMMON_BLOCKS, and a chunk that shares nothing."""
    return [
        scheduled(1, [*COMMON_BLOCKS, 1], 128, 3),
        scheduled(2, [*COMMON_BLOCKS, 2, 3], 130, 4),
        scheduled(3, [*COMMON_BLOCKS, 4], 129, 1),
        scheduled(4, [5], 0, 2),
    ]
