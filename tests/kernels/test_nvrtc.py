"""NVRTC by ctypes: which library is loaded, and that threads and versions do not get in each other's way."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compile_gate import __main__ as gate
from compile_gate.jobs import COMPILERS, Job

from pagekv.kernels import nvrtc
from pagekv.kernels.nvrtc import CompileError, Nvrtc, NvrtcMissing, libraries
from pagekv.kernels.sources import SOURCES
from pagekv.kernels.variants import KERNELS, Variant

TEXT = 'extern "C" __global__ void kernel(float* p) { p[threadIdx.x] *= %d.0f; }'


def test_each_cuda_has_its_own_folder_of_wheels_and_then_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name in (("nvidia/cuda_nvrtc/lib", "libnvrtc.so.12"), ("nvidia/cu13/lib", "libnvrtc.so.13")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).touch()
    monkeypatch.setattr(sys, "path", ["/nowhere", str(tmp_path)])
    for cuda, folder in ((12, "nvidia/cuda_nvrtc/lib"), (13, "nvidia/cu13/lib")):
        name = f"libnvrtc.so.{cuda}"
        assert list(libraries(cuda)) == [str(tmp_path / folder / name), name, f"/usr/local/cuda/lib64/{name}"]
    assert list(libraries(14)) == ["libnvrtc.so.14", "/usr/local/cuda/lib64/libnvrtc.so.14"]


@pytest.mark.parametrize(("cuda", "wheel"), [(12, "nvidia-cuda-nvrtc-cu12"), (13, "'nvidia-cuda-nvrtc==13.*'")])
def test_a_missing_library_is_named_with_its_wheel(cuda: int, wheel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "libraries", lambda cuda: iter(["libnvrtc-of-nobody.so", "/nowhere/libnvrtc.so"]))
    with pytest.raises(NvrtcMissing, match=re.escape(f"no NVRTC of CUDA {cuda} is installed: pip install {wheel}")):
        Nvrtc(cuda)


def test_a_library_that_cannot_be_loaded_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnvrtc.so.12").write_bytes(b"no library")
    found = Nvrtc(12).path
    monkeypatch.setattr(nvrtc, "libraries", lambda cuda: iter([str(tmp_path / "libnvrtc.so.12"), found]))
    assert Nvrtc(12).path == found


def test_both_versions_compile_in_one_process_and_threads_get_what_one_alone_gets() -> None:
    compilers = [Nvrtc(12), Nvrtc(13)]
    assert [compiler.version[0] for compiler in compilers] == [12, 13]
    todo = [(compiler, TEXT % factor) for compiler in compilers for factor in range(8)]

    def compile_(job: tuple[Nvrtc, str]) -> bytes:
        return job[0].compile(job[1], "kernel.cu", ["--gpu-architecture=sm_90"]).code

    alone = [compile_(job) for job in todo]
    assert all(code[:4] == b"\x7fELF" for code in alone)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(compile_, todo)) == alone


@pytest.mark.parametrize("cuda", [12, 13])
def test_what_is_wrong_with_a_text_is_named_with_its_line(cuda: int) -> None:
    with pytest.raises(CompileError, match=r"kernel\.cu\(1\): error"):
        Nvrtc(cuda).compile("int x = ;", "kernel.cu", ["--gpu-architecture=sm_90"])


PRESENT = [name for name, kernel in KERNELS.items() if (SOURCES / kernel.source).is_file()]
PLAIN = Variant("float16", "float16", 128)
# Each compiler with every other kernel in each run: `make kernels-compile` judges all of both.
JOBS = [
    pytest.param(name, cuda, marks=() if (number + place) % len(COMPILERS) == 0 else pytest.mark.nightly)
    for number, name in enumerate(PRESENT)
    for place, cuda in enumerate(COMPILERS)
]


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "cuda"), JOBS)
def test_kernel_compiles(name: str, cuda: int) -> None:
    outcome = gate.compile_job(Job(KERNELS[name], PLAIN, 90, cuda))
    assert outcome.error == ""
    assert outcome.warnings == ""
    assert outcome.usage is not None
    assert outcome.usage.spill_stores + outcome.usage.spill_loads == 0
