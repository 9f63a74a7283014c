"""Rows of decode, prefill, cache write, block copy and swap, over the emulated kernels, and the batch that is timed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench import speed
from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.workload import (
    GQA4,
    MIB,
    AttentionCase,
    BlockCopyCase,
    Heads,
    SwapCase,
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


@pytest.mark.parametrize(
    "case",
    [AttentionCase(SMALL, 2, 40, kv_dtype="float8_e4m3fn"), AttentionCase(SMALL, 2, 300, block_size=256)],
    ids=str,
)
def test_other_types_and_block_sizes(machine: HostMachine, arena: Arena, case: AttentionCase) -> None:
    assert speed.attention_row(machine, arena, case, bandwidth=1.0)["case"] == str(case)


def test_write_and_block_copy_rows(machine: HostMachine, arena: Arena) -> None:
    row = speed.write_row(machine, arena, WriteCase(SMALL, 3), bandwidth=1.0)
    assert row["gb_per_s"] == pytest.approx(2 * 3 * 2 * 128 * 2 / 1e6)
    row = speed.block_copy_row(machine, arena, BlockCopyCase(Heads("", 1, 1), 2), bandwidth=1.0)
    assert row["gb_per_s"] == pytest.approx(2 * 2 * 32 * 2 * 16 * 128 * 2 / 1e6)
    assert WriteCase(GQA4, 10).bytes == 10 * 2 * (2 * 8) * 128 * 2


def test_swapped_blocks_arrive(machine: HostMachine, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SwapCase(1, 3, True)
    host = torch.zeros(4 * case.bytes, dtype=torch.uint8)
    monkeypatch.setattr(HostMachine, "pinned", lambda self, size: host)
    row = speed.swap_row(machine, arena, case, (1.0, 2.0))
    device, outside = speed.block_ids(case, 0)
    pools = [memory.view(12, case.bytes // 3) for memory in (arena.view(torch.uint8, 4 * case.bytes), host)]
    assert torch.equal(pools[0][device], pools[1][outside])
    assert pools[1].any(1).sum() == 3
    assert row["in_against_memcpy"] == pytest.approx(row["out_against_memcpy"] / 2)
    assert row["both_gb_per_s"] == 2 * row["out_gb_per_s"]
    assert speed.pinned_copy(machine, arena, len(host)) == (len(host) / 1e6, len(host) / 1e6)


def test_scattered_blocks_never_adjoin_and_the_directions_share_none() -> None:
    for scattered in (True, False):
        (device, host), (device_in, host_in) = (speed.block_ids(SwapCase(1, 5, scattered), half) for half in range(2))
        assert not set(device) & set(device_in)
        assert not set(host) & set(host_in)
        gaps = [abs(a - b) for ids in (device, host) for a in ids for b in ids if a != b]
        assert min(gaps) == (2 if scattered else 1)
        assert max(*device_in, *host_in) < 20
