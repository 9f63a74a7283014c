"""A kernel as one text: headers count once, and messages name the real files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from compile_gate.jobs import COMPILERS

from pagekv.kernels import sources
from pagekv.kernels.nvrtc import CompileError, Nvrtc
from pagekv.kernels.sources import SOURCES, translation_unit
from pagekv.kernels.variants import KERNELS

PRESENT = [name for name, kernel in KERNELS.items() if (SOURCES / kernel.source).is_file()]


@pytest.fixture(scope="module", params=COMPILERS)
def nvrtc(request: pytest.FixtureRequest) -> Nvrtc:
    return Nvrtc(request.param)


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
