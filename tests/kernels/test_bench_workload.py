"""Cases of the bench: bytes, operations, the shapes that are covered, and the floor that each case counts for."""

from __future__ import annotations

import pytest

from pagekv.kernels.bench.workload import (
    FLOORS,
    GQA4,
    GQA8,
    MHA,
    MIB,
    MQA,
    DecodeCase,
    Heads,
    PrefillCase,
    SwapCase,
    WriteCase,
    decode_cases,
    decode_floor,
    prefill_cases,
    swap_cases,
)


def test_bytes_of_a_decode_case() -> None:
    # 64 sequences x 1k tokens x 2 (keys, values) x 8 heads x 128 elements x 2 bytes = 256 MiB
    case = DecodeCase(GQA4, 64, 1024)
    assert case.kv_bytes == 256 * MIB
    assert case.bytes == 256 * MIB + 2 * 64 * 32 * 128 * 2
    assert DecodeCase(MHA, 64, 1024).kv_bytes == 4 * case.kv_bytes
    assert DecodeCase(GQA8, 64, 1024).kv_bytes == case.kv_bytes
    assert DecodeCase(MQA, 64, 1024).kv_bytes == case.kv_bytes // 8


def test_flops_of_a_prefill_case_count_visible_pairs_only() -> None:
    heads = Heads("", 1, 1)
    assert PrefillCase(heads, 1, 4).flops == 4 * 128 * (1 + 2 + 3 + 4)
    assert PrefillCase(heads, 1, 2, cached=10).flops == 4 * 128 * (11 + 12)
    assert PrefillCase(heads, 3, 2, cached=10).flops == 3 * PrefillCase(heads, 1, 2, cached=10).flops


def test_bytes_of_a_cache_write_and_of_a_swapped_block() -> None:
    # Read and written: 2 x 8 heads of keys and values, 32 heads of queries.
    assert WriteCase(GQA4, 10).bytes == 10 * 2 * (2 * 8 + 32) * 128 * 2
    assert SwapCase(16, 1, True).block_bytes == 2 * MIB  # 128 KiB a token, Llama 3 8B


def test_cases_cover_what_the_figures_promise() -> None:
    decode, prefill = list(decode_cases()), list(prefill_cases())
    assert {case.heads for case in decode} == {MHA, GQA4, GQA8, MQA}
    assert {(min(c.batch for c in decode), max(c.batch for c in decode))} == {(1, 256)}
    assert {(min(c.context for c in decode), max(c.context for c in decode))} == {(256, 65536)}
    assert {case.new for case in prefill if not case.cached} == {512, 1024, 2048, 4096, 8192, 16384}
    assert any(case.cached for case in prefill)
    assert len({case.name for case in decode}) == len(decode)
    assert len({case.name for case in prefill}) == len(prefill)
    assert all(0 < case.bytes <= 512 * MIB for case in swap_cases())


def test_the_floors_are_those_promised() -> None:
    assert {key: floor.at_least for key, floor in FLOORS.items()} == {
        "decode": 0.88,
        "decode small": 0.82,
        "decode mqa": 0.70,
        "paged": 0.97,
        "layers": 0.95,
        "prefill": 0.80,
        "swap": 0.90,
    }


@pytest.mark.parametrize(
    ("case", "floor"),
    [
        (DecodeCase(GQA4, 64, 4096), "decode"),
        (DecodeCase(MHA, 64, 1024), "decode"),
        (DecodeCase(GQA4, 64, 1024), "decode small"),
        (DecodeCase(MQA, 64, 16384), "decode mqa"),
        (DecodeCase(MQA, 64, 1024), None),  # 8 us of memory beside 4 of fixed costs
        (DecodeCase(GQA4, 1, 65536), None),  # one sequence waits for latencies, however long it is
        (DecodeCase(GQA4, 64, 4096, ragged=True), None),
    ],
)
def test_each_case_counts_for_the_floor_that_it_can_reach(case: DecodeCase, floor: str | None) -> None:
    assert decode_floor(case) == floor
    assert floor is None or case in list(decode_cases())
