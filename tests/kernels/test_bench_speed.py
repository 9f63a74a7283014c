"""Rows of decode, prefill, cache write and block copy, over the emulated kernels, and the batch that is timed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernels.bench_machine import HostMachine
from support.kernels.host_build import HostLauncher

from pagekv.kernels.bench import speed
from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.workload import (
    GQA4,
    MIB,
    AttentionCase,
    BlockCopyCase,
    Heads,
    WriteCase,
)

SMALL = Heads("GQA 2", 2, 1)


def test_rounds_walk_over_more_memory_than_a_cache_holds_and_take_a_millisecond() -> None:
    room = 1 << 40
    assert speed.layers_and_rounds(1 * MIB, room, 256) == (256, 256)
    assert speed.layers_and_rounds(8 * MIB, room, 256) == (128, 256)
    assert speed.layers_and_rounds(256 * MIB, room, 256) == (4, 16)
    assert speed.layers_and_rounds(16 << 30, room, 256) == (2, 2)
    assert speed.layers_and_rounds(8 * MIB, 20 * MIB, 256)[0] == 2
    assert speed.layers_and_rounds(8 * MIB, room, 2) == (2, 2)


def test_a_timed_batch_computes_attention(machine: HostMachine, arena: Arena) -> None:
    # The timed work is all of attention: its result is that of torch over the same blocks.
    batch = speed.paged(machine, arena, AttentionCase(SMALL, 2, 40), num_layers=2)
    batch.attend(1)
    pool = batch.held[-1]
    for sequence in range(2):
        blocks = torch.from_numpy(np.random.default_rng(0).permutation(6).reshape(2, 3)[sequence])
        key, value = (pool[blocks, 1, which].flatten(0, 1)[:40].float() for which in (0, 1))
        logits = torch.einsum("hd,kgd->hk", batch.query[sequence].float(), key) / 128**0.5
        expected = torch.einsum("hk,kgd->hd", logits.softmax(-1), value)
        assert (batch.out[sequence].float() - expected).abs().max() < 0.05


def test_decode_and_prefill_rows(machine: HostMachine, arena: Arena) -> None:
    case = AttentionCase(SMALL, 2, 40)
    row = speed.attention_row(machine, arena, case, bandwidth=2.0)
    assert [row["microseconds"], row["microseconds_least"], row["microseconds_most"]] == [1000, 900, 1200]
    assert row["sm_mhz"] == 1980
    assert row["gb_per_s"] == pytest.approx(case.bytes / 1e6)
    assert row["share_of_copy"] == pytest.approx(row["floor_microseconds"] / row["microseconds"])
    case = AttentionCase(SMALL, 1, 40, new=24)
    row = speed.attention_row(machine, arena, case, bandwidth=1.0)
    assert row["tflop_per_s"] == pytest.approx(case.flops / 1e9)
    assert (row["thread_blocks"], row["partial_mib"]) == (1, 0)


def test_thread_blocks_and_partial_results_of_a_short_chunk_behind_a_long_context(
    machine: HostMachine, arena: Arena
) -> None:
    """Of the plan that is timed; five splits of 2,048 keys."""
    work = speed.paged(machine, arena, AttentionCase(SMALL, 1, 8200, 3, kv_dtype="float8_e4m3fn"), num_layers=1).prompts
    assert (work.walks, work.partial_bytes(SMALL.num_heads, 128)) == (5, 3 * 5 * 2 * 130 * 4)


@pytest.mark.parametrize(
    "case",
    [AttentionCase(SMALL, 2, 40, kv_dtype="float8_e4m3fn"), AttentionCase(SMALL, 2, 300, block_size=256)],
    ids=str,
)
def test_other_types_and_block_sizes(machine: HostMachine, arena: Arena, case: AttentionCase) -> None:
    assert speed.attention_row(machine, arena, case, bandwidth=1.0)["case"] == str(case)


def test_sequences_that_share_a_prefix_read_it_once(machine: HostMachine, arena: Arena) -> None:
    """The row says how many times fewer bytes are read, and the emulated kernels copy just so many."""
    case = AttentionCase(SMALL, 9, 300, shared=256)
    assert case.kv_bytes == (256 + 9 * 44) * 2 * 128 * 2
    row = speed.attention_row(machine, arena, case, bandwidth=1.0)
    assert row["times_fewer_bytes"] == pytest.approx(9 * 300 / (256 + 9 * 44))
    batch = speed.paged(machine, arena, case, num_layers=2)
    assert isinstance(machine.launcher, HostLauncher)
    before = machine.launcher.copied_bytes
    batch.attend(1)
    copied = machine.launcher.copied_bytes - before
    # Queries are copied for the shared split and for each sequence's own.
    assert copied == case.kv_bytes + 2 * 9 * 2 * 128 * 2


def test_write_and_block_copy_rows(machine: HostMachine, arena: Arena) -> None:
    row = speed.write_row(machine, arena, WriteCase(SMALL, 3), bandwidth=1.0)
    assert row["gb_per_s"] == pytest.approx(2 * 3 * 2 * 128 * 2 / 1e6)
    row = speed.block_copy_row(machine, arena, BlockCopyCase(Heads("", 1, 1), 2), bandwidth=1.0)
    assert row["gb_per_s"] == pytest.approx(2 * 2 * 32 * 2 * 16 * 128 * 2 / 1e6)
    assert WriteCase(GQA4, 10).bytes == 10 * 2 * (2 * 8) * 128 * 2
