"""Vectors of numbers, for code that emits LLVM's instructions: their length on this processor, and their loads."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target


class _BFloat16(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's type `bfloat`, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
BFLOAT16 = _BFloat16()

# Bytes of a line of the caches.
LINE_BYTES = 64


def vector_lanes() -> int:
    """Float32 numbers in a vector of the processor that Numba compiles for; 0 if it has no vectors that are known here,
    or no fused multiply-add.
    """
    found = features()
    if "avx512f" in found:
        return 16
    if {"avx2", "fma"} <= found:
        return 8
    return 4 if "neon" in found else 0


@cache
def features() -> frozenset[str]:
    """LLVM's names for the processor's features, without those that NUMBA_CPU_FEATURES and the like take away. LLVM
    ends the process if code has an instruction of any other feature.
    """
    _, _, named = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(name[1:] for name in named.split(",") if name.startswith("+"))


def load(builder: Any, place: Any, align: int) -> Any:
    """The number, or vector, at a pointer that is a multiple of `align` bytes."""
    loaded = builder.load(place)
    loaded.align = align
    return loaded


def load_at(builder: Any, address: Any, kind: Any, align: int) -> Any:
    """The number, or vector, of this type at an address, int64, that is a multiple of `align` bytes."""
    return load(builder, builder.inttoptr(address, kind.as_pointer()), align)


def widened(builder: Any, address: Any, lanes: int, width: int) -> Any:
    """A vector of float32 from the numbers at an int64 address: float32, or bfloat16 if `width` is 2 bytes."""
    if width == 4:
        return load_at(builder, address, ir.VectorType(F32, lanes), 4)
    word = ir.VectorType(I32, lanes)
    bits = builder.zext(load_at(builder, address, ir.VectorType(I16, lanes), 2), word)
    return builder.bitcast(builder.shl(bits, ir.Constant(word, [16] * lanes)), ir.VectorType(F32, lanes))


def spread(builder: Any, vector: Any, number: Any) -> Any:
    """A vector with the number in every lane."""
    unknown = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(unknown, number, I32(0))
    return builder.shuffle_vector(first, unknown, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def fetch(builder: Any, address: Any, num_bytes: int) -> None:
    """Prefetches memory at an int64 address into the second-level cache."""
    prefetch = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32]), "llvm.prefetch.p0"
    )
    for line in range(-(-num_bytes // LINE_BYTES)):
        place = builder.inttoptr(builder.add(address, I64(line * LINE_BYTES)), I8.as_pointer())
        # For reading; locality 2, the second-level cache; data and not instructions.
        builder.call(prefetch, [place, I32(0), I32(2), I32(1)])
