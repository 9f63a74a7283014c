"""Instructions that Numba has no name for."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numba import carray, njit

from pagekv.executor.cpu.native.intrinsics import bits_of_float, float_of_bits, pointer, prefetch, take_ticket


@njit
def second(address: int) -> Any:
    return carray(pointer(address), 2, np.int64)[1]


@njit
def three_tickets(address: int) -> Any:
    return take_ticket(address), take_ticket(address), take_ticket(address)


@njit
def fetched(address: int) -> None:
    prefetch(address)


@njit
def there_and_back(number: Any) -> Any:
    bits = bits_of_float(number)
    return bits, float_of_bits(bits)


def test_memory_at_an_address() -> None:
    numbers = np.array([7, 8], np.int64)
    assert second(numbers.ctypes.data) == 8


def test_tickets_are_numbers_in_order() -> None:
    ticket = np.array([5], np.int64)
    assert three_tickets(ticket.ctypes.data) == (5, 6, 7)
    assert ticket[0] == 8


def test_a_prefetch_of_memory_that_is_not_there_is_no_error() -> None:
    fetched(8)
    # The instruction of x86 or of ARM.
    assert re.search(r"\b(prefetcht1|prfm)\b", next(iter(fetched.inspect_asm().values())))


def test_bits_of_a_number() -> None:
    assert there_and_back(np.float32(-1.5)) == (np.float32(-1.5).view(np.int32), -1.5)
