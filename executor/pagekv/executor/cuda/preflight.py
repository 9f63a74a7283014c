"""Whether the cuda backend can start at all, found out in milliseconds: before torch is imported, which takes seconds,
and before weights are read, which takes minutes.

Only what certainly cannot work is refused. Doubtful cases are left to the code that loads, which refuses
the same things where it meets them.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pagekv.executor.cuda.driver import NEEDED, Gpu, UnusableGpu
from pagekv.executor.model.files import StoredModel, read_model_files
from pagekv.kernels.variants import (
    DTYPE_BYTES,
    DTYPE_PAIRS,
    HEAD_SIZES,
    MIN_COMPUTE_CAPABILITY,
    UnsupportedVariant,
    Variant,
    check_heads,
)

# The wheels of CuPy that `pagekv[cuda12]` and `pagekv[cuda13]` install, by the major version of CUDA they are for.
CUPY_WHEELS = {12: "cupy-cuda12x", 13: "cupy-cuda13x"}
# Host memory that torch, CUDA's context and the first page-locked buffers take at the very least.
MIN_HOST_BYTES = 512 * 2**20
FP8 = "float8_e4m3fn"
# As the backend does where config.json names none that kernels serve; no smaller one there could be either.
AUTO_DTYPE = "bfloat16"


@dataclass(frozen=True)
class Builds:
    """CUDA versions that the installed packages are built for."""

    torch_cuda: int | None
    """Major version of CUDA; 0: built without it; None: torch does not say, or is not there."""
    cupy: bool
    """Whether there is any CuPy."""
    cupy_cuda: tuple[int, ...]
    """Major versions of CUDA of its wheels, ascending; empty where it was installed in another way."""


def installed_builds() -> Builds:
    """Asks what is installed without importing it."""
    return Builds(
        torch_cuda=_torch_cuda(),
        cupy=importlib.util.find_spec("cupy") is not None,
        cupy_cuda=tuple(major for major, wheel in CUPY_WHEELS.items() if _is_installed(wheel)),
    )


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


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_machine(gpu: Gpu, builds: Builds, host_bytes: int) -> None:
    """`host_bytes`: memory that is available on the host. Raises UnusableGpu."""
    if gpu.capability < MIN_COMPUTE_CAPABILITY:
        raise UnusableGpu(
            f"the GPU, {gpu.name}, has compute capability {gpu.capability / 10:.1f}; {NEEDED}: use another GPU, which "
            "CUDA_VISIBLE_DEVICES can choose, or --backend cpu"
        )
    serves, oldest = f"the driver of the GPU serves CUDA {gpu.cuda[0]}.{gpu.cuda[1]} at most", min(CUPY_WHEELS)
    if gpu.cuda[0] < oldest:
        raise UnusableGpu(f"{serves}; {oldest}.0 is the oldest that CuPy and torch are used with: update the driver")
    # Within a major version the driver serves newer minor ones too.
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


def check_model(directory: Path, dtype: str, kv_dtype: str, gpu: Gpu) -> None:
    """`dtype`, `kv_dtype`: as the flags. Raises ValueError, naming the model, the reason and what to do."""
    stored = read_model_files(directory)
    served = _served_dtype(stored, dtype)
    try:
        # An unknown head size is not judged: any that there is does here.
        Variant(served, FP8 if kv_dtype == "fp8" else served, HEAD_SIZES[0])
    except UnsupportedVariant as error:
        raise ValueError(
            f"--dtype {dtype}, --kv-dtype {kv_dtype}: no kernels serve {directory} with these: {error}; choose another "
            "element type, or --backend cpu"
        ) from error
    try:
        Variant(served, served, stored.head_size or HEAD_SIZES[0])
        if stored.num_heads and stored.num_kv_heads:
            check_heads(stored.num_heads, stored.num_kv_heads)
    except UnsupportedVariant as error:
        raise ValueError(
            f"{directory}: a model of type {stored.model_type} cannot be served by the cuda backend: {error}; use "
            "another model, or --backend cpu"
        ) from error
    check_room(directory, stored, served, gpu.memory_bytes, f"{gpu.name} has {gib(gpu.memory_bytes)} of memory")


def check_room(directory: Path, stored: StoredModel, dtype: str, room: int, there_is: str) -> None:
    """Raises ValueError where the weights alone take more than `room` bytes; `there_is` says so in words."""
    needed = (stored.num_weights or 0) * DTYPE_BYTES[dtype]
    if needed > room:
        smaller = " --dtype bfloat16," if dtype == "float32" and needed // 2 <= room else ""
        raise ValueError(
            f"{directory}: its weights take {gib(needed)} in {dtype}, {there_is}: use{smaller} a smaller model, a GPU "
            "with more memory, or --backend cpu"
        )


def gib(size: int) -> str:
    """Bytes in words."""
    return f"{size / 2**30:.2f} GiB"


def _served_dtype(stored: StoredModel, dtype: str) -> str:
    """The element type that the weights will have."""
    if dtype != "auto":
        return dtype
    return stored.dtype if stored.dtype is not None and stored.dtype in DTYPE_PAIRS else AUTO_DTYPE
