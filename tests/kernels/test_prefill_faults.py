"""Faults planted in the text of the prefill kernel: its tests would notice each of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from decode_cases import Features
from host_build import HostLauncher
from planted_faults import Fault, assert_noticed, visible
from prefill_cases import check, mixed_batch, random_prompts, run_stored, same_bits

from pagekv.kernels.variants import Variant

Check = Callable[[HostLauncher], None]
HALF = Variant("float16", "float16", 128)
FULL = Variant("float32", "float32", 64)


def of_mixed_batch(variant: Variant = HALF) -> Check:
    return lambda launcher: check(launcher, mixed_batch(variant, group=2))


def of_window(launcher: HostLauncher) -> None:
    check(launcher, mixed_batch(Variant("float16", "float16", 64, features=True), group=2), Features(window=40))


def of_bits(launcher: HostLauncher) -> None:
    """A chunk whose rows share warps otherwise than in the whole."""
    rng = np.random.default_rng(6)
    prompts = random_prompts(rng, FULL, [150], [150], kv_heads=1)
    whole = run_stored(launcher, rng, prompts)
    same_bits(run_stored(launcher, rng, prompts.chunk(0, 50, 150)), whole[50:])


def fault(name: str, old: str, new: str, check_: Check | None = None) -> Fault:
    return Fault(name, "pagekv_prefill", old, new, check_ or of_mixed_batch())


FAULTS = [
    fault("no barrier before a tile is used", "        __syncthreads();\n        issue(", "        issue("),
    fault("a wait too few", "cp_async_wait<STAGES - 2>", "cp_async_wait<STAGES - 1>"),
    fault("a tile is overwritten while in use", "slot == 0 ? STAGES - 1 : slot - 1", "slot"),
    fault("values are taken for keys", "half % 2 ? p.kv_stride *", "half % 2 == 0 ? p.kv_stride *"),
    fault("addresses of the wrong tile", "put_address(tile + 2, next_block)", "put_address(tile + 1, next_block)"),
    fault("blocks of the wrong tile", "block_of_thread(tile + 3)", "block_of_thread(tile + 2)"),
    fault("a key too many is looked up", "key < keys().end", "key <= keys().end"),
    fault("zeros do not replace what is nobody's", "(address & 1) == 0", "true"),
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
    fault("masks of the window are forgotten", "|| begin < logits.first_visible(last)", "", of_window),
    fault(
        "a tile without visible keys is not quite nothing",
        "const float shrink = weight(maximum[i], highest);",
        "const float shrink = weight(maximum[i], highest) * 1.0000001f;",
        of_bits,
    ),
]


@pytest.mark.parametrize("fault", visible(FAULTS), ids=str)
def test_planted_faults_are_noticed(fault: Fault) -> None:
    assert_noticed(fault)
