"""Instructions that Numba has no name for: an array at an address, a counter that threads share, a prefetch, bits of a
number.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagekv.executor.cpu.native.vectors import LINE_BYTES, fetch


@intrinsic
def pointer(_typing: Any, address: Any) -> Any:
    """The int64 address as a pointer, for `carray`."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def take_ticket(_typing: Any, address: Any) -> Any:
    """The int64 at an address, which is increased by 1 atomically: no two threads get the same number."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", number, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def prefetch(_typing: Any, address: Any) -> Any:
    """Prefetches LINE_BYTES of memory at an int64 address into the second-level cache."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        fetch(builder, args[0], LINE_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def call(_typing: Any, address: Any, argument: Any) -> Any:
    """Calls the function `void (void *)` at an int64 address; its argument is an int64 address, too."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [builder.inttoptr(args[1], cgutils.voidptr_t)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def float_of_bits(_typing: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(_typing: Any, number: Any) -> Any:
    """The 32 bits of a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate
