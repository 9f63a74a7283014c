"""The CuPy launcher without a GPU: what it compiles, what it hands to CuPy, and how it says that nothing can run."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagekv.kernels import cupy_launcher, nvrtc
from pagekv.kernels.cupy_launcher import CupyLauncher, GpuUnavailable, import_cupy
from pagekv.kernels.launch_config import LaunchConfig
from pagekv.kernels.nvrtc import Compiled
from pagekv.kernels.params import BLOCK_COPY, MERGE, fill
from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import EVERYWHERE, KERNELS, Variant

PLAIN = Variant("float16", "float16", 128)


class FakeKernel:
    """RawKernel: `kernel` is the loaded function, and shared memory beyond the default has to be allowed."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self._log, self._most_shared, self._carveout = name, log, 48 << 10, -1

    ptr = 0xF00

    @property
    def kernel(self) -> Any:
        return self

    def __call__(self, *launch: Any) -> None:
        self._call(*launch)

    @property
    def shared_size_bytes(self) -> int:
        """Of the kernel's own: the sampler's has much of it."""
        return 45208 if self.name == "pagekv_sample" else 8192

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


def fake_cupy(log: list[Any], capability: str = "90", cuda: int = 13) -> ModuleType:
    """As much of the module as is used."""

    def raw_module(*, path: str) -> Any:
        assert type(path) is str, "CuPy takes no Path"
        log.append(("load", Path(path).read_bytes()))
        return SimpleNamespace(get_function=lambda name: FakeKernel(name, log))

    def at_a_time(function: int, threads: int, shared: int) -> int:
        log.append(("at a time", function, threads, shared))
        return 3

    driver = SimpleNamespace(
        get_build_version=lambda: cuda * 1000 + 20, occupancyMaxActiveBlocksPerMultiprocessor=at_a_time
    )
    device = SimpleNamespace(compute_capability=capability, attributes={"MultiProcessorCount": 132})
    return SimpleNamespace(  # type: ignore[return-value]  # a stand-in for the module
        RawModule=raw_module, cuda=SimpleNamespace(Device=lambda: device, driver=driver), __version__="14.2.0"
    )


class FakeNvrtc:
    """A compiler whose machine code is what it was asked for."""

    version = (13, 0)

    def __init__(self, log: list[Any], cuda: int) -> None:
        self._log = log
        log.append(("compiler of CUDA", cuda))

    def architectures(self) -> list[int]:
        return [75, 80, 90, 100, 103]

    def compile(self, text: str, name: str, options: list[str]) -> Compiled:
        self._log.append(("compile", name, *options))
        return Compiled(f"{text} {options}".encode(), "")


class FakeTorch:
    """torch with a current stream that a test may switch."""

    def __init__(self) -> None:
        self.stream = 7
        self.cuda = SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=self.stream))


def merge_params(**values: int) -> Any:
    return fill(MERGE, **{**dict.fromkeys(MERGE.names or (), 0), **values})


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The requests that compiler and CuPy got, with a cache folder of the test's own."""
    log: list[Any] = []
    monkeypatch.setattr(cupy_launcher, "Nvrtc", lambda cuda: FakeNvrtc(log, cuda))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return log


def asked(log: list[Any], what: str) -> list[Any]:
    return [entry[1:] for entry in log if entry[0] == what]


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
    params = merge_params(num_heads=3, out=1 << 40)
    launcher.launch("pagekv_merge", PLAIN, LaunchConfig((3, 32, 1), 256, 1024), params)
    options = ["--gpu-architecture=sm_90", *KERNELS["pagekv_merge"].options(PLAIN)]
    assert log == [
        ("compiler of CUDA", 13),
        ("compile", "merge.cu", *options),
        ("load", f"{translation_unit('merge.cu')} {options}".encode()),
        ("launch", "pagekv_merge", (3, 32, 1), (256, 1, 1), params.tobytes(), 1024, 7),
    ]


def test_the_stream_is_the_current_one_at_each_launch(launcher: CupyLauncher, log: list[Any], torch: FakeTorch) -> None:
    launcher.launch("pagekv_merge", PLAIN, LaunchConfig((1, 1, 1), 32, 0), merge_params())
    torch.stream = 8
    launcher.launch("pagekv_merge", PLAIN, LaunchConfig((1, 1, 1), 32, 0), merge_params())
    assert [entry[-1] for entry in log if entry[0] == "launch"] == [7, 8]


def test_a_variant_is_compiled_once_and_says_so(launcher: CupyLauncher, log: list[Any], said: list[str]) -> None:
    for _ in range(3):
        launcher.launch("pagekv_merge", PLAIN, LaunchConfig((1, 1, 1), 32, 0), merge_params())
    assert len(asked(log, "compile")) == len(asked(log, "load")) == len(said) == 1
    assert said[0].startswith("kernels: pagekv_merge for float16 d128 on sm_90 ready in ")


def test_variants_that_a_kernel_does_not_tell_apart_share_their_code(launcher: CupyLauncher, log: list[Any]) -> None:
    params = fill(BLOCK_COPY, **dict.fromkeys(BLOCK_COPY.names or (), 0))
    for variant in (PLAIN, Variant("float32", "float32", 64)):
        launcher.launch("pagekv_block_copy", variant, LaunchConfig((1, 1, 1), 32, 0), params)
    assert [entry[0] for entry in log[1:]] == ["compile", "load", "launch", "launch"]


def test_large_shared_memory_is_allowed_once(launcher: CupyLauncher, log: list[Any]) -> None:
    for size in (48 << 10, 96 << 10, 64 << 10, 96 << 10, 100 << 10):
        launcher.launch("pagekv_merge", PLAIN, LaunchConfig((1, 1, 1), 32, size), merge_params())
    assert [entry[2] for entry in log if entry[0] == "allow"] == [96 << 10, 100 << 10]


def test_a_kernel_of_large_shared_memory_gets_all_that_the_multiprocessor_has(
    launcher: CupyLauncher, log: list[Any]
) -> None:
    # Else the driver may carve out less than the thread blocks take that have registers: fewer run at a time.
    launcher.launch("pagekv_merge", PLAIN, LaunchConfig((1, 1, 1), 32, 48 << 10), merge_params())
    assert asked(log, "carve out") == [], "what fits anyway is left to the driver"
    launcher.launch("pagekv_merge", PLAIN, LaunchConfig((1, 1, 1), 32, 70_656), merge_params())
    assert [entry[0] for entry in log[-3:]] == ["allow", "carve out", "launch"]
    assert asked(log, "carve out") == [("pagekv_merge", 100)]


def test_so_does_one_with_much_shared_memory_of_its_own(launcher: CupyLauncher, log: list[Any]) -> None:
    """The sampler, of which two thread blocks share a multiprocessor."""
    launcher.prepare(PLAIN)
    assert asked(log, "carve out") == [("pagekv_sample", 100)]


def test_a_launch_that_deals_its_work_has_no_more_thread_blocks_than_run_at_a_time(
    launcher: CupyLauncher, log: list[Any]
) -> None:
    for blocks, dealt in ((5000, True), (100, True), (5000, False)):
        launcher.launch("pagekv_merge", PLAIN, LaunchConfig((blocks, 1, 1), 128, 70_656, dealt), merge_params())
    assert [entry[1] for entry in asked(log, "launch")] == [(3 * 132, 1, 1), (100, 1, 1), (5000, 1, 1)]
    order = [entry[0] for entry in log]
    assert asked(log, "at a time") == [(FakeKernel.ptr, 128, 70_656)], "of the driver, once"
    assert order.index("carve out") < order.index("at a time")


def test_prepare_compiles_every_kernel_ahead(launcher: CupyLauncher, log: list[Any]) -> None:
    # A capture must not meet a compilation.
    launcher.prepare(PLAIN)
    launcher.prepare(PLAIN)
    launcher.launch("pagekv_merge", PLAIN, LaunchConfig((1, 1, 1), 32, 0), merge_params())
    assert len(asked(log, "compile")) == len(asked(log, "load")) == len(EVERYWHERE)


def test_prepare_compiles_all_kernels_at_the_same_time(launcher: CupyLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(len(EVERYWHERE), timeout=240)  # for a hang, not for speed
    compile_ = FakeNvrtc.compile

    def wait_for_the_others(self: FakeNvrtc, *args: Any) -> Compiled:
        together.wait()
        return compile_(self, *args)

    monkeypatch.setattr(FakeNvrtc, "compile", wait_for_the_others)
    launcher.prepare(PLAIN)
    assert not together.broken


def test_a_second_process_compiles_nothing(launcher: CupyLauncher, log: list[Any], torch: FakeTorch) -> None:
    launcher.prepare(PLAIN)
    first = asked(log, "load")
    log.clear()
    CupyLauncher(fake_cupy(log), torch, lambda line: None).prepare(PLAIN)  # type: ignore[arg-type]  # a stand-in
    assert asked(log, "compile") == []
    assert asked(log, "load") == first


def test_another_text_can_be_compiled_in_place_of_a_kernels(log: list[Any], torch: FakeTorch) -> None:
    stand_in: Any = torch
    launcher = CupyLauncher(fake_cupy(log), stand_in, lambda line: None, lambda source: f"edited {source}")
    launcher.launch("pagekv_merge", PLAIN, LaunchConfig((1, 1, 1), 32, 0), merge_params())
    assert asked(log, "load")[0][0].startswith(b"edited merge.cu ")


@pytest.mark.parametrize(("capability", "arch"), [("80", "sm_80"), ("89", "sm_80"), ("103", "sm_103")])
def test_code_is_for_the_gpu_present_or_an_earlier_one_of_its_generation(
    log: list[Any], torch: FakeTorch, capability: str, arch: str
) -> None:
    assert CupyLauncher(fake_cupy(log, capability), torch).arch == arch  # type: ignore[arg-type]  # a stand-in


@pytest.mark.parametrize(
    ("capability", "message"),
    [
        ("75", "the GPU has compute capability 7.5, the kernels need 8.0 or above: use a GPU"),
        ("120", "the GPU has compute capability 12.0, NVRTC 13.0 compiles for up to 10.3: install a newer"),
    ],
)
def test_a_gpu_without_machine_code_is_refused_by_name(
    log: list[Any], torch: FakeTorch, capability: str, message: str
) -> None:
    with pytest.raises(GpuUnavailable, match=message) as caught:
        CupyLauncher(fake_cupy(log, capability), torch)  # type: ignore[arg-type]  # a stand-in
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cuda", [12, 13])
def test_the_compiler_is_of_cupys_cuda(log: list[Any], torch: FakeTorch, cuda: int) -> None:
    CupyLauncher(fake_cupy(log, cuda=cuda), torch)  # type: ignore[arg-type]  # a stand-in
    assert log == [("compiler of CUDA", cuda)]


def test_a_machine_without_the_compiler_is_told_what_to_install(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "libraries", lambda cuda: iter(["/nowhere/libnvrtc.so"]))
    with pytest.raises(GpuUnavailable) as caught:
        CupyLauncher(fake_cupy([]), torch)  # type: ignore[arg-type]  # a stand-in
    assert str(caught.value) == (
        "CuPy 14.2.0 is built for CUDA 13, and so must be the compiler of the kernels: no NVRTC of CUDA 13 is "
        "installed: pip install 'nvidia-cuda-nvrtc==13.*' (part of pagekv[cuda13])"
    )


def test_a_machine_without_cupy_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(GpuUnavailable, match=r"install pagekv\[cuda12\] or pagekv\[cuda13\]"):
        import_cupy()


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (0, "no NVIDIA driver is loaded, CuPy 14.2.0 needs one for CUDA 13: install it"),
        (12080, r"the driver is for CUDA 12.8, CuPy 14.2.0 needs one for CUDA 13: install pagekv\[cuda12\] and remove"),
        (13000, "cudaErrorUnknown"),
    ],
)
def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch, driver: int, message: str) -> None:
    class NoDriver(RuntimeError):
        pass

    def fail() -> int:
        raise NoDriver("cudaErrorUnknown")

    cupy: Any = fake_cupy([])
    cupy.cuda.runtime = SimpleNamespace(CUDARuntimeError=NoDriver, getDeviceCount=fail, driverGetVersion=lambda: driver)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(GpuUnavailable, match=f"no usable GPU: {message}"):
        import_cupy()
    cupy.cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(GpuUnavailable, match="the driver shows none"):
        import_cupy()
