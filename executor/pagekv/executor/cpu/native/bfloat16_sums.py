"""How this processor sums products of bfloat16: by the matrix unit where there is one, else whichever is faster of an
instruction that multiplies two neighbours of a row by two of a column, and of float32 that they are widened to.

Some processors have the instruction and multiply with it half as fast as in float32: an Intel Xeon of family 6, model
207, whose matrix unit its hypervisor hides, multiplies 32 rows by 35 M weights in 23.6 ms with it, on one thread, and
in 14.1 widened. An AMD EPYC (Zen 4) multiplies faster with it.
"""

from __future__ import annotations

import math
import time
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from pagekv.common.logs import Log
from pagekv.executor.cpu.native.matrix_unit import has_matrix_unit
from pagekv.executor.cpu.native.numbers import address_of
from pagekv.executor.cpu.native.openmp import run
from pagekv.executor.cpu.native.tile import (
    BFLOAT16_DOT,
    BFLOAT16_MATRIX,
    BFLOAT16_WIDENED,
    most_rows,
    panel_vectors,
    tile,
)
from pagekv.executor.cpu.native.vectors import features, vector_lanes

log = Log(__name__)

# A tile whose panel stays in the second level of the cache, as often as it takes to be timed, and rounds in turns.
DEPTH, TILES, ROUNDS = 256, 64, 8
# The instruction needs no rows widened before, so it is taken while it needs at most so many times as long.
MOST = 1.1


@cache
def bfloat16_sums() -> int:
    """One of the ways that `tile` knows, timed on this thread once in a process where there is a choice."""
    if vector_lanes() == 16 and has_matrix_unit():
        return BFLOAT16_MATRIX
    if vector_lanes() != 16 or "avx512bf16" not in features():
        return BFLOAT16_WIDENED
    dot, widened = seconds(BFLOAT16_DOT, BFLOAT16_WIDENED)
    found = BFLOAT16_DOT if dot <= MOST * widened else BFLOAT16_WIDENED
    log.info(
        "products of bfloat16 are summed " + ("in pairs" if found == BFLOAT16_DOT else "as float32"),
        microseconds=[round(1e6 * each / TILES, 2) for each in (dot, widened)],
    )
    return found


def seconds(*ways: int) -> tuple[float, ...]:
    """Seconds of this thread that TILES tiles take in each way, the least of rounds in turns."""
    lanes = vector_lanes()
    rows, wide = most_rows(lanes, BFLOAT16_DOT), panel_vectors(lanes) * lanes
    # Zeros, float32 or pairs of bfloat16; a row that was widened has two numbers where others have a pair.
    left, panel, out = torch.zeros(rows, 2 * DEPTH), torch.zeros(DEPTH, wide), torch.zeros(rows, wide)
    best = [math.inf] * len(ways)
    for _ in range(ROUNDS):
        for index, way in enumerate(ways):
            begin = time.thread_time()
            run(
                _tiles(lanes, way),
                (TILES, rows, DEPTH, left.data_ptr(), 8 * DEPTH, panel.data_ptr(), out.data_ptr()),
                alone=True,
                held=(left, panel, out),
            )
            best[index] = min(best[index], time.thread_time() - begin)
    return tuple(best)


@cache
def _tiles(lanes: int, sums: int) -> int:
    def work(raw: Any) -> None:
        args = carray(raw, 8, np.int64)
        for _ in range(args[1]):
            tile(lanes, sums, args[2], args[3], args[4], args[5], args[6], args[7], args[6], 0, 0)

    return address_of(work)
