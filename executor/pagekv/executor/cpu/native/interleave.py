"""Pairs of bfloat16 from two rows of the block pool: a step of a panel of values for products of pairs."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from pagekv.executor.cpu.native.intrinsics import pointer
from pagekv.executor.cpu.native.numbers import OPTIONS


@njit(**OPTIONS)
def interleave(first: int, second: int, count: int, wide: int, out: int) -> None:
    """Writes `wide` pairs at `out`: pair i has number i of the row at the address `first` in its lower half and that of
    `second` in its upper half. From number `count` on, and for a row with the address 0, numbers are zeros. Addresses
    are int64, numbers are bits of bfloat16.
    """
    pairs = carray(pointer(out), wide, np.uint32)
    kept = count if first or second else 0
    # A row that is not there is read from the place of the other one, and none of its bits is used.
    lower = carray(pointer(first or second), kept, np.uint16)
    upper = carray(pointer(second or first), kept, np.uint16)
    lower_bits, upper_bits = np.uint32(0xFFFF if first else 0), np.uint32(0xFFFF0000 if second else 0)
    for i in range(kept):
        pairs[i] = np.uint32(lower[i]) & lower_bits | np.uint32(upper[i]) << np.uint32(16) & upper_bits
    for i in range(kept, wide):
        pairs[i] = 0
