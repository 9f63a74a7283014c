"""Faults planted in the text of the prefill kernel: its tests would notice each of them.

Not among them, because they cannot show in the emulation: behind the loop, `cp_async_wait<0>` and the barrier where no
tile was walked. Both keep copies of queries from landing on results that are about to leave from the same rows. In the
emulation copies land when their thread waits and never later, and a warp's results have left before the next warp runs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.kernels.host_build import HostLauncher
from support.kernels.planted_faults import Fault, assert_noticed, visible
from support.kernels.prefill_cases import check, mixed_batch, random_prompts, run_prefill, run_stored, worst_error
from support.kernels.stored_sequences import TOLERANCE, Features, same_bits, store

from pagekv.kernels.variants import Variant

Check = Callable[[HostLauncher], None]
HALF = Variant("float16", "float16", 128)
FULL = Variant("float32", "float32", 64)


def of_mixed_batch(variant: Variant = HALF) -> Check:
    return lambda launcher: check(launcher, mixed_batch(variant, group=2))


def of_window(launcher: HostLauncher) -> None:
    check(launcher, mixed_batch(Variant("float16", "float16", 64, features=True), group=2), Features(window=40))


def of_sinks(launcher: HostLauncher) -> None:
    check(launcher, mixed_batch(Variant("float16", "float16", 64, features=True), group=2), Features(sinks=True))


def of_bits(launcher: HostLauncher) -> None:
    """A chunk whose rows share warps otherwise than in the whole."""
    rng = np.random.default_rng(6)
    prompts = random_prompts(rng, FULL, [150], [150], kv_heads=1)
    whole = run_stored(launcher, rng, prompts)
    same_bits(run_stored(launcher, rng, prompts.chunk(0, 50, 150)), whole[50:])


def of_one_prompt(launcher: HostLauncher) -> None:
    """Three blocks of six: whichever they are, one at least has a neighbour, by id, that is nobody's and holds NaN."""
    check(launcher, random_prompts(np.random.default_rng(2), HALF, [40], [40]))


def of_blocks_that_the_window_left(launcher: HostLauncher) -> None:
    """Keys from 151 on are seen, so that tile 2 begins with a block that may be another sequence's by now."""
    rng, features = np.random.default_rng(3), Features(window=40)
    prompts = random_prompts(rng, Variant("float16", "float16", 64, features=True), [10], [200])
    cache = store(rng, prompts.sequences, 16)
    with launcher.forbidden(*(cache.pool[block] for block in cache.tables[0, : 151 // 16])):
        result = run_prefill(launcher, prompts, cache, features)
    assert worst_error(prompts, result, features) <= TOLERANCE["float16"]


def fault(name: str, old: str, new: str, check_: Check | None = None) -> Fault:
    return Fault(name, "pagekv_prefill", old, new, check_ or of_mixed_batch())


START = "    stream.start(first_tile);\n    __syncthreads();\n"
BLOCK = "keys().table[key >> p.block_size_log2]"
FAULTS = [
    fault("no barrier before rows and keys are read", "    __syncthreads();\n    load_queries(", "    load_queries("),
    fault("no barrier before addresses are read", START, START.replace("    __syncthreads();\n", "")),
    fault("a wrong block", BLOCK, BLOCK + " ^ 1", of_one_prompt),
    fault("no barrier before a tile is used", "        __syncthreads();\n        issue(", "        issue("),
    fault("a wait too few", "cp_async_wait<STAGES - 2>", "cp_async_wait<STAGES - 1>"),
    fault("a tile is overwritten while in use", "slot == 0 ? STAGES - 1 : slot - 1", "slot"),
    fault("values are taken for keys", "half % 2 ? p.kv_stride *", "half % 2 == 0 ? p.kv_stride *"),
    fault("addresses of the wrong tile", "put_address(tile + 2, next_block)", "put_address(tile + 1, next_block)"),
    fault("blocks of the wrong tile", "block_of_thread(tile + 3)", "block_of_thread(tile + 2)"),
    fault("a key too many is looked up", "key < keys().end", "key <= keys().end"),
    fault("zeros do not replace what is nobody's", "(address & NOWHERE) == 0", "true"),
    fault("copies that are ignored have a misaligned source", "(address & ~NOWHERE)", "address"),
    fault("rows see the next token", "if (d > 0 ||", "if (d > 1 ||"),
    fault("a tile with one visible key is left out", "begin <= last &&", "begin < last &&"),
    fault("outputs keep their old maximum", "out[i / 2][n][half] *= shrink;", ""),
    fault(
        "rows leave before they are complete", "        __syncwarp();\n        constexpr int", "        constexpr int"
    ),
    fault("rows beyond the last are written", "row_of_warp + from < all.count", "row_of_warp + from <= all.count"),
    fault(
        "fp8 is widened over a tile in use",
        "half % 2 * (TILE_KEYS",
        "0 * (TILE_KEYS",
        of_mixed_batch(Variant("float16", "float8_e4m3fn", 64)),
    ),
    fault(
        "fp32 weights go to another row",
        "weights[i * TILE_KEYS + lane()]",
        "weights[(i ^ 1) * TILE_KEYS + lane()]",
        of_mixed_batch(FULL),
    ),
    fault("the window is a key too wide", "d < oldest", "d < oldest - 1", of_window),
    fault(
        "rows have their neighbour's sink",
        "head + first + row - (position",
        "head + first + (row ^ 1) - (position",
        of_sinks,
    ),
    fault(
        "the sink counts beside the sum, not beside the maximum", "weight(sink, common)", "weight(sink, 0.0f)", of_sinks
    ),
    fault(
        "values have the first head's scale",
        "kv_scale(p, 1, rows.head / rows.group)",
        "kv_scale(p, 1, 0)",
        of_mixed_batch(Variant("float16", "float8_e4m3fn", 64)),
    ),
    fault("masks of the window are forgotten", "|| begin < logits.first_visible(last)", "", of_window),
    fault(
        "a tile without visible keys is not quite nothing",
        "const float shrink = weight(maximum[i], highest);",
        "const float shrink = weight(maximum[i], highest) * 1.0000001f;",
        of_bits,
    ),
    Fault(
        "keys that the window has left are read",
        "pagekv_prefill",
        "return key >= keys().first && key",
        "return key",
        of_blocks_that_the_window_left,
        sanitizer=True,
    ),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("fault", visible(FAULTS), ids=str)
def test_planted_faults_are_noticed(fault: Fault) -> None:
    assert_noticed(fault)
