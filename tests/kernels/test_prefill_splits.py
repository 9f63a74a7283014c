"""Splits of prompts: where keys are cut, items that have every key once, and places of partial results."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagekv.kernels.decode_plan import KernelTile
from pagekv.kernels.prefill_plan import PrefillWork, prefill_tile, prefill_work
from pagekv.kernels.prefill_splits import SPLIT_RULE, SplitRule
from pagekv.kernels.tensors import Ints
from pagekv.kernels.variants import Variant, all_variants

TILE = KernelTile(keys=16, rows=16, threads=128, shared_bytes=0)
RULE = SplitRule(most_whole=100, least_log2=6, most_splits=4)


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def work_of(counts: list[int], contexts: list[int], *, group: int = 1, **how: Any) -> PrefillWork:
    starts = ints(0, *np.cumsum(counts).tolist())
    every = np.arange(len(counts), dtype=np.int32)
    return prefill_work(starts, ints(*contexts), every, group_size=group, tile=TILE, **{"rule": RULE, **how})


# --- the rule


def test_the_length_of_splits_follows_from_the_number_of_visible_keys() -> None:
    assert SPLIT_RULE.classes(8192) == [(0, 0)]
    expected = [(0, 0), (8193, 11), (32769, 12), (65537, 13), (131073, 14)]
    assert SPLIT_RULE.classes(200_000) == expected
    assert -(-8193 // (1 << 11)) == 5
    for (_, log2), (beyond, next_log2) in pairwise(expected[1:]):
        assert -(-(beyond - 1) // (1 << log2)) == 16
        assert -(-beyond // (1 << next_log2)) == 9


@pytest.mark.parametrize("variant", all_variants(), ids=str)
def test_cuts_lie_between_tiles_of_keys(variant: Variant) -> None:
    assert (1 << SPLIT_RULE.least_log2) % prefill_tile(variant).keys == 0


def test_layers_with_a_short_window_split_nothing() -> None:
    assert [SPLIT_RULE.splits(window) for window in (0, 1, 8192, 8193)] == [True, False, False, True]
    assert len(work_of([70], [300], window=100).split_items) == 0
    assert len(work_of([70], [300], window=101).split_items) > 0


@pytest.mark.parametrize(
    ("context", "window", "most"),
    [(8192, 0, 0), (8193, 0, 16), (1 << 20, 0, 16), (1 << 20, 4096, 0), (1 << 20, 9000, 17)],
)
def test_the_most_partial_results_of_a_row(context: int, window: int, most: int) -> None:
    assert SPLIT_RULE.most_partials(context, window) == most


# --- the work


@given(
    shapes=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([0, 30, 99, 100, 250, 256, 600])), max_size=4),
    group=st.sampled_from([1, 4, 7, 40]),
    window=st.sampled_from([0, 60, 101, 130]),
)
def test_every_visible_key_of_every_row_is_in_one_item(shapes: list[tuple[int, int]], group: int, window: int) -> None:
    counts, contexts = [count for count, _ in shapes], [count + past for count, past in shapes]
    work = work_of(counts, contexts, group=group, window=window)
    starts = np.cumsum([0, *counts]).tolist()

    def rows_of(items: Ints) -> list[tuple[int, int]]:
        return [(int(s), row) for s, first, rows, _ in items for row in range(first, first + rows)]

    everything = [(s, row) for s, count in enumerate(counts) for row in range(count * group)]
    assert sorted(rows_of(work.items)) == everything, "whole, each row is in one item"
    assert all(0 < rows <= TILE.rows for rows in work.items[:, 2])

    def oldest(position: int) -> int:
        return max(0, position - window + 1) if window else 0

    def visible(s: int, row: int) -> int:
        position = contexts[s] - counts[s] + row // group
        return position + 1 - oldest(position)

    long = {(s, row) for s, row in everything if visible(s, row) > RULE.most_whole}
    # Where some rows are split, the same list has the others whole.
    whole = work.split_items[work.split_items[:, 3] == 0]
    assert sorted(rows_of(whole)) == (sorted(set(everything) - long) if long else [])
    assert bool(long) == bool(len(work.split_items))

    keys: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s, first, rows, word in work.split_items[work.split_items[:, 3] > 0].tolist():
        split, log2 = word & 0xFFFFFF, word >> 24
        for row in range(first, first + rows):
            position = contexts[s] - counts[s] + row // group
            begin, end = max(split << log2, oldest(position)), min((split + 1) << log2, position + 1)
            token, _, partials, first_split = work.merges[starts[s] + row // group].tolist()
            assert token == starts[s] + row // group
            assert (begin < end) == (first_split <= split < first_split + partials), "a partial result where keys are"
            if begin < end:
                keys.setdefault((s, row), []).append((begin, end))
    for (s, row), found in keys.items():
        position = contexts[s] - counts[s] + row // group
        assert [begin for begin, _ in sorted(found)] == [oldest(position), *(end for _, end in sorted(found)[:-1])]
        assert max(found)[1] == position + 1
    assert set(keys) == long


@given(counts=st.lists(st.integers(0, 60), min_size=1, max_size=3), group=st.sampled_from([1, 7]))
def test_partial_results_are_side_by_side_in_the_order_of_rows(counts: list[int], group: int) -> None:
    work = work_of(counts, [count + 90 for count in counts], group=group)
    split = work.merges[work.merges[:, 0] >= 0]
    places = [place for _, first, partials, _ in split.tolist() for place in range(first, first + partials)]
    assert places == list(range(work.num_partials))


def test_items_come_heaviest_first_and_those_of_a_split_are_neighbours() -> None:
    items = work_of([40], [250]).split_items
    assert [(first, word & 0xFFFFFF) for _, first, _, word in items.tolist()] == [
        *((first, split) for split in (0, 1, 2) for first in (0, 16, 32)),
        *((first, 3) for first in (16, 32, 0)),
    ]
