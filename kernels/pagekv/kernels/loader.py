"""Kernels on a GPU: compiled by CuPy at first use, started on torch's current stream.

CuPy is imported when the first launcher is made, so that everything else works without it. It compiles for the GPU
present and keeps the machine code in ~/.cupy/kernel_cache, so that a second process starts at once.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pagekv.kernels.nvrtc import IN_SITE_PACKAGES
from pagekv.kernels.params import Struct
from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import KERNELS, MIN_COMPUTE_CAPABILITY, Variant

STATIC_SHARED_LIMIT = 48 << 10
"""Dynamic shared memory beyond this has to be asked for, kernel by kernel."""

Say = Callable[[str], None]


class GpuUnavailable(RuntimeError):
    """No GPU, driver or CuPy that the kernels could run with; the message says which."""


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def import_cupy() -> ModuleType:
    """CuPy, with its compiler loaded. Raises GpuUnavailable where it cannot be used."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise GpuUnavailable(
            f"CuPy cannot be imported ({error}): install pagekv[cuda12] or pagekv[cuda13], as the driver allows"
        ) from error
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise GpuUnavailable(f"no usable GPU: {error}") from error
    if not devices:
        raise GpuUnavailable("no usable GPU: the driver shows none")
    preload_compiler(cupy.cuda.driver.get_build_version() // 1000)
    return cupy


def preload_compiler(cuda_major: int, load: Callable[..., object] = ctypes.CDLL) -> None:
    """Loads the NVRTC of this CUDA version from a wheel, so that CuPy finds it by name without a toolkit installed;
    else the system's. Raises GpuUnavailable where there is neither.
    """
    for entry in sys.path:
        for folder in IN_SITE_PACKAGES:
            library = Path(entry, folder, f"libnvrtc.so.{cuda_major}")
            if library.is_file():
                load(str(library), mode=ctypes.RTLD_GLOBAL)
                return
    try:
        load(f"libnvrtc.so.{cuda_major}", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise GpuUnavailable(
            f"CuPy is built for CUDA {cuda_major} and no NVRTC of that version is installed ({error}): install "
            f"pagekv[cuda{cuda_major}]"
        ) from error


@dataclass(frozen=True)
class _Stream:
    """What CuPy asks of a stream. (`cupy.cuda.ExternalStream` is deprecated since CuPy 14, its successor new there.)"""

    ptr: int


class CupyLauncher:
    """A `Launcher` for the current CUDA device. Each kernel variant is compiled when it is first started."""

    def __init__(
        self, cupy: ModuleType | None = None, torch: ModuleType | None = None, say: Say = say_on_stderr
    ) -> None:
        """`cupy`, `torch`: the modules, imported where not given. `say` takes a line for each compilation.

        Raises GpuUnavailable.
        """
        self._cupy: Any = import_cupy() if cupy is None else cupy
        self._torch: Any = importlib.import_module("torch") if torch is None else torch
        self._say = say
        capability = int(self._cupy.cuda.Device().compute_capability)
        if capability < MIN_COMPUTE_CAPABILITY:
            raise GpuUnavailable(
                f"the GPU has compute capability {capability}; the kernels need {MIN_COMPUTE_CAPABILITY}"
            )
        self.arch = f"sm_{capability}"
        self._functions: dict[tuple[str, Variant], Any] = {}
        self._by_text: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._shared: dict[tuple[str, Variant], int] = {}

    def launch(
        self,
        kernel: str,
        variant: Variant,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        params: Struct,
    ) -> None:
        """See `Launcher.launch`."""
        function = self._functions.get((kernel, variant)) or self._load(kernel, variant)
        if shared_bytes > self._shared[kernel, variant]:
            function.max_dynamic_shared_size_bytes = shared_bytes
            self._shared[kernel, variant] = shared_bytes
        # torch may have switched streams (a capture does), so its stream is asked for each time. A NumPy array of one
        # element is what CuPy passes by value.
        stream = _Stream(self._torch.cuda.current_stream().cuda_stream)
        function.kernel(grid, (threads, 1, 1), (params,), shared_bytes, stream)

    def prepare(self, variant: Variant, kernels: Iterable[str] = tuple(KERNELS)) -> None:
        """Compiles now what would be compiled at first use: before serving, and before a graph is captured."""
        for kernel in kernels:
            if (kernel, variant) not in self._functions:
                self._load(kernel, variant)

    def _load(self, name: str, variant: Variant) -> Any:
        kernel = KERNELS[name]
        key = (name, kernel.options(variant))
        if key not in self._by_text:
            started = time.perf_counter()
            text = translation_unit(kernel.source)
            function = self._cupy.RawModule(code=text, options=kernel.options(variant)).get_function(name)
            _ = function.kernel  # compiles now: the attribute is the loaded machine code
            self._by_text[key] = function
            took = time.perf_counter() - started
            self._say(f"kernels: {name} for {kernel.label(variant)} on {self.arch} ready in {took:.1f} s")
        self._functions[name, variant] = self._by_text[key]
        self._shared.setdefault((name, variant), STATIC_SHARED_LIMIT)
        return self._functions[name, variant]
