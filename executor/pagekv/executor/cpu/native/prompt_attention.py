"""Attention of many rows over the same blocks, which are read straight from the block pool: chunks of prompts, and
prefixes that several sequences share.

Keys and values of a few blocks at a time are packed into panels for `tile`, which multiplies all rows of a run with
them. The softmax is computed online, with a running maximum and sum (FlashAttention, arXiv:2205.14135). Panels begin at
fixed positions of a context, so a row's result does not depend on the other rows of a step. The exception is NaN among
the values (V): if one row of a run sees it, other rows of the run may become NaN, too, because NaN times a weight of 0
is NaN.

Where products of bfloat16 are summed in pairs (`bfloat16_sums`), keys and values are multiplied as they are stored, and
weights are rounded to bfloat16, as FlashAttention does on GPUs. In all other cases bfloat16 is widened to float32; so
are heads of an odd size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.native.bfloat16_sums import bfloat16_sums
from pagekv.executor.cpu.native.interleave import interleave
from pagekv.executor.cpu.native.intrinsics import float_of_bits, pointer, prefetch, take_ticket
from pagekv.executor.cpu.native.numbers import OPTIONS, STORED, address_of, exp, widen
from pagekv.executor.cpu.native.openmp import bits_of, empty, run
from pagekv.executor.cpu.native.softmax import softmax_rows
from pagekv.executor.cpu.native.tile import BFLOAT16_DOT, FLOAT32, most_rows, panel_vectors, tile
from pagekv.executor.cpu.native.transpose import transpose
from pagekv.executor.cpu.native.vectors import LINE_BYTES, vector_lanes
from pagekv.executor.cpu.paged_reads import PagedRuns
from pagekv.executor.model.attention_interface import Scores

# Keys that are packed at a time: a multiple of a panel's columns on every processor.
KEYS = 64


def prompt_attention(
    pools: KvCache,
    layer: int,
    query: torch.Tensor,
    runs: PagedRuns,
    scores: Scores,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    merge: bool,
) -> None:
    """Attention of the rows `runs.rows` of `query` `[T, num_heads, head_size]` over the slots that `runs` names. The
    output goes to the same rows of `out` `[T, num_heads, head_size]`, the log-sum-exp of the scores to those of `lse`
    `[T, num_heads]`; both are float32 and contiguous. `merge`: both hold a result over other slots already, and become
    the result over all these slots. `scores.window` is ignored, because `runs` has applied it.
    """
    _, num_heads, size = query.shape
    keys, values = pools.layer(layer)
    kv_heads = keys.shape[2]
    group = num_heads // kv_heads
    lanes = vector_lanes() or 4
    wide = panel_vectors(lanes) * lanes
    columns = -(-size // wide) * wide
    most = runs.most_rows * group
    pairs = keys.dtype == torch.bfloat16 and size % 2 == 0 and bfloat16_sums() == BFLOAT16_DOT
    # Each thread's scratch memory, in float32: panels of keys and of values; for each row of a run its query, weighted
    # sum of values, maximum and sum of weights; for each row of a tile its scores and weights, and the factor by which
    # its sums shrink. Pairs of bfloat16 need less.
    tile_rows = most_rows(lanes, FLOAT32)
    numbers = KEYS * (size + columns) + most * (size + columns) + 2 * most + tile_rows * (2 * KEYS + 1)
    numbers = -(-numbers // 16) * 16 + 64
    scratch = empty(torch.get_num_threads(), numbers)
    run(
        _compiled(STORED[keys.dtype], lanes, BFLOAT16_DOT if pairs else FLOAT32),
        (
            *(len(runs.firsts) - 1, kv_heads, pools.block_size, keys.stride(0), keys.stride(1)),
            *(keys.data_ptr(), values.data_ptr(), query.data_ptr(), query.stride(0), query.stride(1)),
            *(out.data_ptr(), lse.data_ptr(), runs.rows.data_ptr(), runs.begins.data_ptr(), runs.ends.data_ptr()),
            *(runs.firsts.data_ptr(), runs.tables.data_ptr(), runs.offsets.data_ptr(), len(runs.rows)),
            *(bits_of(scores.scale), bits_of(scores.cap or 0.0), int(merge)),
            *(scratch.data_ptr(), 4 * scratch.stride(0), most, len(runs.tables), group, size),
        ),
        held=(query, out, lse, scratch, *runs.tensors),
    )


@njit(**OPTIONS)
def slot_offset(tables: Any, table: int, place: int, block_size: int, block_bytes: int, slot_bytes: int) -> Any:
    """Bytes from the start of a layer's keys, or values, to slot `place` of the blocks `tables[table:]`."""
    return tables[table + place // block_size] * block_bytes + place % block_size * slot_bytes


@cache
def _compiled(stored: Any, lanes: int, sums_kind: int) -> int:
    """Address of the function. `sums_kind`: FLOAT32 or BFLOAT16_DOT of `tile`."""
    width = np.dtype(stored).itemsize
    # Queries, panels and weights have words of 32 bits: one float32 each, or two bfloat16. To be copied, two bfloat16
    # are taken for one float32.
    paired = 2 if sums_kind == BFLOAT16_DOT else 1
    weight_bytes = 4 // paired
    word_type, word_bytes = (np.float32, 4) if paired == 2 else (stored, width)
    wide = panel_vectors(lanes) * lanes
    tile_rows = most_rows(lanes, FLOAT32)
    least = np.float32(-np.inf)

    def work(raw: Any) -> None:
        args = carray(raw, 29, np.int64)
        group, size = args[27], args[28]
        words = size // paired
        columns = (size + wide - 1) // wide * wide
        num_runs, kv_heads, block_size = args[1], args[2], args[3]
        block_bytes, slot_bytes = args[4] * width, args[5] * width
        rows, begins = carray(pointer(args[13]), args[19], np.int64), carray(pointer(args[14]), args[19], np.int64)
        ends, firsts = carray(pointer(args[15]), args[19], np.int64), carray(pointer(args[16]), num_runs + 1, np.int64)
        tables = carray(pointer(args[17]), args[26], np.int64)
        offsets = carray(pointer(args[18]), num_runs, np.int64)
        scale, cap = float_of_bits(np.int32(args[20])), float_of_bits(np.int32(args[21]))
        merge, most = args[22], args[25]
        # The second ticket is the number of the thread.
        scratch = args[23] + take_ticket(args[0] + 8) * args[24]
        # Keys `[KEYS / wide, words, wide]`, values `[columns / wide, KEYS / paired, wide]`, and results of `tile`: all
        # are aligned to vectors.
        keys_at, values_at = scratch, scratch + KEYS * words * 4
        scores_at = values_at + KEYS // paired * columns * 4
        weights_at = scores_at + tile_rows * KEYS * 4
        sums_at = weights_at + tile_rows * KEYS * 4
        queries_at = sums_at + most * columns * 4
        key_panels = carray(pointer(keys_at), (KEYS // wide, words, wide), np.float32)
        value_panels = carray(pointer(values_at), (columns // wide, KEYS, wide), np.float32)
        found = carray(pointer(scores_at), (KEYS // wide, tile_rows, wide), np.float32)
        queries = carray(pointer(queries_at), (most, words), np.float32)
        sums = carray(pointer(sums_at), (columns // wide, most, wide), np.float32)
        tops_at = queries_at + most * words * 4
        totals_at = tops_at + most * 4
        shrinks_at = totals_at + most * 4
        tops, totals = carray(pointer(tops_at), most, np.float32), carray(pointer(totals_at), most, np.float32)
        while True:
            item = take_ticket(args[0])
            if item >= num_runs * kv_heads:
                return
            number, head = item // kv_heads, item % kv_heads
            first, count = firsts[number], firsts[number + 1] - firsts[number]
            table, behind = offsets[number], head * size * width
            for row in range(count):
                for member in range(group):
                    at = rows[first + row] * args[9] + (head * group + member) * args[10]
                    source = carray(pointer(args[8] + at * width), words, word_type)
                    for i in range(words):
                        queries[row * group + member, i] = widen(source[i])
            for row in range(count * group):
                tops[row] = least
                totals[row] = 0
                for part in range(columns // wide):
                    for i in range(wide):
                        sums[part, row, i] = 0
            begin, end = begins[first], ends[first + count - 1]
            # Rows before `done` have seen all their keys: the begins and ends of a run's rows never fall.
            done = 0
            for start in range(begin // KEYS * KEYS, end, KEYS):
                here = min(KEYS, end - start)
                # Slots that no row sees may hold anything, even NaN, so they are packed as zeros.
                for low in range(0, KEYS, lanes):
                    place, panel, lane = start + low, low // wide, low % wide
                    near = args[6] + tables[table + min(place, end - 1) // block_size] * block_bytes
                    near += place % block_size * slot_bytes + behind
                    whole = place >= begin and place + lanes <= end and place % block_size + lanes <= block_size
                    # Whole vectors of words are transposed, the rest is copied word by word.
                    vectors = words // lanes * lanes if whole else 0
                    for i in range(0, vectors, lanes):
                        target = keys_at + ((panel * words + i) * wide + lane) * 4
                        transpose(lanes, word_bytes, near + i * word_bytes, slot_bytes, target, wide * 4)
                    if vectors == words:
                        continue
                    for slot in range(low, low + lanes):
                        place, lane = start + slot, slot % wide
                        if place < begin or place >= end:
                            for i in range(words):
                                key_panels[panel, i, lane] = 0
                        else:
                            at = slot_offset(tables, table, place, block_size, block_bytes, slot_bytes) + behind
                            key = carray(pointer(args[6] + at), words, word_type)
                            for i in range(vectors, words):
                                key_panels[panel, i, lane] = widen(key[i])
                # Pairs: a word has the same column of two slots.
                for slot in range(0, KEYS if paired == 2 else 0, 2):
                    lower = upper = 0
                    place = start + slot
                    if begin <= place < end:
                        at = slot_offset(tables, table, place, block_size, block_bytes, slot_bytes) + behind
                        lower = args[7] + at
                    place += 1
                    if begin <= place < end:
                        at = slot_offset(tables, table, place, block_size, block_bytes, slot_bytes) + behind
                        upper = args[7] + at
                    for part in range(columns // wide):
                        shift = part * wide * width
                        interleave(
                            lower + shift if lower else 0,
                            upper + shift if upper else 0,
                            min(wide, size - part * wide),
                            wide,
                            values_at + (part * KEYS + slot) // 2 * wide * 4,
                        )
                for slot in range(0 if paired == 2 else KEYS):
                    place = start + slot
                    if place < begin or place >= end:
                        for part in range(columns // wide):
                            for i in range(wide):
                                value_panels[part, slot, i] = 0
                    else:
                        at = slot_offset(tables, table, place, block_size, block_bytes, slot_bytes) + behind
                        value = carray(pointer(args[7] + at), size, stored)
                        for part in range(columns // wide):
                            kept = min(wide, size - part * wide)
                            for i in range(kept):
                                value_panels[part, slot, i] = widen(value[part * wide + i])
                            for i in range(kept, wide):
                                value_panels[part, slot, i] = 0
                while done < count and ends[first + done] <= start:
                    done += 1
                # Each tile prefetches its share of the next panel's keys and values. With this, a prefix of 512 tokens
                # that no cache holds takes 0.79 of the time for 8 rows and 0.87 for 32 (one thread, AMD EPYC, Zen 4).
                # Tiles whose rows see nothing of this panel, because of a window, leave their shares out.
                tiles = ((count - done) * group + tile_rows - 1) // tile_rows
                following, fetched = max(0, min(KEYS, end - start - KEYS)), 0
                for low in range(done * group, count * group, tile_rows):
                    if begins[first + low // group] >= start + KEYS:
                        break
                    height = min(tile_rows, count * group - low)
                    share = following * ((low - done * group) // tile_rows + 1) // tiles
                    for slot in range(fetched, share):
                        place = start + KEYS + slot
                        at = slot_offset(tables, table, place, block_size, block_bytes, slot_bytes) + behind
                        for line in range(0, size * width, LINE_BYTES):
                            prefetch(args[6] + at + line)
                            prefetch(args[7] + at + line)
                    fetched = share
                    left = queries_at + low * words * 4
                    for panel in range((here + wide - 1) // wide):
                        tile(
                            lanes,
                            sums_kind,
                            height,
                            words,
                            left,
                            words * 4,
                            keys_at + panel * words * wide * 4,
                            scores_at + panel * tile_rows * wide * 4,
                            keys_at,
                            0,
                            0,
                        )
                    if cap != 0:
                        for panel in range(KEYS // wide):
                            for row in range(height):
                                for i in range(wide):
                                    # tanh by `exp`, which LLVM inlines: no function call for each number.
                                    score = found[panel, row, i] * scale
                                    shrunk = exp(np.float32(-2) * abs(score) / cap)
                                    bent = cap * (np.float32(1) - shrunk) / (np.float32(1) + shrunk)
                                    found[panel, row, i] = bent if score > 0 else -bent
                    if begins[first + (low + height - 1) // group] > start or ends[first + low // group] < start + KEYS:
                        for row in range(height):
                            near = begins[first + (low + row) // group] - start
                            far = ends[first + (low + row) // group] - start
                            for panel in range(KEYS // wide):
                                for i in range(wide):
                                    seen = near <= panel * wide + i and panel * wide + i < far
                                    found[panel, row, i] = found[panel, row, i] if seen else least
                    softmax_rows(
                        lanes,
                        wide,
                        tile_rows,
                        KEYS,
                        weight_bytes,
                        height,
                        scores_at,
                        weights_at,
                        tops_at + low * 4,
                        totals_at + low * 4,
                        shrinks_at,
                        scale if cap == 0 else np.float32(1),
                    )
                    for part in range(columns // wide):
                        tile(
                            lanes,
                            sums_kind,
                            height,
                            (here + paired - 1) // paired,
                            weights_at,
                            KEYS // paired * 4,
                            values_at + part * (KEYS // paired) * wide * 4,
                            sums_at + (part * most + low) * wide * 4,
                            values_at,
                            0,
                            shrinks_at,
                        )
            for row in range(count * group):
                place = rows[first + row // group] * kv_heads * group + head * group + row % group
                target = carray(pointer(args[11] + place * size * 4), size, np.float32)
                sum_of = carray(pointer(args[12] + place * 4), 1, np.float32)
                ours = tops[row] + np.log(totals[row])
                mine, theirs = np.float32(1) / totals[row], np.float32(0)
                if merge != 0:
                    other = sum_of[0]
                    high = max(ours, other)
                    both = high + np.log(np.exp(ours - high) + np.exp(other - high))
                    mine, theirs = mine * np.exp(ours - both), np.exp(other - both)
                    ours = both
                sum_of[0] = ours
                for part in range(columns // wide):
                    for i in range(min(wide, size - part * wide)):
                        number = sums[part, row, i] * mine
                        if merge != 0:
                            number += target[part * wide + i] * theirs
                        target[part * wide + i] = number

    return address_of(work)
