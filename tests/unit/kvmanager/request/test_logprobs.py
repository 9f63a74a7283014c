"""Log-probabilities that nobody has read yet: exact to the 32 bits of the wire, and small (DESIGN 7, memory bound)."""

from __future__ import annotations

import asyncio
import random
import tracemalloc

import pytest

from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.request.logprobs import PackedLogprobs, TokenLogprobs
from pagekv.kvmanager.request.stream import RequestStream, SequenceDelta

# Of each log-probability, beside the token itself: 8 bytes and what the arrays have in reserve.
BYTES_PER_LOGPROB = 10
BYTES_PER_TOKEN = 80


def position(chance: random.Random, num_top: int) -> TokenLogprobs:
    """Values that 32 bits hold exactly."""
    top = tuple((chance.randrange(2**32), -chance.randrange(1000) / 8) for _ in range(num_top))
    return TokenLogprobs(chance.randrange(2**32), -chance.randrange(1000) / 8, top)


def test_what_is_kept_comes_back() -> None:
    chance = random.Random(1)
    positions = [position(chance, chance.choice([0, 1, 2, 20])) for _ in range(50)]
    kept = PackedLogprobs(positions[:10])
    kept.extend(positions[10:])
    assert len(kept) == 50
    assert list(kept) == positions
    assert (kept[0], kept[-1]) == (positions[0], positions[-1])
    assert [list(kept[:7]), list(kept[3:]), list(kept[::2])] == [positions[:7], positions[3:], positions[::2]]
    assert not PackedLogprobs()
    with pytest.raises(IndexError):
        kept[50]


@pytest.mark.parametrize("num_top", [0, 5, 20])
def test_a_silent_reader_costs_ten_bytes_a_log_probability(num_top: int) -> None:
    chance, length = random.Random(2), 2000
    positions = [position(chance, num_top) for _ in range(length)]

    def fill(stream: RequestStream) -> None:
        for number, logprobs in enumerate(positions):
            stream.push_token(0, 1000 + number, 0, 0)
            stream.push_logprobs(0, logprobs)
        stream.push_end(0, FinishReason.LENGTH, None)

    async def run() -> tuple[int, SequenceDelta]:
        stream = RequestStream("r", 1)
        tracemalloc.start()
        fill(stream)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held, (await stream.take())[0]

    held, delta = asyncio.run(run())
    assert held / length < BYTES_PER_TOKEN + BYTES_PER_LOGPROB * (num_top + 1)
    assert list(delta.logprobs) == positions
