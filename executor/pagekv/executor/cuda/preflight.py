"""Checks in milliseconds whether the cuda backend can start at all: before torch is imported, which takes seconds, and
before weights are read, which takes minutes.

A start is refused only if it certainly cannot work. Doubtful cases are left to the code that loads the model, which
makes the same checks. The driver is called through ctypes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pagekv.executor.machine import available_bytes
from pagekv.executor.model.files import StoredModel, read_model_files
from pagekv.executor.model.start_check import check_kv_memory, check_ranks, check_same_model
from pagekv.kernels.variants import (
    DTYPE_BYTES,
    DTYPE_PAIRS,
    HEAD_SIZES,
    MIN_COMPUTE_CAPABILITY,
    UnsupportedVariant,
    Variant,
    check_heads,
)

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Constants of cuda.h.
CUDA_ERROR_NO_DEVICE = 100
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
MAX_NAME = 256

NEEDED = f"a GPU of compute capability {MIN_COMPUTE_CAPABILITY / 10:.1f} or newer and its driver are needed"
# The wheels of CuPy that `pagekv[cuda12]` and `pagekv[cuda13]` install, by major version of CUDA.
CUPY_WHEELS = {12: "cupy-cuda12x", 13: "cupy-cuda13x"}
# The least host memory that torch, CUDA's context and the first pinned buffers take.
MIN_HOST_BYTES = 512 * 2**20
FP8 = "float8_e4m3fn"
# The element type if config.json names none that kernels serve. No served type is smaller, so checks stay cautious.
AUTO_DTYPE = "bfloat16"


class UnusableGpu(ValueError):
    """The cuda backend cannot start here; the message says what was found, what is needed and what to do."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver shows it; torch and CuPy give it the same number."""

    name: str
    capability: int
    """Compute capability as in sm_90: 90 for 9.0."""
    memory_bytes: int
    """All memory of the GPU, free or in use."""
    cuda: tuple[int, int]
    """The newest version of CUDA that the driver supports."""


def find_gpu(load: Callable[[str], Any] = ctypes.CDLL, *, index: int = 0) -> Gpu:
    """Asks the driver for the GPU with this number; `load` opens its library by name. Raises UnusableGpu when there is
    no driver or no such GPU.
    """
    try:
        library = load("libcuda.so.1")
    except OSError as error:
        raise UnusableGpu(
            f"there is no NVIDIA driver ({error}); {NEEDED}: install the driver, give a container the GPU (docker run "
            "--gpus all), or use --backend cpu"
        ) from error
    hidden = f" ({VISIBLE} is {os.environ[VISIBLE]!r})" if VISIBLE in os.environ else ""
    no_gpu = (
        f"the NVIDIA driver shows no GPU{hidden}; {NEEDED}: see what nvidia-smi lists and {VISIBLE} leaves of it, or "
        "use --backend cpu"
    )

    def call(name: str, *args: Any) -> None:
        code = getattr(library, name)(*args)
        if code == CUDA_ERROR_NO_DEVICE:
            raise UnusableGpu(no_gpu)
        if code:
            word = ctypes.c_char_p()
            library.cuGetErrorName(code, ctypes.byref(word))
            raise UnusableGpu(
                f"the NVIDIA driver does not work: {name} says {(word.value or b'error').decode()} ({code}); {NEEDED}: "
                "see whether nvidia-smi works and its driver is the one that the kernel has loaded, or use "
                "--backend cpu"
            )

    def number(name: str, *args: Any) -> int:
        """Calls a function of the driver; returns the int that it writes to its first argument."""
        found = ctypes.c_int()
        call(name, ctypes.byref(found), *args)
        return found.value

    call("cuInit", 0)
    count = number("cuDeviceGetCount")
    if not count:
        raise UnusableGpu(no_gpu)
    if index >= count:
        raise UnusableGpu(
            f"the NVIDIA driver shows {count} GPU{'s' * (count > 1)}{hidden}, too few for LOCAL_RANK {index}: "
            "each rank of a group needs one of its own; start fewer ranks on this machine, or use --backend cpu"
        )
    device = number("cuDeviceGet", index)
    name, memory = ctypes.create_string_buffer(MAX_NAME), ctypes.c_size_t()
    call("cuDeviceGetName", name, MAX_NAME, device)
    call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    major = number("cuDeviceGetAttribute", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = number("cuDeviceGetAttribute", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    cuda = number("cuDriverGetVersion")
    return Gpu(name.value.decode(errors="replace"), 10 * major + minor, memory.value, (cuda // 1000, cuda % 1000 // 10))


@dataclass(frozen=True)
class Builds:
    """The CUDA versions that the installed packages are built for."""

    torch_cuda: int | None
    """torch's major version of CUDA; 0: built without CUDA; None: unknown, or torch is not installed."""
    cupy: bool
    """Whether any CuPy is installed."""
    cupy_cuda: tuple[int, ...]
    """Major versions of CUDA of the installed CuPy wheels, ascending; empty if CuPy was installed in another way."""


def installed_builds() -> Builds:
    """Finds out which builds are installed, without importing them."""
    return Builds(
        torch_cuda=_torch_cuda(),
        cupy=importlib.util.find_spec("cupy") is not None,
        cupy_cuda=tuple(major for major, wheel in CUPY_WHEELS.items() if any(metadata.distributions(name=wheel))),
    )


def cupy_version() -> str:
    """The installed CuPy wheels with their versions; "none" if there are none."""
    wheels = [
        (wheel, metadata.version(wheel)) for wheel in CUPY_WHEELS.values() if any(metadata.distributions(name=wheel))
    ]
    return ", ".join(f"{wheel} {version}" for wheel, version in wheels) or "none"


def _torch_cuda() -> int | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*=\s*(?:None|'(\d+)[\d.]*')", text, re.MULTILINE)
    return int(found[1] or 0) if found else None


def check_machine(gpu: Gpu, builds: Builds, host_bytes: int) -> None:
    """Checks GPU, driver, packages and host memory. `host_bytes`: bytes available on the host. Raises UnusableGpu."""
    if gpu.capability < MIN_COMPUTE_CAPABILITY:
        raise UnusableGpu(
            f"the GPU, {gpu.name}, has compute capability {gpu.capability / 10:.1f}; {NEEDED}: use another GPU, which "
            "CUDA_VISIBLE_DEVICES can choose, or --backend cpu"
        )
    serves, oldest = f"the driver of the GPU serves CUDA {gpu.cuda[0]}.{gpu.cuda[1]} at most", min(CUPY_WHEELS)
    if gpu.cuda[0] < oldest:
        raise UnusableGpu(f"{serves}; {oldest}.0 is the oldest that CuPy and torch are used with: update the driver")
    # A driver also supports newer minor versions of the same major version.
    extra = f"pip install 'pagekv[cuda{min(gpu.cuda[0], max(CUPY_WHEELS))}]'"
    index = "cu126" if gpu.cuda[0] == 12 else "cu130"
    torch = f"pip install torch --index-url https://download.pytorch.org/whl/{index}"
    if builds.torch_cuda == 0:
        raise UnusableGpu(
            f"torch is built without CUDA; a build for CUDA {gpu.cuda[0]} or older is needed: {torch}, or use "
            "--backend cpu"
        )
    if builds.torch_cuda is not None and builds.torch_cuda > gpu.cuda[0]:
        raise UnusableGpu(f"{serves} and torch is built for CUDA {builds.torch_cuda}: update the driver, or {torch}")
    if not builds.cupy:
        raise UnusableGpu(f"CuPy is not installed; it compiles and starts the kernels: {extra}, or use --backend cpu")
    if builds.cupy_cuda and builds.cupy_cuda[0] > gpu.cuda[0]:
        wheel = CUPY_WHEELS[builds.cupy_cuda[0]]
        raise UnusableGpu(
            f"{serves} and CuPy ({wheel}) needs {builds.cupy_cuda[0]}.0 or newer: update the driver, or pip uninstall "
            f"{wheel} and {extra}"
        )
    if host_bytes < MIN_HOST_BYTES:
        raise UnusableGpu(
            f"{host_bytes >> 20} MiB of host memory are available; {MIN_HOST_BYTES >> 20} MiB are the least that CUDA "
            "and page-locked buffers need: free some, or raise the memory limit of the container"
        )


def usable_gpu(index: int) -> Gpu:
    """The GPU with this number. Raises UnusableGpu if it cannot be used on this machine."""
    gpu = find_gpu(index=index)
    check_machine(gpu, installed_builds(), available_bytes())
    return gpu


def served_dtypes(directory: Path, stored: StoredModel, dtype: str, kv_dtype: str) -> tuple[str, str]:
    """The element types of weights and KV memory for the flags `dtype` and `kv_dtype`. Raises ValueError, naming the
    model, the reason and what to do, if no kernels serve them.
    """
    as_stored = stored.dtype if stored.dtype and stored.dtype in DTYPE_PAIRS else AUTO_DTYPE
    served = as_stored if dtype == "auto" else dtype
    kept = FP8 if kv_dtype == "fp8" else served
    try:
        # Any supported head size will do: only the element types are checked.
        Variant(served, kept, HEAD_SIZES[0])
    except UnsupportedVariant as error:
        raise ValueError(
            f"--dtype {dtype}, --kv-dtype {kv_dtype}: no kernels serve {directory} with these: {error}; choose another "
            "element type, or --backend cpu"
        ) from error
    return served, kept


def check_model(directory: Path, dtype: str, kv_dtype: str, gpu: Gpu, kv_memory: int = 0, *, ranks: int = 1) -> None:
    """Checks the model against the GPU. `dtype`, `kv_dtype` and `kv_memory`: values of the flags. `ranks`: the number
    of ranks that split the model. Raises ValueError, naming the model, the reason and what to do.
    """
    stored = read_model_files(directory)
    check_same_model(directory, stored)
    check_ranks(directory, stored, ranks)
    served, kept = served_dtypes(directory, stored, dtype, kv_dtype)
    check_kv_memory(directory, stored, DTYPE_BYTES[kept], kv_memory, gpu.memory_bytes, ranks)
    try:
        # An unknown head size is not checked.
        Variant(served, served, stored.head_size or HEAD_SIZES[0])
        if stored.num_heads and stored.num_kv_heads:
            # The heads of one rank, as in `num_rank_kv_heads`.
            check_heads(stored.num_heads // ranks, stored.num_kv_heads // math.gcd(stored.num_kv_heads, ranks))
    except UnsupportedVariant as error:
        raise ValueError(
            f"{directory}: a model of type {stored.model_type} cannot be served by the cuda backend: {error}; use "
            "another model, or --backend cpu"
        ) from error
    there_is = f"{gpu.name} has {gib(gpu.memory_bytes)} of memory"
    check_room(directory, stored, served, gpu.memory_bytes, there_is, ranks=ranks)


def check_room(directory: Path, stored: StoredModel, dtype: str, room: int, there_is: str, *, ranks: int = 1) -> None:
    """Raises ValueError if a rank's share of the weights alone takes more than `room` bytes. `there_is`: the available
    memory in words, for the message.
    """
    needed = (stored.num_weights or 0) * DTYPE_BYTES[dtype] // ranks
    if needed > room:
        smaller = " --dtype bfloat16," if dtype == "float32" and needed // 2 <= room else ""
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ValueError(
            f"{directory}: its weights take {gib(needed)} in {dtype}{each}, {there_is}: use{smaller} a smaller model, "
            "a GPU with more memory, more ranks (torchrun), or --backend cpu"
        )


def gib(size: int) -> str:
    """A number of bytes as text in GiB."""
    return f"{size / 2**30:.2f} GiB"
