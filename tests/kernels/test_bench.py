"""The bench without a GPU: its arithmetic, its tables, its use of time, and every stage over the emulated kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from host_build import HostLauncher

from pagekv.kernels.bench import __main__ as bench_main
from pagekv.kernels.bench import flashinfer_peer, speed, stages, workload
from pagekv.kernels.bench.correctness import Scene, checks, variants_to_check
from pagekv.kernels.bench.flashinfer_peer import FlashInferPeer, from_text, to_text
from pagekv.kernels.bench.machine import Arena, Clock
from pagekv.kernels.bench.paged import layers_for, paged
from pagekv.kernels.bench.report import COLUMNS, Report, table
from pagekv.kernels.bench.stages import Bench
from pagekv.kernels.bench.swap_speed import block_ids, swap_row
from pagekv.kernels.bench.workload import (
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
    prefill_cases,
    swap_cases,
)
from pagekv.kernels.swap import Stream
from pagekv.kernels.variants import DTYPE_PAIRS, HEAD_SIZES, Variant

SMALL = Heads("GQA 2", 2, 1)


class FakeStreams:
    """Copies at once: what runs in order needs no events."""

    def mark(self, stream: Stream) -> None: ...
    def wait(self, stream: Stream, event: None) -> None: ...
    def done(self, event: None) -> bool:
        return True

    def copy(self, stream: Stream, destination: Any, source: Any) -> None:
        destination.copy_(source)


class HostMachine:
    """The emulated kernels, with a clock that says a millisecond for everything."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.launcher = HostLauncher()

    def seconds(self, run: Callable[[int], object], rounds: int = 1, *, capture: bool = True) -> float:
        for index in range(min(rounds, 2)):
            run(index)
        return 1e-3

    def memory(self) -> int:
        return 4 * MIB

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def streams(self) -> FakeStreams:
        return FakeStreams()


@pytest.fixture(scope="module")
def machine() -> HostMachine:
    return HostMachine()


@pytest.fixture(scope="module")
def arena(machine: HostMachine) -> Arena:
    return Arena(machine, machine.memory())


def bench_on(machine: HostMachine, arena: Arena, clock: Clock | None = None) -> Bench:
    return Bench(machine, arena, clock or Clock(1e9), Report({"gpu": "none"}), lambda line: None)


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


def test_correctness_covers_every_type_pair_and_head_size() -> None:
    variants = variants_to_check()
    pairs = {(dtype, kv_dtype) for dtype, kv_dtypes in DTYPE_PAIRS.items() for kv_dtype in kv_dtypes}
    assert {(v.dtype, v.kv_dtype) for v in variants} == pairs
    assert {v.head_size for v in variants} == set(HEAD_SIZES)
    assert any(v.features for v in variants)


def test_rounds_walk_over_more_memory_than_a_cache_holds() -> None:
    assert layers_for(1 * MIB, 1 << 40) == 64
    assert layers_for(8 * MIB, 1 << 40) == 32
    assert layers_for(1 << 30, 1 << 40) == 1
    assert layers_for(8 * MIB, 20 * MIB) == 2


# --- correctness, over the emulated kernels


def test_every_check_passes_on_the_emulated_kernels(machine: HostMachine) -> None:
    found = list(checks(machine, Variant("float16", "float16", 64), (1, 17, 40)))
    assert [check.name for check in found if not check.passed] == []
    assert len(found) == 7


def test_a_wrong_kernel_is_found(machine: HostMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Values that the pool does not hold any more: as a kernel that reads a wrong block.
    place = Scene.place
    broken: list[Scene] = []

    def place_and_break(scene: Scene, blocks: Any) -> None:
        place(scene, blocks)
        if not broken:
            broken.append(scene)
            scene.pool[int(scene.tables[2, 0]), 1, 1, 0] += 1

    monkeypatch.setattr(Scene, "place", place_and_break)
    found = {
        check.name.partition(": ")[2]: check
        for check in checks(machine, Variant("float16", "float16", 64), (1, 17, 40))
    }
    assert not found["cache write"].passed
    assert not found["decode"].passed
    assert not found["prefill"].passed


def test_nan_is_no_pass(machine: HostMachine) -> None:
    check = next(checks(machine, Variant("float16", "float16", 64), (3,)))
    assert type(check)("x", float("nan"), 1.0).passed is False


# --- every stage, over the emulated kernels


def test_decode_and_prefill_rows(machine: HostMachine, arena: Arena) -> None:
    row = speed.decode_row(machine, arena, DecodeCase(SMALL, 2, 40), bandwidth=1.0)
    assert row["microseconds"] == 1000
    assert row["gb_per_s"] == pytest.approx(DecodeCase(SMALL, 2, 40).bytes / 1e6)
    assert row["against_sdpa"] == row["paged_against_in_order"] == 1
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


def test_memory_and_swap_stages(machine: HostMachine, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "write_cases", lambda: [WriteCase(SMALL, 3)])
    monkeypatch.setattr(stages, "GQA4", SMALL)
    monkeypatch.setattr(stages, "swap_cases", lambda total: [SwapCase(1, 2, True), SwapCase(1, 2, False)])
    bench = bench_on(machine, arena)
    bench.report.copy_gb_per_s = 1.0
    monkeypatch.setattr(speed, "block_copy_row", lambda *args: {"case": "copy"})
    bench.memory()
    bench.swap(total=1)
    assert [len(bench.report.sections[name]) for name in ("memory", "swap")] == [3, 2]
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
    row = speed.block_copy_row(machine, arena, Heads("", 1, 1), 2, bandwidth=1.0)
    assert row["gb_per_s"] == pytest.approx(2 * 2 * 32 * 2 * 16 * 128 * 2 / 1e6)


# --- time, memory, failures


def test_a_stage_stops_when_its_time_is_up_and_names_what_is_left(machine: HostMachine, arena: Arena) -> None:
    now = iter(range(0, 1000, 10))
    bench = bench_on(machine, arena, Clock(100, lambda: float(next(now))))
    bench.report.copy_gb_per_s = 1.0
    bench.decode([DecodeCase(SMALL, 1, context) for context in range(16, 24)])
    rows = bench.report.sections["decode"]
    assert 0 < len(rows) < 8
    assert "no time was left" in bench.report.notes[0]
    assert f"1 x {23}" in bench.report.notes[0]


def test_cases_that_do_not_fit_are_named_not_tried(machine: HostMachine, arena: Arena) -> None:
    bench = bench_on(machine, arena)
    bench.decode([DecodeCase(MHA, 256, 65536)])
    assert bench.report.sections["decode"] == []
    assert "MHA, 256 x 64k: keys and values exceed" in bench.report.notes[0]


def test_a_peer_that_fails_is_named_and_costs_nothing_else() -> None:
    def fail() -> float:
        raise RuntimeError("no kernel\nlong trace")

    assert speed.against("sdpa", 1.0, fail) == {"against_sdpa": None, "sdpa_failed": "no kernel"}


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
    report = Report({"gpu": "H200"})
    report.sections["decode"] = [
        {"case": "a", "counts_for": {"decode": 0.95, "paged": 0.99}},
        {"case": "b", "counts_for": {"decode": 0.85, "paged": 0.98}},
        {"case": "c", "counts_for": {"decode": None}},
    ]
    decode, flashinfer, in_order, *_ = report.floors()
    assert (decode["worst"], decode["case"], decode["reached"]) == (0.85, "decode b", False)
    assert (in_order["worst"], in_order["reached"]) == (0.98, True)
    assert (flashinfer["worst"], flashinfer["reached"]) == (None, None)
    text = report.text()
    assert (
        "floor MISSED: decode from 64 x 1k up, share of copy bandwidth: worst 0.850 (decode b), at least 0.88" in text
    )
    assert "floor not measured: decode from 64 x 1k up, against FlashInfer (at least 1.0)" in text


def test_the_floors_are_those_promised() -> None:
    floors = {key: floor.at_least for key, floor in workload.FLOORS.items()}
    assert floors == {"decode": 0.88, "flashinfer": 1.0, "paged": 0.97, "prefill": 0.65, "swap": 0.90}
    assert workload.counts_for_decode_floor(DecodeCase(MQA, 64, 1024))
    assert not workload.counts_for_decode_floor(DecodeCase(MQA, 8, 65536))


def test_tables_align_and_leave_out_what_nobody_has() -> None:
    rows: list[dict[str, Any]] = [
        {"case": "MHA, 1 x 256", "microseconds": 12.34, "gb_per_s": 345.6, "share_of_copy": 0.1234},
        {"case": "MHA, 256 x 64k", "microseconds": None, "gb_per_s": 4000.0, "share_of_copy": 0.9},
    ]
    lines = table(COLUMNS["decode"], rows).splitlines()
    assert lines == [
        "decode                        us     GB/s  of copy",
        "MHA, 1 x 256                12.3      346    12.3%",
        "MHA, 256 x 64k                 -     4000    90.0%",
    ]


def test_json_holds_every_row_and_floor() -> None:
    report = Report({"gpu": "H200"}, copy_gb_per_s=4000.0)
    report.sections["swap"] = [{"case": "a", "out_gb_per_s": 50.0, "counts_for": {"swap": 0.95}}]
    found = json.loads(report.to_json())
    assert found["swap"] == [{"case": "a", "out_gb_per_s": 50.0}]
    assert [row["reached"] for row in found["floors"]] == [None, None, None, None, True]


# --- a machine without a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: the bench needs a GPU, torch and CuPy, and cannot run here: torch ")
    assert err.count("\n") == 1


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench_main.main([]) == 2
    assert "torch is not installed: pip install 'pagekv[executor,cuda12]'" in capsys.readouterr().err


def test_nothing_is_timed_where_a_kernel_is_wrong(machine: HostMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagekv.kernels.bench import machine as machine_module

    monkeypatch.setattr(HostMachine, "versions", lambda self: {"gpu": "none"}, raising=False)
    monkeypatch.setattr(machine_module, "CudaMachine", lambda say: machine)
    monkeypatch.setattr(Bench, "correctness", lambda self: False)
    monkeypatch.setattr(Bench, "bandwidth", lambda self: pytest.fail("timed"))
    assert bench_main.main([]) == 1
