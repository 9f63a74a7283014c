"""One step of an online softmax (Milakov and Gimelshein, arXiv:1805.02867): the scores of a few rows with one panel of
keys, in vector registers.

LLVM's vectoriser would read a row's scores three times.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagekv.executor.cpu.native.numbers import EXP, LEAST
from pagekv.executor.cpu.native.stored_rows import rounded
from pagekv.executor.cpu.native.vectors import F32, I32, I64, load_at, spread


@intrinsic(prefer_literal=True)
def softmax_rows(
    _typing: Any,
    lanes: Any,
    wide: Any,
    tile_rows: Any,
    keys: Any,
    width: Any,
    count: Any,
    scores: Any,
    weights: Any,
    tops: Any,
    totals: Any,
    shrinks: Any,
    scale: Any,
) -> Any:
    """Multiplies the scores of each row r, of which there are `count`, at least 1, by `scale`, and adds them to the
    row's softmax:

    - `tops[r]` becomes the maximum of itself and of the scores that are not NaN;
    - `shrinks[r]` is exp(old top - new top), but 0 if the old top was minus infinity;
    - `weights[r]` are exp(score - new top), but 0 for a score of minus infinity, whatever `scale` is;
    - `totals[r]` becomes `totals[r] * shrinks[r]` plus the sum of the weights, which is NaN if a score is NaN.

    Literals: `lanes` of a vector, a divisor of `wide`; `wide`, a divisor of `keys`; `tile_rows`; `keys`, the number of
    scores of a row; `width`, the bytes of a stored weight: 4, or 2 for weights that are rounded to bfloat16, after they
    were added to the total. `scale` is a float32. All others are int64: `count`, and addresses. `scores` is
    `[keys / wide, tile_rows, wide]`, `weights` is `[count, keys]`; all but the weights are float32.
    """
    lane_count, panel, panel_rows, columns = (each.literal_value for each in (lanes, wide, tile_rows, keys))
    num_bytes = width.literal_value
    vector = ir.VectorType(F32, lane_count)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        count, scores, weights, tops, totals, shrinks, scale = args[5:]
        factor = spread(builder, vector, scale)
        before, loop = builder.block, builder.append_basic_block("row")
        after = builder.append_basic_block("rows.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        row = builder.phi(I64)
        row.add_incoming(I64(0), before)

        def place(base: Any, bytes_a_row: int, offset: int) -> Any:
            return builder.add(base, builder.add(builder.mul(row, I64(bytes_a_row)), I64(offset)))

        def number(base: Any) -> Any:
            return builder.inttoptr(place(base, 4, 0), F32.as_pointer())

        found, unseen = [], []
        nothing = ir.Constant(vector, [float("-inf")] * lane_count)
        for first in range(0, columns, lane_count):
            offset = first // panel * panel_rows * panel + first % panel
            score = load_at(builder, place(scores, 4 * panel, 4 * offset), vector, 4)
            unseen.append(builder.fcmp_ordered("==", score, nothing))
            found.append(builder.select(unseen[-1], nothing, builder.fmul(score, factor)))
        old = builder.load(number(tops))
        top = _larger(builder, _largest(builder, found), old)
        spread_top = spread(builder, vector, top)
        shrink = builder.fsub(old, top)
        none_yet = builder.fcmp_ordered("==", old, ir.Constant(F32, float("-inf")))
        shrink = builder.select(none_yet, F32(0.0), exp_of(builder, shrink))
        total = vector([0.0] * lane_count)
        for index, score in enumerate(found):
            weight = exp_of(builder, builder.fsub(score, spread_top))
            weight = builder.select(unseen[index], vector([0.0] * lane_count), weight)
            target = place(weights, num_bytes * columns, num_bytes * index * lane_count)
            stored = weight if num_bytes == 4 else rounded(builder, weight)
            builder.store(stored, builder.inttoptr(target, stored.type.as_pointer())).align = num_bytes
            total = builder.fadd(total, weight)
        reduce = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(F32, [F32, vector]), f"llvm.vector.reduce.fadd.v{lane_count}f32"
        )
        added = builder.call(reduce, [F32(0.0), total], fastmath=("reassoc",))
        builder.store(top, number(tops))
        builder.store(shrink, number(shrinks))
        builder.store(builder.fadd(builder.fmul(builder.load(number(totals)), shrink), added), number(totals))
        following = builder.add(row, I64(1))
        row.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    numbers = (types.int64 for _ in range(6))
    return types.void(lanes, wide, tile_rows, keys, width, *numbers, types.float32), generate


def exp_of(builder: Any, x: Any) -> Any:
    """exp of a float32, or of a vector of float32, that is at most 88; computed as in `numbers.exp`."""
    kind = x.type

    def constant(value: float) -> Any:
        return ir.Constant(kind, value) if kind == F32 else ir.Constant(kind, [value] * kind.count)

    def called(name: str, *args: Any) -> Any:
        suffix = "f32" if kind == F32 else f"v{kind.count}f32"
        type_ = ir.FunctionType(kind, [kind] * len(args))
        return builder.call(cgutils.get_or_insert_function(builder.module, type_, f"llvm.{name}.{suffix}"), args)

    least = constant(float(LEAST))
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    power = called("floor", called("fma", x, constant(EXP.log2_e), constant(0.5)))
    rest = called("fma", power, constant(-EXP.ln_2_high), x)
    rest = called("fma", power, constant(-EXP.ln_2_low), rest)
    found = constant(EXP.polynomial[0])
    for factor in EXP.polynomial[1:]:
        found = called("fma", found, rest, constant(factor))
    found = builder.fadd(called("fma", builder.fmul(found, rest), rest, rest), constant(1.0))
    word = I32 if kind == F32 else ir.VectorType(I32, kind.count)

    def whole(value: int) -> Any:
        return I32(value) if kind == F32 else ir.Constant(word, [value] * kind.count)

    bits = builder.shl(builder.add(builder.fptosi(power, word), whole(127)), whole(23))
    return builder.fmul(found, builder.bitcast(bits, kind))


def _larger(builder: Any, left: Any, right: Any) -> Any:
    """The larger number in each lane; the right one if either is NaN."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _largest(builder: Any, vectors: list[Any]) -> Any:
    """The largest number in all lanes of all vectors, NaN left out; minus infinity if all are NaN."""
    kind = vectors[0].type
    lowest = ir.Constant(kind, [float("-inf")] * kind.count)
    largest = lowest
    for each in vectors:
        largest = _larger(builder, each, largest)
    unknown = ir.Constant(kind, ir.Undefined)
    half = kind.count // 2
    while half:
        lanes = ir.Constant(ir.VectorType(I32, kind.count), [(lane + half) % kind.count for lane in range(kind.count)])
        largest = _larger(builder, largest, builder.shuffle_vector(largest, unknown, lanes))
        half //= 2
    return builder.extract_element(largest, I32(0))
