"""Stores rows of float32 sums in the model's type, whole vectors at a time.

LLVM vectorises a loop over `narrow`, too. But before each row it checks whether memory overlaps, and it rounds with
integer instructions even if the processor has one for rounding: 256 rows of a product on the matrix unit took 1.1 times
as long.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagekv.executor.cpu.native.vectors import BFLOAT16, F32, I16, I32, I64, features, load_at


@intrinsic(prefer_literal=True)
def store_rows(
    _typing: Any, lanes: Any, width: Any, rows: Any, count: Any, sums: Any, sums_row: Any, out: Any, out_row: Any
) -> Any:
    """Stores `rows` rows of `count` float32 numbers, a multiple of `lanes`: as float32 if `width` is 4 bytes, rounded
    to bfloat16 as by `narrow` if it is 2. `lanes` and `width` are literals, all others int64. `sums` and `out`:
    addresses of the first rows, that of `sums` aligned to vectors. Each next row is `sums_row` or `out_row` bytes
    further.
    """
    lane_count, num_bytes = lanes.literal_value, width.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, _, rows, count, sums, sums_row, out, out_row = args
        with cgutils.for_range(builder, rows, intp=I64) as loop:
            source = builder.add(sums, builder.mul(loop.index, sums_row))
            target = builder.add(out, builder.mul(loop.index, out_row))
            with cgutils.for_range_slice(builder, I64(0), count, I64(lane_count)) as (at, _):
                place = builder.add(source, builder.mul(at, I64(4)))
                found = load_at(builder, place, ir.VectorType(F32, lane_count), 4 * lane_count)
                stored = found if num_bytes == 4 else rounded(builder, found)
                place = builder.add(target, builder.mul(at, I64(num_bytes)))
                builder.store(stored, builder.inttoptr(place, stored.type.as_pointer())).align = num_bytes
        return context.get_dummy_value()

    return types.void(lanes, width, *(types.int64 for _ in range(6))), generate


def rounded(builder: Any, numbers: Any) -> Any:
    """The bits of the bfloat16 nearest to each float32 of a vector, ties to even; NaN stays NaN. The processor's
    instruction takes subnormal numbers as 0.
    """
    lanes = numbers.type.count
    short, word = ir.VectorType(I16, lanes), ir.VectorType(I32, lanes)
    if lanes == 16 and "avx512bf16" in features():
        name, kind = "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(BFLOAT16, lanes)
        convert = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [numbers.type]), name)
        return builder.bitcast(builder.call(convert, [numbers]), short)

    def all_of(number: int) -> Any:
        return ir.Constant(word, [number] * lanes)

    bits = builder.bitcast(numbers, word)
    odd = builder.and_(builder.lshr(bits, all_of(16)), all_of(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, all_of(0x7FFF))), all_of(16))
    is_number = builder.fcmp_ordered("ord", numbers, numbers)
    return builder.trunc(builder.select(is_number, rounded, all_of(0x7FC0)), short)
