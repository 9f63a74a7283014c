"""NumPy mirrors of the parameter structures in `src/params.cuh`, laid out as the C++ compiler lays them out.

A kernel takes one such structure by value. `fill` makes it from keywords and names a field that is missing or unknown.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

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


@cache
def _packer(dtype: np.dtype[np.void]) -> tuple[struct.Struct, Callable[[dict[str, float]], tuple[float, ...]]]:
    """What packs a structure's values in their order, ten times as fast as NumPy's assignments to fields."""
    names = dtype.names or ()
    codes = "".join({"u8": "Q", "i8": "q", "i4": "i", "f4": "f"}[dtype[name].str[1:]] for name in names)
    return struct.Struct(f"@{codes}0q"), itemgetter(*names)  # native alignment; padded to that of 8-byte fields


def fill(dtype: np.dtype[np.void], **values: float) -> Struct:
    """One structure (an array of shape `()`) with every field set.

    Raises ValueError where a field is missing, unknown or out of its type's range.
    """
    packer, in_order = _packer(dtype)
    names = dtype.names or ()
    if len(values) != len(names) or not all(map(values.__contains__, names)):
        wrong = [name for name in names if name not in values]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: missing")
        raise ValueError(f"{', '.join(name for name in values if name not in names)}: no such field")
    try:
        packed = packer.pack(*in_order(values))
    except struct.error as error:
        raise ValueError(_out_of_range(dtype, values) or str(error)) from error
    return np.frombuffer(packed, dtype).reshape(())


def _out_of_range(dtype: np.dtype[np.void], values: dict[str, float]) -> str:
    """Names the first field whose value does not fit."""
    for name, value in values.items():
        if (
            np.issubdtype(dtype[name], np.integer)
            and not np.iinfo(dtype[name]).min <= value <= np.iinfo(dtype[name]).max
        ):
            return f"{name}: {value} does not fit {dtype[name]}"
    return ""
