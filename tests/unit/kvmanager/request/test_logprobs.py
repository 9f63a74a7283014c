"""Packed log-probabilities are exact to the 32 bits of the wire."""

from __future__ import annotations

import random

import pytest

from pagekv.kvmanager.request.logprobs import PackedLogprobs, TokenLogprobs


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
