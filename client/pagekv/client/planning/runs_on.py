"""The backends of PageKV that support a cache of a given shape, so that nobody plans a cache that none of them
supports.

The limits are those of docs/models.md and docs/kernels.md. A client does not import executors and their packages, so
the limits are repeated here; a test compares them with the kernels and the executor's flags.
"""

from __future__ import annotations

from pagekv.client.planning.kv_geometry import KvGeometry

# Element types of keys and values.
CPU_DTYPES = ("float32", "bfloat16", "float64")
CUDA_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")
CUDA_HEAD_SIZES = (64, 80, 96, 128, 256)


def runs_on(geometry: KvGeometry, ranks: int = 1, query_heads: int | None = None) -> dict[str, str]:
    """For each backend by name, why it does not support this cache over so many ranks; empty if it does. The model's
    kind of attention, its size, and whether its family can be split are not checked, nor are `query_heads` of None.
    """
    reasons: dict[str, list[str]] = {"cpu": [], "cuda": []}
    for backend, dtypes in (("cpu", CPU_DTYPES), ("cuda", CUDA_DTYPES)):
        if geometry.dtype not in dtypes:
            reasons[backend].append(f"keys and values in {geometry.dtype} (it has {', '.join(dtypes)})")
    if geometry.head_size not in CUDA_HEAD_SIZES:
        sizes = ", ".join(map(str, CUDA_HEAD_SIZES))
        reasons["cuda"].append(f"a head size of {geometry.head_size} (its kernels have {sizes})")
    if query_heads is not None and query_heads % ranks:
        for found in reasons.values():
            found.append(f"{ranks} ranks, which do not divide its {query_heads} query heads")
    return {backend: "; ".join(found) for backend, found in reasons.items()}
