"""Cases of the bench: bytes, operations and the shapes that are covered."""

from __future__ import annotations

from pagekv.kernels.bench.workload import (
    GQA4,
    GQA8,
    MHA,
    MIB,
    MQA,
    AttentionCase,
    Heads,
    WriteCase,
    decode_cases,
    prefill_cases,
)


def test_bytes_of_a_decode_case() -> None:
    # 64 sequences x 1k tokens x 2 (keys, values) x 8 heads x 128 elements x 2 bytes = 256 MiB
    case = AttentionCase(GQA4, 64, 1024)
    assert case.kv_bytes == 256 * MIB
    assert case.bytes == 256 * MIB + 2 * 64 * 32 * 128 * 2
    assert AttentionCase(MHA, 64, 1024).kv_bytes == 4 * case.kv_bytes
    assert AttentionCase(GQA8, 64, 1024).kv_bytes == case.kv_bytes
    assert AttentionCase(MQA, 64, 1024).kv_bytes == case.kv_bytes // 8


def test_flops_of_a_prefill_case_count_visible_pairs_only() -> None:
    heads = Heads("", 1, 1)
    assert AttentionCase(heads, 1, 4, 4).flops == 4 * 128 * (1 + 2 + 3 + 4)
    assert AttentionCase(heads, 1, 12, 2).flops == 4 * 128 * (11 + 12)
    assert AttentionCase(heads, 3, 12, 2).flops == 3 * AttentionCase(heads, 1, 12, 2).flops


def test_bytes_of_a_cache_write() -> None:
    # Read and written: 2 x 8 heads of keys and values.
    assert WriteCase(GQA4, 10).bytes == 10 * 2 * (2 * 8) * 128 * 2


def test_cases_cover_what_the_figures_promise() -> None:
    decode, prefill = list(decode_cases()), list(prefill_cases())
    assert {case.heads for case in decode} == {MHA, GQA4, GQA8, MQA}
    assert {(min(c.batch for c in decode), max(c.batch for c in decode))} == {(1, 256)}
    assert {(min(c.context for c in decode), max(c.context for c in decode))} == {(256, 65536)}
    assert {case.block_size for case in decode} == {1, 16, 64, 256}
    assert {case.kv_dtype for case in decode} == {"bfloat16", "float8_e4m3fn"}
    assert {case.new for case in prefill if case.new == case.context} == {512, 1024, 2048, 4096, 8192, 16384}
    assert any(case.new < case.context for case in prefill)
    assert len({str(case) for case in decode}) == len(decode)
    assert len({str(case) for case in prefill}) == len(prefill)
