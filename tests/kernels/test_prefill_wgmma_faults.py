"""Faults planted in the text of the prefill kernel of warpgroups: its tests would notice each of them.

Not among them, because they cannot show in the emulation: fences between copies and products, registers dealt anew, and
both waits for `barriers.queries`, since a warp there reads its own 16 query rows alone, once all warps wait.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.kernels.host_build import HostLauncher
from support.kernels.planted_faults import Fault, assert_noticed, visible
from support.kernels.prefill_cases import check, mixed_batch, random_prompts
from support.kernels.stored_sequences import Features

from pagekv.kernels.prefill_splits import SplitRule
from pagekv.kernels.variants import Variant

HALF = Variant("float16", "float16", 128)
RULE = SplitRule(most_whole=100, least_log2=7, most_splits=4)


def of_long_prompt(launcher: HostLauncher) -> None:
    """Nine tiles, so that every slot is used again."""
    check(launcher, random_prompts(np.random.default_rng(0), HALF, [70], [1100], group=2, kv_heads=1), wgmma=True)


def of_mixed_batch(launcher: HostLauncher) -> None:
    check(launcher, mixed_batch(HALF, group=2), wgmma=True)


def of_crossing(launcher: HostLauncher) -> None:
    """The last key of a tile, 127, stands among the positions of a warp, 124 to 131."""
    check(launcher, random_prompts(np.random.default_rng(0), HALF, [70], [170], group=2), wgmma=True)


def of_window(launcher: HostLauncher) -> None:
    check(launcher, mixed_batch(Variant("float16", "float16", 64, True), group=2), Features(window=40), wgmma=True)


def of_splits(launcher: HostLauncher) -> None:
    check(launcher, random_prompts(np.random.default_rng(0), HALF, [70], [400], group=2), rule=RULE, wgmma=True)


def fault(name: str, old: str, new: str, check_: Callable[[HostLauncher], None] = of_long_prompt) -> Fault:
    return Fault(name, "pagekv_prefill_wgmma", old, new, check_)


RELEASE = "        barriers.release(turn.slot());\n"
MULTIPLY = "        if (seen) mine.multiply(shared + RING + turn.slot() * TILE_BYTES, score);\n"
ADD = "        if (seen) mine.add(shared + RING + turn.slot() * TILE_BYTES);\n"
FULL = "        mbarrier_wait(&barriers.full[turn.slot()], turn.parity());\n"
FAULTS = [
    fault("keys are released before their product is done", MULTIPLY + RELEASE, RELEASE + MULTIPLY),
    fault("no wait for keys", FULL + MULTIPLY, MULTIPLY),
    fault("chunks are not swizzled", "(chunk ^ row) % 8", "(chunk ^ 0 * row) % 8"),
    fault(
        "the second panel of values is the first", "EIGHT_ROWS, PANEL_BYTES, EIGHT_ROWS", "EIGHT_ROWS, 0, EIGHT_ROWS"
    ),
    fault("values are released before their product is done", ADD + RELEASE, RELEASE + ADD),
    fault("no wait for values", FULL + ADD, ADD),
    fault("no wait for products", "        wgmma_wait<0>();\n", ""),
    fault("a product without a fence", "        wgmma_fence();\n", ""),
    fault("a tile is overwritten while in use", "turn.parity() ^ 1);", "1);"),
    fault("slots are waited for a phase too early", "turn.parity() ^ 1);", "turn.parity());"),
    fault("a copy's wait is a group short", "cp_async_wait<1>();", "cp_async_wait<2>();"),
    fault("the last tile is never full", "if (turn.count > 0) mbarrier_arrive", "if (false) mbarrier_arrive"),
    fault("eight rows follow too closely", "(queries + at, 0, EIGHT_ROWS)", "(queries + at, 0, EIGHT_ROWS / 2)"),
    fault("a step takes the wrong elements", "step % 4 * 32", "step % 4 * 16"),
    fault("values follow too closely", "values + k * 2 * EIGHT_ROWS", "values + k * EIGHT_ROWS"),
    fault("the first product adds", ", step > 0);", ", true);"),
    fault("rows see the next token", "if (d > 0 ||", "if (d > 1 ||", of_mixed_batch),
    fault(
        "warps skip products of their warpgroup",
        "positions[first_row + GROUP_ROWS - 1];",
        "mine.positions[15];",
        of_crossing,
    ),
    fault("a tile with one visible key is left out", "begin <= newest &&", "begin < newest &&", of_mixed_batch),
    fault("masks look at the last row", "> mine.positions[0] ||", "> mine.positions[15] ||", of_crossing),
    fault("masks of the window are forgotten", "|| begin < logits.first_visible(mine.positions[15])", "", of_window),
    fault("zeros do not replace what is nobody's", "(from & NOWHERE) == 0", "true", of_mixed_batch),
    fault("blocks of the wrong tile", "block_of_thread(tile + 1)", "block_of_thread(tile)"),
    fault("keys of another row", "__shfl_sync(kFullWarp, address, row)", "__shfl_sync(kFullWarp, address, row ^ 1)"),
    fault("a split begins at the first key", "max(first_key, split.first_key())", "first_key", of_splits),
    fault("rows stand where their neighbours do", "% GROUP_THREADS / 32 * 16;", "% GROUP_THREADS / 32 * 8;"),
]


@pytest.mark.parametrize("fault", visible(FAULTS), ids=str)
def test_planted_faults_are_noticed(fault: Fault) -> None:
    assert_noticed(fault)
