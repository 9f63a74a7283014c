"""The GPU as the NVIDIA driver describes it, asked through ctypes in milliseconds: without torch, CuPy or NumPy."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagekv.kernels.variants import MIN_COMPUTE_CAPABILITY

LIBRARY = "libcuda.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Numbers of cuda.h.
CUDA_ERROR_NO_DEVICE = 100
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
MAX_NAME = 256

NEEDED = f"a GPU of compute capability {MIN_COMPUTE_CAPABILITY / 10:.1f} or newer and its driver are needed"


class UnusableGpu(ValueError):
    """The cuda backend cannot start here; the message says what there is, what is needed and what to do."""


@dataclass(frozen=True)
class Gpu:
    """The GPU that torch will call current: the first one that the driver shows."""

    name: str
    capability: int
    """As in sm_90."""
    memory_bytes: int
    """All of it, whoever holds it."""
    cuda: tuple[int, int]
    """Version of the newest CUDA that the driver serves."""


def find_gpu(load: Callable[[str], Any] = ctypes.CDLL) -> Gpu:
    """Asks the driver; `load` opens its library by name. Raises UnusableGpu when there is no driver or no GPU."""
    try:
        library = load(LIBRARY)
    except OSError as error:
        raise UnusableGpu(
            f"there is no NVIDIA driver ({error}); {NEEDED}: install the driver, give a container the GPU (docker run "
            "--gpus all), or use --backend cpu"
        ) from error
    driver = _Driver(library)
    driver.call("cuInit", 0)
    if not driver.number("cuDeviceGetCount"):
        raise UnusableGpu(no_gpu())
    device = driver.number("cuDeviceGet", 0)
    name, memory = ctypes.create_string_buffer(MAX_NAME), ctypes.c_size_t()
    driver.call("cuDeviceGetName", name, MAX_NAME, device)
    driver.call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    major = driver.number("cuDeviceGetAttribute", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = driver.number("cuDeviceGetAttribute", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    cuda = driver.number("cuDriverGetVersion")
    return Gpu(name.value.decode(errors="replace"), 10 * major + minor, memory.value, (cuda // 1000, cuda % 1000 // 10))


def no_gpu() -> str:
    """The refusal where the driver shows no GPU."""
    hidden = f" ({VISIBLE} is {os.environ[VISIBLE]!r})" if VISIBLE in os.environ else ""
    return (
        f"the NVIDIA driver shows no GPU{hidden}; {NEEDED}: see what nvidia-smi lists and {VISIBLE} leaves of it, or "
        "use --backend cpu"
    )


class _Driver:
    """Calls by name; an error of the driver is an UnusableGpu."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code == CUDA_ERROR_NO_DEVICE:
            raise UnusableGpu(no_gpu())
        if code:
            raise UnusableGpu(
                f"the NVIDIA driver does not work: {name} says {self._words(code)}; {NEEDED}: see whether nvidia-smi "
                "works and its driver is the one that the kernel has loaded, or use --backend cpu"
            )

    def number(self, name: str, *args: Any) -> int:
        """The int that a function writes to its first argument."""
        found = ctypes.c_int()
        self.call(name, ctypes.byref(found), *args)
        return found.value

    def _words(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        return f"{(name.value or b'error').decode()} ({code})"
