"""Element types as compiled loops see them, and functions of one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from pagekv.executor.cpu.native.intrinsics import bits_of_float, float_of_bits

# Sums may be taken in any order. NaN stays NaN: a sequence whose logits are no numbers must be noticed.
OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
# exp of less is 0 in float32, and of more infinite.
LEAST, MOST = np.float32(-87.3), np.float32(88.7)


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def exp32(x: Any) -> Any:
    """exp of a float32 to 2 units in the last place (reduction by Cody and Waite, polynomial of Cephes' expf). NumPy's
    own is a call for each number.
    """
    if x < LEAST:
        x = LEAST
    if x > MOST:
        x = MOST
    power = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    rest = x - power * np.float32(0.693359375) - power * np.float32(-2.12194440e-4)
    found = np.float32(1.9875691500e-4) * rest + np.float32(1.3981999507e-3)
    found = found * rest + np.float32(8.3334519073e-3)
    found = found * rest + np.float32(4.1665795894e-2)
    found = found * rest + np.float32(1.6666665459e-1)
    found = found * rest + np.float32(5.0000001201e-1)
    found = found * rest * rest + rest + np.float32(1)
    return found * float_of_bits((np.int32(power) + np.int32(127)) << np.int32(23))


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def exp64(x: Any) -> Any:
    return np.exp(x)


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def same(x: Any) -> Any:
    return x


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def widened(x: Any) -> Any:
    """A bfloat16, given as its bits: the upper half of a float32."""
    return float_of_bits(np.int32(np.uint32(x) << np.uint32(16)))


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def narrowed(x: Any) -> Any:
    """The bits of the bfloat16 next to a float32, of two equally near the even one; NaN stays NaN."""
    bits = np.uint32(bits_of_float(x))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if x == x else np.uint16(0x7FC0)  # noqa: PLR0124 - false of NaN alone


class ElementType(NamedTuple):
    """Elements of a tensor as NumPy knows them, the type that is computed in, and the ways there, back, and to exp."""

    stored: Any
    exact: Any
    widen: Callable[[Any], Any]
    narrow: Callable[[Any], Any]
    exp: Callable[[Any], Any]


ELEMENTS = {
    torch.float32: ElementType(np.float32, np.float32, same, same, exp32),
    torch.float64: ElementType(np.float64, np.float64, same, same, exp64),
    torch.bfloat16: ElementType(np.uint16, np.float32, widened, narrowed, exp32),
}
