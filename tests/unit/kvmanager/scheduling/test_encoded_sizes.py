"""The parts of a step are never reckoned to take less than what protobuf writes."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from support.engine.scheduler_driver import Driver

from pagekv.common.message_sizes import MAX_RECEIVE_BYTES, MAX_RESULT_BYTES
from pagekv.kvmanager.engine.executor_wire import pack_token_ids, step_bytes, step_request
from pagekv.kvmanager.kvcache.block_hash import root_digest
from pagekv.kvmanager.kvcache.prefix_table import PrefixTable
from pagekv.kvmanager.scheduling.encoded_sizes import COLUMNS_BYTES, SEQUENCE_BYTES, IdBytes, id_bytes
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt
from pagekv.kvmanager.scheduling.sequence import Seq
from pagekv.kvmanager.scheduling.step_plan import BlockCopy, CopyKind, CopyList, NewSeq, StepPlan
from pagekv.steps.v1 import executor_service_pb2 as pb

# The largest that the wire has room for.
ID, MANY = 2**31 - 1, 1024
# Flags and executors allow so many.
MAX_RUNNING = 65536


# Every setting at its longest, with as many ids banned as there may be beside those that end every sequence.
MOST: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "min_p": 0.5,
    "top_k": ID,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "logprobs": 20,
    "seed": 2**64 - 1,
    "stop_token_ids": tuple(range(ID - MANY, ID - 960)),
}


def size(plan: StepPlan) -> int:
    return step_request(plan, 2**64 - 1, 2**64 - 1, range(ID - 960, ID)).ByteSize()


def test_what_is_reckoned_is_never_less_than_what_is_sent() -> None:
    driver = Driver()
    biases = dict.fromkeys(range(ID - MANY, ID), 1.5)
    (sequence,) = driver.submit([1], min_tokens=8, logit_bias=biases, **MOST).sequences
    (message,) = step_request(StepPlan(new=[_new(sequence, 1, 0)]), 1, 1, range(ID - 960, ID)).new_seqs
    assert len(message.sampling.banned_until_min) == len(message.sampling.biases) == MANY
    (plainer,) = driver.submit([1], **MOST).sequences
    for one, lists in ((sequence, True), (plainer, False)):
        for tokens, blocks in ((1, 0), (5000, 5000)):
            assert size(StepPlan(new=[_new(one, tokens, blocks)])) < IdBytes().entry(tokens, blocks, lists=lists)
    copies = CopyList(BlockCopy(CopyKind.SWAP_OUT, ID - index, ID - index) for index in range(5000))
    assert size(StepPlan(copies=copies)) < IdBytes().copies(5000) + 100
    # Between the pools, or on the device.
    assert (IdBytes(5, 1, 3).copies(10), IdBytes(5, 2, 1).copies(10)) == (40, 40)


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_prompt_that_was_packed_in_slices_takes_no_more(block_size: int) -> None:
    prompt = array("I", [2**32 - 1] * 50_000)
    prepared = PreparedPrompt(root_digest("model", "", ""))
    table = PrefixTable(4, block_size, np.zeros(4, np.int32))
    num_slices = len(list(prepared.slices(prompt, (), table, pack_token_ids)))
    assert num_slices == (49 if block_size == 1 else 4)
    (sequence,) = Driver().submit(list(prompt), **MOST).sequences
    sequence.request.packed_prompt = prepared.packed
    table_ids = array("i", [ID] * (50_001 // block_size))
    new = NewSeq(sequence, ID, array("I", [*prompt, ID]), table_ids, ID)
    sent = len(step_bytes(StepPlan(new=[new]), 1, 1, ()))
    assert IdBytes().entry(50_001, len(table_ids), lists=False) - SEQUENCE_BYTES < sent
    assert sent <= IdBytes().entry(50_001, len(table_ids), lists=False)


def _new(sequence: Seq, tokens: int, blocks: int) -> NewSeq:
    return NewSeq(sequence, ID, array("i", [ID] * tokens), array("i", [ID] * blocks), ID)


def test_columns_of_all_sequences_have_room_beside_what_enters() -> None:
    """Each sequence leaves, gets a block, is scheduled, and a copy of its own kind."""
    ids, few = [MAX_RUNNING - 1] * MAX_RUNNING, 64
    kinds = (CopyKind.SWAP_OUT, CopyKind.SWAP_IN)
    copies = CopyList(BlockCopy(kinds[index % 2], ID - index, ID - index) for index in range(few))
    plan = StepPlan(
        finished=ids,
        append_seq_ids=ids,
        append_blocks=[ID] * MAX_RUNNING,
        scheduled_seq_ids=ids,
        scheduled_tokens=ids,
    )
    assert size(plan) + size(StepPlan(copies=copies)) * MAX_RUNNING // few < COLUMNS_BYTES * MAX_RUNNING


def test_the_largest_result_is_taken() -> None:
    row = pb.SampledLogprobs(seq_id=ID, chosen=-1.5, top_token_ids=[ID] * 128, top_logprobs=[-1.5] * 128)
    one = pb.StepResult(sampled_seqs=[ID], sampled_tokens=[ID], logprobs=[row])
    assert one.ByteSize() * MAX_RUNNING < MAX_RESULT_BYTES


@pytest.mark.parametrize("num_ids", [1, 2, 128, 129, 2**14, 2**14 + 1, 2**21, 2**28, 2**31])
def test_an_id_takes_what_protobuf_writes(num_ids: int) -> None:
    written = pb.NewSequence(token_ids=[num_ids - 1] * 3).ByteSize() - 2
    assert written == 3 * id_bytes(num_ids)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
@pytest.mark.parametrize(("vocab", "blocks"), [(2, 2), (512, 2**14), (128_000, 2**20), (2**31, 2**31)])
def test_the_longest_sequence_enters_alone_whatever_else_a_step_has(
    vocab: int, blocks: int, block_size: int, host: bool
) -> None:
    """Each of its blocks is copied in and another out, beside the columns; of one more block that is not so."""
    ids = IdBytes(id_bytes(vocab), id_bytes(blocks), id_bytes(blocks))
    length = ids.longest_sequence(block_size, 256, host=host)

    def needed(tokens: int) -> int:
        table = -(-tokens // block_size)
        copies = ids.copies(2 * table) if host else 0
        return ids.entry(tokens, table, lists=True) + copies + COLUMNS_BYTES * 256

    assert needed(length) <= MAX_RECEIVE_BYTES < needed(length + 3 * block_size)


def test_a_million_tokens_enter_with_a_host_pool() -> None:
    assert IdBytes(3, 3, 3).longest_sequence(16, 256, host=True) > 2**20
