"""A tile of a matrix product, kept in vector registers: a few rows times one panel of columns.

Each step along the inner dimension loads a few vectors of the panel and one number of every row, and adds their
products to the sums (outer products; Goto and van de Geijn, doi 10.1145/1356052.1356053). LLVM's vectoriser would not
keep the sums in registers, so this module emits the vector instructions itself.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagekv.executor.cpu.native.matrix_unit import ROWS, matrix_tile
from pagekv.executor.cpu.native.vectors import BFLOAT16, F32, I32, I64, fetch, load, spread

# How products are computed and summed: float32 by float32; pairs of bfloat16 by one instruction; bfloat16 that is
# widened to float32 first (rows before the tile, the panel within the tile); bfloat16 by the matrix unit.
FLOAT32, BFLOAT16_DOT, BFLOAT16_WIDENED, BFLOAT16_MATRIX = 0, 1, 2, 3


def panel_vectors(lanes: int) -> int:
    """Vectors of a panel that one step loads. Wider panels leave registers for fewer rows, whose addresses need
    registers, too.
    """
    return 2 if lanes == 8 else 4


def most_rows(lanes: int, sums: int) -> int:
    """Rows of the largest tile. Its sums and operands fit the vector registers, of which AVX2 has 16 and other sets of
    instructions have 32; the matrix unit has registers of its own.
    """
    if sums == BFLOAT16_MATRIX:
        return 2 * ROWS
    return 6


@intrinsic(prefer_literal=True)
def tile(
    _typing: Any,
    lanes: Any,
    sums: Any,
    rows: Any,
    depth: Any,
    left: Any,
    left_row: Any,
    panel: Any,
    out: Any,
    ahead: Any,
    ahead_step: Any,
    factors: Any,
) -> Any:
    """`out = left @ panel` for `rows` rows, from 1 to `most_rows(lanes, sums)`; `lanes` and `sums` are literals.

    All others are int64. `left`: address of the first row; each next row is `left_row` bytes further. `panel`: address
    of `panel_vectors(lanes) * lanes` columns, side by side in each of `depth` steps. A step takes 32 bits of each row
    and of each column: one float32 or two bfloat16. With BFLOAT16_WIDENED, rows are float32, and a step takes two
    numbers of each. `out`: address of float32 `[rows, columns]`. `panel` and `out` are aligned to vectors. Step s
    prefetches memory at `ahead + s * ahead_step`. `factors`: 0 to overwrite `out`, else the address of a float32 for
    each row: the product is added to the row of `out` times that factor. `matrix_tile` computes BFLOAT16_MATRIX, and
    always overwrites `out`.
    """
    lane_count, kind = lanes.literal_value, sums.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, _, row_count, *others = args
        if kind == BFLOAT16_MATRIX:
            matrix_tile(builder, [row_count, *others[:-1]])
            return context.get_dummy_value()
        done = builder.append_basic_block("done")
        switch = builder.switch(row_count, done)
        for count in range(1, most_rows(lane_count, kind) + 1):
            with builder.goto_block(builder.append_basic_block(f"rows.{count}")):
                switch.add_case(I64(count), builder.block)
                _rows(builder, lane_count, kind, count, others)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(lanes, sums, *(types.int64 for _ in range(9))), generate


def _rows(builder: Any, lanes: int, kind: int, count: int, args: Any) -> None:
    """The loop for `count` rows."""
    depth, left, left_row, panel, out, ahead, ahead_step, factors = args
    vectors = panel_vectors(lanes)
    vector = ir.VectorType(F32, lanes)
    word = vector if kind == FLOAT32 else ir.VectorType(I32, lanes)
    # A step takes one number of a row, or two one after the other, and spreads each over a vector.
    numbers, spread_to = (2, vector) if kind == BFLOAT16_WIDENED else (1, word)
    starts = [
        builder.inttoptr(builder.add(left, builder.mul(left_row, I64(row))), spread_to.element.as_pointer())
        for row in range(count)
    ]
    columns = builder.inttoptr(panel, word.as_pointer())
    places = builder.inttoptr(out, vector.as_pointer())
    before = builder.block
    kept = builder.append_basic_block("kept")
    loop = builder.append_basic_block("step")
    after = builder.append_basic_block("sums")
    builder.cbranch(builder.icmp_signed("!=", factors, I64(0)), kept, loop)

    builder.position_at_end(kept)
    factor_of = [
        spread(
            builder, vector, load(builder, builder.inttoptr(builder.add(factors, I64(4 * row)), F32.as_pointer()), 4)
        )
        for row in range(count)
    ]
    found = [
        builder.fmul(factor_of[index // vectors], load(builder, builder.gep(places, [I64(index)]), lanes * 4))
        for index in range(count * vectors)
    ]
    builder.branch(loop)

    builder.position_at_end(loop)
    step, fetched = builder.phi(I64), builder.phi(I64)
    sums = [builder.phi(vector) for _ in range(count * vectors)]
    for changing, first in ((step, I64(0)), (fetched, ahead)):
        changing.add_incoming(first, before)
        changing.add_incoming(first, kept)
    for total, first in zip(sums, found, strict=True):
        total.add_incoming(vector([0.0] * lanes), before)
        total.add_incoming(first, kept)
    parts = [
        load(builder, builder.gep(columns, [builder.add(builder.mul(step, I64(vectors)), I64(at))]), lanes * 4)
        for at in range(vectors)
    ]
    fetch(builder, fetched, vectors * lanes * 4)
    grown = sums
    for place in range(numbers):
        halves = parts if numbers == 1 else [_half(builder, part, vector, place) for part in parts]
        at = builder.add(builder.mul(step, I64(numbers)), I64(place))
        totals, grown = grown, []
        for row in range(count):
            number = spread(builder, spread_to, load(builder, builder.gep(starts[row], [at]), 4))
            grown += [
                _add_product(builder, kind, number, half, totals[len(grown) + i]) for i, half in enumerate(halves)
            ]
    for total, new in zip(sums, grown, strict=True):
        total.add_incoming(new, loop)
    following = builder.add(step, I64(1))
    step.add_incoming(following, loop)
    fetched.add_incoming(builder.add(fetched, ahead_step), loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)

    builder.position_at_end(after)
    for index, total in enumerate(grown):
        builder.store(total, builder.gep(places, [I64(index)])).align = lanes * 4


def _add_product(builder: Any, kind: int, left: Any, right: Any, total: Any) -> Any:
    """`total` plus the product of each lane; with BFLOAT16_DOT, plus both products of the pairs in each lane."""
    vector = total.type
    if kind == BFLOAT16_DOT:
        pairs = ir.VectorType(BFLOAT16, 2 * vector.count)
        dot = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector, pairs, pairs]), "llvm.x86.avx512bf16.dpbf16ps.512"
        )
        return builder.call(dot, [total, builder.bitcast(left, pairs), builder.bitcast(right, pairs)])
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector, vector, vector]), f"llvm.fma.v{vector.count}f32"
    )
    return builder.call(fma, [left, right, total])


@intrinsic(prefer_literal=True)
def widen_steps(_typing: Any, lanes: Any, steps: Any, panel: Any, out: Any) -> Any:
    """Widens `steps` steps of a panel for BFLOAT16_WIDENED to twice as many steps of a panel for FLOAT32, at `out`.
    `lanes` is a literal, all others are int64; addresses are aligned to vectors.
    """
    lane_count = lanes.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, count, *addresses = args
        vectors, vector, words = (
            panel_vectors(lane_count),
            ir.VectorType(F32, lane_count),
            ir.VectorType(I32, lane_count),
        )
        source, target = (
            builder.inttoptr(address, kind.as_pointer())
            for address, kind in zip(addresses, (words, vector), strict=True)
        )
        with cgutils.for_range(builder, count) as loop:
            first = builder.mul(loop.index, I64(vectors))
            for at in range(vectors):
                pairs = load(builder, builder.gep(source, [builder.add(first, I64(at))]), lane_count * 4)
                for place in range(2):
                    index = builder.add(builder.mul(first, I64(2)), I64(place * vectors + at))
                    stored = builder.store(_half(builder, pairs, vector, place), builder.gep(target, [index]))
                    stored.align = lane_count * 4
        return context.get_dummy_value()

    return types.void(lanes, *(types.int64 for _ in range(3))), generate


def _half(builder: Any, pairs: Any, vector: Any, place: int) -> Any:
    """The first bfloat16 of each pair, which has the lower bits, or the second one (`place` 1), as float32."""
    if place:
        bits = builder.and_(pairs, ir.Constant(pairs.type, [0xFFFF0000] * vector.count))
    else:
        bits = builder.shl(pairs, ir.Constant(pairs.type, [16] * vector.count))
    return builder.bitcast(bits, vector)
