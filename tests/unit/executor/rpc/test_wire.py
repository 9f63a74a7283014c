"""Messages to and from the executor's own types: every field arrives."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import fields

import numpy as np
import pytest
from google.protobuf.message import Message

from pagekv.common.errors import InvalidRequest
from pagekv.executor.backend.interface import (
    BackendDescription,
    BackendFeature,
    CopyDirection,
    Sampled,
    Sampling,
    SequenceState,
)
from pagekv.executor.backend.row_sampler import sample_row
from pagekv.executor.rpc import wire
from pagekv.executor.session.attach_check import AttachOrder
from pagekv.executor.session.step import NO_SAMPLING, ExecutedStep
from pagekv.kvmanager.engine import executor_wire
from pagekv.steps.v1 import executor_service_pb2 as pb

# Every field differs from its default and is exact in float32.
SAMPLING = Sampling(0.5, 0.25, 3, 0.125, 1.5, -0.5, 0.75, 2**63, 5, 6, (7, 8), (9, 10), (1.5, -2.0), 0)


def sampling_message(sampling: Sampling) -> pb.StepSampling:
    return pb.StepSampling(**{field.name: getattr(sampling, field.name) for field in fields(Sampling)})


def test_a_step_has_every_field_of_its_message() -> None:
    new = pb.NewSequence(seq_id=4, token_ids=[1, 2, 3], num_prompt_tokens=2, block_ids=[6, 5], computed_tokens=1)
    new.sampling.CopyFrom(sampling_message(SAMPLING))
    copies = pb.MemoryOp(kind=pb.MEMORY_OP_KIND_SWAP_IN, sources=[1, 2], destinations=[3, 4])
    columns = {"finished_seqs": [1], "append_seqs": [2], "append_blocks": [3]}
    columns |= {"scheduled_seqs": [4], "scheduled_tokens": [5]}
    request = pb.StepRequest(epoch=7, step=8, memory_ops=[copies], new_seqs=[new], **columns)
    step = wire.step(request.SerializeToString())
    assert (step.epoch, step.step) == (7, 8)
    assert {name: getattr(step, name) for name in columns} == columns
    (state,) = step.new_seqs
    assert (state.seq_id, state.token_ids, state.num_prompt_tokens) == (4, array("i", [1, 2, 3]), 2)
    assert (state.block_table, state.computed_tokens, state.sampling) == ([6, 5], 1, SAMPLING)
    (found,) = step.memory_ops
    assert (found.direction, found.sources, found.destinations) == (CopyDirection.SWAP_IN, [1, 2], [3, 4])


def test_a_large_step_is_the_same_with_turns_of_the_event_loop_between_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "IDS_AT_ONCE", wire.SEQUENCE_IDS)
    sizes = [(4, 2), (5, 5), (1, 1), (600, 300)]
    news = [
        pb.NewSequence(seq_id=at, token_ids=range(tokens), block_ids=range(blocks), sampling=sampling_message(SAMPLING))
        for at, (tokens, blocks) in enumerate(sizes)
    ]
    copies = pb.MemoryOp(kind=pb.MEMORY_OP_KIND_COPY, sources=range(1000), destinations=range(1000, 2000))
    request = pb.StepRequest(epoch=7, step=8, memory_ops=[copies], new_seqs=news, append_seqs=[2], append_blocks=[3])

    data = request.SerializeToString()

    async def main() -> int:
        taking, turns = asyncio.create_task(wire.large_step(request, data)), 0
        while not taking.done():
            await asyncio.sleep(0)
            turns += 1
        assert taking.result() == wire.step(data)
        assert taking.result().memory_ops[0].destinations == [*range(1000, 2000)]
        return turns

    assert asyncio.run(main()) == len(sizes)


def test_absent_sampling_and_unknown_kinds_are_told_from_neutral_ones() -> None:
    request = pb.StepRequest(new_seqs=[pb.NewSequence(), pb.NewSequence(sampling=pb.StepSampling())])
    request.memory_ops.add(kind=pb.MEMORY_OP_KIND_UNSPECIFIED)
    request.memory_ops.add().MergeFromString(b"\x08\x63")  # kind 99
    step = wire.step(request.SerializeToString())
    assert step.new_seqs[0].sampling is NO_SAMPLING
    assert step.new_seqs[1].sampling is not NO_SAMPLING
    assert step.new_seqs[1].sampling.logprobs is None
    assert [op.direction for op in step.memory_ops] == [None, None]


def test_the_attachment_asked_for() -> None:
    order = AttachOrder("m", 16, 100, 50, "layout", True, (1, 3, 99), 7)
    names = [field.name for field in pb.AttachRequest.DESCRIPTOR.fields]
    assert names == [field.name for field in fields(AttachOrder)]
    assert wire.attach_order(pb.AttachRequest(**{name: getattr(order, name) for name in names})) == order


def test_log_probabilities_of_infinite_logits_are_finite() -> None:
    """Managers refuse what is not, and with it the whole step."""
    state = SequenceState(4, [5], 1, [0], 0, Sampling(min_tokens=1, banned_until_min=(1,), logprobs=3))
    sampled = sample_row(np.array([1.0, np.inf, 2.0, 3.0]), state)
    assert sampled.token_id == 3
    assert sampled.logprob == -np.inf
    message = wire.step_result(ExecutedStep(7, 1, {4: sampled}, 1, 0, 0))
    result = executor_wire.step_result(pb.StepResult.FromString(message.SerializeToString()))
    least = float(np.finfo(np.float32).min)
    (row,) = result.logprobs.values()
    assert (row.logprob, [value for _, value in row.top[1:]]) == (least, [least, least])


def test_results_of_a_step() -> None:
    sampled = {3: Sampled(5), 4: Sampled(6, -0.5, ((6, -0.5), (2, -1.0)))}
    message = wire.step_result(ExecutedStep(7, 8, sampled, 9, 10, 11, [2, 5], 12))
    assert (message.epoch, message.step, message.computed_tokens) == (7, 8, 9)
    assert (message.execute_us, message.idle_us, message.threads) == (10, 11, 12)
    assert (list(message.sampled_seqs), list(message.sampled_tokens)) == ([3, 4], [5, 6])
    assert list(message.failed_seqs) == [2, 5]
    assert list(message.failed_reasons) == [pb.SEQUENCE_FAILURE_NOT_A_NUMBER] * 2
    (logprobs,) = message.logprobs
    assert (logprobs.seq_id, logprobs.chosen) == (4, -0.5)
    assert (list(logprobs.top_token_ids), list(logprobs.top_logprobs)) == ([6, 2], [-0.5, -1.0])


def test_every_field_of_a_description_has_a_field_of_the_message() -> None:
    names = {field.name for field in fields(BackendDescription)} | {"contract_revision", "max_steps_in_flight"}
    assert names == {field.name for field in pb.DescribeResponse.DESCRIPTOR.fields}


def test_features_are_those_of_the_contract() -> None:
    names = {f"EXECUTOR_FEATURE_{feature.name}": feature.value for feature in BackendFeature}
    assert names | {"EXECUTOR_FEATURE_UNSPECIFIED": 0} == dict(pb.ExecutorFeature.items())


# Field 999, a varint.
UNKNOWN = b"\xb8\x3e\x01"


@pytest.mark.parametrize("where", ["", "memory_ops[1].", "new_seqs[1].", "new_seqs[1].sampling."])
def test_a_field_that_is_not_known_is_refused_wherever_it_is(where: str) -> None:
    request = pb.StepRequest(memory_ops=[pb.MemoryOp(), pb.MemoryOp()])
    request.new_seqs.extend(pb.NewSequence(sampling=pb.StepSampling()) for _ in range(2))
    parts: dict[str, Message] = {
        "": request,
        "memory_ops[1].": request.memory_ops[1],
        "new_seqs[1].": request.new_seqs[1],
        "new_seqs[1].sampling.": request.new_seqs[1].sampling,
    }
    wire.step(request.SerializeToString())
    parts[where].MergeFromString(UNKNOWN)
    with pytest.raises(InvalidRequest) as caught:
        wire.step(request.SerializeToString())
    assert (caught.value.field, caught.value.rule) == (f"{where}999", "R35")
    assert f"has no field 999 of {type(parts[where]).__name__}" in caught.value.description
