"""Faults planted in the text of the split prefill and of its merge: their tests would notice each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.kernels.host_build import HostLauncher
from support.kernels.planted_faults import Fault, assert_noticed, visible
from support.kernels.prefill_cases import check, random_prompts, run_prefill, worst_error
from support.kernels.stored_sequences import PLAIN, TOLERANCE, Features, store

from pagekv.kernels.prefill_splits import SplitRule
from pagekv.kernels.variants import Variant

Check = Callable[[HostLauncher], None]
RULE = SplitRule(most_whole=100, least_log2=6, most_splits=4)
HALF = Variant("float16", "float16", 64)


def of_chunk(variant: Variant = HALF, features: Features = PLAIN, **how: Any) -> Check:
    """Rows in front of the first split row, and behind it on both sides of a cut."""
    used = replace(variant, features=features != PLAIN)
    prompts = random_prompts(np.random.default_rng(0), used, [3, 34], [260, 130], group=2)
    return lambda launcher: check(launcher, prompts, features, rule=RULE, **how)


def of_blocks_that_the_window_left(launcher: HostLauncher) -> None:
    rng, features = np.random.default_rng(3), Features(window=110)
    prompts = random_prompts(rng, Variant("float16", "float16", 64, features=True), [10], [200])
    cache = store(rng, prompts.sequences, 16)
    with launcher.forbidden(*(cache.pool[block] for block in cache.tables[0, : 81 // 16])):
        result = run_prefill(launcher, prompts, cache, features, rule=RULE, plan_window=0)
    assert worst_error(prompts, result, features) <= TOLERANCE["float16"]


def fault(name: str, old: str, new: str, check_: Check | None = None, kernel: str = "pagekv_prefill") -> Fault:
    return Fault(name, kernel, old, new, check_ or of_chunk())


FP8 = Variant("float16", "float8_e4m3fn", 64)
FAULTS = [
    fault("rows that are not split see one key", "if (!split.all()) {", "if (true) {"),
    fault("rows that are not split leave partial results", "if (!Split::of(p).all()) {", "if (true) {"),
    fault("rows that are split leave no partial results", "if (!Split::of(p).all()) {", "if (false) {"),
    fault("keys before the split count", "max(first_key, split.first_key())", "first_key"),
    fault("keys behind the split count", "min(end_key, split.end_key())", "end_key"),
    fault("a split ends a key early", "(index + 1) << log2", "((index + 1) << log2) - 1"),
    fault("splits have another length", "word >> 24", "(word >> 24) - 1"),
    fault("rows in front of a split have a partial result", "partial >= merge.partials", "false"),
    fault("rows beyond the last have a partial result", "if (row >= all.count) return -1;", ""),
    fault(
        "a partial result goes to its neighbour's place",
        "merge.first_partial + partial",
        "merge.first_partial + (partial ^ 1)",
    ),
    fault(
        "heads go to their neighbours' places",
        "p.num_heads + all.head_of(row, position)",
        "p.num_heads + (all.head_of(row, position) ^ 1)",
    ),
    fault("maxima are in another base", "maximum[i] * unit", "maximum[i] * (unit > 0.0f ? 1.0f : unit)"),
    fault(
        "maxima count the factor twice",
        "PAGEKV_FEATURES ? 1.0f : keys.factor",
        "keys.factor",
        of_chunk(features=Features(soft_cap=5.0)),
    ),
    fault("values have no scale", "from[i % 2 * 2] * keys.value_factor", "from[i % 2 * 2]", of_chunk(FP8)),
    fault(
        "a lane's sum stands for its row's",
        "total += __shfl_xor_sync(kFullWarp, total, 2);\n            const i64",
        "const i64",
    ),
    fault(
        "fp32 dims of another lane",
        "place * HEAD_SIZE + lane();",
        "place * HEAD_SIZE + (lane() ^ 1);",
        of_chunk(Variant("float32", "float32", 64)),
    ),
    fault("a row is left out of the merge", "merge.row < 0", "merge.row <= 0", kernel="pagekv_merge_rows"),
    fault("a head too many is merged", "head < p.num_heads", "true", of_chunk(), kernel="pagekv_merge_rows"),
    fault(
        "sinks are forgotten",
        "{maximum, m.sum}, p.sinks, head",
        "{maximum, m.sum}, nullptr, head",
        of_chunk(features=Features(sinks=True)),
        kernel="pagekv_merge_rows",
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
