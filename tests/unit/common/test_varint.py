"""Variable-length numbers, against protobuf's own."""

from __future__ import annotations

import pytest

from pagekv.common.varint import varint
from pagekv.v1 import types_pb2


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**32 - 1])
def test_what_protobuf_writes(number: int) -> None:
    behind_length_and_tag = types_pb2.TokenIds(ids=[number]).SerializeToString()[2:]
    assert varint(number) == behind_length_and_tag
