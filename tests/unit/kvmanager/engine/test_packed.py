"""Numbers packed by NumPy are those that protobuf packs, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from pagekv.kvmanager.engine.packed import packed_field
from pagekv.steps.v1 import executor_service_pb2 as pb

BOUNDS = [most + beside for most in (2**7, 2**14, 2**21, 2**28) for beside in (-1, 0)]


@pytest.mark.parametrize("numbers", [[], [0], [127], [128], BOUNDS, BOUNDS[::-1], [*BOUNDS, 0, 2**32 - 1]])
def test_every_width(numbers: list[int]) -> None:
    packed = packed_field(pb.NewSequence.BLOCK_IDS_FIELD_NUMBER, np.array(numbers, np.uint32))
    assert packed == pb.NewSequence(block_ids=numbers).SerializeToString()


@pytest.mark.parametrize("bits", range(1, 33))
def test_many_numbers_of_every_size(bits: int) -> None:
    numbers = np.random.default_rng(bits).integers(0, 2**bits, 500, np.uint64).astype(np.uint32)
    packed = packed_field(pb.NewSequence.TOKEN_IDS_FIELD_NUMBER, numbers)
    assert packed == pb.NewSequence(token_ids=numbers.tolist()).SerializeToString()


def test_adding_keeps_what_the_message_has() -> None:
    message = pb.NewSequence(seq_id=3, token_ids=[5], block_ids=[1, 300])
    for numbers in ([7, 2**20], []):
        message.MergeFromString(packed_field(pb.NewSequence.BLOCK_IDS_FIELD_NUMBER, np.array(numbers, np.int32)))
    assert message == pb.NewSequence(seq_id=3, token_ids=[5], block_ids=[1, 300, 7, 2**20])
