"""NumPy mirrors of the parameter structures in `src/params.cuh`, laid out as the C++ compiler lays them out.

A kernel takes one such structure by value; `fill` makes it from keywords.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

Struct = np.ndarray[Any, np.dtype[np.void]]


def _struct(*, pointers: str, i64: str = "", i32: str = "", f32: str = "") -> np.dtype[np.void]:
    """A structure with these fields, in this order: 8-byte fields come first."""
    kinds = ((pointers, "u8"), (i64, "i8"), (i32, "i4"), (f32, "f4"))
    return np.dtype([(name, kind) for names, kind in kinds for name in names.split()], align=True)


CACHE_WRITE = _struct(
    pointers="key value query pool slots rope positions kv_scales norm_weight",
    i64="block_stride kv_stride key_stride value_stride query_stride",
    i32="num_heads num_kv_heads block_size_log2 layer rotary_dim",
    f32="norm_eps",
)

ADD_NORM = _struct(pointers="stream added out added_weight weight", i32="size", f32="factor added_eps eps")
GATED = _struct(pointers="gate_up out", i32="size gelu")

SAMPLE = _struct(
    pointers="logits adjusted choices tokens last_tokens counts seen", i64="logit_stride", i32="vocab_size"
)
ADJUST = _struct(pointers="logits out adjustments edits counts seen", i64="logit_stride", i32="vocab_size")
# Elements of the arrays that SAMPLE and ADJUST point to.
CHOICE = _struct(
    pointers="draw_key top_p min_weight", i32="top_k adjusted last_token penalty_row", f32="scale scale_low"
)
ADJUSTMENT = _struct(pointers="", i32="row edits num_edits penalty_row", f32="repetition presence frequency")
EDIT = _struct(pointers="", i32="token", f32="value")

BLOCK_COPY = _struct(pointers="pool pairs", i64="block_bytes")

_ATTENTION = {
    "i64": "block_stride kv_stride query_stride out_stride",
    "i32": "num_heads num_kv_heads block_size_log2 table_stride layer window",
    "f32": "scale soft_cap",
}
DECODE = _struct(
    pointers="query out pool block_tables items item_contexts dealt kv_scales sinks members merges merge_counters "
    "partial_out partial_state",
    **{**_ATTENTION, "i32": "num_items " + _ATTENTION["i32"]},
)
PREFILL = _struct(
    pointers="query out pool block_tables context_lens kv_scales sinks query_start items merges partial_out "
    "partial_state",
    **_ATTENTION,
)
MERGE = _struct(pointers="out partial_out partial_state sinks items", i64="out_stride", i32="num_heads")


@cache
def _packer(dtype: np.dtype[np.void]) -> tuple[struct.Struct, Callable[[dict[str, float]], tuple[float, ...]]]:
    """A packer of a structure's values, and a function that puts them in its order: ten times as fast as NumPy's
    assignments to fields."""
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
        missing, unknown = ", ".join(set(names) - values.keys()), ", ".join(values.keys() - set(names))
        raise ValueError(f"{missing}: missing" if missing else f"{unknown}: no such field")
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
