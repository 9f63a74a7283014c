"""The columns of sequences that decode, beside a model of one sequence after the other."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
from support.engine.integrity import check_batch, pending
from support.engine.scheduler_driver import Driver

from pagekv.kvmanager.scheduling.decode_batch import DecodeBatch
from pagekv.kvmanager.scheduling.sequence import NO_SEQ_ID, Seq


def decoding(driver: Driver, batch: DecodeBatch, length: int) -> Seq:
    """A sequence that has begun to decode after a prompt of `length` tokens."""
    (sequence,) = driver.submit([*range(length)], max_tokens=1000).sequences
    sequence.num_computed = length
    sequence.block_table.extend([0] * -(-length // driver.block_size))
    batch.open(sequence)
    batch.start_decoding(sequence)
    return sequence


@pytest.mark.parametrize("block_size", [1, 2, 8])
def test_columns_know_what_each_sequence_knows(block_size: int) -> None:
    """More rows than the first capacity; blocks are completed as the scheduler does, before the ring comes round."""
    chance = random.Random(block_size)
    driver, batch = Driver(block_size=block_size), DecodeBatch(block_size)
    sequences = [decoding(driver, batch, chance.randrange(1, 20)) for _ in range(100)]
    known = [sequence.token_ids.tolist() for sequence in sequences]
    read = sequences[::7]
    for _ in range(40):
        rows = batch.decoding_rows()
        full = batch.full(rows)
        blocks, raw = batch.complete_blocks(full)
        assert b"".join(raw) == blocks.tobytes()
        for seq_id, tokens_of in zip(full.tolist(), blocks.tolist(), strict=True):
            end = sequences[seq_id].num_computed
            assert (end % block_size, tokens_of) == (0, known[seq_id][end - block_size : end])
        batch.slots[full] += block_size
        batch.promise(rows)
        batch.pending[rows] -= 1
        tokens = [chance.randrange(1000) for _ in rows]
        batch.append(rows, np.array(tokens, np.uint32))
        for tokens_of, token in zip(known, tokens, strict=True):
            tokens_of.append(token)
        assert all(s.num_tokens == len(k) for s, k in zip(sequences, known, strict=True))
        # Reading changes nothing, however rarely it is done.
        assert all(s.token_ids.tolist() == known[s.seq_id] for s in read)
    assert [s.token_ids.tolist() for s in sequences] == known


def test_a_row_is_kept_until_the_last_promised_token_has_come() -> None:
    driver, batch = Driver(), DecodeBatch(4)
    preempted, finished = (decoding(driver, batch, 3) for _ in range(2))
    rows = batch.decoding_rows().copy()
    batch.remove(preempted, finished=False)
    batch.remove(finished, finished=True)
    batch.settle()
    newcomer = decoding(driver, batch, 5)
    assert newcomer.seq_id not in rows
    assert (pending(preempted), pending(finished)) == (1, 1)
    batch.pending[rows] -= 1
    assert batch.alive[rows].tolist() == [True, False]
    batch.append(rows[:1], np.array([77], np.uint32))
    batch.settle()
    assert preempted.token_ids.tolist() == [0, 1, 2, 77]
    assert finished.token_ids.tolist() == [0, 1, 2]
    assert (preempted.seq_id, finished.seq_id, preempted.num_computed) == (NO_SEQ_ID, NO_SEQ_ID, 3)
    # The smallest free row comes first.
    assert decoding(driver, batch, 2).seq_id == 0


def test_a_lost_executor_frees_every_row_and_forgets_what_was_promised() -> None:
    driver, batch = Driver(), DecodeBatch(4)
    sequences = [decoding(driver, batch, 3) for _ in range(3)]
    batch.remove(sequences[1], finished=False)
    batch.clear()
    assert all((s.seq_id, pending(s), s.batch) == (NO_SEQ_ID, 0, None) for s in sequences)
    assert len(batch.decoding_rows()) == 0
    check_batch(batch, [])


def test_the_tokens_of_a_sequence_that_has_ended_are_kept_by_nobody() -> None:
    driver, batch = Driver(), DecodeBatch(4)
    sequence = decoding(driver, batch, 50)
    kept = weakref.ref(sequence.token_ids)
    batch.pending[sequence.seq_id] = 0
    batch.remove(sequence, finished=True)
    del driver, sequence
    gc.collect()
    assert kept() is None


def test_a_promise_says_whose_last_block_it_completes_with_a_token_that_is_known() -> None:
    """Of prompts of 6, 7 and 7 tokens, in blocks of 4, each with a first token that has come or not."""
    driver, batch = Driver(), DecodeBatch(4)
    for length in (6, 7, 7):
        decoding(driver, batch, length)
    rows = batch.decoding_rows()
    come = rows[:2]
    batch.pending[come] -= 1
    batch.append(come, np.array([70, 71], np.uint32))
    assert batch.promise(rows).tolist() == [1]
    assert batch.complete_blocks(np.array([1], np.intp))[0].tolist() == [[4, 5, 6, 71]]
    # All tokens are promised by now, or the block is not full.
    assert batch.promise(rows).tolist() == []
