"""Tiles of bfloat16 products on the processor's matrix unit (AMX, Intel SDM volume 1, chapter 18). One instruction
multiplies 32 numbers of up to 16 rows by 32 numbers of 16 columns.

Each thread has eight tile registers, and sets their shapes. oneDNN relies on shapes that it has set itself, so code
that sets shapes begins with `keep_shapes` and ends with `restore_shapes`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagekv.executor.cpu.native.vectors import I8, I64, features

# Bytes of a tile configuration, which describes the shapes of all registers.
SHAPES_BYTES = 64
# Pairs of numbers in a row of a tile; rows of a tile; columns of a panel, which has the columns of four tiles.
PAIRS, ROWS, PANEL = 16, 16, 64
# Columns of a tile. A panel stores them together: all pairs of its first 16 columns, then all pairs of the next 16.
COLUMNS = 16
# The registers: four for sums, one for rows, one for a panel. The other two are for the next 16 rows and columns, or
# for the pairs that are left over at the end of the inner dimension.
_SUMS, _LEFT, _RIGHT, _OTHER_LEFT, _OTHER_RIGHT = (0, 1, 2, 3), 4, 5, 6, 7
_ROW_BYTES = 64
# Offsets in a tile configuration: bytes a row of each register, two bytes each; rows of each register, one byte each.
# Byte 0 is the palette, always 1.
_COLSB, _ROWS = 16, 48


@cache
def has_matrix_unit() -> bool:
    """Whether the processor has a matrix unit for bfloat16 that compiled code may use. Asks the operating system for
    permission to use it, once in a process.
    """
    return {"amx-tile", "amx-bf16"} <= features() and torch.cpu._init_amx()


@intrinsic
def keep_shapes(_typing: Any, place: Any) -> Any:
    """Saves this thread's shapes in the SHAPES_BYTES at `place`, an int64 address."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _call(builder, "sttilecfg", builder.inttoptr(args[0], cgutils.voidptr_t))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def restore_shapes(_typing: Any, place: Any) -> Any:
    """Sets this thread's shapes to those saved at `place`, an int64 address."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _call(builder, "ldtilecfg", builder.inttoptr(args[0], cgutils.voidptr_t))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def set_shapes(_typing: Any, rows: Any, depth: Any, place: Any) -> Any:
    """Sets this thread's shapes for `matrix_tile` with `rows` rows, from 1 to ROWS, of `depth` pairs. Writes their
    configuration to the SHAPES_BYTES at `place`, an int64 address.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, depth, place = args
        described = builder.inttoptr(place, I8.as_pointer())
        for at in range(0, SHAPES_BYTES, 8):
            builder.store(I64(0), builder.inttoptr(builder.add(place, I64(at)), I64.as_pointer())).align = 1
        builder.store(I8(1), described)

        def describe(register: int, count: Any, num_bytes: Any) -> None:
            builder.store(builder.trunc(count, I8), builder.gep(described, [I64(_ROWS + register)]))
            # Two bytes, of which the upper one is 0.
            builder.store(builder.trunc(num_bytes, I8), builder.gep(described, [I64(_COLSB + 2 * register)]))

        for register in (*_SUMS, _LEFT):
            describe(register, rows, I64(_ROW_BYTES))
        describe(_RIGHT, I64(PAIRS), I64(_ROW_BYTES))
        rest = builder.urem(depth, I64(PAIRS))
        with builder.if_else(builder.icmp_signed("!=", rest, I64(0))) as (some, none):
            with some:
                describe(_OTHER_LEFT, rows, builder.mul(rest, I64(4)))
                describe(_OTHER_RIGHT, rest, I64(_ROW_BYTES))
            with none:
                describe(_OTHER_LEFT, rows, I64(_ROW_BYTES))
                describe(_OTHER_RIGHT, I64(PAIRS), I64(_ROW_BYTES))
        _call(builder, "ldtilecfg", described)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def matrix_tile(builder: Any, args: Any) -> None:
    """Emits `tile` for pairs of bfloat16 and a panel that stores COLUMNS columns together. `args`: those of `tile` from
    `rows` to `ahead_step`. `rows` is the number that the thread's shapes are set for; or 2 * ROWS, if the shapes are
    for ROWS and `depth` is a multiple of PAIRS. Nothing is prefetched here: the processor does so by itself.
    """
    rows, depth, left, left_row, panel, out, _, _ = args
    line, stride, rest = I64(_ROW_BYTES), I64(4 * PANEL), builder.urem(depth, I64(PAIRS))
    whole = builder.sub(depth, rest)
    columns = [builder.add(panel, builder.mul(depth, I64(part * _ROW_BYTES))) for part in range(PANEL // COLUMNS)]

    with builder.if_else(builder.icmp_signed(">", rows, I64(ROWS))) as (two, one):
        with two:
            lower = builder.add(left, builder.mul(left_row, I64(ROWS)))
            for half in range(2):
                there = builder.add(out, I64(2 * half * _ROW_BYTES))
                _clear(builder)
                with cgutils.for_range_slice(builder, I64(0), whole, I64(PAIRS)) as (step, _):
                    along, down = builder.mul(step, I64(4)), builder.mul(step, line)
                    _load(builder, _LEFT, builder.add(left, along), left_row)
                    _load_once(builder, _RIGHT, builder.add(columns[2 * half], down), line)
                    _add(builder, 0, _LEFT, _RIGHT)
                    _load_once(builder, _OTHER_RIGHT, builder.add(columns[2 * half + 1], down), line)
                    _add(builder, 1, _LEFT, _OTHER_RIGHT)
                    _load(builder, _OTHER_LEFT, builder.add(lower, along), left_row)
                    _add(builder, 2, _OTHER_LEFT, _RIGHT)
                    _add(builder, 3, _OTHER_LEFT, _OTHER_RIGHT)
                for register in _SUMS:
                    place = I64(register // 2 * ROWS * 4 * PANEL + register % 2 * _ROW_BYTES)
                    _store(builder, register, builder.add(there, place), stride)
        with one:
            _clear(builder)
            with cgutils.for_range_slice(builder, I64(0), whole, I64(PAIRS)) as (step, _):
                _step(builder, _LEFT, _RIGHT, step, (left, left_row, columns))
            with builder.if_then(builder.icmp_signed("!=", rest, I64(0))):
                _step(builder, _OTHER_LEFT, _OTHER_RIGHT, whole, (left, left_row, columns))
            for register in _SUMS:
                _store(builder, register, builder.add(out, I64(register * _ROW_BYTES)), stride)


def _step(builder: Any, left_register: int, right_register: int, step: Any, places: Any) -> None:
    """Adds the products of the pairs that one register holds, from pair `step` on."""
    left, left_row, columns = places
    _load(builder, left_register, builder.add(left, builder.mul(step, I64(4))), left_row)
    down = builder.mul(step, I64(_ROW_BYTES))
    for total, each in zip(_SUMS, columns, strict=True):
        _load_once(builder, right_register, builder.add(each, down), I64(_ROW_BYTES))
        _add(builder, total, left_register, right_register)


def _clear(builder: Any) -> None:
    for register in _SUMS:
        _call(builder, "tilezero", I8(register))


def _add(builder: Any, total: int, left: int, right: int) -> None:
    _call(builder, "tdpbf16ps", I8(total), I8(left), I8(right))


def _store(builder: Any, register: int, address: Any, stride: Any) -> None:
    _call(builder, "tilestored64", I8(register), builder.inttoptr(address, cgutils.voidptr_t), stride)


def _load(builder: Any, register: int, address: Any, stride: Any) -> None:
    _call(builder, "tileloadd64", I8(register), builder.inttoptr(address, cgutils.voidptr_t), stride)


def _load_once(builder: Any, register: int, address: Any, stride: Any) -> None:
    """Loads columns, which are read once, with a hint not to keep them in the first-level cache. The rows, which are
    read again and again, then stay there.
    """
    _call(builder, "tileloaddt164", I8(register), builder.inttoptr(address, cgutils.voidptr_t), stride)


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)
