"""NumPy mirrors of the parameter structures in `src/params.cuh`, laid out as the C++ compiler lays them out.

A kernel takes one such structure by value. `fill` makes it from keywords and names a field that is missing or unknown.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Struct = np.ndarray[Any, np.dtype[np.void]]

POINTER, I64, I32, F32 = "u8", "i8", "i4", "f4"


def _struct(**fields: str) -> np.dtype[np.void]:
    return np.dtype(list(fields.items()), align=True)


CACHE_WRITE = _struct(
    key=POINTER,
    value=POINTER,
    query=POINTER,
    pool=POINTER,
    slots=POINTER,
    rope=POINTER,
    positions=POINTER,
    block_stride=I64,
    kv_stride=I64,
    key_stride=I64,
    value_stride=I64,
    query_stride=I64,
    num_tokens=I32,
    num_heads=I32,
    num_kv_heads=I32,
    block_size_log2=I32,
    layer=I32,
    rotary_dim=I32,
    rope_interleaved=I32,
    k_scale=F32,
    v_scale=F32,
)

BLOCK_COPY = _struct(
    source_pool=POINTER,
    destination_pool=POINTER,
    pairs=POINTER,
    block_bytes=I64,
    num_pairs=I32,
)

DECODE = _struct(
    query=POINTER,
    out=POINTER,
    pool=POINTER,
    block_tables=POINTER,
    context_lens=POINTER,
    items=POINTER,
    merges=POINTER,
    arrivals=POINTER,
    partial_out=POINTER,
    partial_state=POINTER,
    alibi_slopes=POINTER,
    block_stride=I64,
    kv_stride=I64,
    query_stride=I64,
    out_stride=I64,
    num_items=I32,
    num_heads=I32,
    num_kv_heads=I32,
    block_size_log2=I32,
    table_stride=I32,
    layer=I32,
    window=I32,
    scale=F32,
    soft_cap=F32,
    k_scale=F32,
    v_scale=F32,
)

MERGE = _struct(
    out=POINTER,
    partial_out=POINTER,
    partial_state=POINTER,
    items=POINTER,
    out_stride=I64,
    num_items=I32,
    num_heads=I32,
)

PREFILL = _struct(
    query=POINTER,
    out=POINTER,
    pool=POINTER,
    block_tables=POINTER,
    context_lens=POINTER,
    query_start=POINTER,
    items=POINTER,
    alibi_slopes=POINTER,
    block_stride=I64,
    kv_stride=I64,
    query_stride=I64,
    out_stride=I64,
    num_items=I32,
    num_heads=I32,
    num_kv_heads=I32,
    block_size_log2=I32,
    table_stride=I32,
    layer=I32,
    window=I32,
    scale=F32,
    soft_cap=F32,
    k_scale=F32,
    v_scale=F32,
)

# Name of the C++ structure -> its mirror.
STRUCTS: dict[str, np.dtype[np.void]] = {
    "CacheWriteParams": CACHE_WRITE,
    "BlockCopyParams": BLOCK_COPY,
    "DecodeParams": DECODE,
    "MergeParams": MERGE,
    "PrefillParams": PREFILL,
}


def fill(struct: npt.DTypeLike, **values: float) -> Struct:
    """One structure (an array of shape `()`) with every field set.

    Raises ValueError where a field is missing, unknown or out of its type's range.
    """
    dtype = np.dtype(struct)
    names = dtype.names or ()
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"{', '.join(missing)}: missing")
    if unknown := [name for name in values if name not in names]:
        raise ValueError(f"{', '.join(unknown)}: no such field")
    filled = np.zeros((), dtype)
    for name, value in values.items():
        try:
            filled[name] = value
        except OverflowError as error:
            raise ValueError(f"{name}: {value} does not fit {dtype[name]}") from error
    return filled
