"""The bench without a GPU: its arithmetic, its tables, its use of time, and every stage over the emulated kernels."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench import __main__ as bench_main
from pagekv.kernels.bench import flashinfer_peer, speed, stages
from pagekv.kernels.bench.flashinfer_peer import FlashInferPeer, from_text, to_text
from pagekv.kernels.bench.machine import Arena, Clock
from pagekv.kernels.bench.paged import Rounds, paged, ragged_lengths
from pagekv.kernels.bench.report import COLUMNS, BenchReport, table
from pagekv.kernels.bench.scene import Setup
from pagekv.kernels.bench.stages import Bench
from pagekv.kernels.bench.swap_speed import block_ids, swap_row
from pagekv.kernels.bench.workload import (
    FLOORS,
    GQA4,
    GQA8,
    MHA,
    MIB,
    MQA,
    BlockCopyCase,
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
from pagekv.kernels.variants import Variant

SMALL = Heads("GQA 2", 2, 1)
HALF = Variant("float16", "float16", 64)


@pytest.fixture(scope="module")
def machine() -> HostMachine:
    return HostMachine()


@pytest.fixture(scope="module")
def arena(machine: HostMachine) -> Arena:
    return Arena(machine, machine.memory())


def bench_on(machine: HostMachine, arena: Arena, clock: Clock | None = None) -> Bench:
    return Bench(machine, arena, clock or Clock(1e9), BenchReport({"gpu": "none"}), lambda line: None)


# --- arithmetic


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


def test_rounds_walk_over_more_memory_than_a_cache_holds_and_take_a_millisecond() -> None:
    room = 1 << 40
    assert Rounds.of(1 * MIB, room, 256) == Rounds(256, 256)
    assert Rounds.of(8 * MIB, room, 256) == Rounds(128, 256)
    assert Rounds.of(256 * MIB, room, 256) == Rounds(4, 16)
    assert Rounds.of(16 << 30, room, 256) == Rounds(2, 2)
    assert Rounds.of(8 * MIB, 20 * MIB, 256).layers == 2
    assert Rounds.of(8 * MIB, room, 2) == Rounds(2, 2)


def test_ragged_contexts_have_the_average_of_equal_ones() -> None:
    lengths = ragged_lengths(64, 4096)
    assert (lengths.min(), lengths.max()) == (1, 8192)
    assert abs(lengths.mean() - 4096) < 1
    assert len(set(lengths.tolist())) == 64


# --- every stage, over the emulated kernels


def test_decode_and_prefill_rows(machine: HostMachine, arena: Arena) -> None:
    row = speed.decode_row(machine, arena, DecodeCase(SMALL, 2, 40), bandwidth=1.0)
    assert [row["microseconds"], row["microseconds_least"], row["microseconds_most"]] == [1000, 900, 1200]
    assert (row["sm_mhz"], row["watts"]) == (1980, 600)
    assert row["gb_per_s"] == pytest.approx(DecodeCase(SMALL, 2, 40).bytes / 1e6)
    assert row["against_flash"] == 1
    row = speed.prefill_row(machine, arena, PrefillCase(SMALL, 1, 24, cached=16))
    assert row["tflop_per_s"] == pytest.approx(PrefillCase(SMALL, 1, 24, cached=16).flops / 1e9)


def test_a_timed_batch_computes_attention(machine: HostMachine, arena: Arena) -> None:
    # What is timed is the whole thing: the result is that of torch over the same blocks.
    batch = paged(machine, arena, SMALL, batch=2, context=40, seed=3, num_layers=2)
    batch.attend(1)
    pool = batch.held[-1]
    for sequence in range(2):
        blocks = torch.from_numpy(np.random.default_rng(3).permutation(6).reshape(2, 3)[sequence])
        key, value = (pool[blocks, 1, which].flatten(0, 1)[:40].float() for which in (0, 1))
        logits = torch.einsum("hd,kgd->hk", batch.query[sequence].float(), key) / 128**0.5
        expected = torch.einsum("hk,kgd->hd", logits.softmax(-1), value)
        assert (batch.out[sequence].float() - expected).abs().max() < 0.05


def test_memory_and_swap_stages(machine: HostMachine, arena: Arena) -> None:
    bench = bench_on(machine, arena)
    bench.report.copy_gb_per_s = 1.0
    bench.memory([WriteCase(SMALL, 3)], [BlockCopyCase(SMALL, 2), BlockCopyCase(SMALL, 3)])
    bench.swap([SwapCase(1, 2, True), SwapCase(1, 2, False)])
    assert [len(bench.report.sections[name]) for name in ("memory", "swap")] == [3, 2]
    assert bench.report.sections["memory"][1]["case"] == "copy of 2 blocks of 0.25 MiB"
    assert bench.report.notes == []


def test_swapped_blocks_arrive(machine: HostMachine, arena: Arena) -> None:
    case = SwapCase(1, 3, True)
    host = machine.pinned(4 * case.bytes)
    row = swap_row(machine, arena, host, case, (1.0, 2.0))
    device, outside = block_ids(case, 0)
    pools = [memory.view(12, case.block_bytes) for memory in (arena.view(torch.uint8, 4 * case.bytes), host)]
    assert torch.equal(pools[0][device], pools[1][outside])
    assert pools[1].any(1).sum() == 3
    assert row["in_against_memcpy"] == pytest.approx(row["out_against_memcpy"] / 2)
    assert row["both_gb_per_s"] == 2 * row["out_gb_per_s"]


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


# --- time, memory, failures


def test_a_stage_stops_when_its_time_is_up_and_names_what_is_left(machine: HostMachine, arena: Arena) -> None:
    now = iter(range(0, 1000, 10))
    bench = bench_on(machine, arena, Clock(100, lambda: float(next(now))))
    bench.report.copy_gb_per_s = 1.0
    bench.decode([DecodeCase(SMALL, 1, context) for context in range(16, 24)])
    rows = bench.report.sections["decode"]
    assert 0 < len(rows) < 8
    assert "no time was left" in bench.report.notes[0]
    assert bench.report.late
    assert f"1 x {23}" in bench.report.notes[0]


def test_cases_that_do_not_fit_are_named_not_tried(machine: HostMachine, arena: Arena) -> None:
    bench = bench_on(machine, arena)
    bench.decode([DecodeCase(MHA, 256, 65536)])
    assert bench.report.sections["decode"] == []
    assert "MHA, 256 x 64k: more than the 0 GiB of memory" in bench.report.notes[0]


def test_a_case_that_a_watcher_leaves_out_is_not_measured(machine: HostMachine, arena: Arena) -> None:
    seen: list[tuple[str, str]] = []

    class Watcher:
        def begins(self, section: str, case: str) -> bool:
            seen.append((section, case))
            return case.endswith("17")

        def found(self, section: str, row: dict[str, Any]) -> None:
            seen.append((section, "found " + row["case"]))

    bench = bench_on(machine, arena)
    bench.watcher = Watcher()
    bench.report.copy_gb_per_s = 1.0
    bench.decode([DecodeCase(SMALL, 1, context) for context in (16, 17)])
    names = [DecodeCase(SMALL, 1, context).name for context in (16, 17)]
    assert seen == [("decode", names[0]), ("decode", names[1]), ("decode", "found " + names[1])]
    assert bench.correctness([Setup(HALF, (3,))])
    assert len(seen) == 4  # asked, and left out


def test_a_peer_that_fails_is_named_and_costs_nothing_else() -> None:
    def fail() -> float:
        raise RuntimeError("no kernel\nlong trace")

    assert speed.against("sdpa", 1.0, fail) == {"against_sdpa": None, "sdpa_failed": "no kernel"}


def test_a_fault_of_the_device_is_no_failure_of_a_peer() -> None:
    def fault() -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        speed.against("sdpa", 1.0, fault)


def test_stages_share_less_than_all_the_time() -> None:
    shares = [stages.CORRECTNESS, stages.DECODE, stages.PREFILL, stages.MEMORY, stages.SWAP, stages.PEERS]
    assert shares == sorted(shares)
    assert bench_main.TOTAL_SECONDS * stages.PEERS < 8 * 60 - 15


# --- FlashInfer's process


@pytest.mark.parametrize("case", [DecodeCase(GQA4, 64, 1024), PrefillCase(MHA, 2, 512, cached=64)])
def test_cases_travel_to_the_peer_as_text(case: Any) -> None:
    back = from_text(to_text(case))
    assert (back.batch, back.context, back.heads.num_heads, back.heads.num_kv_heads) == (
        case.batch,
        case.context,
        case.heads.num_heads,
        case.heads.num_kv_heads,
    )
    assert type(back) is type(case)


def test_pages_of_the_peer() -> None:
    indptr, indices, last = flashinfer_peer.page_table(DecodeCase(SMALL, 3, 33), torch.device("cpu"))
    assert indptr.tolist() == [0, 3, 6, 9]
    assert sorted(indices.tolist()) == list(range(9))
    assert last.tolist() == [1, 1, 1]


FAKE_PEER = """
import json, sys, time
print("compiling")
print(json.dumps({"version": "0.6.6"}), flush=True)
print(json.dumps({"case": sys.argv[1], "seconds": 0.002}), flush=True)
for case in sys.argv[2:]:
    if case.startswith("prefill"): sys.exit("compiler not found")
    time.sleep(60)
"""


def peer(cases: list[Any]) -> FlashInferPeer:
    return FlashInferPeer(cases, (sys.executable, "-c", FAKE_PEER))


def test_the_peer_is_ended_when_time_is_up_and_what_it_got_done_counts() -> None:
    cases: list[Any] = [DecodeCase(GQA4, 64, 1024), DecodeCase(GQA4, 64, 2048)]
    found = peer(cases).measure(2.0)
    assert found == {"version": "0.6.6", "seconds": {to_text(cases[0]): 0.002}, "note": "stopped after 2 s"}


def test_the_peer_that_fails_says_why() -> None:
    found = peer([DecodeCase(GQA4, 1, 256), PrefillCase(GQA4, 1, 512)]).measure(30.0)
    assert found["note"] == "compiler not found"
    assert len(found["seconds"]) == 1


def test_the_peers_figures_join_the_rows(machine: HostMachine, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashInferPeer, "installed", staticmethod(lambda: True))
    bench = bench_on(machine, arena)
    rows = [{"case": c.name, "microseconds": 1000.0} for c in (DecodeCase(MHA, 64, 1024), DecodeCase(MHA, 64, 256))]
    bench.report.sections["decode"] = rows
    found = {"version": "0.6.6", "seconds": {to_text(DecodeCase(MHA, 64, 1024)): 0.002}, "note": "stopped"}

    class Peer:
        def measure(self, limit: float) -> dict[str, Any]:
            return found

    bench.flashinfer(lambda cases: Peer())  # type: ignore[arg-type, return-value]  # a stand-in
    assert rows[0]["against_flashinfer"] == 2
    assert rows[0]["counts_for"] == {"flashinfer": 2}
    assert "against_flashinfer" not in rows[1]
    assert bench.report.notes == ["FlashInfer: 1 of 2 cases: stopped"]


# --- the report


def test_floors_take_the_worst_case_and_say_what_was_not_measured() -> None:
    report = BenchReport({"gpu": "H200"})
    report.sections["decode"] = [
        {"case": "a", "counts_for": {"decode": 0.95, "paged": 0.99, "flashinfer": 0.98}},
        {"case": "b", "counts_for": {"decode": 0.85, "paged": 0.98, "flashinfer": 1.1}},
        {"case": "c", "counts_for": {"decode": None}},
    ]
    found = dict(zip(FLOORS, report.floors(), strict=True))
    decode, paging = found["decode"], found["paged"]
    assert (decode["worst"], decode["case"], decode["reached"]) == (0.85, "decode b", False)
    assert (paging["worst"], paging["reached"]) == (0.98, True)
    assert (found["flashinfer"]["worst"], found["flashinfer"]["reached"]) == (0.98, True)
    assert found["flashinfer mean"]["worst"] == pytest.approx((0.98 * 1.1) ** 0.5)
    assert (found["swap"]["worst"], found["swap"]["reached"]) == (None, None)
    text = report.text()
    assert f"floor MISSED: {FLOORS['decode'].name}: worst 0.850 (decode b), at least 0.88" in text
    assert f"floor not measured: {FLOORS['swap'].name} (at least 0.9)" in text


def test_the_floors_are_those_promised() -> None:
    assert {key: floor.at_least for key, floor in FLOORS.items()} == {
        "decode": 0.88,
        "decode small": 0.82,
        "decode mqa": 0.70,
        "paged": 0.97,
        "layers": 0.95,
        "flashinfer": 0.97,
        "flashinfer mean": 1.0,
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


def test_tables_align_and_leave_out_what_nobody_has() -> None:
    rows: list[dict[str, Any]] = [
        {"case": "MHA, 1 x 256", "microseconds": 12.34, "gb_per_s": 345.6, "share_of_copy": 0.1234},
        {"case": "MHA, 256 x 64k", "microseconds": None, "gb_per_s": 4000.0, "share_of_copy": 0.9},
    ]
    lines = table(COLUMNS["decode"], rows).splitlines()
    assert lines == [
        "decode                                  us   GB/s  of copy",
        "MHA, 1 x 256                          12.3    346    12.3%",
        "MHA, 256 x 64k                           -   4000    90.0%",
    ]


def test_json_holds_every_row_and_floor() -> None:
    report = BenchReport({"gpu": "H200"}, copy_gb_per_s=4000.0)
    report.sections["swap"] = [{"case": "a", "out_gb_per_s": 50.0, "counts_for": {"swap": 0.95}}]
    found = json.loads(report.to_json())
    assert found["swap"] == [{"case": "a", "out_gb_per_s": 50.0}]
    assert [row["reached"] for row in found["floors"]] == [None] * 8 + [True]


# --- a machine without a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: the bench needs a GPU, torch and CuPy, and no NVIDIA driver is here")
    assert err.count("\n") == 1


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_main, "driver_is_there", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench_main.main([]) == 2
    assert "torch is not installed: pip install 'pagekv[executor,cuda12]'" in capsys.readouterr().err


def test_nothing_is_timed_where_a_kernel_is_wrong(machine: HostMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagekv.kernels.bench import machine as machine_module

    monkeypatch.setattr(bench_main, "driver_is_there", lambda: True)
    monkeypatch.setattr(machine_module, "CudaMachine", lambda say: machine)
    monkeypatch.setattr(Bench, "correctness", lambda self, wanted: False)
    monkeypatch.setattr(Bench, "bandwidth", lambda self: pytest.fail("timed"))
    assert bench_main.main([]) == 1
