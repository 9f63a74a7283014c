"""Finds a start that cannot succeed in the flags and in files of the model, before torch is imported, which takes
seconds. The code that loads refuses the same things where it meets them.
"""

from __future__ import annotations

from pathlib import Path

from pagekv.executor.model.files import StoredModel, read_model_files

# Bytes of an element by the values of --dtype that the cpu backend has.
CPU_ELEMENT_BYTES = {"auto": 4, "float32": 4, "bfloat16": 2, "float64": 8}


def check_cpu_dtype(dtype: str) -> None:
    """Raises ValueError for an element type that the cpu backend has not."""
    if dtype not in CPU_ELEMENT_BYTES:
        raise ValueError(
            f"--dtype {dtype}: must be one of {', '.join(CPU_ELEMENT_BYTES)} with the cpu backend; or use another "
            "--backend"
        )


def check_cpu_start(directory: Path, dtype: str, kv_memory: int) -> None:
    """Raises ValueError where `CpuBackend` would, as far as config.json shows."""
    check_cpu_dtype(dtype)
    check_kv_memory(directory, read_model_files(directory), CPU_ELEMENT_BYTES[dtype], kv_memory)


def check_kv_memory(directory: Path, stored: StoredModel, element_bytes: int, kv_memory: int) -> None:
    """Raises ValueError where memory that is given (not 0) cannot hold one token, so no block of any size."""
    token = stored.token_bytes(element_bytes)
    if token and 0 < kv_memory < token:
        raise ValueError(
            f"--kv-memory {kv_memory}: must be a size of at least one block, and a block of 16 tokens of {directory} "
            f"takes {16 * token} bytes, one token {token}; 0 takes a share of what is available"
        )
