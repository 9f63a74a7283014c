"""Loops over the slots of a block, in vector registers: scores of queries with keys, and weighted sums of values.

LLVM's vectoriser would load and store the sums for every slot, so this module emits the vector instructions itself, as
`tile` does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagekv.executor.cpu.native.vectors import F32, I64, fetch, load_at, spread, vector_lanes, widened

# The most vectors of sums that one loop keeps in registers: of scores (one vector a query), and of weighted values.
_MOST_SCORES, _MOST_SUMS = 4, 16
# The most vectors of queries that a loop of scores keeps in registers as well.
_MOST_QUERY = 16


def lanes_of(size: int) -> int:
    """Float32 numbers in the longest vector that divides a head of `size` elements."""
    lanes = vector_lanes() or 4
    while size % lanes:
        lanes //= 2
    return lanes


@intrinsic(prefer_literal=True)
def score_slots(
    _typing: Any,
    lanes: Any,
    size: Any,
    members: Any,
    width: Any,
    keys: Any,
    slot_bytes: Any,
    count: Any,
    query: Any,
    scores: Any,
    score_bytes: Any,
    most: Any,
    ahead: Any,
    ahead_step: Any,
) -> Any:
    """`scores[m, i] = dot(query[m], keys[i])` for `members` queries and `count` slots, at least 1.

    Literals: `lanes` (`lanes_of(size)`), `size`, `members`, and `width`, the bytes of a stored number: 4 for float32, 2
    for bfloat16. All others are int64. `keys`: address of the first slot; each next slot is `slot_bytes` further.
    `query`: address of float32 `[members, size]`. `scores`: address of float32 rows, `score_bytes` apart. `most`:
    address of float32 `[members]`; each becomes the maximum of itself and of its scores that are not NaN. Slot i
    prefetches the bytes of one slot at `ahead + i * ahead_step`.
    """
    shape = _Shape(lanes.literal_value, size.literal_value, width.literal_value)
    num_rows = members.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        for first in range(0, num_rows, _MOST_SCORES):
            _scores(builder, shape, range(first, min(first + _MOST_SCORES, num_rows)), args[4:])
        return context.get_dummy_value()

    return types.void(lanes, size, members, width, *(types.int64 for _ in range(9))), generate


@intrinsic(prefer_literal=True)
def weigh_slots(
    _typing: Any,
    lanes: Any,
    size: Any,
    members: Any,
    width: Any,
    values: Any,
    slot_bytes: Any,
    count: Any,
    weights: Any,
    weight_bytes: Any,
    out: Any,
    ahead: Any,
    ahead_step: Any,
) -> Any:
    """`out[m] += sum of weights[m, i] * values[i]`. `weights` and `values` are laid out as the scores and keys of
    `score_slots`; `out` is the address of float32 `[members, size]`.
    """
    shape = _Shape(lanes.literal_value, size.literal_value, width.literal_value)
    num_rows, vectors = members.literal_value, shape.size // shape.lanes
    # AVX2 has half as many registers as AVX-512 and NEON.
    most = _MOST_SUMS // 2 if shape.lanes == 8 else _MOST_SUMS

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        wide = min(vectors, most)
        high = max(1, most // wide)
        for column in range(0, vectors, wide):
            for first in range(0, num_rows, high):
                chosen = range(first, min(first + high, num_rows))
                _weigh(builder, shape, chosen, range(column, min(column + wide, vectors)), args[4:])
        return context.get_dummy_value()

    return types.void(lanes, size, members, width, *(types.int64 for _ in range(8))), generate


class _Shape(NamedTuple):
    """Numbers in a vector and in a head, and bytes of a stored number."""

    lanes: int
    size: int
    width: int


class _Slots:
    """A loop over slots that a builder emits: its body lies between construction and `end`."""

    def __init__(self, builder: Any, count: Any) -> None:
        self._builder, self._count = builder, count
        self._before = builder.block
        self._loop = builder.append_basic_block("slot")
        self._sums: list[Any] = []
        builder.branch(self._loop)
        builder.position_at_end(self._loop)
        self.index = builder.phi(I64)
        self.index.add_incoming(I64(0), self._before)

    def sum(self, first: Any) -> Any:
        """A number that every slot changes, beginning with `first`."""
        found = self._builder.phi(first.type)
        found.add_incoming(first, self._before)
        self._sums.append(found)
        return found

    def end(self, sums: list[Any]) -> None:
        """Ends the body. `sums`: the new value of each number from `sum`, in the same order."""
        builder = self._builder
        for found, new in zip(self._sums, sums, strict=True):
            found.add_incoming(new, builder.block)
        following = builder.add(self.index, I64(1))
        self.index.add_incoming(following, builder.block)
        after = builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", following, self._count), self._loop, after)
        builder.position_at_end(after)


def _scores(builder: Any, shape: _Shape, rows: range, args: Any) -> None:
    lanes, size, width = shape
    keys, slot_bytes, count, query, scores, score_bytes, most, ahead, ahead_step = args
    vector, vectors = ir.VectorType(F32, lanes), size // lanes

    def part(row: int, at: int) -> Any:
        return load_at(builder, builder.add(query, I64((row * size + at * lanes) * 4)), vector, 4)

    kept = {}
    if len(rows) * vectors <= _MOST_QUERY:
        kept = {(row, at): part(row, at) for row in rows for at in range(vectors)}
    reduce = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(F32, [F32, vector]), f"llvm.vector.reduce.fadd.v{lanes}f32"
    )
    tops = [builder.inttoptr(builder.add(most, I64(row * 4)), F32.as_pointer()) for row in rows]
    before = [builder.load(place) for place in tops]
    slots = _Slots(builder, count)
    largest = [slots.sum(number) for number in before]
    offset = builder.mul(slots.index, slot_bytes)
    if not rows.start:
        fetch(builder, builder.add(ahead, builder.mul(slots.index, ahead_step)), size * width)
    start = builder.add(keys, offset)
    sums = [vector([0.0] * lanes) for _ in rows]
    for at in range(vectors):
        key = widened(builder, builder.add(start, I64(at * lanes * width)), lanes, width)
        for place, row in enumerate(rows):
            sums[place] = _add_product(builder, kept.get((row, at)) or part(row, at), key, sums[place])
    grown = []
    for row, total, top in zip(rows, sums, largest, strict=True):
        score = builder.call(reduce, [F32(0.0), total], fastmath=("reassoc",))
        grown.append(builder.select(builder.fcmp_ordered(">", score, top), score, top))
        place = builder.add(scores, builder.add(builder.mul(score_bytes, I64(row)), builder.mul(slots.index, I64(4))))
        builder.store(score, builder.inttoptr(place, F32.as_pointer()))
    slots.end(grown)
    for place, top in zip(tops, grown, strict=True):
        builder.store(top, place)


def _weigh(builder: Any, shape: _Shape, rows: range, columns: range, args: Any) -> None:
    lanes, size, width = shape
    values, slot_bytes, count, weights, weight_bytes, out, ahead, ahead_step = args
    vector = ir.VectorType(F32, lanes)
    places = [builder.add(out, I64((row * size + at * lanes) * 4)) for row in rows for at in columns]
    before = [load_at(builder, place, vector, 4) for place in places]
    slots = _Slots(builder, count)
    sums = [slots.sum(number) for number in before]
    offset = builder.mul(slots.index, slot_bytes)
    if not rows.start and not columns.start:
        fetch(builder, builder.add(ahead, builder.mul(slots.index, ahead_step)), size * width)
    start = builder.add(values, offset)
    parts = [widened(builder, builder.add(start, I64(at * lanes * width)), lanes, width) for at in columns]
    grown: list[Any] = []
    for row in rows:
        place = builder.add(weights, builder.add(builder.mul(weight_bytes, I64(row)), builder.mul(slots.index, I64(4))))
        weight = spread(builder, vector, load_at(builder, place, F32, 4))
        grown += [_add_product(builder, weight, value, sums[len(grown) + at]) for at, value in enumerate(parts)]
    slots.end(grown)
    for place, total in zip(places, grown, strict=True):
        builder.store(total, builder.inttoptr(place, vector.as_pointer())).align = 4


def _add_product(builder: Any, left: Any, right: Any, total: Any) -> Any:
    # "contract" lets LLVM use one instruction for both operations.
    return builder.fadd(total, builder.fmul(left, right, flags=("contract",)), flags=("contract",))
