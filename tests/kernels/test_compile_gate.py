"""The compile gate: the assembler's log, budgets, records and verdicts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from compile_gate import __main__ as gate
from compile_gate import jobs as gate_jobs
from compile_gate import ptxas_log
from compile_gate.cache import Cache
from compile_gate.jobs import ARCHITECTURES, COMPILERS, Job, Outcome, jobs
from compile_gate.ptxas_log import Usage
from compile_gate.record import Record, sampled
from compile_gate.report import judge, table

from pagekv.kernels import nvrtc as nvrtc_module
from pagekv.kernels.nvrtc import Nvrtc
from pagekv.kernels.variants import KERNELS, Kernel, Variant, all_variants

PLAIN = Variant("float16", "float16", 128)


@pytest.fixture(scope="module", params=COMPILERS)
def nvrtc(request: pytest.FixtureRequest) -> Nvrtc:
    return Nvrtc(request.param)


def test_variants_that_a_kernel_does_not_tell_apart_are_compiled_once() -> None:
    assert len(jobs([80, 90], [KERNELS["pagekv_block_copy"]], all_variants())) == 2 * len(COMPILERS)
    assert len(jobs([80], [KERNELS["pagekv_merge"]], all_variants())) == 3 * 5 * len(COMPILERS)
    assert len(jobs([80], [KERNELS["pagekv_decode"]], all_variants())) == 50 * len(COMPILERS)


def test_a_kernel_of_one_architecture_is_compiled_for_that_alone() -> None:
    found = jobs(list(ARCHITECTURES), [KERNELS["pagekv_prefill_wgmma"]], all_variants())
    assert len(found) == 8 * len(COMPILERS)
    assert {job.options()[0] for job in found} == {"--gpu-architecture=sm_90a"}
    assert jobs([80, 100], [KERNELS["pagekv_prefill_wgmma"]], all_variants()) == []


def test_products_of_a_warpgroup_in_a_row_fail_the_gate() -> None:
    """Accumulators that are touched between a product and its wait: the assembler then waits for each product."""
    kernel = KERNELS["pagekv_prefill_wgmma"]
    commit = "        wgmma_commit();\n"

    class Touched(Job):
        @property
        def text(self) -> str:
            return super().text.replace(commit, "        for (auto& n : score[0]) n[0] += 1.0f;\n" + commit, 1)

    outcome = gate.compile_job(Touched(kernel, Variant("float16", "float16", 128), 90, 12))
    assert "Potential Performance Loss" in outcome.warnings, outcome


SPILLING = """
extern "C" __global__ void spilling(float* p) {
    float a[128];
    #pragma unroll
    for (int i = 0; i < 128; ++i) a[i] = p[i * 32 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 128; ++i) p[i * 32 + threadIdx.x] = a[i] * a[127 - i];
}
"""


def compile_text(nvrtc: Nvrtc, text: str, *options: str) -> dict[str, Usage]:
    compiled = nvrtc.compile(text, "test.cu", ["--gpu-architecture=sm_90", "--ptxas-options=-v", *options])
    assert compiled.code[:4] == b"\x7fELF"
    return ptxas_log.parse(compiled.log)


def test_spills_are_seen(nvrtc: Nvrtc) -> None:
    usage = compile_text(nvrtc, SPILLING, "--maxrregcount=32")["spilling"]
    assert usage.registers <= 32
    assert usage.spill_stores > 0
    assert usage.spill_loads > 0
    assert compile_text(nvrtc, SPILLING)["spilling"].spill_stores == 0


def test_spills_of_a_function_that_was_not_inlined_are_the_kernels(nvrtc: Nvrtc) -> None:
    text = SPILLING.replace('extern "C" __global__', "__device__ __noinline__").replace("spilling", "helper")
    text += 'extern "C" __global__ void outer(float* p) { helper(p); }'
    assert compile_text(nvrtc, text, "--maxrregcount=32")["outer"].spill_stores > 0


def test_stack_and_static_shared_memory_are_seen(nvrtc: Nvrtc) -> None:
    usage = compile_text(
        nvrtc,
        """
        extern "C" __global__ void kernel(float* p, int n) {
            __shared__ float shared[256];
            float local[64];
            for (int i = 0; i < 64; ++i) local[(i * n) % 64] = p[i];
            shared[threadIdx.x] = local[n % 64];
            __syncthreads();
            p[0] = shared[n % 256];
        }
        """,
    )["kernel"]
    assert (usage.stack, usage.shared) == (256, 1024)


def test_a_log_without_numbers_is_no_pass() -> None:
    with pytest.raises(ValueError, match="nothing of kernel's registers"):
        ptxas_log.parse("ptxas info    : Compiling entry function 'kernel' for 'sm_90'\n")


DECODE_JOB = Job(KERNELS["pagekv_decode"], PLAIN, 90, 12)
WITH_13 = replace(DECODE_JOB, cuda=13)
ON_80 = replace(DECODE_JOB, arch=80)


def usage_of(registers: int) -> Usage:
    return Usage(registers, stack=0, spill_stores=0, spill_loads=0, shared=0)


FINE = usage_of(100)


def record_of(job: Job, usage: Usage) -> Record:
    record = Record()
    record.set(job, usage)
    return record


@pytest.mark.parametrize(
    ("usage", "verdict"),
    [
        (FINE, None),
        (Usage(101, 0, 0, 0, 0), "takes 101 registers, more than its budget of 100"),
        (Usage(100, 8, 8, 0, 0), "spills 8 bytes of stores"),
        (Usage(100, 8, 0, 4, 0), "and 4 of loads"),
        (Usage(100, 16, 0, 0, 0), "keeps 16 bytes on a stack"),
        (Usage(100, 0, 0, 0, 228 << 10), "bytes of shared memory of 232448"),
    ],
)
def test_the_gate_fails_on(usage: Usage, verdict: str | None) -> None:
    failures = judge(Outcome(DECODE_JOB, usage), record_of(DECODE_JOB, FINE))
    assert failures == [] if verdict is None else any(verdict in str(failure) for failure in failures)
    for failure in failures:
        assert str(failure).startswith("pagekv_decode float16 d128 sm_90 CUDA 12: ")


def test_the_gate_fails_on_what_has_no_budget_and_on_what_does_not_compile() -> None:
    assert "no budget" in str(judge(Outcome(DECODE_JOB, FINE), Record())[0])
    assert "nonsense" in str(judge(Outcome(DECODE_JOB, None, "nonsense"), record_of(DECODE_JOB, FINE))[0])


def test_a_broken_kernel_is_an_outcome_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_jobs, "translation_unit", lambda name: "int x = ;")
    assert "error" in gate.compile_job(DECODE_JOB).error
    monkeypatch.setattr(gate_jobs, "translation_unit", lambda name: 'extern "C" __global__ void other() {}')
    assert "pagekv_decode" in gate.compile_job(DECODE_JOB).error


def test_the_record_survives_its_file_and_drops_what_is_gone() -> None:
    record = record_of(DECODE_JOB, FINE)
    gone = replace(DECODE_JOB, kernel=Kernel("pagekv_gone", "decode.cu", ()))
    record.set(gone, FINE)
    record.keep_only([DECODE_JOB])
    again = Record(json.loads(record.dumps()))
    assert again.dumps() == record.dumps()
    assert (again.budget(DECODE_JOB), again.budget(WITH_13), again.budget(gone)) == (100, None, None)


def test_the_record_stands_for_a_compilation_of_just_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(DECODE_JOB, FINE)
    assert record.measured(DECODE_JOB) == FINE
    assert record.measured(ON_80) is record.measured(WITH_13) is None
    text = DECODE_JOB.text
    monkeypatch.setattr(gate_jobs, "translation_unit", lambda name: text + "// edited")
    assert record.measured(DECODE_JOB) is None
    assert record.budget(DECODE_JOB) == 100  # as a budget it still binds
    record.set(ON_80, FINE)
    assert record.budget(DECODE_JOB) is None  # numbers of two texts are never mixed


@pytest.mark.parametrize(
    ("numbers", "written"), [({12: 100, 13: 100}, "100"), ({13: 99, 12: 100}, "[100, 99]"), ({13: 99}, "[null, 99]")]
)
def test_what_compilers_agree_on_is_written_once(numbers: dict[int, int], written: str) -> None:
    record = Record()
    for job in (ON_80, DECODE_JOB):
        for cuda, registers in numbers.items():
            record.set(replace(job, cuda=cuda), usage_of(registers))
    text = record.dumps()
    digest = DECODE_JOB.digest()
    assert f'      "float16 d128": {{"text": "{digest}", "shared": 0, "80": {written}, "90": {written}}}\n' in text
    again = Record(json.loads(text))
    assert [again.budget(replace(ON_80, cuda=cuda)) for cuda in COMPILERS] == [numbers.get(cuda) for cuda in COMPILERS]
    assert again.dumps() == text


def test_each_compiler_is_judged_by_its_own_numbers() -> None:
    record = record_of(DECODE_JOB, FINE)
    record.set(WITH_13, usage_of(90))
    assert judge(Outcome(DECODE_JOB, FINE), record) == []
    assert "takes 100 registers, more than its budget of 90" in str(judge(Outcome(WITH_13, FINE), record)[0])


def test_every_third_variant_is_compiled_for_one_architecture_with_one_compiler_whatever_the_record_says() -> None:
    todo = jobs(list(ARCHITECTURES), KERNELS.values(), all_variants())
    picked = [(job.kernel.name, job.label) for job in todo if sampled(job)]
    assert len(picked) == len(set(picked))
    assert len(picked) == pytest.approx(len(todo) / len(ARCHITECTURES) / len(COMPILERS) / 3, rel=0.3)
    pairs = {(job.arch, job.cuda) for job in todo if sampled(job)}
    assert pairs == set(product(ARCHITECTURES, COMPILERS))


def run_gate(monkeypatch: pytest.MonkeyPatch, record: Record, registers: int, *args: str) -> int:
    """The gate over one decode variant, with a compiler that always finds `registers`."""
    record.nvrtc = gate.found_compilers()
    monkeypatch.setattr(gate, "select", lambda _: [DECODE_JOB])
    monkeypatch.setattr(gate, "compile_all", lambda todo, *_: [Outcome(job, usage_of(registers)) for job in todo])
    monkeypatch.setattr(Record, "load", lambda: record)
    return gate.main(args)


def test_a_record_that_the_compiler_contradicts_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "sampled", lambda job: True)
    assert run_gate(monkeypatch, record_of(DECODE_JOB, FINE), 100) == 0
    # Fewer would pass as a budget; but for this very text it means that the record was not made by the gate.
    assert run_gate(monkeypatch, record_of(DECODE_JOB, FINE), 90) == 1
    assert "unlike the 100 on record for this very text" in capsys.readouterr().err


def test_what_is_on_record_is_not_compiled_again_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "sampled", lambda job: False)
    assert run_gate(monkeypatch, record_of(DECODE_JOB, FINE), 101) == 0
    assert run_gate(monkeypatch, record_of(DECODE_JOB, FINE), 101, "--all") == 1


def test_what_another_version_recorded_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "sampled", lambda job: False)
    monkeypatch.setattr(gate, "found_compilers", lambda: {12: "12.9", 13: "13.1"})
    monkeypatch.setattr(gate, "select", lambda _: [DECODE_JOB, WITH_13])
    monkeypatch.setattr(gate, "compile_all", lambda todo, *_: [Outcome(job, FINE) for job in todo])
    record = record_of(DECODE_JOB, FINE)
    record.set(WITH_13, FINE)
    record.nvrtc = {12: "12.9", 13: "13.0"}
    monkeypatch.setattr(Record, "load", lambda: record)
    assert gate.main([]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("2 compilations judged with NVRTC 12.9 and 13.1 in ")
    assert "1 on record for this very text, 1 compiled now" in line


def test_compilers_that_are_missing_are_all_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvrtc_module, "libraries", lambda cuda: iter(["/nowhere/libnvrtc.so"]))
    gate.compiler.cache_clear()
    assert gate.main([]) == 2
    assert capsys.readouterr().err == (
        "error: no NVRTC of CUDA 12 is installed: pip install nvidia-cuda-nvrtc-cu12; no NVRTC of CUDA 13 is "
        "installed: pip install 'nvidia-cuda-nvrtc==13.*' (pagekv[dev] has them all)\n"
    )


def test_the_table_names_every_architecture() -> None:
    todo = [replace(DECODE_JOB, arch=arch, cuda=cuda) for arch, cuda in product(ARCHITECTURES, COMPILERS)]
    lines = table([Outcome(job, usage_of(job.arch + (job == WITH_13))) for job in todo]).splitlines()
    assert lines[1].split()[2:8] == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert lines[2].split()[:9] == ["pagekv_decode", "float16", "d128", "80", "86", "89", "90/91", "100", "120"]


def test_the_tables_columns_are_as_wide_as_the_longest_kernel_and_variant() -> None:
    todo = jobs([90], KERNELS.values(), all_variants())
    head, *lines = table([Outcome(job, usage_of(90)) for job in todo]).splitlines()[1:]
    cells = {(line[: head.index("variant")].strip(), line[head.index("variant") :].split("  ")[0]) for line in lines}
    assert cells == {(job.kernel.name, job.label) for job in todo}
    assert {len(line) for line in lines} == {len(head)}


def test_the_cache_is_keyed_by_text_options_and_compiler(tmp_path: Path) -> None:
    cache = Cache("12.9", folder=tmp_path)
    cache.put("text", ["-a"], FINE)
    assert cache.get("text", ["-a"]) == FINE
    assert cache.get("text ", ["-a"]) is None
    assert cache.get("text", ["-b"]) is None
    assert Cache("13.0", folder=tmp_path).get("text", ["-a"]) is None
    assert Cache("12.9", folder=tmp_path, enabled=False).get("text", ["-a"]) is None
    next(tmp_path.iterdir()).write_text("{")
    assert cache.get("text", ["-a"]) is None


def test_the_record_is_of_these_kernels() -> None:
    # After an edit: python -m compile_gate --update
    record = Record.load()
    todo = jobs(list(ARCHITECTURES), KERNELS.values(), all_variants())
    assert [str(job) for job in todo if record.measured(job) is None] == []
