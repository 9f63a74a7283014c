"""What compiles the kernels without a GPU: one text, NVRTC, the assembler's log, budgets and the gate's verdicts."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pagekv.kernels import compile_gate, gate_cache, ptxas_log, sources
from pagekv.kernels.compile_gate import ARCHITECTURES, Budgets, Job, Outcome
from pagekv.kernels.nvrtc import CompileError, Nvrtc
from pagekv.kernels.params import DECODE, STRUCTS, fill
from pagekv.kernels.ptxas_log import Usage
from pagekv.kernels.sources import SOURCES, translation_unit
from pagekv.kernels.variants import DTYPE_PAIRS, KERNELS, Kernel, UnsupportedVariant, Variant, all_variants

PRESENT = [name for name, kernel in KERNELS.items() if (SOURCES / kernel.source).is_file()]
PLAIN = Variant("float16", "float16", 128)


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


# --- variants


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (("float64", "float64", 64), "dtype: must be one of float32, float16, bfloat16"),
        (("float16", "bfloat16", 64), "kv_dtype: must be one of float16, float8_e4m3fn with dtype float16"),
        (("float32", "float8_e4m3fn", 64), "kv_dtype: must be one of float32 with"),
        (("float16", "float16", 112), "head_size: must be one of 64, 80, 96, 128, 256"),
    ],
)
def test_an_unsupported_combination_is_refused_by_name(values: tuple[str, str, int], field: str) -> None:
    with pytest.raises(UnsupportedVariant, match=field):
        Variant(*values)


def test_every_variant_is_listed_once() -> None:
    variants = all_variants()
    assert len(set(variants)) == len(variants) == sum(map(len, DTYPE_PAIRS.values())) * 5 * 2


def test_variants_that_a_kernel_does_not_tell_apart_are_compiled_once() -> None:
    assert len(compile_gate.jobs([80, 90], ["pagekv_block_copy"], all_variants())) == 2
    assert len(compile_gate.jobs([80], ["pagekv_merge"], all_variants())) == 3 * 5
    assert len(compile_gate.jobs([80], ["pagekv_decode"], all_variants())) == 50


@pytest.mark.parametrize("name", PRESENT)
def test_labels_tell_apart_what_macros_tell_apart(name: str) -> None:
    # A budget is found by its label: two different texts must never share one.
    kernel = KERNELS[name]
    labels = {tuple(kernel.macros_of(variant).items()): kernel.label(variant) for variant in all_variants()}
    assert len(set(labels.values())) == len(labels)


@pytest.mark.parametrize("name", PRESENT)
def test_a_kernel_depends_on_no_macro_it_does_not_list(name: str) -> None:
    # Else the gate would skip machine code that differs.
    text = re.sub(r"//[^\n]*", "", sources.read(KERNELS[name].source))
    unlisted = set(compile_gate.jobs([80], [name], [PLAIN])[0].variant.macros()) - set(KERNELS[name].macros)
    assert [macro for macro in unlisted if macro in text] == []


# --- one text


def test_headers_count_once_and_messages_name_the_real_file(
    nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "low.cuh").write_text('#pragma once\n#include "high.cuh"\nstruct Low { int a; };\n')
    high = '#pragma once\n#include "low.cuh"\n__device__ int high(Low low) { return low.b; }\n'
    (tmp_path / "high.cuh").write_text(high)
    # The branch that is not taken must not use up the header.
    (tmp_path / "kernel.cu").write_text(
        '#if 0\n#include "high.cuh"\n#else\n#include "low.cuh"\n#include "high.cuh"\n#endif\nint host_variable;\n'
    )
    monkeypatch.setattr(sources, "SOURCES", tmp_path)
    with pytest.raises(CompileError) as caught:
        nvrtc.compile(translation_unit.__wrapped__("kernel.cu"), "kernel.cu", ["--gpu-architecture=sm_80"])
    assert re.findall(r"^(\S+): error", str(caught.value), re.M) == ["high.cuh(3)", "kernel.cu(7)"]


@pytest.mark.parametrize("name", PRESENT)
def test_kernels_include_nothing_that_nvrtc_lacks(name: str) -> None:
    assert re.findall(r"^\s*#\s*include.*$", translation_unit(KERNELS[name].source), re.M) == []


# --- parameters


def test_structures_lie_in_memory_as_numpy_lays_them_out(nvrtc: Nvrtc) -> None:
    sizes, offsets = [], []
    for name, dtype in STRUCTS.items():
        assert dtype.fields is not None
        sizes.append(f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name}");')
        for field, (kind, offset, *_) in dtype.fields.items():
            sizes.append(f'static_assert(sizeof({name}::{field}) == {kind.itemsize}, "{name}::{field}");')
            offsets.append(f'static_assert(offsetof({name}, {field}) == {offset}, "{name}::{field}");')
    macros = [f"-D{name}={value}" for name, value in PLAIN.macros().items()]
    text = translation_unit("params.cuh") + "\n".join(sizes)
    nvrtc.compile(text, "params.cu", ["--gpu-architecture=sm_80", "--std=c++17", *macros])
    # NVRTC has no constant offsetof; both compilers follow the same rules, and g++ has one.
    plain = re.sub(r"^#include.*$", "", sources.read("params.cuh"), flags=re.M)
    text = f"#include <cstddef>\ntypedef int i32;\ntypedef unsigned u32;\ntypedef long long i64;\n{plain}\n" + "\n".join(sizes + offsets)
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_structures_have_the_fields_of_the_source() -> None:
    # In order: what was added to one side alone would otherwise shift nothing and be missed.
    text = re.sub(r"//[^\n]*", "", sources.read("params.cuh"))
    for name, dtype in STRUCTS.items():
        body = re.search(rf"struct {name} \{{(.*?)\}};", text, re.S)
        assert body is not None, name
        assert tuple(re.findall(r"(\w+)\s*;", body[1])) == dtype.names


def test_fill_names_missing_unknown_and_oversized_fields() -> None:
    values = dict.fromkeys(DECODE.names or (), 0)
    assert fill(DECODE, **{**values, "scale": 0.5})["scale"] == np.float32(0.5)
    with pytest.raises(ValueError, match="window: missing"):
        fill(DECODE, **{name: value for name, value in values.items() if name != "window"})
    with pytest.raises(ValueError, match="windows: no such field"):
        fill(DECODE, **values, windows=1)
    with pytest.raises(ValueError, match="layer: 2147483648 does not fit int32"):
        fill(DECODE, **{**values, "layer": 1 << 31})


# --- the assembler's log

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


# --- verdicts

DECODE_JOB = Job(KERNELS["pagekv_decode"], PLAIN, 90)
FINE = Usage(registers=100, stack=0, spill_stores=0, spill_loads=0, shared=0)


def budgets_of(job: Job, registers: int) -> Budgets:
    budgets = Budgets()
    budgets.set(job, registers)
    return budgets


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
    failures = compile_gate.judge(Outcome(DECODE_JOB, usage), budgets_of(DECODE_JOB, 100))
    assert failures == [] if verdict is None else any(verdict in str(failure) for failure in failures)
    for failure in failures:
        assert str(failure).startswith("pagekv_decode float16 d128 sm_90: ")


def test_the_gate_fails_on_what_has_no_budget_and_on_what_does_not_compile() -> None:
    assert "no budget" in str(compile_gate.judge(Outcome(DECODE_JOB, FINE), Budgets())[0])
    assert "nonsense" in str(compile_gate.judge(Outcome(DECODE_JOB, None, "nonsense"), budgets_of(DECODE_JOB, 1))[0])


def test_a_broken_kernel_is_an_outcome_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_gate, "translation_unit", lambda name: "int x = ;")
    assert "error" in compile_gate.compile_job(DECODE_JOB).error
    monkeypatch.setattr(compile_gate, "translation_unit", lambda name: 'extern "C" __global__ void other() {}')
    assert "pagekv_decode" in compile_gate.compile_job(DECODE_JOB).error


def test_budgets_survive_the_file_and_forget_what_is_gone() -> None:
    budgets = budgets_of(DECODE_JOB, 100)
    gone = Job(Kernel("pagekv_gone", "gone.cu", "DecodeParams", ()), PLAIN, 90)
    budgets.set(gone, 7)
    budgets.set(Job(DECODE_JOB.kernel, PLAIN, 75), 7)
    budgets.keep_only([DECODE_JOB])
    again = Budgets(json.loads(budgets.dumps()))
    assert again.dumps() == budgets.dumps()
    assert again.get(DECODE_JOB) == 100
    assert again.get(gone) is None
    assert again.get(Job(DECODE_JOB.kernel, PLAIN, 75)) is None


def test_the_cache_is_keyed_by_text_options_and_compiler(tmp_path: Path) -> None:
    cache = gate_cache.GateCache("12.9", folder=tmp_path)
    cache.put("text", ["-a"], FINE)
    assert cache.get("text", ["-a"]) == FINE
    assert cache.get("text ", ["-a"]) is None
    assert cache.get("text", ["-b"]) is None
    assert gate_cache.GateCache("13.0", folder=tmp_path).get("text", ["-a"]) is None
    assert gate_cache.GateCache("12.9", folder=tmp_path, enabled=False).get("text", ["-a"]) is None
    next(tmp_path.iterdir()).write_text("{")
    assert cache.get("text", ["-a"]) is None


# --- the kernels themselves: `make kernels` compiles every variant; here each compiles once


@pytest.mark.parametrize("name", PRESENT)
def test_kernel_compiles(name: str) -> None:
    outcome = compile_gate.compile_job(Job(KERNELS[name], PLAIN, 90))
    assert outcome.error == ""
    assert outcome.warnings == ""
    assert outcome.usage is not None
    assert outcome.usage.spill_stores + outcome.usage.spill_loads == 0


def test_every_variant_has_a_budget_on_every_architecture() -> None:
    budgets = Budgets(json.loads(compile_gate.BUDGETS.read_text()))
    todo = compile_gate.jobs(list(ARCHITECTURES), list(KERNELS), all_variants())
    assert [f"{job.kernel.name} {job.label} sm_{job.arch}" for job in todo if budgets.get(job) is None] == []
