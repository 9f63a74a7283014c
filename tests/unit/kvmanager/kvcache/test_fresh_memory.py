"""Large columns of zeros take memory as they are written, and give it back."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from pagekv.kvmanager.kvcache.fresh_memory import fresh_zeros

MIB = 2**20


def resident_mib(kind: str = "VmRSS") -> float:
    """Of this process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("shape", [(0, 16), (3, 16), (2**16, 16), (2**18,)])
def test_they_are_zeros_that_can_be_written(shape: tuple[int, ...]) -> None:
    column = fresh_zeros(shape, np.uint32)
    assert column.shape == shape
    assert column.dtype == np.uint32
    assert column.flags.c_contiguous
    assert not column.any()
    column[:] = 7
    assert (column == 7).all()


def test_memory_is_taken_when_it_is_written_and_given_back_with_the_array() -> None:
    gc.collect()
    before, shared = resident_mib(), resident_mib("RssShmem")
    column = fresh_zeros((64, MIB), np.uint8)
    assert resident_mib() < before + 8
    column[:32] = 1
    written = resident_mib()
    assert before + 24 < written < before + 40
    # A process that is forked has a copy.
    assert resident_mib("RssShmem") < shared + 8
    del column
    assert resident_mib() < written - 24


def test_more_than_there_can_be_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="1125899906842624 bytes for a column: Cannot allocate memory"):
        fresh_zeros((2**50,), np.uint8)
