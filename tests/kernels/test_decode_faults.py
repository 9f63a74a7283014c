"""Faults planted in the decode and merge kernels: each must be noticed (see `planted_faults.py`).

Not among them, because the emulation runs thread blocks one after the other, each with its own stores in order:

- the fences around the count of finished splits;
- the first barrier of `merge_if_last`, between a block's partial results and that count. Without it another block might
  read results that are not there yet; here no other block runs before this one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import pytest
from support.kernels.decode_cases import run_decode, worst_error
from support.kernels.host_build import HostLauncher
from support.kernels.planted_faults import Fault, assert_noticed, visible
from support.kernels.stored_sequences import TOLERANCE, Features, random_sequences, store

from pagekv.kernels import shared_splits
from pagekv.kernels.variants import Variant


def check(
    variant: Variant,
    features: Features,
    *,
    lengths: Sequence[int] = (900, 800, 0, 70, 256),
    fused: bool = True,
    blocks: int | None = None,
    padding: int = 0,
    share: int = 0,
) -> Callable[[HostLauncher], None]:
    """A launch and its comparison: an empty row, rows that end within a tile, and two of several splits.

    With a window of 600 the first row's splits begin at split 1, and the second one's at split 0: partial results of
    the first row that go a place too far are still within the buffer. `share`: tokens that all rows have in the same
    blocks, which is when the wide kernel has work.
    """
    sequences = random_sequences(np.random.default_rng(0), variant, list(lengths), group=3, kv_heads=2, shared=share)
    cache = store(np.random.default_rng(1), sequences, 16, shared=share)

    def run(launcher: HostLauncher) -> None:
        with mock.patch.object(shared_splits, "MIN_SAVED", 1):
            # The plan of a model that has layers without a window, so that members see different parts of a split.
            plan_window = 0 if share else None
            result = run_decode(
                launcher,
                sequences,
                cache,
                features,
                fused=fused,
                blocks=blocks,
                padding=padding,
                share=bool(share),
                plan_window=plan_window,
            )
        assert worst_error(sequences, result, features) <= TOLERANCE[variant.dtype]

    return run


FEATURES = Features(window=600)
SINKS = Features(window=600, sinks=True)
MMA = check(Variant("float16", "float16", 64, True), FEATURES)
MMA_WINDOW = check(Variant("float16", "float16", 64, True), Features(window=60))
# The last row of the table has the most blocks, and the table ends within its last split.
MMA_TABLE_END = check(Variant("float16", "float16", 64, True), FEATURES, lengths=(70, 300))
FMA = check(Variant("float32", "float32", 64, True), FEATURES)
FP8 = check(Variant("bfloat16", "float8_e4m3fn", 64, True), FEATURES)
# A ring of two stages; the queries stay in shared memory, and the results of warps are merged in two rounds.
FP8_128 = check(Variant("bfloat16", "float8_e4m3fn", 128), Features())
UNFUSED = check(Variant("float16", "float16", 64, True), FEATURES, fused=False)
MMA_SINKS = check(Variant("float16", "float16", 64, True), SINKS)
UNFUSED_SINKS = check(Variant("float16", "float16", 64, True), SINKS, fused=False)

# Splits of four segments, of which the third and fourth are looked up while tiles are on their way.
LONG = check(Variant("float16", "float16", 64, True), Features(), lengths=(16384 + 600, 5000))
ONE_BLOCK = check(Variant("bfloat16", "bfloat16", 128, True), FEATURES, blocks=1)
PADDED = check(Variant("float16", "float16", 64, True), FEATURES, padding=5)


SHARED = check(
    Variant("float16", "float16", 64, True), Features(window=600), lengths=(900, 800, 790, 860, 515, 870), share=512
)

# Rows that end with what they share: the wide kernel finishes them.
SHARED_WHOLE = check(Variant("float16", "float16", 64, True), Features(), lengths=(512,) * 5, share=512)


def fault(name: str, run: Callable[[HostLauncher], None], old: str, new: str = "") -> Fault:
    return Fault(name, "pagekv_decode", old, new, run)


def wide(name: str, old: str, new: str = "") -> Fault:
    return Fault(name, "pagekv_decode_wide", old, new, SHARED)


WAIT = "            if (left > 1) cp_async_wait<STAGES - 2>();  // else the next tile is another item's\n"
DONE = "            __syncthreads();  // the tile used is done with, the next one is there\n"
START = "            copy_tile(free_stage());\n"
LAST_DONE = DONE.replace("__syncthreads", "if (left > 1) __syncthreads")
SLICES = "                __syncthreads();\n                if (merged == 0"
ROUNDS = "if (first_dim > 0 || (WIDE && merged > 0)) __syncthreads();  // those before are merged"
LATE_QUERIES = "        if (ended > 0)\n            cp_async_wait<0>();"
BEHIND_THE_LAST_SEGMENT = "source.place((span.last - 1) / SEGMENT) ^ SEGMENT"
COUNTER_BACK = "            if (word == launch().all_work - blocks - 1) *p.dealt = 0;\n"
LAST = "min(end, longest)"
STRANDS = "for (i32 i = strand; i < merge.partials; i += STRANDS) parts"
COUNTED = "    __syncthreads();\n    constexpr int PIECES = HEAD_SIZE / 4;\n    for (i32 m = 0"
TABLE_END = "(first + blocks, p.table_stride);"
FAULTS = [
    fault("no wait for a tile", MMA, WAIT),
    fault("a wait for one tile too few of four", FP8, WAIT, WAIT.replace("- 2", "- 1")),
    fault("no barrier between one tile and the next, mma", MMA, DONE),
    fault("no barrier between one tile and the next, two stages", FP8_128, DONE),
    fault("no barrier between one tile and the next, fma", FMA, DONE),
    fault("a wait for one tile too few of two", FP8_128, WAIT, WAIT.replace("- 2", "- 1")),
    fault(
        "a tile is copied into the stage in use",
        MMA,
        START,
        START.replace("free_stage()", "ring + stage * STAGE_BYTES"),
    ),
    fault("the counter of dealt work is left as it is", MMA, COUNTER_BACK),
    fault("the counter goes back before the last drawing", MMA, COUNTER_BACK, COUNTER_BACK.replace("- 1)", "- 2)")),
    fault("a work is dealt to nobody", MMA, "word += 2 * blocks;", "word += 2 * blocks + 1;"),
    fault("padding is taken for work", PADDED, "(i32)p.dealt[1] * heads_of_item", "p.num_items * heads_of_item"),
    fault(
        "the next item's words over those in use",
        MMA,
        "&record(ended + 1))[thread] = word",
        "&record(ended))[thread] = word",
    ),
    fault("the next item's block ids over those in use", MMA, BEHIND_THE_LAST_SEGMENT, BEHIND_THE_LAST_SEGMENT[:-10]),
    fault("the next item begins before it is described", MMA, "max(left, STAGES + 1)", "left"),
    fault("the next item's first tile before its block ids", MMA, "left == STAGES - 1)", "left == STAGES)"),
    fault("no wait for the next item's queries", FP8, LATE_QUERIES, LATE_QUERIES.replace("ended > 0", "false")),
    fault("the next item's queries over those in use, mma", FP8_128, DONE, LAST_DONE),
    fault("the next item's queries over those in use, fma", FMA, DONE, LAST_DONE),
    fault(
        "results over the next item's tile",
        FP8,
        "(float*)walk.free_stage()",
        "(float*)(walk.ring + walk.stage * STAGE_BYTES)",
    ),
    fault("no barrier between two rounds of the merge", FP8_128, ROUNDS, "if (WIDE && merged > 0) __syncthreads();"),
    fault("dims of queries in another order than those of fp8 keys", FP8_128, "0x5410u", "0x7610u"),
    fault("results over a tile in use", MMA, DONE, LAST_DONE),
    fault("no barrier after the block ids, mma", MMA, "__syncthreads();  // the block ids are there"),
    fault("no barrier after the block ids, fma", FMA, "__syncthreads();  // the block ids are there"),
    fault("no barrier before the merge of slices", MMA, SLICES, SLICES.replace("__syncthreads();", "")),
    fault(
        "no barrier between items",
        ONE_BLOCK,
        "__syncthreads();  // what the item before had in shared memory is done with",
    ),
    fault("no barrier of a warp between weights and values", FMA, "            __syncwarp();\n"),
    fault("a wrong block", MMA, "? table[first + i] : 0", "? table[first + (i ^ 1)] : 0"),
    fault("the wrong layer", MMA, "(i64)p.layer * 2 * p.kv_stride", "(i64)p.layer * p.kv_stride"),
    fault("keys for values", MMA, "to_values = (u64)(p.kv_stride", "to_values = (u64)(0 * p.kv_stride"),
    fault("one token too many", MMA, LAST, LAST.replace("longest", "longest + 1")),
    fault("one token too few", FP8, LAST, LAST.replace("longest", "longest - 1")),
    fault("a window of one more", MMA_WINDOW, "? position - window + 1 : 0", "? position - window : 0"),
    fault("masked keys are weighed", MMA, "visible ? logits.base2(s[n][i]", "visible || true ? logits.base2(s[n][i]"),
    fault("slots never written are copied", MMA, "(from + to_values), valid)", "(from + to_values), valid || true)"),
    fault("outputs keep the old maximum", MMA, "rows.out[n][2 * half] *= factor;"),
    fault("sums keep the old maximum", FMA, "state[r].sum *= factor;"),
    fault("fp8 dims out of order", FP8, "4 + element * 2 + fragment % 2", "4 + element + fragment % 2 * 2"),
    fault("a row is merged before its last split", MMA, ".partials - 1;", ".partials - 2;"),
    fault("no barrier after the count of splits", MMA, COUNTED, COUNTED.replace("__syncthreads();", "")),
    fault("rows share a counter", MMA, "(index * p.num_kv_heads", "(0 * p.num_kv_heads"),
    fault("the counter is left as it is", MMA, "if (last) *counter = 0;"),
    fault("a partial result in the wrong place", MMA, "+ work.split - merge.first_split)", "+ work.split)"),
    Fault("a partial result is left out", "pagekv_merge", STRANDS, STRANDS.replace("; i +=", " - 1; i +="), UNFUSED),
    Fault("the wrong strands are added", "pagekv_merge", "lane / 4, 4);", "lane / 4, 2);", UNFUSED),
    fault(
        "a row of one split has no sink",
        MMA_SINKS,
        "normaliser(state, PAGEKV_FEATURES ? p.sinks",
        "normaliser(state, 0 ? p.sinks",
    ),
    fault("merged rows have the first head's sink", MMA_SINKS, "p.sinks, head)", "p.sinks, 0)"),
    fault("sinks are not in base 2", MMA_SINKS, "sinks[head] * LOG2_E", "sinks[head]"),
    Fault(
        "merged rows have no sink",
        "pagekv_merge",
        "normaliser({maximum, m.sum}, p.sinks",
        "normaliser({maximum, m.sum}, nullptr",
        UNFUSED_SINKS,
    ),
    fault(
        "block ids over those of the segment in use",
        LONG,
        "source.place(tile / SEGMENT_TILES + 1)",
        "source.place(tile / SEGMENT_TILES)",
    ),
    fault("block ids of the wrong segment", LONG, "tile / SEGMENT_TILES + 1, ids", "tile / SEGMENT_TILES + 2, ids"),
    fault("a long split is not looked up to its end", LONG, "if (own_ids) keep_ids", "if (false) keep_ids"),
    fault("keys have the first head's scale", FP8, "kv_scale(p, 0, work.kv_head)", "kv_scale(p, 0, 0)"),
    fault("values have the first head's scale", FP8, "kv_scale(p, 1, work.kv_head)", "kv_scale(p, 1, 0)"),
    wide("no barrier after the members", "            __syncthreads();  // the members are there\n"),
    wide("the next item's members over those in use", "((i32*)members(ended + 1))", "((i32*)members(ended))"),
    wide("no barrier between row tiles", ROUNDS),
    wide("members see as much as the first", "work.member(work.member_of(row)).context", "work.member(0).context"),
    wide("queries of the first member", "work.member(work.member_of(existing)).row", "work.member(0).row"),
    wide("results of the first member", "work.member(work.member_of(of_block))", "work.member(0)"),
    wide("heads out of order", "(work.first_head + work.head_of(existing))", "(work.first_head + existing % 2)"),
    Fault(
        "only the first member is merged",
        "pagekv_decode_wide",
        "if (flags[m] != MERGED_HERE)",
        "if (flags[m] != MERGED_HERE || m > 0)",
        SHARED_WHOLE,
    ),
    Fault(
        "ids beside the table are read",
        "pagekv_decode",
        TABLE_END,
        "(first + blocks, 1000000);",
        MMA_TABLE_END,
        sanitizer=True,
    ),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("fault", visible(FAULTS), ids=str)
def test_planted_faults_are_noticed(fault: Fault) -> None:
    assert_noticed(fault)
