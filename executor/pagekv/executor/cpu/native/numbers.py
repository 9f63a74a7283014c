"""Numbers as compiled loops see them: float32 in the computation, stored as float32 or as the bits of a bfloat16."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import cfunc, njit, types
from numba.extending import overload

from pagekv.executor.cpu.native.code_cache import compile_kept
from pagekv.executor.cpu.native.intrinsics import bits_of_float, float_of_bits

# Sums may be taken in any order. NaN stays NaN: a sequence whose logits are no numbers must be noticed.
OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
# Elements of a tensor as NumPy knows them.
STORED: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.bfloat16: np.uint16}
# exp of less is 0 in float32, and of more infinite.
LEAST, MOST = np.float32(-87.3), np.float32(88.7)


class _Exp(NamedTuple):
    """Numbers of exp: a reduction by two parts of ln 2 (Cody and Waite), and the polynomial of Cephes' expf, from the
    highest power to the second.
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
    """Address of the machine code of `work(arguments)`, `void (void *)`, in whose closure are only numbers and types:
    compiled, or kept by an earlier process.
    """
    compiled = compile_kept(_compile, work)
    # The code lives as long as its object.
    _kept.append(compiled)
    address: int = compiled.address
    return address


def _compile(work: Any, *, cache: bool) -> Any:
    return cfunc(types.void(types.voidptr), cache=cache, **OPTIONS)(work)


def widen(stored: Any) -> Any:
    """The float32 that is stored."""
    raise NotImplementedError("for compiled code")


def narrow(number: Any, stored: Any) -> Any:
    """A float32 as it is stored; `stored` is any number of the type wanted. Of two bfloat16 equally near it is the even
    one, and NaN stays NaN.
    """
    raise NotImplementedError("for compiled code")


# Annotations of what stands for a function must be those of the function.
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
        # False of NaN alone.
        return upper if number == number else np.uint16(0x7FC0)

    def same(number: Any, stored: Any) -> Any:
        return number

    return rounded if stored == types.uint16 else same


_LOG2_E, _LN_2_HIGH, _LN_2_LOW = (np.float32(each) for each in (EXP.log2_e, EXP.ln_2_high, EXP.ln_2_low))
_POLYNOMIAL = tuple(np.float32(each) for each in EXP.polynomial)


# Without OPTIONS: in another order the two parts of ln 2 would be one. Numba inlines nothing of it, LLVM all.
@njit(fastmath={"contract"}, error_model="numpy")
def exp(x: Any) -> Any:
    """exp of a float32 to 2 units in the last place. NumPy's own is a call for each number."""
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
