"""Parameter structures: the same layout in NumPy, in g++ and in NVRTC."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest
from compile_gate.jobs import COMPILERS

from pagekv.kernels import sources
from pagekv.kernels.nvrtc import Nvrtc
from pagekv.kernels.params import (
    ADD_NORM,
    ADJUST,
    ADJUSTMENT,
    BLOCK_COPY,
    CACHE_WRITE,
    CHOICE,
    DECODE,
    EDIT,
    GATED,
    MERGE,
    PREFILL,
    SAMPLE,
    fill,
)
from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import Variant

PLAIN = Variant("float16", "float16", 128)
HEADERS = ("params.cuh", "row_params.cuh", "sample_params.cuh")
# Name of the C++ structure -> its mirror.
STRUCTS = {
    "CacheWriteParams": CACHE_WRITE,
    "AddNormParams": ADD_NORM,
    "GatedParams": GATED,
    "Choice": CHOICE,
    "SampleParams": SAMPLE,
    "Adjustment": ADJUSTMENT,
    "Edit": EDIT,
    "AdjustParams": ADJUST,
    "BlockCopyParams": BLOCK_COPY,
    "DecodeParams": DECODE,
    "MergeParams": MERGE,
    "PrefillParams": PREFILL,
}


@pytest.fixture(scope="module", params=COMPILERS)
def nvrtc(request: pytest.FixtureRequest) -> Nvrtc:
    return Nvrtc(request.param)


def test_structures_lie_in_memory_as_numpy_lays_them_out(nvrtc: Nvrtc) -> None:
    sizes, offsets = [], []
    for name, dtype in STRUCTS.items():
        assert dtype.fields is not None
        sizes.append(f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name}");')
        for field, (kind, offset, *_) in dtype.fields.items():
            sizes.append(f'static_assert(sizeof({name}::{field}) == {kind.itemsize}, "{name}::{field}");')
            offsets.append(f'static_assert(offsetof({name}, {field}) == {offset}, "{name}::{field}");')
    macros = [f"-D{name}={value}" for name, value in PLAIN.macros().items()]
    text = "".join(map(translation_unit, HEADERS)) + "\n".join(sizes)
    nvrtc.compile(text, "params.cu", ["--gpu-architecture=sm_80", "--std=c++17", *macros])
    # NVRTC has no constant offsetof; both compilers follow the same rules, and g++ has one.
    plain = re.sub(r"^#(include|pragma).*$", "", "".join(map(sources.read, HEADERS)), flags=re.M)
    types = "typedef int i32; typedef unsigned u32; typedef long long i64; "
    types += "typedef unsigned char u8; typedef unsigned long long u64;"
    text = f"#include <cstddef>\n{types}\n{plain}\n" + "\n".join(sizes + offsets)
    device = ["-D__device__=", "-D__forceinline__=inline", *macros]
    command = ["g++", "-std=c++17", "-fsyntax-only", *device, "-x", "c++", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_structures_have_the_fields_of_the_source() -> None:
    # In order: what was added to one side alone would otherwise shift nothing and be missed.
    text = re.sub(r"//[^\n]*", "", "".join(map(sources.read, HEADERS)))
    for name, dtype in STRUCTS.items():
        body = re.search(rf"struct {name}(?: : (\w+))? \{{(.*?)\}};", text, re.S)
        assert body is not None, name
        inherited = STRUCTS[body[1]].names or () if body[1] else ()
        assert (*inherited, *re.findall(r"(\w+)\s*;", body[2])) == dtype.names


def test_fill_names_missing_unknown_and_oversized_fields() -> None:
    values = dict.fromkeys(DECODE.names or (), 0)
    assert fill(DECODE, **{**values, "scale": 0.5})["scale"] == np.float32(0.5)
    with pytest.raises(ValueError, match="window: missing"):
        fill(DECODE, **{name: value for name, value in values.items() if name != "window"})
    with pytest.raises(ValueError, match="windows: no such field"):
        fill(DECODE, **values, windows=1)
    with pytest.raises(ValueError, match="layer: 2147483648 does not fit int32"):
        fill(DECODE, **{**values, "layer": 1 << 31})
