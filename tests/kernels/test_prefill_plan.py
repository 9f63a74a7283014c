"""Work items of the prefill kernel: every row once, the heaviest first, and tiles that fit every GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kernels.host_build import HostKernelError, HostLauncher
from support.kernels.prefill_cases import check, mixed_batch

from pagekv.kernels import launch_config
from pagekv.kernels.decode_plan import KernelTile
from pagekv.kernels.prefill_plan import prefill_tile, prefill_work
from pagekv.kernels.tensors import Ints
from pagekv.kernels.variants import Variant, all_variants

TILE = KernelTile(keys=64, rows=128, threads=128, shared_bytes=0)


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def items_of(
    counts: list[int], contexts: list[int], *, group: int = 1, window: int = 0, chosen: list[int] | None = None
) -> list[tuple[int, int]]:
    """(sequence, first row) of every item."""
    sequences = list(range(len(counts))) if chosen is None else chosen
    work = prefill_work(
        ints(0, *np.cumsum(counts).tolist()),
        ints(*contexts),
        ints(*sequences),
        group_size=group,
        tile=TILE,
        window=window,
    )
    assert work.items.dtype == np.int32
    assert len(work.split_items) == len(work.merges) == work.num_partials == 0
    rows = np.array(counts, np.int32)[work.items[:, 0]] * group
    assert work.items[:, 2].tolist() == np.minimum(rows - work.items[:, 1], TILE.rows).tolist()
    assert not work.items[:, 3].any()
    return [(int(sequence), int(row)) for sequence, row, *_ in work.items]


def test_a_tile_is_made_of_queries_and_the_heads_of_a_group() -> None:
    assert items_of([65], [65], group=2) == [(0, 128), (0, 0)]
    assert items_of([64], [64], group=2) == [(0, 0)]
    # 19 queries of 7 heads are 133 rows: the second tile begins at head 2 of query 18.
    assert sorted(items_of([19], [19], group=7)) == [(0, 0), (0, 128)]


def test_sequences_without_rows_have_no_items() -> None:
    assert items_of([0, 3, 0], [9, 3, 0]) == [(1, 0)]
    assert items_of([], []) == []


def test_only_chosen_sequences_get_items() -> None:
    assert items_of([1, 200, 1], [9, 200, 9], chosen=[0, 2]) == [(0, 0), (2, 0)]


def test_items_that_walk_the_most_keys_come_first() -> None:
    # Keys walked: 200 and 328; 1; 1000.
    assert items_of([256, 1, 1], [328, 1, 1000]) == [(2, 0), (0, 128), (0, 0), (1, 0)]
    # With a window of 64 all but the shortest walk about as many: order of the batch.
    assert items_of([256, 1, 1], [328, 1, 1000], window=64)[0] == (0, 0)


@given(
    shapes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 500)), max_size=6),
    group=st.integers(1, 16),
    window=st.sampled_from([0, 1, 100]),
)
def test_every_row_is_in_one_item(shapes: list[tuple[int, int]], group: int, window: int) -> None:
    counts = [count for count, _ in shapes]
    contexts = [count + past for count, past in shapes]
    items = items_of(counts, contexts, group=group, window=window)
    assert sorted(items) == [
        (sequence, row) for sequence, count in enumerate(counts) for row in range(0, count * group, TILE.rows)
    ]

    def walked(item: tuple[int, int]) -> int:
        sequence, row = item
        past, rows = contexts[sequence] - counts[sequence], counts[sequence] * group
        last = past + (min(row + TILE.rows, rows) - 1) // group
        first = max(0, past + row // group - window + 1) if window else 0
        return last // TILE.keys - first // TILE.keys

    weights = [walked(item) for item in items]
    assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize("variant", all_variants(), ids=str)
def test_tiles_fit_the_shared_memory_of_every_gpu(variant: Variant) -> None:
    """99 KiB a thread block on sm_86, 89 and 120."""
    assert prefill_tile(variant).shared_bytes <= 99 << 10


@pytest.mark.kernels
@pytest.mark.parametrize(
    "variant",
    [
        Variant("float16", "float16", 128),
        Variant("bfloat16", "float8_e4m3fn", 64, features=True),
        Variant("float32", "float32", 64, features=True),
    ],
    ids=str,
)
def test_shared_memory_is_what_the_source_uses(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough (every test of the kernel shows it), and not a row of its last table more."""
    monkeypatch.setattr(
        launch_config, "prefill_tile", lambda v: replace(tile := prefill_tile(v), shared_bytes=tile.shared_bytes - 16)
    )
    with pytest.raises(HostKernelError, match="wrong address"):
        check(HostLauncher(), mixed_batch(variant))
