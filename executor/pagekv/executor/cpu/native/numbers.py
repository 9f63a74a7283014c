"""Numbers as compiled loops see them: float32 in the computation, stored as float32 or as the bits of a bfloat16."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import cfunc, njit, types
from numba.extending import overload

from pagekv.executor.cpu.native.code_cache import compile_kept
from pagekv.executor.cpu.native.intrinsics import bits_of_float, float_of_bits

# LLVM may reorder sums, but not assume that there is no NaN, because NaN in a sequence's logits must be noticed.
OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
# Element types as loops see them. NumPy has no bfloat16, so loops see its bits.
STORED: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.bfloat16: np.uint16}
# Bounds of the argument of `exp`, which keep the power of 2 in the result within the 8 bits of an exponent. From 88.38
# on that power, and so the result, is infinite.
LEAST, MOST = np.float32(-87.3), np.float32(88.7)


class _Exp(NamedTuple):
    """Constants of `exp`: ln 2 in two parts, for the reduction of the argument (Cody and Waite), and the polynomial of
    Cephes' expf, from the highest power to the second.
    """

    log2_e: float = 1.44269504
    ln_2_high: float = 0.693359375
    ln_2_low: float = -2.12194440e-4
    polynomial: tuple[float, ...] = (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )


EXP = _Exp()

_kept: list[Any] = []


def address_of(work: Any) -> int:
    """Address of the machine code of `work(arguments)`, a C function `void (void *)`: compiled now, or kept by an
    earlier process. The closure of `work` holds only numbers and types.
    """
    compiled = compile_kept(_compile, work)
    # The machine code is freed with this object.
    _kept.append(compiled)
    address: int = compiled.address
    return address


def _compile(work: Any, *, cache: bool) -> Any:
    return cfunc(types.void(types.voidptr), cache=cache, **OPTIONS)(work)


def widen(stored: Any) -> Any:
    """A stored number, float32 or the bits of a bfloat16, as float32."""
    raise NotImplementedError("for compiled code")


def narrow(number: Any, stored: Any) -> Any:
    """A float32 as it is stored, in the type of `stored`, whose value means nothing. Rounds to the nearest bfloat16,
    ties to even; NaN stays NaN.
    """
    raise NotImplementedError("for compiled code")


# Numba requires that the functions which an overload returns have its signature, annotations included.
@overload(widen, jit_options=OPTIONS)
def _widen(stored: Any) -> Any:
    def of_bits(stored: Any) -> Any:
        return float_of_bits(np.int32(np.uint32(stored) << np.uint32(16)))

    def same(stored: Any) -> Any:
        return stored

    return of_bits if stored == types.uint16 else same


@overload(narrow, jit_options=OPTIONS)
def _narrow(number: Any, stored: Any) -> Any:
    def rounded(number: Any, stored: Any) -> Any:
        bits = np.uint32(bits_of_float(number))
        even = (bits >> np.uint32(16)) & np.uint32(1)
        upper = np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))
        # Only NaN differs from itself.
        return upper if number == number else np.uint16(0x7FC0)

    def same(number: Any, stored: Any) -> Any:
        return number

    return rounded if stored == types.uint16 else same


_LOG2_E, _LN_2_HIGH, _LN_2_LOW = (np.float32(each) for each in (EXP.log2_e, EXP.ln_2_high, EXP.ln_2_low))
_POLYNOMIAL = tuple(np.float32(each) for each in EXP.polynomial)


# Not with OPTIONS: LLVM would then add the two parts of ln 2 before using them. LLVM inlines this function.
@njit(fastmath={"contract"}, error_model="numpy")
def exp(x: Any) -> Any:
    """exp of a float32 below 88.38, to 2 units in the last place; infinity above. NumPy's exp would be a call of a
    function for each number.
    """
    if x < LEAST:
        x = LEAST
    if x > MOST:
        x = MOST
    power = np.floor(x * _LOG2_E + np.float32(0.5))
    rest = x - power * _LN_2_HIGH - power * _LN_2_LOW
    found = _POLYNOMIAL[0] * rest + _POLYNOMIAL[1]
    found = found * rest + _POLYNOMIAL[2]
    found = found * rest + _POLYNOMIAL[3]
    found = found * rest + _POLYNOMIAL[4]
    found = found * rest + _POLYNOMIAL[5]
    found = found * rest * rest + rest + np.float32(1)
    return found * float_of_bits((np.int32(power) + np.int32(127)) << np.int32(23))
