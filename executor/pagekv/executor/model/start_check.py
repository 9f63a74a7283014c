"""Refuses a start that cannot succeed, judging by the flags and the model's files, before torch is imported, which
takes seconds. The code that loads the model makes the same checks later.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

from pagekv.executor.model.files import StoredModel, absent_layers, embedding_size, read_model_files
from pagekv.executor.world import MAX_RANKS

# Bytes of an element, by the values of --dtype that the cpu backend supports.
CPU_ELEMENT_BYTES = {"auto": 4, "float32": 4, "bfloat16": 2, "float64": 8}
# Element types in which compiled loops compute.
REPACKED = ("float32", "bfloat16")

# Least tokens of a pool: one block of the manager's default --block-size. Blocks may be smaller, but no useful prompt
# fits into less. For larger blocks the memory is checked when a manager asks with its block size.
MIN_POOL_TOKENS = 16


def check_cpu_dtype(dtype: str) -> None:
    """Raises ValueError for an element type that the cpu backend does not support."""
    if dtype not in CPU_ELEMENT_BYTES:
        raise ValueError(
            f"--dtype {dtype}: must be one of {', '.join(CPU_ELEMENT_BYTES)} with the cpu backend; or use another "
            "--backend"
        )


def check_cpu_start(
    directory: Path, dtype: str, kv_memory: int, available: int, ranks: int = 1, *, fused: bool = True
) -> None:
    """Raises ValueError where `CpuBackend` would raise it or run out of memory, as far as the model's files show.
    `available`: bytes that this process can get. `ranks`: the number of ranks that split the model. `fused`: compiled
    loops are to compute it.
    """
    check_cpu_dtype(dtype)
    stored = read_model_files(directory)
    check_same_model(directory, stored)
    check_ranks(directory, stored, ranks)
    check_kv_memory(directory, stored, CPU_ELEMENT_BYTES[dtype], kv_memory, available, ranks)
    served = "float32" if dtype == "auto" else dtype
    repacked = fused and served in REPACKED and find_spec("numba") is not None
    _check_weights(directory, stored, served, available, ranks, repacked=repacked)


def _check_weights(
    directory: Path, stored: StoredModel, dtype: str, available: int, ranks: int, *, repacked: bool
) -> None:
    """Raises ValueError if the weights do not fit. Weights of the served type are mapped from their files; `repacked`:
    those of linear layers are then copied for compiled loops.
    """
    copied = stored.num_weights
    if stored.dtype in (None, dtype):
        copied = stored.num_linear if repacked else 0
    needed = (copied or 0) * CPU_ELEMENT_BYTES[dtype] // ranks
    if needed <= available:
        return
    fits = (
        stored.dtype in REPACKED and (stored.num_weights or 0) * CPU_ELEMENT_BYTES[stored.dtype] // ranks <= available
    )
    mapped = f"--dtype {stored.dtype}, as they are stored, " if fits else ""
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    raise ValueError(
        f"{directory}: its weights take {needed / 2**30:.2f} GiB in {dtype}{each}, and {available / 2**30:.2f} GiB are "
        f"available: use {mapped}a smaller model, or a machine with more memory"
    )


def check_same_model(directory: Path, stored: StoredModel) -> None:
    """Raises ValueError if the weights are certain to belong to another model than the one in config.json."""
    size = embedding_size(directory, stored)
    absent, first = absent_layers(directory, stored)
    if size is not None and stored.hidden_size not in (None, size):
        found = f"vectors of {size} elements, and config.json says hidden_size {stored.hidden_size}"
    elif absent:
        found = f"no tensor of {absent} of the {stored.num_layers} layers of config.json, such as {first}"
    else:
        return
    raise ValueError(f"{directory}: its weights have {found}: copy the config.json and all weights of one model there")


def check_ranks(directory: Path, stored: StoredModel, ranks: int) -> None:
    """Raises ValueError if the query heads cannot be divided equally among `ranks`."""
    heads = stored.num_heads
    if ranks > 1 and heads and heads % ranks:
        fits = [each for each in range(1, MAX_RANKS + 1) if heads % each == 0]
        near = [*[each for each in fits if each < ranks][-1:], *[each for each in fits if each > ranks][:1]]
        raise ValueError(
            f"{ranks} ranks (--tp of pagekv up, WORLD_SIZE with torchrun) do not divide the {heads} query heads of "
            f"{directory}: start {' or '.join(map(str, near))} ranks"
        )


def check_kv_memory(
    directory: Path, stored: StoredModel, element_bytes: int, kv_memory: int, most: int, ranks: int = 1
) -> None:
    """Raises ValueError if the given memory (not 0) cannot hold `MIN_POOL_TOKENS` tokens, of which each of the `ranks`
    has its KV heads, or exceeds the `most` bytes that the machine or GPU can provide to a rank.
    """
    if kv_memory > most:
        each = " on each rank" if ranks > 1 else ""
        raise ValueError(
            f"--kv-memory {kv_memory}: at most {most} bytes ({most / 2**30:.1f} GiB) are available{each} for the "
            "model and the KV cache together: give less, or 0 for a share of what is available"
        )
    # As `num_rank_kv_heads` shares heads out.
    heads = stored.num_kv_heads or stored.num_heads or 1
    token = (stored.token_bytes(element_bytes) or 0) // math.gcd(heads, ranks)
    if token and 0 < kv_memory < MIN_POOL_TOKENS * token:
        raise ValueError(
            f"--kv-memory {kv_memory}: must hold a block of {MIN_POOL_TOKENS} tokens, for {directory} "
            f"{MIN_POOL_TOKENS * token} bytes or more, at {token} a token; 0 takes a share of what is available"
        )
