"""Rows beside those of the users' bench, over the emulated kernels; peers that fail."""

from __future__ import annotations

import pytest
import torch
from gpu_first import kernel_rows
from gpu_first.floors import decode_floor
from gpu_first.kernel_rows import LayoutCase, RopeWriteCase, layout_cases
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.speed import paged
from pagekv.kernels.bench.workload import GQA4, AttentionCase, Heads

SMALL = Heads("GQA 2", 2, 1)


@pytest.fixture(scope="module")
def machine() -> HostMachine:
    return HostMachine()


@pytest.fixture(scope="module")
def arena(machine: HostMachine) -> Arena:
    return Arena(machine, machine.memory())


def test_ragged_contexts_have_the_average_of_equal_ones() -> None:
    lengths = LayoutCase(GQA4, 64, 4096, ragged=True).contexts
    assert (lengths.min(), lengths.max()) == (1, 8192)
    assert abs(lengths.mean() - 4096) < 1
    assert len(set(lengths.tolist())) == 64


def test_layouts_are_those_of_real_pools_and_loads() -> None:
    names = {str(case) for case in layout_cases()}
    assert {"GQA 4, 64 x 1k, 32 layers", "GQA 4, 256 x 4k, ragged", "GQA 4, 64 x 4k, fp8"} <= names
    assert "GQA 4, 64 x 4k, block size 256" in names
    assert all(decode_floor(case) is None for case in layout_cases())


@pytest.mark.kernels
def test_decode_and_prefill_rows(machine: HostMachine, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    row = kernel_rows.decode_row(machine, arena, AttentionCase(SMALL, 2, 40), 1.0)
    assert (row["sm_mhz"], row["watts"]) == (1980, 600)
    assert row["against_flash"] == 1
    row = kernel_rows.prefill_row(machine, arena, AttentionCase(SMALL, 1, 40, 24))
    assert (row["new"], row["cached"], row["against_flash"]) == (24, 16, 1)
    assert "against_cudnn" not in row
    row = kernel_rows.wgmma_row(machine, arena, AttentionCase(SMALL, 1, 40, 24))
    assert (row["new"], row["cached"], row["against_mma"]) == (24, 16, 1)
    monkeypatch.setattr(kernel_rows, "SMALL", 0)
    row = kernel_rows.decode_row(machine, arena, AttentionCase(Heads("", 1, 1), 64, 1), 1.0)
    assert row["counts_for"] == {"paged": 1}


@pytest.mark.kernels
@pytest.mark.parametrize(
    "case", [LayoutCase(SMALL, 2, 40, ragged=True), LayoutCase(SMALL, 2, 40, pool_layers=5)], ids=str
)
def test_what_real_pools_add_is_measured_too(machine: HostMachine, arena: Arena, case: LayoutCase) -> None:
    row = kernel_rows.decode_row(machine, arena, case, 1.0)
    assert row["case"] == str(case) != str(AttentionCase(SMALL, 2, 40))
    assert "against_flash" not in row
    assert row["counts_for"] == ({"layers": 1} if case.pool_layers else {})


@pytest.mark.kernels
def test_a_cache_write_with_rope(machine: HostMachine, arena: Arena) -> None:
    row = kernel_rows.rope_write_row(machine, arena, RopeWriteCase(SMALL, 3), 1.0)
    # Read and written: 2 heads of keys and values, 2 heads of queries.
    assert row["gb_per_s"] == pytest.approx(3 * 2 * (2 + 2) * 128 * 2 / 1e6)
    assert row["case"] == "GQA 2, 3 tokens, RoPE"


@pytest.mark.kernels
@pytest.mark.parametrize(
    "heads", [SMALL, Heads("more heads than the narrow kernel takes", 20, 1)], ids=["narrow", "wide"]
)
def test_without_a_table_the_kernel_computes_the_same_over_blocks_in_order(
    machine: HostMachine, arena: Arena, heads: Heads
) -> None:
    """And reads no table: one that is full of ids of no block changes nothing."""
    case = AttentionCase(heads, 2, 300)
    torch.manual_seed(0)
    batch = paged(machine, arena, case, num_layers=2, scattered=False)
    batch.attend(1)
    expected = batch.out.clone()
    torch.manual_seed(0)
    batch = paged(machine.edited(kernel_rows.without_table), arena, case, num_layers=2, scattered=False)
    tables = batch.held[0].numpy()
    first = (batch.plan.at["block_tables"] - batch.held[0].data_ptr()) // 4
    tables[first : first + 2 * batch.plan.table_stride] = 10**6
    batch.attend(1)
    assert torch.equal(batch.out, expected)
    with pytest.raises(ValueError, match="has no"):
        kernel_rows.without_table("void pagekv_decode(const DecodeParams p)")


@pytest.mark.parametrize("said", ["no kernel", "CUDA error: operation not permitted when stream is capturing"])
def test_a_peer_that_fails_is_named_and_costs_nothing_else(said: str) -> None:
    def fail() -> float:
        raise RuntimeError(f"{said}\nlong trace")

    assert kernel_rows.against("sdpa", 1.0, fail) == {"against_sdpa": None, "sdpa_failed": said}


def test_a_fault_of_the_device_is_no_failure_of_a_peer() -> None:
    def fault() -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernel_rows.against("sdpa", 1.0, fault)
