"""Launches kernels on a GPU: they are compiled at first use, loaded by CuPy and started on torch's current stream.

CuPy is imported when the first launcher is made, so that everything else works without CuPy. Machine code for the
present GPU is kept in the user's cache folder, so that a second process starts at once.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pagekv.kernels.launch_config import LaunchConfig
from pagekv.kernels.machine_code import MachineCode
from pagekv.kernels.nvrtc import Nvrtc, NvrtcMissing
from pagekv.kernels.params import Struct
from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import EVERYWHERE, KERNELS, MIN_COMPUTE_CAPABILITY, Variant

STATIC_SHARED_LIMIT = 48 << 10
"""Bytes of dynamic shared memory; more has to be requested for each kernel."""
ALL_SHARED = 100
"""Percent of a multiprocessor's memory for L1 and shared memory that is shared memory."""
MUCH_SHARED = 16 << 10
"""Bytes of static shared memory; a kernel with more asks for ALL_SHARED."""

Say = Callable[[str], None]


class GpuUnavailable(RuntimeError):
    """GPU, driver, CuPy or compiler is missing or unsuitable; the message says which, and what to do."""


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def import_cupy() -> ModuleType:
    """CuPy with a usable GPU. Raises GpuUnavailable."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise GpuUnavailable(
            f"CuPy cannot be imported ({error}): install pagekv[cuda12] or pagekv[cuda13], as the driver allows"
        ) from error
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise GpuUnavailable(f"no usable GPU: {_driver_trouble(cupy) or error}") from error
    if not devices:
        raise GpuUnavailable("no usable GPU: the driver shows none; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    return cupy


def _driver_trouble(cupy: Any) -> str:
    """A sentence that says that the driver is missing or too old; empty if its version is fine."""
    driver, cuda = cupy.cuda.runtime.driverGetVersion(), _cuda_of(cupy)
    if driver == 0:
        return f"no NVIDIA driver is loaded, CuPy {cupy.__version__} needs one for CUDA {cuda}: install it"
    if driver // 1000 < cuda:
        return (
            f"the driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, CuPy {cupy.__version__} needs one for "
            f"CUDA {cuda}: install pagekv[cuda{driver // 1000}] and remove this CuPy, or install a newer driver"
        )
    return ""


def _cuda_of(cupy: Any) -> int:
    """CUDA major version of CuPy's build."""
    return int(cupy.cuda.driver.get_build_version()) // 1000


def machine_code_for(cupy: Any) -> MachineCode:
    """Machine code for CuPy's current device, by a compiler of CuPy's CUDA version. Raises GpuUnavailable."""
    capability = int(cupy.cuda.Device().compute_capability)
    if capability < MIN_COMPUTE_CAPABILITY:
        raise GpuUnavailable(
            f"the GPU has compute capability {_dotted(capability)}, the kernels need {_dotted(MIN_COMPUTE_CAPABILITY)} "
            "or above: use a GPU of the Ampere generation or later, or serve on the CPU"
        )
    cuda = _cuda_of(cupy)
    try:
        compiler = Nvrtc(cuda)
    except NvrtcMissing as error:
        raise GpuUnavailable(
            f"CuPy {cupy.__version__} is built for CUDA {cuda}, and so must be the compiler of the kernels: {error} "
            f"(part of pagekv[cuda{cuda}])"
        ) from error
    # Code for an earlier GPU of the same generation runs on a later one too.
    known = [arch for arch in compiler.architectures() if arch // 10 == capability // 10 and arch <= capability]
    if not known:
        version = ".".join(map(str, compiler.version))
        raise GpuUnavailable(
            f"the GPU has compute capability {_dotted(capability)}, NVRTC {version} compiles for up to "
            f"{_dotted(max(compiler.architectures()))}: install a newer nvidia-cuda-nvrtc, and CuPy of its CUDA version"
        )
    return MachineCode(compiler, max(known))


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


@dataclass(frozen=True)
class _Stream:
    """The part of a stream that CuPy reads (`cupy.cuda.ExternalStream` is deprecated since CuPy 14)."""

    ptr: int


class CupyLauncher:
    """A `Launcher` for the current CUDA device. Each kernel variant is compiled when it is first started."""

    def __init__(
        self,
        cupy: ModuleType | None = None,
        torch: ModuleType | None = None,
        say: Say = say_on_stderr,
        text: Callable[[str], str] = translation_unit,
    ) -> None:
        """`cupy`, `torch`: the modules; imported if None. `say` is called with a line for each kernel that is ready.
        `text` maps the name of a kernel's source, such as decode.cu, to the text that is compiled.

        Raises GpuUnavailable.
        """
        self._cupy: Any = import_cupy() if cupy is None else cupy
        self._torch: Any = importlib.import_module("torch") if torch is None else torch
        self._say, self._text = say, text
        self._machine_code = machine_code_for(self._cupy)
        self.arch = f"sm_{self._machine_code.arch}"
        self._functions: dict[tuple[str, Variant], Any] = {}
        self._by_text: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._shared: dict[tuple[str, Variant], int] = {}
        self._at_a_time: dict[tuple[str, Variant], int] = {}

    def launch(self, kernel: str, variant: Variant, config: LaunchConfig, params: Struct) -> None:
        if (kernel, variant) not in self._functions:
            self.prepare(variant, [kernel])
        function = self._functions[kernel, variant]
        if config.shared_bytes > self._shared[kernel, variant]:
            function.max_dynamic_shared_size_bytes = config.shared_bytes
            function.preferred_shared_memory_carveout = ALL_SHARED
            self._shared[kernel, variant] = config.shared_bytes
        # torch may have switched streams (a capture does), so its stream is looked up each time. CuPy passes a NumPy
        # array of one element by value.
        stream = _Stream(self._torch.cuda.current_stream().cuda_stream)
        grid = config.grid
        if config.dealt:
            grid = (min(grid[0], self._blocks_at_a_time(kernel, variant, config)), *grid[1:])
        function.kernel(grid, (config.threads, 1, 1), (params,), config.shared_bytes, stream)

    def _blocks_at_a_time(self, kernel: str, variant: Variant, config: LaunchConfig) -> int:
        """Thread blocks of a kernel that run on the device at a time, by registers and shared memory."""
        if (kernel, variant) not in self._at_a_time:
            function = self._functions[kernel, variant].kernel
            of_one = self._cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
                function.ptr, config.threads, config.shared_bytes
            )
            self._at_a_time[kernel, variant] = of_one * self._cupy.cuda.Device().attributes["MultiProcessorCount"]
        return self._at_a_time[kernel, variant]

    def prepare(self, variant: Variant, kernels: Iterable[str] = EVERYWHERE) -> None:
        """Compiles kernels in parallel; otherwise each is compiled at its first launch. Called before serving, and
        before a graph is captured.
        """
        started = time.perf_counter()
        missing = [kernel for kernel in kernels if (kernel, variant) not in self._functions]
        new = [kernel for kernel in missing if self._key(kernel, variant) not in self._by_text]
        if new:
            with ThreadPoolExecutor(len(new)) as pool:
                files = list(pool.map(lambda kernel: self._compile(kernel, variant), new))
            for kernel, file in zip(new, files, strict=True):
                function = self._cupy.RawModule(path=str(file)).get_function(kernel)
                if function.shared_size_bytes > MUCH_SHARED:
                    # By default the driver may reserve less shared memory than the resident thread blocks need.
                    function.preferred_shared_memory_carveout = ALL_SHARED
                self._by_text[self._key(kernel, variant)] = function
                took, label = time.perf_counter() - started, KERNELS[kernel].label(variant)
                self._say(f"kernels: {kernel} for {label} on {self.arch} ready in {took:.1f} s")
        for kernel in missing:
            self._functions[kernel, variant] = self._by_text[self._key(kernel, variant)]
            self._shared[kernel, variant] = STATIC_SHARED_LIMIT

    @staticmethod
    def _key(kernel: str, variant: Variant) -> tuple[str, tuple[str, ...]]:
        return kernel, KERNELS[kernel].options(variant)

    def _compile(self, name: str, variant: Variant) -> Path:
        kernel = KERNELS[name]
        return self._machine_code.file(
            self._text(kernel.source),
            kernel.source,
            kernel.options(variant),
            kernel.architecture(self._machine_code.arch),
        )
