"""The CuPy launcher without a GPU: what it hands to CuPy, when it compiles, and how it says that nothing can run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagekv.kernels.loader import CupyLauncher, GpuUnavailable, import_cupy, preload_compiler
from pagekv.kernels.params import BLOCK_COPY, MERGE, fill
from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import KERNELS, Variant

PLAIN = Variant("float16", "float16", 128)


class FakeKernel:
    """RawKernel: `kernel` is the loaded function, and shared memory beyond the default has to be allowed."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self._log, self._most_shared, self._carveout = name, log, 48 << 10, -1

    @property
    def kernel(self) -> Any:
        return self._call

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._most_shared

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        self._log.append(("allow", self.name, size))
        self._most_shared = size

    @property
    def preferred_shared_memory_carveout(self) -> int:
        return self._carveout

    @preferred_shared_memory_carveout.setter
    def preferred_shared_memory_carveout(self, percent: int) -> None:
        self._log.append(("carve out", self.name, percent))
        self._carveout = percent

    def _call(self, grid: Any, block: Any, args: Any, shared_mem: int, stream: Any) -> None:
        assert shared_mem <= self._most_shared
        assert [type(a) for a in args] == [np.ndarray]
        assert args[0].size == 1  # the only arrays that CuPy passes by value
        self._log.append(("launch", self.name, grid, block, args[0].tobytes(), shared_mem, stream.ptr))


def fake_cupy(log: list[Any], capability: str = "90") -> ModuleType:
    def raw_module(*, code: str, options: tuple[str, ...]) -> Any:
        log.append(("compile", code, options))
        return SimpleNamespace(get_function=lambda name: FakeKernel(name, log))

    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(compute_capability=capability))
    return SimpleNamespace(RawModule=raw_module, cuda=cuda)  # type: ignore[return-value]  # as much of the module as is used


class FakeTorch:
    """torch with a current stream that a test may switch."""

    def __init__(self) -> None:
        self.stream = 7
        self.cuda = SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=self.stream))


def merge_params(**values: int) -> Any:
    return fill(MERGE, **{**dict.fromkeys(MERGE.names or (), 0), **values})


@pytest.fixture
def log() -> list[Any]:
    return []


@pytest.fixture
def torch() -> FakeTorch:
    return FakeTorch()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def launcher(log: list[Any], torch: FakeTorch, said: list[str]) -> CupyLauncher:
    return CupyLauncher(fake_cupy(log), torch, said.append)  # type: ignore[arg-type]  # a stand-in for the module


def test_a_launch_passes_the_structure_by_value_on_torchs_stream(launcher: CupyLauncher, log: list[Any]) -> None:
    params = merge_params(num_items=3, out=1 << 40)
    launcher.launch("pagekv_merge", PLAIN, (3, 32, 1), 256, 1024, params)
    compiled, launched = log
    assert compiled == ("compile", translation_unit("merge.cu"), KERNELS["pagekv_merge"].options(PLAIN))
    assert launched == ("launch", "pagekv_merge", (3, 32, 1), (256, 1, 1), params.tobytes(), 1024, 7)


def test_the_stream_is_the_current_one_at_each_launch(launcher: CupyLauncher, log: list[Any], torch: FakeTorch) -> None:
    launcher.launch("pagekv_merge", PLAIN, (1, 1, 1), 32, 0, merge_params())
    torch.stream = 8
    launcher.launch("pagekv_merge", PLAIN, (1, 1, 1), 32, 0, merge_params())
    assert [entry[-1] for entry in log if entry[0] == "launch"] == [7, 8]


def test_a_variant_is_compiled_once_and_says_so(launcher: CupyLauncher, log: list[Any], said: list[str]) -> None:
    for _ in range(3):
        launcher.launch("pagekv_merge", PLAIN, (1, 1, 1), 32, 0, merge_params())
    assert [entry[0] for entry in log].count("compile") == 1
    assert len(said) == 1
    assert said[0].startswith("kernels: pagekv_merge for float16 d128 on sm_90 ready in ")


def test_variants_that_a_kernel_does_not_tell_apart_share_their_code(launcher: CupyLauncher, log: list[Any]) -> None:
    params = fill(BLOCK_COPY, **dict.fromkeys(BLOCK_COPY.names or (), 0))
    for variant in (PLAIN, Variant("float32", "float32", 64)):
        launcher.launch("pagekv_block_copy", variant, (1, 1, 1), 32, 0, params)
    assert [entry[0] for entry in log] == ["compile", "launch", "launch"]


def test_large_shared_memory_is_allowed_once(launcher: CupyLauncher, log: list[Any]) -> None:
    for size in (48 << 10, 96 << 10, 64 << 10, 96 << 10, 100 << 10):
        launcher.launch("pagekv_merge", PLAIN, (1, 1, 1), 32, size, merge_params())
    assert [entry[2] for entry in log if entry[0] == "allow"] == [96 << 10, 100 << 10]


def test_a_kernel_of_large_shared_memory_gets_all_that_the_multiprocessor_has(
    launcher: CupyLauncher, log: list[Any]
) -> None:
    # Else the driver may carve out less than the thread blocks take that have registers: fewer run at a time.
    launcher.launch("pagekv_merge", PLAIN, (1, 1, 1), 32, 48 << 10, merge_params())
    assert [entry[0] for entry in log] == ["compile", "launch"], "what fits anyway is left to the driver"
    launcher.launch("pagekv_merge", PLAIN, (1, 1, 1), 32, 70_656, merge_params())
    assert [entry[0] for entry in log[2:]] == ["allow", "carve out", "launch"]
    assert ("carve out", "pagekv_merge", 100) in log


def test_prepare_compiles_every_kernel_ahead(launcher: CupyLauncher, log: list[Any]) -> None:
    # A capture must not meet a compilation.
    launcher.prepare(PLAIN)
    assert [entry[0] for entry in log] == ["compile"] * len(KERNELS)
    launcher.prepare(PLAIN)
    launcher.launch("pagekv_merge", PLAIN, (1, 1, 1), 32, 0, merge_params())
    assert [entry[0] for entry in log].count("compile") == len(KERNELS)


def test_an_old_gpu_is_refused_by_name(torch: FakeTorch) -> None:
    with pytest.raises(GpuUnavailable, match="compute capability 75; the kernels need 80"):
        CupyLauncher(fake_cupy([], "75"), torch)  # type: ignore[arg-type]  # a stand-in for the module


def test_a_machine_without_cupy_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(GpuUnavailable, match=r"install pagekv\[cuda12\] or pagekv\[cuda13\]"):
        import_cupy()


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDriver(RuntimeError):
        pass

    def fail() -> int:
        raise NoDriver("cudaErrorInsufficientDriver")

    def cupy_where(count: Any) -> Any:
        runtime = SimpleNamespace(CUDARuntimeError=NoDriver, getDeviceCount=count)
        return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))

    monkeypatch.setitem(sys.modules, "cupy", cupy_where(fail))
    with pytest.raises(GpuUnavailable, match="no usable GPU: cudaErrorInsufficientDriver"):
        import_cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy_where(lambda: 0))
    with pytest.raises(GpuUnavailable, match="the driver shows none"):
        import_cupy()


def test_the_compiler_of_cupys_cuda_is_loaded_from_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in (("nvidia/cuda_nvrtc/lib", "libnvrtc.so.12"), ("nvidia/cu13/lib", "libnvrtc.so.13")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    loaded: list[str] = []

    def load(path: str, mode: int) -> None:
        if path == "libnvrtc.so.15":
            raise OSError("no such file")
        loaded.append(path)

    for major in (12, 13, 14):
        preload_compiler(major, load)
    assert [Path(path).parent.name for path in loaded] == ["lib", "lib", ""]
    # What no wheel has is the system's, found by name; and what that has not either is said before CuPy looks for it.
    assert [Path(path).name for path in loaded] == ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so.14"]
    with pytest.raises(GpuUnavailable, match=r"for CUDA 15 and no NVRTC .* install pagekv\[cuda15\]"):
        preload_compiler(15, load)
