"""Loops over the slots of a block, in vector registers: scores of queries with keys, and values weighed and summed.

LLVM's vectoriser would load and store the sums for every slot, so vectors are written out here, as in `tile`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagekv.executor.cpu.native.tile import vector_lanes

# Sums that one loop keeps in registers: of scores, which are one vector each, and of weighed values.
_MOST_SCORES, _MOST_SUMS = 4, 16
# Of queries, what a loop keeps besides.
_MOST_QUERY = 16
_LINE_BYTES = 64
_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def lanes_of(size: int) -> int:
    """Float32 numbers in a vector that divides a head of so many elements."""
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

    Literals: `lanes` of `lanes_of(size)`, `size`, `members`, and `width`, 4 bytes a float32 or 2 a bfloat16. All others
    are int64: `keys`, address of the first slot, the next one `slot_bytes` behind; `query`, of float32
    `[members, size]`; `scores`, of float32, rows `score_bytes` apart. What lies at `ahead` as the keys do is called into
    the cache.
    """
    literals = [part.literal_value for part in (lanes, size, members, width)]

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        for first in range(0, literals[2], _MOST_SCORES):
            _scores(builder, *literals, range(first, min(first + _MOST_SCORES, literals[2])), args[4:])
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
    """`out[m] += sum of weights[m, i] * values[i]`, with `weights` and `values` as scores and keys of `score_slots`;
    `out` is the address of float32 `[members, size]`.
    """
    literals = [part.literal_value for part in (lanes, size, members, width)]

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lane_count, numbers, rows, _ = literals
        vectors = numbers // lane_count
        wide = min(vectors, _MOST_SUMS)
        high = max(1, _MOST_SUMS // wide)
        for column in range(0, vectors, wide):
            for first in range(0, rows, high):
                chosen = range(first, min(first + high, rows))
                _weigh(builder, *literals, chosen, range(column, min(column + wide, vectors)), args[4:])
        return context.get_dummy_value()

    return types.void(lanes, size, members, width, *(types.int64 for _ in range(8))), generate


class _Slots:
    """A loop over slots, from the block that a builder is at."""

    def __init__(self, builder: Any, count: Any) -> None:
        self._builder, self._count = builder, count
        self._before = builder.block
        self._loop = builder.append_basic_block("slot")
        self._sums: list[Any] = []
        builder.branch(self._loop)
        builder.position_at_end(self._loop)
        self.index = builder.phi(_I64)
        self.index.add_incoming(_I64(0), self._before)

    def sum(self, first: Any) -> Any:
        """A number that every slot changes."""
        found = self._builder.phi(first.type)
        found.add_incoming(first, self._before)
        self._sums.append(found)
        return found

    def end(self, sums: list[Any]) -> None:
        """`sums`: what this slot made of each."""
        builder = self._builder
        for found, new in zip(self._sums, sums, strict=True):
            found.add_incoming(new, builder.block)
        following = builder.add(self.index, _I64(1))
        self.index.add_incoming(following, builder.block)
        after = builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", following, self._count), self._loop, after)
        builder.position_at_end(after)


def _scores(builder: Any, lanes: int, size: int, _members: int, width: int, rows: range, args: Any) -> None:
    keys, slot_bytes, count, query, scores, score_bytes, most, ahead, ahead_step = args
    vector, vectors = ir.VectorType(_F32, lanes), size // lanes

    def part(row: int, at: int) -> Any:
        return _load(builder, builder.add(query, _I64((row * size + at * lanes) * 4)), vector, 4)

    kept = {}
    if len(rows) * vectors <= _MOST_QUERY:
        kept = {(row, at): part(row, at) for row in rows for at in range(vectors)}
    reduce = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_F32, [_F32, vector]), f"llvm.vector.reduce.fadd.v{lanes}f32"
    )
    tops = [builder.inttoptr(builder.add(most, _I64(row * 4)), _F32.as_pointer()) for row in rows]
    before = [builder.load(place) for place in tops]
    slots = _Slots(builder, count)
    largest = [slots.sum(number) for number in before]
    offset = builder.mul(slots.index, slot_bytes)
    if not rows.start:
        _fetch(builder, builder.add(ahead, builder.mul(slots.index, ahead_step)), size * width)
    start = builder.add(keys, offset)
    sums = [vector([0.0] * lanes) for _ in rows]
    for at in range(vectors):
        key = _widened(builder, builder.add(start, _I64(at * lanes * width)), lanes, width)
        for place, row in enumerate(rows):
            sums[place] = _add_product(builder, kept.get((row, at)) or part(row, at), key, sums[place])
    grown = []
    for row, total, top in zip(rows, sums, largest, strict=True):
        score = builder.call(reduce, [_F32(0.0), total], fastmath=("reassoc",))
        grown.append(builder.select(builder.fcmp_ordered(">", score, top), score, top))
        place = builder.add(scores, builder.add(builder.mul(score_bytes, _I64(row)), builder.mul(slots.index, _I64(4))))
        builder.store(score, builder.inttoptr(place, _F32.as_pointer()))
    slots.end(grown)
    for place, top in zip(tops, grown, strict=True):
        builder.store(top, place)


def _weigh(
    builder: Any, lanes: int, size: int, _members: int, width: int, rows: range, columns: range, args: Any
) -> None:
    values, slot_bytes, count, weights, weight_bytes, out, ahead, ahead_step = args
    vector = ir.VectorType(_F32, lanes)
    places = [builder.add(out, _I64((row * size + at * lanes) * 4)) for row in rows for at in columns]
    before = [_load(builder, place, vector, 4) for place in places]
    slots = _Slots(builder, count)
    sums = [slots.sum(number) for number in before]
    offset = builder.mul(slots.index, slot_bytes)
    if not rows.start and not columns.start:
        _fetch(builder, builder.add(ahead, builder.mul(slots.index, ahead_step)), size * width)
    start = builder.add(values, offset)
    loaded = [_widened(builder, builder.add(start, _I64(at * lanes * width)), lanes, width) for at in columns]
    grown = []
    for row in rows:
        place = builder.add(
            weights, builder.add(builder.mul(weight_bytes, _I64(row)), builder.mul(slots.index, _I64(4)))
        )
        weight = _spread(builder, vector, _load(builder, place, _F32, 4))
        grown += [_add_product(builder, weight, value, sums[len(grown) + at]) for at, value in enumerate(loaded)]
    slots.end(grown)
    for place, total in zip(places, grown, strict=True):
        builder.store(total, builder.inttoptr(place, vector.as_pointer())).align = 4


def _load(builder: Any, place: Any, kind: Any, align: int) -> Any:
    loaded = builder.load(builder.inttoptr(place, kind.as_pointer()))
    loaded.align = align
    return loaded


def _widened(builder: Any, place: Any, lanes: int, width: int) -> Any:
    """A vector of float32 from what is stored."""
    vector = ir.VectorType(_F32, lanes)
    if width == 4:
        return _load(builder, place, vector, 4)
    word = ir.VectorType(_I32, lanes)
    bits = builder.zext(_load(builder, place, ir.VectorType(_I16, lanes), 2), word)
    return builder.bitcast(builder.shl(bits, ir.Constant(word, [16] * lanes)), vector)


def _spread(builder: Any, vector: Any, number: Any) -> Any:
    """A vector of one number."""
    unknown = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(unknown, number, _I32(0))
    return builder.shuffle_vector(first, unknown, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))


def _add_product(builder: Any, left: Any, right: Any, total: Any) -> Any:
    product = builder.fmul(left, right, flags=("contract",))
    return builder.fadd(total, product, flags=("contract",))


def _fetch(builder: Any, place: Any, num_bytes: int) -> None:
    """Calls memory into the second level of the cache."""
    prefetch = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]), "llvm.prefetch.p0"
    )
    for line in range(-(-num_bytes // _LINE_BYTES)):
        at = builder.inttoptr(builder.add(place, _I64(line * _LINE_BYTES)), _I8.as_pointer())
        builder.call(prefetch, [at, _I32(0), _I32(2), _I32(1)])
