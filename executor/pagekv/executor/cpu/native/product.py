"""Products of rows with weights that never change. The weights are packed once, into the panels of columns that `tile`
multiplies by; each panel is contiguous.

A thread takes one panel at a time and multiplies it with one tile of rows after the other. Meanwhile it prefetches the
panel that it will probably take next: on a 2-core AMD EPYC (Zen 4), 16 rows take 1.2 times as long without this. If
panels meet a single tile, a thread takes several at a time, and the tile prefetches what follows in its own panel. The
result of a row does not depend on the number of rows.

Such products take less time than oneDNN's while rows are few: one thread of that EPYC multiplies 8 bfloat16 rows by the
25 M weights of 8 layers (hidden 512) in 4.4 ms, oneDNN in 7.5 ms; 256 rows take 73 and 76 ms.

On processors that multiply float32 faster than bfloat16, each thread widens its rows to float32 once: on an AMD EPYC
with AVX2 alone (family 25, model 1), 256 rows take 0.82 of the time of tiles that widen their rows for each panel. If
many tiles meet a panel, the thread also widens the panel once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray

from pagekv.executor.cpu.native.bfloat16_sums import bfloat16_sums
from pagekv.executor.cpu.native.intrinsics import pointer, take_ticket
from pagekv.executor.cpu.native.matrix_unit import (
    COLUMNS,
    PAIRS,
    ROWS,
    SHAPES_BYTES,
    keep_shapes,
    restore_shapes,
    set_shapes,
)
from pagekv.executor.cpu.native.numbers import STORED, address_of, exp, narrow, widen
from pagekv.executor.cpu.native.openmp import empty, run
from pagekv.executor.cpu.native.packing import packed
from pagekv.executor.cpu.native.stored_rows import store_rows
from pagekv.executor.cpu.native.tile import (
    BFLOAT16_MATRIX,
    BFLOAT16_WIDENED,
    FLOAT32,
    most_rows,
    panel_vectors,
    tile,
    widen_steps,
)
from pagekv.executor.cpu.native.vectors import vector_lanes

# Rows of a chunk. A chunk meets all panels before the next chunk does; more rows would not stay in the cache.
CHUNK_ROWS = 256
# Float32 numbers that a thread widens at a time. If rows are long, a chunk has only as many rows as this allows.
WIDENED_NUMBERS = 2**19
# Steps of a panel that a thread widens at a time, so that they stay in the first-level cache; and the fewest tiles for
# which it does so. For fewer tiles widening costs more than it saves; 64 to 512 rows take 0.9 to 1.0 of the time on an
# Intel Xeon of family 6, model 207.
WIDENED_STEPS, WIDENED_TILES = 64, 8
# How many steps ahead a single tile prefetches: memory has answered by the time that the tile gets there. With this, 1
# to 6 rows take 0.65 to 1.0 of the time on an Intel Xeon of family 6, model 207, without its matrix unit.
AHEAD_STEPS = 16
# If a panel meets a single tile, a thread takes panels of so many bytes at a time, one behind the other: a processor
# reads one long piece of memory faster than short ones. On an AMD EPYC with AVX2 alone (family 25, model 1), 1 to 4
# rows take 0.85 to 0.95 of the time with this and AHEAD_STEPS. Before, a tile fetched an eighth of a panel ahead.
TICKET_BYTES = 2**17
# Up to so many multiplications one thread computes alone: waking the others would take longer.
ALONE = 2**18

# How the sums of a panel are finished: stored as they are, or the gate and up columns combined.
_PLAIN, _SILU, _GELU_TANH = 0, 1, 2
_FINISHES = {None: _PLAIN, "silu": _SILU, "gelu_tanh": _GELU_TANH}


class Product:
    """`x @ weight.T + bias`. With an activation it is `activation(gate) * up`: gate is the first half of the columns of
    `x @ weight.T + bias`, up the second half. Rows and results are float32 or bfloat16, like the weight; sums are
    float32. The object keeps only the packed weight.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> None:
        """`weight` `[out, in]`; `activation`: a value of `model.decoder.ACTIVATIONS`."""
        lanes = vector_lanes()
        sums = FLOAT32 if weight.dtype == torch.float32 else bfloat16_sums()
        self._dtype = weight.dtype
        # Numbers of a row that one step of a tile takes.
        self._paired = 1 if sums == FLOAT32 else 2
        # With an activation, half of a panel's columns are of the gate projection and half of the up projection, so
        # that a panel can be finished by itself.
        parts = 1 if activation is None else 2
        self._columns = weight.shape[0] // parts
        wide = panel_vectors(lanes) * lanes
        self._depth = -(-weight.shape[1] // self._paired)
        # Whether torch copies rows first, to pad them. A `Program` cannot record such a product.
        self.pads_rows = weight.shape[1] % self._paired > 0
        run = COLUMNS if sums == BFLOAT16_MATRIX else 0
        self._panels = packed(weight, parts, wide // parts, self._depth, self._paired, run)
        self._bias = None
        if bias is not None:
            self._bias = packed(bias.float()[:, None], parts, wide // parts, 1, 1)
        # Addresses of the panels and of the bias. A step with experts passes those of hundreds of products.
        self._addresses = [self._panels.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()]
        self._most = most_rows(lanes, sums)
        # A factor of 1 for each row of a tile.
        self._ones = torch.ones(self._most)
        # So many rows are a single tile; more may be two tiles of the matrix unit. And the panels that a thread then
        # takes at a time.
        self._single = min(self._most, ROWS)
        self._at_once = max(1, TICKET_BYTES // self._panels[0].nbytes)
        self._tile_numbers = self._most * wide + 2 * SHAPES_BYTES // 4
        self._widens = sums == BFLOAT16_WIDENED
        self._chunk_rows = CHUNK_ROWS
        if self._widens:
            self._chunk_rows = max(self._most, min(CHUNK_ROWS, WIDENED_NUMBERS // (2 * self._depth)))
            # Room for the sums of a chunk, and for widened steps of a panel.
            self._tile_numbers += (self._chunk_rows + 2 * WIDENED_STEPS) * wide
        self._finish = _FINISHES[activation]
        self._function = _compiled(STORED[weight.dtype], lanes, sums, False)
        self._of_several = partial(_compiled, STORED[weight.dtype], lanes, sums, True)

    def __call__(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`[T, in]` to `[T, out]`, or to `[T, out / 2]` with an activation. `out`: memory for the result."""
        count, panels, threads = len(rows), len(self._panels), self._threads(len(rows))
        # If there are too few panels to keep all threads busy, rows are divided too.
        chunks = max(-(-count // self._chunk_rows), min(-(-count // self._most), 2 * threads // panels))
        return self._multiply(rows, chunks, threads, out=out)

    @staticmethod
    def each(products: Sequence[Product], rows: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
        """`[S, out]` for rows `[S, in]`, in one call of compiled code: product i multiplies the rows [begin, end) of
        `bounds[i]`. All products have weights of one shape. Bounds follow each other and cover all rows.
        """
        # Four numbers for each chunk: its first row, the number of its rows, the addresses of panels and bias.
        first, parts = products[0], list[int]()
        for product, (begin, end) in zip(products, bounds, strict=True):
            chunks = -(-(end - begin) // first._chunk_rows)
            for chunk in range(chunks):
                low, high = (begin + (end - begin) * at // chunks for at in (chunk, chunk + 1))
                parts += [low, high - low, *product._addresses]
        return first._multiply(rows, len(parts) // 4, first._threads(len(rows)), parts)

    def _threads(self, count: int) -> int:
        """Threads that compute `count` rows."""
        return 1 if count * self._panels.numel() <= ALONE else torch.get_num_threads()

    def _multiply(
        self,
        rows: torch.Tensor,
        chunks: int,
        threads: int,
        parts: Sequence[int] = (),
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`parts`: the four numbers of each chunk, as in `each`, if chunks are of different products."""
        count = len(rows)
        if out is None:
            out = empty(count, self._columns, dtype=self._dtype)
        if not count:
            return out
        padding = self._depth * self._paired - rows.shape[1]
        rows = torch.nn.functional.pad(rows, (0, padding)) if padding else rows.contiguous()
        # Each thread's scratch memory: the sums of a tile, then the rows that the thread widens. torch aligns it to 64
        # bytes.
        own = self._tile_numbers
        if self._widens:
            own += -(-min(count, self._chunk_rows) * 2 * self._depth // 16) * 16
        scratch = empty(threads * own)
        # A single tile reads weights at the rate of memory. With few panels they are shared out one by one.
        taken = 1
        if chunks == 1 and count <= self._single:
            taken = min(self._at_once, max(1, len(self._panels) // (4 * threads)))
        run(
            self._of_several() if parts else self._function,
            (
                *(count, self._columns, self._depth, chunks, len(self._panels), threads),
                *(rows.data_ptr(), self._addresses[0], out.data_ptr(), self._addresses[1]),
                *(scratch.data_ptr(), 4 * own, self._finish, self._chunk_rows, taken, self._ones.data_ptr()),
                *parts,
            ),
            alone=threads == 1,
            held=(rows, self._panels, out, scratch, self._ones),
        )
        return out


@cache
def _compiled(stored: Any, lanes: int, sums: int, several: bool) -> int:
    """Address of the function. `several`: each chunk has weights of its own."""
    width = np.dtype(stored).itemsize
    most, wide = most_rows(lanes, sums), panel_vectors(lanes) * lanes
    half, plain, silu = wide // 2, _PLAIN, _SILU
    matrix, widens = sums == BFLOAT16_MATRIX, sums == BFLOAT16_WIDENED
    # gelu(x) = x * sigmoid(2 * z), z = sqrt(2 / pi) * (x + 0.044715 * x^3), by tanh(z) = 2 * sigmoid(2 * z) - 1.
    outer, inner = np.float32(2 * np.sqrt(2 / np.pi)), np.float32(0.044715)

    def work(raw: Any) -> None:
        args = carray(raw, 17, np.int64)
        count, columns, depth, chunks, panels, threads = args[1], args[2], args[3], args[4], args[5], args[6]
        finish = args[13]
        kept = wide if finish == plain else half
        # The second ticket is the number of the thread.
        scratch = args[11] + take_ticket(args[0] + 8) * args[12]
        panel_bytes = depth * wide * 4
        row_bytes = depth * (8 if widens else 4)
        if several:
            # The chunks' parts are the last arguments, just before the tickets.
            parts = carray(pointer(args[0] - 32 * chunks), (chunks, 4), np.int64)
        shapes, shaped = scratch + most * wide * 4, 0
        steps_at = shapes + 2 * SHAPES_BYTES
        sums_at = steps_at + 2 * WIDENED_STEPS * wide * 4
        widened, widened_chunk = sums_at + args[14] * wide * 4, -1
        if matrix:
            keep_shapes(shapes)
        # Panels that a thread takes at a time, and how many such groups there are.
        taken = args[15]
        groups = (panels + taken - 1) // taken
        chunk = panel = left_to_take = 0
        while True:
            if left_to_take:
                panel += 1
            else:
                item = take_ticket(args[0])
                if item >= chunks * groups:
                    break
                chunk, panel = item // groups, item % groups * taken
                left_to_take = min(taken, panels - panel)
            left_to_take -= 1
            begin = count * chunk // chunks
            members = count * (chunk + 1) // chunks - begin
            weights, biases = args[8], args[10]
            if several:
                begin, members, weights, biases = parts[chunk, 0], parts[chunk, 1], parts[chunk, 2], parts[chunk, 3]
            height = most
            if matrix:
                height = most if members >= most and depth % PAIRS == 0 else min(members, ROWS)
                if min(height, ROWS) != shaped:
                    shaped = min(height, ROWS)
                    set_shapes(shaped, depth, shapes + SHAPES_BYTES)
            left = args[7] + begin * row_bytes
            if widens:
                left = widened
                if chunk != widened_chunk:
                    widened_chunk = chunk
                    source = carray(pointer(args[7] + begin * depth * 4), members * depth * 2, stored)
                    target = carray(pointer(left), members * depth * 2, np.float32)
                    for i in range(members * depth * 2):
                        target[i] = widen(source[i])
            at = weights + panel * panel_bytes
            tiles = (members + height - 1) // height
            # Each tile prefetches its share of the next panel. A single tile waits for memory and not for arithmetic,
            # so it prefetches the bytes of this panel that it is about to read.
            share = wide * 4 // tiles
            following = at + panel_bytes * threads if tiles > 1 else at + wide * 4 * AHEAD_STEPS
            here = min(kept, columns - panel * kept)
            widens_steps = widens and tiles >= WIDENED_TILES
            at_once = WIDENED_STEPS if widens_steps else depth
            for low in range(0, depth, at_once):
                steps = min(at_once, depth - low)
                if widens_steps:
                    widen_steps(lanes, steps, at + low * wide * 4, steps_at)
                for index in range(tiles):
                    first = members * index // tiles
                    rows = members * (index + 1) // tiles - first
                    ahead = following + low * wide * 4 + share * steps * index
                    found_at = scratch
                    if matrix:
                        # Every tile has the height that the unit's shapes are set for, so the last tile computes some
                        # rows of the tile before it again.
                        first, rows = min(index * height, members - height), height
                    row_at = left + first * row_bytes
                    if widens_steps:
                        found_at = sums_at + first * wide * 4
                        row_at += low * 8
                        tile(
                            lanes,
                            FLOAT32,
                            rows,
                            2 * steps,
                            row_at,
                            row_bytes,
                            steps_at,
                            found_at,
                            ahead,
                            share // 2,
                            args[16] if low else 0,
                        )
                        if low + steps < depth:
                            continue
                    else:
                        tile(lanes, sums, rows, depth, row_at, row_bytes, at, found_at, ahead, share, 0)
                    if biases != 0 or finish != plain:
                        for row in range(rows):
                            found = carray(pointer(found_at + row * wide * 4), wide, np.float32)
                            if biases != 0:
                                bias = carray(pointer(biases + panel * wide * 4), wide, np.float32)
                                for i in range(wide):
                                    found[i] += bias[i]
                            if finish != plain:
                                for i in range(half):
                                    x = found[i]
                                    z = x if finish == silu else outer * (x + inner * x * x * x)
                                    found[i] = x / (np.float32(1) + exp(-z)) * found[i + half]
                    place = args[9] + ((begin + first) * columns + panel * kept) * width
                    if here % lanes == 0:
                        store_rows(lanes, width, rows, here, found_at, wide * 4, place, columns * width)
                    else:
                        for row in range(rows):
                            found = carray(pointer(found_at + row * wide * 4), here, np.float32)
                            out = carray(pointer(place + row * columns * width), here, stored)
                            for i in range(here):
                                out[i] = narrow(found[i], out[i])
        if matrix:
            restore_shapes(shapes)

    return address_of(work)
