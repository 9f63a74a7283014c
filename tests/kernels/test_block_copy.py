"""`block_copy.cu` on the CPU: destinations become their sources, bit for bit, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.host_build import HostLauncher, address, aligned_empty
from support.kernels.planted_faults import Fault, assert_noticed, visible

from pagekv.kernels import launch_config
from pagekv.kernels.params import BLOCK_COPY, fill
from pagekv.kernels.variants import Variant

VARIANT = Variant("float16", "float16", 64)  # the kernel depends on none


def copy_blocks(launcher: HostLauncher, block_bytes: int, pairs: list[tuple[int, int]], num_blocks: int) -> None:
    """Launches once and compares the pool with the same copies by NumPy."""
    pool = aligned_empty((num_blocks, block_bytes), np.uint8)
    pool[:] = np.random.default_rng(1).integers(0, 256, pool.shape)
    expected = pool.copy()
    sources, destinations = np.array(pairs).T
    expected[destinations] = pool[sources]
    columns = np.array(pairs, np.int32)
    params = fill(BLOCK_COPY, pool=address(pool), pairs=address(columns), block_bytes=block_bytes)
    shape = launch_config.block_copy(len(pairs), block_bytes)
    strangers = [pool[block] for block in set(range(num_blocks)) - {*sources, *destinations}]
    with launcher.forbidden(*strangers):
        launcher.launch("pagekv_block_copy", VARIANT, shape, params)
    np.testing.assert_array_equal(pool, expected)


@st.composite
def pairs_of_blocks(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Pairs in which no destination is part of another pair; a source may be copied to several places."""
    num_blocks = draw(st.integers(2, 12))
    order = draw(st.permutations(range(num_blocks)))
    count = draw(st.integers(1, num_blocks - 1))
    destinations, free = order[:count], order[count:]
    return [(draw(st.sampled_from(free)), destination) for destination in destinations], num_blocks


@pytest.mark.sanitize
@settings(max_examples=30)
@given(
    pairs=pairs_of_blocks(),
    block_bytes=st.sampled_from([16, 48, 2048, 16384, 16400, 40_000, 131_072]),
)
def test_any_pairs_are_copied(
    launcher: HostLauncher, pairs: tuple[list[tuple[int, int]], int], block_bytes: int
) -> None:
    copy_blocks(launcher, block_bytes, *pairs)


def test_a_block_of_more_pieces_than_the_grid_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = launch_config.block_copy(1, 16384 * 5)
    monkeypatch.setattr(launch_config, "block_copy", lambda *_: launch_config.LaunchConfig((1, 2, 1), whole.threads, 0))
    copy_blocks(HostLauncher(), 16384 * 5 - 16, [(1, 0)], 2)


def check(launcher: HostLauncher) -> None:
    copy_blocks(launcher, 40_000, [(3, 0), (3, 4), (1, 2)], 6)


NAME = "pagekv_block_copy"
FAULTS = [
    Fault("the pair's blocks exchanged", NAME, "pair[0] * p.block_bytes", "pair[1] * p.block_bytes", check),
    Fault("the next block", NAME, "pair[1] * p.block_bytes", "(pair[1] + 1) * p.block_bytes", check),
    Fault("the first pair for all", NAME, "static_cast<i64>(blockIdx.x)", "0", check),
    Fault("a piece is left out", NAME, "rest = p.block_bytes - begin", "rest = p.block_bytes - begin - 16", check),
    Fault("whole pieces only", NAME, "(rest < kPieceBytes ?", "(rest < 0 ?", check, sanitizer=True),
    Fault("one vector too many", NAME, ") / 16)", ") / 16) + (pair[0] == 1)", check),
]


@pytest.mark.sanitize
@pytest.mark.parametrize("fault", visible(FAULTS), ids=str)
def test_planted_faults_are_noticed(fault: Fault) -> None:
    assert_noticed(fault)
