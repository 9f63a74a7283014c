"""A digest of the block tables and tokens that the steps of an epoch led to. Ranks of a group compare it to find
differences.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Collection, Iterable, Mapping

from pagekv.executor.backend.interface import Sampled, SequenceState
from pagekv.executor.session.step import Step

DIGEST_BYTES = 8
# Each step includes some whole block tables, so that every table comes once in this many steps: hashing a table of
# 2,000 blocks takes 50 microseconds.
WHOLE_EVERY = 64


class StateDigest:
    """The digest of one epoch. `launched` and `collected` are each called in the order of the steps; later steps may be
    launched before an earlier one is collected.

    Tokens have a hash chain of their own: when a rank launches the next step, it may have collected the step before or
    not, which differs between ranks.
    """

    def __init__(self) -> None:
        self._changes = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._tokens = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def launched(self, step: Step, live: Mapping[int, SequenceState]) -> bytes:
        """The digest of all changes up to this step, which was just applied. Includes the whole block tables of the
        live sequences whose turn it is: each comes once in `WHOLE_EVERY` steps.
        """
        add = self._changes.update
        add(struct.pack("<QQ", step.step, len(live)))
        columns = (step.finished_seqs, step.append_seqs, step.append_blocks, step.scheduled_seqs, step.scheduled_tokens)
        for number, column in enumerate(columns):
            if column:
                add(bytes([number]) + _bytes(column))
        for copies in step.memory_ops:
            add(str(copies.direction).encode() + _bytes(copies.sources) + _bytes(copies.destinations))
        for new in step.new_seqs:
            # The lists of the message are the live sequence's own: they include blocks that this step appended.
            add(struct.pack("<IQQ", new.seq_id, new.num_prompt_tokens, new.computed_tokens))
            add(_bytes(new.block_table))
            add(_bytes(new.token_ids))
        turn = step.step % WHOLE_EVERY
        for seq_id in [seq_id for seq_id in live if seq_id % WHOLE_EVERY == turn]:
            state = live[seq_id]
            add(struct.pack("<IQ", seq_id, state.computed_tokens) + _bytes(state.block_table))
        return self._changes.digest()

    def collected(self, launched: bytes, sampled: Mapping[int, Sampled], failed: Collection[int]) -> bytes:
        """The digest of a step, given its digest from `launched`, and of every token sampled up to it."""
        seqs, tokens = _bytes(sampled), _bytes(each.token_id for each in sampled.values())
        self._tokens.update(launched + seqs + tokens + _bytes(failed))
        return self._tokens.digest()


def _bytes(numbers: Iterable[int]) -> bytes:
    return numbers.tobytes() if isinstance(numbers, array) else array("q", numbers).tobytes()
