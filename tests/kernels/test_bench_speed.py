"""Rows of decode, prefill, cache write and block copy, over the emulated kernels; peers that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench import speed
from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.paged import paged
from pagekv.kernels.bench.workload import (
    BlockCopyCase,
    DecodeCase,
    Heads,
    PrefillCase,
)

SMALL = Heads("GQA 2", 2, 1)


def test_decode_and_prefill_rows(machine: HostMachine, arena: Arena) -> None:
    row = speed.decode_row(machine, arena, DecodeCase(SMALL, 2, 40), bandwidth=1.0)
    assert [row["microseconds"], row["microseconds_least"], row["microseconds_most"]] == [1000, 900, 1200]
    assert (row["sm_mhz"], row["watts"]) == (1980, 600)
    assert row["gb_per_s"] == pytest.approx(DecodeCase(SMALL, 2, 40).bytes / 1e6)
    assert row["against_flash"] == 1
    row = speed.prefill_row(machine, arena, PrefillCase(SMALL, 1, 24, cached=16))
    assert row["tflop_per_s"] == pytest.approx(PrefillCase(SMALL, 1, 24, cached=16).flops / 1e9)


def test_block_copy_row(machine: HostMachine, arena: Arena) -> None:
    row = speed.block_copy_row(machine, arena, BlockCopyCase(Heads("", 1, 1), 2), bandwidth=1.0)
    assert row["gb_per_s"] == pytest.approx(2 * 2 * 32 * 2 * 16 * 128 * 2 / 1e6)


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(SMALL, 2, 40, ragged=True),
        DecodeCase(SMALL, 2, 40, kv_dtype="float8_e4m3fn"),
        DecodeCase(SMALL, 2, 40, block_size=1),
        DecodeCase(SMALL, 2, 300, block_size=256),
        DecodeCase(SMALL, 2, 40, pool_layers=5),
    ],
    ids=lambda case: case.name,
)
def test_what_real_pools_add_is_measured_too(machine: HostMachine, arena: Arena, case: DecodeCase) -> None:
    row = speed.decode_row(machine, arena, case, bandwidth=1.0)
    assert row["case"] == case.name != DecodeCase(SMALL, 2, case.context).name
    assert "against_flash" not in row


def test_without_a_table_the_kernel_computes_the_same_over_blocks_in_order(machine: HostMachine, arena: Arena) -> None:
    """And reads no table: one that is full of ids of no block changes nothing."""
    options: dict[str, Any] = {"batch": 2, "context": 300, "num_layers": 2, "scattered": False}
    batch = paged(machine, arena, SMALL, **options)
    batch.attend(1)
    expected = batch.out.clone()
    batch = paged(machine, arena, SMALL, **options, launcher=machine.edited(speed.without_table))
    tables = batch.held[0].numpy()
    first = (batch.plan.block_tables - batch.held[0].data_ptr()) // 4
    tables[first : first + 2 * batch.plan.table_stride] = 10**6
    batch.attend(1)
    assert torch.equal(batch.out, expected)
    with pytest.raises(ValueError, match="has no"):
        speed.without_table("void pagekv_decode(const DecodeParams p)")


def test_a_peer_that_fails_is_named_and_costs_nothing_else() -> None:
    def fail() -> float:
        raise RuntimeError("no kernel\nlong trace")

    assert speed.against("sdpa", 1.0, fail) == {"against_sdpa": None, "sdpa_failed": "no kernel"}


def test_a_fault_of_the_device_is_no_failure_of_a_peer() -> None:
    def fault() -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        speed.against("sdpa", 1.0, fault)
