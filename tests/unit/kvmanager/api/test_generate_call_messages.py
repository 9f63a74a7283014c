"""When the messages of a Generate call are made: a small first one with others' in a row, the rest between writes."""

from __future__ import annotations

import asyncio

import pytest
from support.engine.fake_engine import MODEL, FakeEngine

from pagekv.kvmanager.api.generate_call import SMALL_TOKENS, GenerateCall
from pagekv.kvmanager.api.served_model import Served
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand, SamplingParams
from pagekv.kvmanager.request.logprobs import TokenLogprobs
from pagekv.kvmanager.request.stream import SequenceDelta
from pagekv.v1 import inference_service_pb2 as pb


def made(*deltas: SequenceDelta) -> list[int]:
    """How many messages of these news there are when readers are woken, and when each is about to be written."""
    count = 0

    def serialise(response: pb.GenerateResponse) -> bytes:
        nonlocal count
        count += 1
        return response.SerializeToString()

    async def write(message: bytes) -> None:
        raise AssertionError("nothing was pushed")

    async def body() -> list[int]:
        command = GenerateCommand("r", [5, 6], SamplingParams(), n=len(deltas))
        served = Served(MODEL, None)
        generation = GenerateCall(FakeEngine(MODEL), served, command, (), only_complete=False, serialise=serialise)
        running = asyncio.create_task(generation.run(write))
        await asyncio.sleep(0)
        messages = generation._begin(list(deltas))
        counts = [count, *(count for _ in messages)]
        running.cancel()
        generation.close()
        return counts

    return asyncio.run(body())


def test_a_small_first_message_is_made_in_a_row() -> None:
    assert made(SequenceDelta(0, [7] * SMALL_TOKENS)) == [1, 1]
    assert made(*(SequenceDelta(index, [7]) for index in range(3))) == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("delta", "messages"),
    [
        (SequenceDelta(0, [7] * (SMALL_TOKENS + 1)), 1),
        (SequenceDelta(0, [7], [TokenLogprobs(7, -0.5)]), 1),
        (SequenceDelta(0, [7], finish=FinishReason.LENGTH), 2),
    ],
)
def test_a_large_one_is_made_when_it_is_written(delta: SequenceDelta, messages: int) -> None:
    assert made(delta) == list(range(messages + 1))
