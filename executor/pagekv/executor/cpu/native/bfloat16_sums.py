"""How this processor computes products of bfloat16: with its matrix unit, if it has one; else in the faster of two
ways, with an instruction for pairs of bfloat16 or with numbers that are widened to float32.

Some processors have that instruction, but are faster with float32: an Intel Xeon of family 6, model 207, whose matrix
unit its hypervisor hides, multiplies 32 rows by 35 M weights in 23.6 ms with the instruction and in 14.1 ms widened, on
one thread. An AMD EPYC (Zen 4) is faster with the instruction.
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

# Steps of the tile that is timed, whose panel stays in the second-level cache; tiles of one timing; and rounds, in
# which the ways take turns.
DEPTH, TILES, ROUNDS = 256, 64, 8
# The instruction is chosen if it takes at most this many times as long: unlike the other way, it needs no widened rows,
# and widening them is not timed.
MOST = 1.1


@cache
def bfloat16_sums() -> int:
    """BFLOAT16_MATRIX, BFLOAT16_DOT or BFLOAT16_WIDENED of `tile`. If the processor has a choice of the last two, both
    are timed on this thread, once in a process.
    """
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
    """Seconds of this thread's time that TILES tiles take in each of `ways`: the least of ROUNDS rounds."""
    lanes = vector_lanes()
    rows, wide = most_rows(lanes, BFLOAT16_DOT), panel_vectors(lanes) * lanes
    # All are zeros, as float32 and as pairs of bfloat16. A step takes 8 bytes of a widened row and 4 bytes of any
    # other, so these rows suffice for both.
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
