"""A request's stream: deltas are merged until they are read, and the end comes last."""

from __future__ import annotations

import asyncio
import random
import tracemalloc

import pytest
from support.event_loop import in_event_loop

from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.request.logprobs import LOGPROBS_AT_ONCE, PackedLogprobs, TokenLogprobs
from pagekv.kvmanager.request.stream import MOST_AT_ONCE, RequestStream, SequenceDelta
from pagekv.kvmanager.request.wakeups import Wakeups


@in_event_loop
async def test_deltas_of_a_sequence_are_merged_until_they_are_taken() -> None:
    stream = RequestStream("r", 2)
    assert stream.request_id == "r"
    stream.push_token(1, 20, 4, 0)
    stream.push_token(0, 10, 4, 0)
    stream.push(SequenceDelta(0, [11], [TokenLogprobs(11, -0.5)], cached_tokens=4, preemptions=1))
    first, second = await stream.take()
    assert (first.index, first.token_ids, list(first.logprobs), first.preemptions) == (
        0,
        [10, 11],
        [TokenLogprobs(11, -0.5)],
        1,
    )
    assert (second.index, second.token_ids, second.finish) == (1, [20], None)
    stream.push_token(1, 21, 4, 0)
    stream.push_end(1, FinishReason.STOP, 21)
    stream.push(SequenceDelta(0, finish=FinishReason.ABORT))
    assert [(delta.finish, delta.stop_token_id) for delta in await stream.take()] == [
        (FinishReason.ABORT, None),
        (FinishReason.STOP, 21),
    ]
    assert await stream.take() == []


@in_event_loop
async def test_an_error_comes_after_what_was_pushed_before_it() -> None:
    stream = RequestStream("r", 1, Wakeups())
    stream.push_token(0, 5, 0, 0)
    stream.fail(ValueError("over"))
    assert [delta.token_ids for delta in await stream.take()] == [[5]]
    try:
        await stream.take()
    except ValueError:
        return
    raise AssertionError("no error")


BYTES_PER_LOGPROB = 10


BYTES_PER_TOKEN = 80


def position(chance: random.Random, num_top: int) -> TokenLogprobs:
    """Values that 32 bits hold exactly."""
    top = tuple((chance.randrange(2**32), -chance.randrange(1000) / 8) for _ in range(num_top))
    return TokenLogprobs(chance.randrange(2**32), -chance.randrange(1000) / 8, top)


@pytest.mark.parametrize("num_top", [0, 5, 20])
def test_a_silent_reader_costs_ten_bytes_a_log_probability(num_top: int) -> None:
    chance, length = random.Random(2), 2000
    positions = [position(chance, num_top) for _ in range(length)]

    def fill(stream: RequestStream) -> None:
        for number, logprobs in enumerate(positions):
            stream.push_token(0, 1000 + number, 0, 0)
            stream.push_logprobs(0, logprobs)
        stream.push_end(0, FinishReason.LENGTH, None)

    async def run_bounded() -> tuple[int, SequenceDelta]:
        stream = RequestStream("r", 1)
        tracemalloc.start()
        fill(stream)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held, (await stream.take())[0]

    held, delta = asyncio.run(run_bounded())
    assert held / length < BYTES_PER_TOKEN + BYTES_PER_LOGPROB * (num_top + 1)
    assert list(delta.logprobs) == positions


@in_event_loop
async def test_a_reader_of_whole_answers_is_woken_at_ends_alone() -> None:
    """And before a sequence has more tokens than are made into text at once."""
    stream = RequestStream("r", 3)
    reading = asyncio.create_task(stream.take(at_ends=True))
    for token in range(MOST_AT_ONCE - 1):
        stream.push_token(0, token, 0, 0)
        stream.push_token(1, token, 0, 0)
        await asyncio.sleep(0)
    assert not reading.done()
    stream.push_token(1, 9, 0, 0)
    assert [len(delta.token_ids) for delta in await reading] == [MOST_AT_ONCE - 1, MOST_AT_ONCE]
    reading = asyncio.create_task(stream.take(at_ends=True))
    stream.push_token(0, 1, 0, 0)
    stream.push_token(1, 2, 0, 0)
    stream.push_end(1, FinishReason.LENGTH, None)
    assert [(delta.index, delta.finish) for delta in await reading] == [(0, None), (1, FinishReason.LENGTH)]
    stream.push_token(2, 3, 0, 0)
    stream.push(SequenceDelta(0, finish=FinishReason.ABORT))
    # An end that came before it was asked for.
    assert [delta.index for delta in await stream.take(at_ends=True)] == [0, 2]
    stream.push_token(2, 4, 0, 0)
    reading = asyncio.create_task(stream.take(at_ends=True))
    await asyncio.sleep(0.01)
    assert not reading.done()
    stream.fail(ValueError("over"))
    assert [delta.token_ids for delta in await reading] == [[4]]
    with pytest.raises(ValueError, match="over"):
        await stream.take(at_ends=True)


@pytest.mark.parametrize("most", [MOST_AT_ONCE, LOGPROBS_AT_ONCE])
def test_many_tokens_come_in_parts_and_the_end_with_the_last(most: int) -> None:
    count = 2 * most + 1
    asked_for = most == LOGPROBS_AT_ONCE
    logprobs = PackedLogprobs(TokenLogprobs(token, -0.5) for token in range(count if asked_for else 0))
    delta = SequenceDelta(3, list(range(count)), logprobs, 7, 1, FinishReason.STOP, count - 1, -2.0)
    parts = list(delta.parts())
    assert [len(part.token_ids) for part in parts] == [most, most, 1]
    assert [token for part in parts for token in part.token_ids] == delta.token_ids
    assert [each.token_id for part in parts for each in part.logprobs] == (delta.token_ids if asked_for else [])
    assert {(part.index, part.cached_tokens, part.preemptions) for part in parts} == {(3, 7, 1)}
    ends = [(part.finish, part.stop_token_id, part.cumulative_logprob) for part in parts]
    assert ends == [(None, None, None)] * 2 + [(FinishReason.STOP, count - 1, -2.0)]
    # As almost always.
    few = SequenceDelta(0, [1] * MOST_AT_ONCE, finish=FinishReason.LENGTH)
    (only,) = few.parts()
    assert only is few
