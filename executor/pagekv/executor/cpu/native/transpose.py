"""Transposes rows of the block pool in vector registers: the columns of a panel of keys.

Halves of a square change places, then its quarters, and so on (Eklundh, doi 10.1109/TC.1972.5009037). LLVM would store
number by number.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagekv.executor.cpu.native.vectors import I32, I64, widened


@intrinsic(prefer_literal=True)
def transpose(_typing: Any, lanes: Any, width: Any, rows: Any, row_bytes: Any, out: Any, out_bytes: Any) -> Any:
    """`out[i, j] = rows[j, i]` for i and j below `lanes`.

    Literals: `lanes`, a power of two; and `width`, the bytes of a stored number: 4 for float32, 2 for bfloat16. All
    others are int64: the address of stored numbers and that of float32, each with the bytes from one row to the next.
    """
    count, bytes_ = lanes.literal_value, width.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, row_bytes, out, out_bytes = args[2:]

        def place(base: Any, step: Any, index: int) -> Any:
            return builder.add(base, builder.mul(step, I64(index)))

        square = [widened(builder, place(rows, row_bytes, row), count, bytes_) for row in range(count)]
        apart = count // 2
        while apart:
            square = _exchanged(builder, square, apart)
            apart //= 2
        for index, column in enumerate(square):
            target = builder.inttoptr(place(out, out_bytes, index), column.type.as_pointer())
            builder.store(column, target).align = 4
        return context.get_dummy_value()

    return types.void(lanes, width, *(types.int64 for _ in range(4))), generate


def _exchanged(builder: Any, rows: list[Any], apart: int) -> list[Any]:
    """Exchanges numbers between each pair of rows that are `apart` from each other: lanes of the first row whose index
    has the bit `apart` change places with lanes of the second row whose index lacks it.
    """
    count = len(rows)
    upper = [lane + count - apart if lane & apart else lane for lane in range(count)]
    lower = [lane + count if lane & apart else lane + apart for lane in range(count)]
    masks = [ir.Constant(ir.VectorType(I32, count), lanes) for lanes in (upper, lower)]
    found = list(rows)
    for index in range(count):
        if not index & apart:
            pair = rows[index], rows[index + apart]
            found[index], found[index + apart] = (builder.shuffle_vector(*pair, mask) for mask in masks)
    return found
