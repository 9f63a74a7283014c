"""Messages are counted before they are parsed, and parsed in slices to what the parser makes of them whole."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message

from pagekv.common.errors import InvalidRequest
from pagekv.common.large_messages import (
    COUNTED_BYTES,
    MAX_FIELDS,
    MAX_NUMBERS,
    MAX_TEXT_BYTES,
    SLICE_BYTES,
    Bounds,
    parse_slices,
    read_large,
)
from pagekv.common.unknown_fields import check_known
from pagekv.steps.v1 import executor_service_pb2 as steps_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2


def parsed(cls: type[Message], data: bytes, bounds: Bounds | None = None) -> tuple[Message, int]:
    """The message, and how many slices it came in."""
    message = cls()
    return message, len(list(parse_slices(message, data, bounds or Bounds())))


def refused(cls: type[Message], data: bytes, bounds: Bounds | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parsed(cls, data, bounds)
    return caught.value


def generate(**prompt: Any) -> pb.GenerateRequest:
    sampling = types_pb2.SamplingParams(stop=["a", "ü" * 256], logit_bias=dict.fromkeys(range(900), 0.5), seed=2**63)
    return pb.GenerateRequest(
        request_id="r", prompt=types_pb2.Prompt(**prompt), sampling_params=sampling, resumed_token_ids=range(70_000)
    )


@pytest.mark.parametrize(
    "prompt",
    [
        {"token_ids": types_pb2.TokenIds(ids=[7, 300, 2**20, 2**32 - 1] * 50_000)},
        {"text": "grün " * 100_000},
        {"chat": types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content="hello " * 5)] * 4096)},
        {"chat": types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content="x" * 3 * SLICE_BYTES)] * 5)},
    ],
)
def test_slices_make_the_same_message(prompt: dict[str, Message]) -> None:
    whole = generate(**prompt)
    message, slices = parsed(pb.GenerateRequest, whole.SerializeToString())
    assert message == whole
    assert slices > 5


def test_steps_come_in_slices_with_their_epoch_first() -> None:
    rng = random.Random(1)
    step = steps_pb.StepRequest(epoch=2**63, step=1, finished_seqs=range(9000), append_blocks=range(20_000))
    for seq_id in range(20):
        sampling = steps_pb.StepSampling(top_p=0.5, bias_token_ids=range(1024), biases=[0.25] * 1024, logprobs=0)
        ids = [rng.randrange(2**18) for _ in range(rng.choice([1, 1000, 40_000]))]
        step.new_seqs.add(seq_id=seq_id, token_ids=ids, block_ids=range(len(ids) // 16 + 1), sampling=sampling)
    message = steps_pb.StepRequest()
    slices = parse_slices(message, step.SerializeToString(), Bounds())
    next(slices)
    assert message.epoch == 2**63
    assert not message.new_seqs
    assert len(list(slices)) > 20
    assert message == step


def test_a_list_in_parts_is_one_list() -> None:
    ids = types_pb2.TokenIds(ids=range(100_000)).SerializeToString()
    message, _ = parsed(types_pb2.TokenIds, ids + ids)
    assert message == types_pb2.TokenIds(ids=[*range(100_000)] * 2)
    biases = steps_pb.StepSampling(biases=[n / 8 for n in range(50_000)])
    assert parsed(steps_pb.StepSampling, biases.SerializeToString())[0] == biases


def test_of_two_kinds_of_prompt_the_last_counts() -> None:
    first = generate(token_ids=types_pb2.TokenIds(ids=range(50_000))).SerializeToString()
    last = generate(text="x" * 5 * SLICE_BYTES).SerializeToString()
    message, _ = parsed(pb.GenerateRequest, first + last)
    assert message == pb.GenerateRequest.FromString(first + last)


def sampling(entries: bytes) -> bytes:
    return b"\x2a" + varint(len(entries)) + entries


def varint(number: int) -> bytes:
    return types_pb2.TokenIds(ids=[number]).SerializeToString()[2:]


@pytest.mark.parametrize(
    ("cls", "data", "field"),
    [
        (pb.AbortRequest, b"\x0a\x00" * 2**21, "request_ids"),
        (pb.GenerateRequest, sampling(b"\x4a\x00" * 2**22), "sampling_params.stop"),
        (pb.GenerateRequest, sampling(b"\x82\x01\x00" * 2**22), "sampling_params.logit_bias"),
        (pb.GenerateRequest, b"\x7a\x00" * 2**22, "prompt"),
        (types_pb2.TokenIds, b"\x08\x05" * 2**22, "ids"),  # not packed
        (steps_pb.StepRequest, b"\x2a\x00" * 2**22, "new_seqs"),
    ],
)
def test_the_walk_ends_at_the_first_field_too_many(cls: type[Message], data: bytes, field: str) -> None:
    message = cls()
    slices = parse_slices(message, data, Bounds())
    with pytest.raises(InvalidRequest, match=f"at most {MAX_FIELDS} fields.*has more") as caught:
        deque(slices)
    assert caught.value.field == field
    assert message.ByteSize() <= 8 * MAX_FIELDS


@pytest.mark.parametrize("count", [MAX_NUMBERS + 1, 4 * 2**20 - 100])
def test_numbers_are_counted_before_they_are_parsed(count: int) -> None:
    data = b"\x5a" + varint(count) + bytes(count)
    error = refused(pb.GenerateRequest, data)
    assert error.field == "resumed_token_ids"
    assert error.description == f"must have at most {MAX_NUMBERS} entries, has {count}"


def test_a_text_is_measured_before_it_is_parsed() -> None:
    for size, wrong in ((MAX_TEXT_BYTES, False), (MAX_TEXT_BYTES + 1, True)):
        data = pb.GenerateRequest(request_id="r").SerializeToString()
        prompt = types_pb2.Prompt.DESCRIPTOR.fields_by_name["text"].number
        body = varint(prompt << 3 | 2) + varint(size) + b"x" * size
        data += varint(pb.GenerateRequest.PROMPT_FIELD_NUMBER << 3 | 2) + varint(len(body)) + body
        if wrong:
            error = refused(pb.GenerateRequest, data)
            assert error.field == "prompt.text"
            assert error.description == f"must be at most {MAX_TEXT_BYTES} bytes, has {size}"
        else:
            assert len(parsed(pb.GenerateRequest, data)[0].prompt.text) == size  # type: ignore[attr-defined]  # any message


def test_a_list_has_its_own_bound_and_rule_in_all_its_parts() -> None:
    bounds = Bounds(numbers=10, lists={"pagekv.steps.v1.NewSequence.token_ids": (3000, "R11")})
    one = steps_pb.NewSequence(token_ids=[300] * 1500)
    step = steps_pb.StepRequest(new_seqs=[one, one, one])
    assert parsed(steps_pb.StepRequest, step.SerializeToString(), bounds)[0] == step
    parts = one.SerializeToString() * 2 + steps_pb.NewSequence(token_ids=[7]).SerializeToString()
    error = refused(steps_pb.StepRequest, b"\x2a\x00\x2a" + varint(len(parts)) + parts, bounds)
    assert (error.field, error.rule) == ("new_seqs[1].token_ids", "R11")
    assert error.description == "must have at most 3000 entries, has 3001"
    assert refused(steps_pb.StepRequest, b"\x1a\x0b" + bytes(11), bounds).field == "finished_seqs"


def test_an_unknown_field_is_named_with_its_place() -> None:
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content="x" * 10)] * 3).SerializeToString()
    bent = chat + b"\x0a\x04\xc0\xa9\x07\x01"
    error = refused(types_pb2.Chat, bent)
    assert error.field == "messages[3].15000"
    assert "no field 15000 of ChatMessage" in error.description
    assert refused(steps_pb.StepRequest, b"\xc0\xa9\x07\x01", Bounds(unknown_rule="R35")).rule == "R35"


@pytest.mark.parametrize(
    "bent",
    [
        b"\x08\x01",  # request_id, text, as a number
        b"\x79" + bytes(8),  # prompt, a message, as eight bytes
        b"\x3a\x01\x01",  # priority, a number, as a list of numbers
        b"\x3d" + bytes(4),  # the same as four bytes
        b"\x5d" + bytes(4),  # resumed_token_ids, varints, as four bytes
    ],
)
def test_a_field_of_another_kind_is_one_that_is_not_known(bent: bytes) -> None:
    data = b"\x0a\x01r" + bent
    with pytest.raises(InvalidRequest) as whole:
        check_known(pb.GenerateRequest.FromString(data))
    error = refused(pb.GenerateRequest, data)
    assert (error.field, error.description) == (whole.value.field, whole.value.description)


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",  # a length is missing
        b"\x0a\x05abcd",  # longer than the message
        b"\x08" + b"\xff" * 11,  # a number without an end
        b"\x0b\x0c",  # a group
        b"\x0a" + varint(2 * SLICE_BYTES) + b"\xff" * 2 * SLICE_BYTES,  # numbers without an end
        b"\x0d\x00\x00",  # a number cut off
    ],
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(DecodeError):
        parsed(types_pb2.TokenIds, data)


def test_what_is_nested_too_deeply_is_no_message() -> None:
    # A field of the type of the message it is in: google.protobuf.Value, through a list.
    from google.protobuf import struct_pb2

    data = b""
    for _ in range(120):
        data = b"\x32" + varint(len(data)) + data  # list_value
        data = b"\x0a" + varint(len(data)) + data  # values
    with pytest.raises(DecodeError, match="nested"):
        parsed(struct_pb2.ListValue, data)


def test_the_event_loop_turns_while_a_message_is_read() -> None:
    data = types_pb2.TokenIds(ids=[7] * 2 * COUNTED_BYTES).SerializeToString()
    turns = 0

    async def main() -> None:
        async def beside() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(beside())
        await read_large(types_pb2.TokenIds(), data, Bounds())
        other.cancel()

    asyncio.run(main())
    assert turns >= len(data) // SLICE_BYTES
