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
# A ring of two stages with the queries behind it.
FP8_128 = check(Variant("bfloat16", "float8_e4m3fn", 128), Features())
UNFUSED = check(Variant("float16", "float16", 64, True), FEATURES, fused=False)
MMA_SINKS = check(Variant("float16", "float16", 64, True), SINKS)
UNFUSED_SINKS = check(Variant("float16", "float16", 64, True), SINKS, fused=False)

# Splits of four segments, of which the third and fourth are looked up while tiles are on their way.
LONG = check(Variant("float16", "float16", 64, True), Features(), lengths=(16384 + 600, 5000))
SPLITS_OF_128 = check(Variant("bfloat16", "bfloat16", 128, True), FEATURES, blocks=1)


SHARED = check(
    Variant("float16", "float16", 64, True), Features(window=600), lengths=(900, 800, 790, 860, 515, 870), share=512
)

# Rows that end with what they share: the wide kernel finishes them.
SHARED_WHOLE = check(Variant("float16", "float16", 64, True), Features(), lengths=(512,) * 5, share=512)


def fault(name: str, run: Callable[[HostLauncher], None], old: str, new: str = "") -> Fault:
    return Fault(name, "pagekv_decode", old, new, run)


def wide(name: str, old: str, new: str = "") -> Fault:
    return Fault(name, "pagekv_decode_wide", old, new, SHARED)


WAIT = "        cp_async_wait<STAGES - 2>();\n        __syncthreads();\n        start("
START_TOO_EARLY = "start(tile + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);\n" + WAIT.replace(
    "start(", "if (false) start("
)
SLICES = "        __syncthreads();\n        merge_slices("
LAST = "min(end, longest)"
STRANDS = "for (i32 i = strand; i < merge.partials; i += STRANDS) parts"
COUNTED = "    __syncthreads();\n    constexpr int PIECES = HEAD_SIZE / 4;\n    for (i32 m = 0"
TABLE_END = "(first + blocks, p.table_stride);"
FAULTS = [
    fault("no wait for a tile", MMA, WAIT, WAIT.replace("cp_async_wait<STAGES - 2>();", "")),
    fault("a wait for one tile too few", MMA, WAIT, WAIT.replace("- 2", "- 1")),
    fault("no barrier between copying and using a tile", MMA, WAIT, WAIT.replace("__syncthreads();", "")),
    fault("a stage is filled again before the barrier", FMA, WAIT, START_TOO_EARLY),
    fault("a stage of two is filled again before the barrier", FP8_128, WAIT, START_TOO_EARLY),
    fault("a wait for one tile too few of two", FP8_128, WAIT, WAIT.replace("- 2", "- 1")),
    fault("tiles overwrite queries in use", FP8_128, "QUERY_IN_RING = QUERY_IN_REGISTERS && ", "QUERY_IN_RING = "),
    fault("dims of queries in another order than those of fp8 keys", FP8_128, "0x5410u", "0x7610u"),
    fault("results overwrite a tile in use", MMA, "__syncthreads();  // the ring is free"),
    fault("no barrier after the block ids, mma", MMA, "__syncthreads();  // the row indices are there"),
    fault("no barrier after the block ids, fma", FMA, "__syncthreads();  // the row indices are there"),
    fault("no barrier before the merge of slices", MMA, SLICES, SLICES.replace("__syncthreads();", "")),
    fault("no barrier between items", SPLITS_OF_128, "__syncthreads();  // shared memory is free for the next work"),
    fault("no barrier of a warp between weights and values", FMA, "            __syncwarp();\n"),
    fault("a wrong block", MMA, "max(table[first + i], 0)", "max(table[first + (i ^ 1)], 0)"),
    fault("the wrong layer", MMA, "(i64)p.layer * 2 * p.kv_stride", "(i64)p.layer * p.kv_stride"),
    fault("keys for values", MMA, "rows.values = p.kv_stride", "rows.values = 0 * p.kv_stride"),
    fault("one token too many", MMA, LAST, LAST.replace("longest", "longest + 1")),
    fault("one token too few", FP8, LAST, LAST.replace("longest", "longest - 1")),
    fault("a window of one more", MMA_WINDOW, "? position - window + 1 : 0", "? position - window : 0"),
    fault("masked keys are weighed", MMA, "visible ? logits.base2(s[n][i]", "visible || true ? logits.base2(s[n][i]"),
    fault("slots never written are copied", MMA, "(source + values), valid)", "(source + values), valid || true)"),
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
    fault("block ids over those of the segment in use", LONG, "(segment % 2 ? blocks : 0)", "0"),
    fault("block ids of the wrong segment", LONG, "tile / SEGMENT_TILES + 1);", "tile / SEGMENT_TILES + 2);"),
    fault(
        "a long split is not looked up to its end",
        LONG,
        "rows.load<THREADS>(p, work, tile",
        "if (tile < 0) rows.load<THREADS>(p, work, tile",
    ),
    fault("keys have the first head's scale", FP8, "kv_scale(p, 0, work.kv_head)", "kv_scale(p, 0, 0)"),
    fault("values have the first head's scale", FP8, "kv_scale(p, 1, work.kv_head)", "kv_scale(p, 1, 0)"),
    wide("no barrier after the members", "        __syncthreads();  // the members are there\n"),
    wide("no barrier between row tiles", "if (WIDE && merged > 0) __syncthreads();  // the row tile before is merged"),
    wide("members see as much as the first", "work.member(work.member_of(row)).context", "work.member(0).context"),
    wide("queries of the first member", "work.member(work.member_of(existing)).row", "work.member(0).row"),
    wide("results of the first member", "work.member(work.member_of(of_block))", "work.member(0)"),
    wide("heads out of order", "(work.first_head + work.head_of(existing))", "(work.first_head + existing % 2)"),
    Fault(
        "only the first member is merged",
        "pagekv_decode_wide",
        "if (shared[m] != MERGED_HERE)",
        "if (shared[m] != MERGED_HERE || m > 0)",
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
