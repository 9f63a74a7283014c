"""Attention of decoding sequences straight from the block pool: one pass over each block, nothing is gathered.

One softmax over a context whose blocks come one after the other: a running maximum and sum, and an output that is scaled
when the maximum grows (Milakov and Gimelshein, arXiv:1805.02867; per block as in FlashAttention, arXiv:2205.14135).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types

from pagekv.executor.cpu.attention_plan import PagedDecodes
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.native.intrinsics import pointer, take_ticket
from pagekv.executor.cpu.native.numbers import ELEMENTS, OPTIONS
from pagekv.executor.cpu.native.openmp import run_parallel
from pagekv.executor.model.attention_interface import Scores

def decode_attention(
    cache: KvCache, layer: int, query: torch.Tensor, decodes: PagedDecodes, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query` `[num_heads, S, head_size]`. Output `[S, num_heads, head_size]` in the type of the query and log-sum-exp
    of the scores `[S, num_heads]` in that of the computation: float64 for float64, else float32.
    """
    num_heads, count, size = query.shape
    keys, values = cache.layer(layer)
    kv_heads = keys.shape[2]
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    query = query.to(exact)
    out = torch.empty(count, num_heads, size, dtype=exact)
    lse = torch.empty(count, num_heads, dtype=exact)
    # Whole sequences stream best; where there are few, their heads share the threads.
    split = kv_heads if count < 4 * torch.get_num_threads() else 1
    ticket = np.zeros(2, np.int64)
    # Weights of a block, and the running maximum, sum and query of every head.
    each = (num_heads // kv_heads * cache.block_size + num_heads * (2 + size)) * exact.itemsize
    scratch = np.empty(each * torch.get_num_threads(), np.uint8)
    numbers = np.array([scores.scale, scores.cap or 0.0])
    arguments = np.array(
        [
            *(ticket.ctypes.data, numbers.ctypes.data, keys.data_ptr(), values.data_ptr() - keys.data_ptr()),
            *(keys.stride(0), keys.stride(1)),
            *(query.data_ptr(), query.stride(1), query.stride(0), out.data_ptr(), lse.data_ptr()),
            *(decodes.tables.ctypes.data, decodes.offsets.ctypes.data),
            *(decodes.begins.ctypes.data, decodes.ends.ctypes.data),
            *(count, kv_heads, cache.block_size, split, 0),
            *(scratch.ctypes.data, each),
        ],
        np.int64,
    )
    run_parallel(_compiled(keys.dtype, num_heads // kv_heads, size), arguments)
    return out.to(keys.dtype), lse


@cache
def _compiled(dtype: torch.dtype, group: int, size: int) -> int:
    """Address of the function for `group` query heads of `size` elements to a KV head."""
    element, exact, widen, _, exp = ELEMENTS[dtype]
    bytes_, exact_bytes = np.dtype(element).itemsize, np.dtype(exact).itemsize

    @njit(**OPTIONS)  # type: ignore[untyped-decorator]
    def block(
        keys: Any, values: Any, low: int, high: int, query: Any, at: int, scale: Any, cap: Any,
        weights: Any, most: Any, total: Any, out: Any,
    ) -> None:  # fmt: skip
        """Slots [low, high) of one block and KV head `at`, for its query heads. Indices, not slices: a slice is an
        object whose references are counted.
        """
        for slot in range(low, high):
            for head in range(group):
                score = exact(0)
                for i in range(size):
                    score += query[at, head, i] * widen(keys[slot, i])
                weights[head, slot] = score * scale
        if cap != 0:
            for head in range(group):
                for slot in range(low, high):
                    weights[head, slot] = cap * np.tanh(weights[head, slot] / cap)
        for head in range(group):
            before = most[at, head]
            top = before
            for slot in range(low, high):
                if not weights[head, slot] <= top:
                    top = weights[head, slot]
            for slot in range(low, high):
                weights[head, slot] = exp(weights[head, slot] - top)
            added = exact(0)
            for slot in range(low, high):
                added += weights[head, slot]
            shrink = exp(before - top)
            if top != before:
                for i in range(size):
                    out[at, head, i] *= shrink
            total[at, head] = total[at, head] * shrink + added
            most[at, head] = top
        for slot in range(low, high):
            for head in range(group):
                weight = weights[head, slot]
                for i in range(size):
                    out[at, head, i] += weight * widen(values[slot, i])

    def work(raw: Any) -> None:
        args = carray(raw, 22, np.int64)
        numbers = carray(pointer(args[1]), 2, np.float64)
        scale, cap = exact(numbers[0]), exact(numbers[1])
        keys_at, values_behind, block_stride, slot_stride = args[2], args[3], args[4], args[5]
        count, kv_heads, block_size, split, num_blocks = args[15], args[16], args[17], args[18], args[19]
        heads_each = kv_heads // split
        tables = carray(pointer(args[11]), carray(pointer(args[12]), count + 1, np.int64)[count], np.int64)
        offsets = carray(pointer(args[12]), count + 1, np.int64)
        begins, ends = carray(pointer(args[13]), count, np.int64), carray(pointer(args[14]), count, np.int64)
        sums = carray(pointer(args[10]), (count, kv_heads, group), exact)
        thread = take_ticket(args[0] + 8)
        scratch = args[20] + thread * args[21]
        weights = carray(pointer(scratch), (group, block_size), exact)
        scratch += group * block_size * exact_bytes
        most = carray(pointer(scratch), (heads_each, group), exact)
        scratch += heads_each * group * exact_bytes
        total = carray(pointer(scratch), (heads_each, group), exact)
        scratch += heads_each * group * exact_bytes
        rows = carray(pointer(scratch), (heads_each, group, size), exact)
        while True:
            item = take_ticket(args[0])
            if item >= count * split:
                return
            sequence, first_head = item // split, item % split * heads_each
            for head in range(heads_each):
                for member in range(group):
                    place = sequence * args[7] + ((first_head + head) * group + member) * args[8]
                    row = carray(pointer(args[6] + place * exact_bytes), size, exact)
                    for i in range(size):
                        rows[head, member, i] = row[i]
            most[:] = exact(-np.inf)
            total[:] = 0
            place = (sequence * kv_heads + first_head) * group * size * exact_bytes
            out = carray(pointer(args[9] + place), (heads_each, group, size), exact)
            out[:] = 0
            begin, end = begins[sequence], ends[sequence]
            for index in range(begin // block_size, (end - 1) // block_size + 1):
                low, high = max(begin - index * block_size, 0), min(end - index * block_size, block_size)
                number = tables[offsets[sequence] + index]
                for head in range(heads_each):
                    at = keys_at + (number * block_stride + (first_head + head) * size) * bytes_
                    keys = carray(pointer(at), (block_size, slot_stride), element)
                    values = carray(pointer(at + values_behind), (block_size, slot_stride), element)
                    block(keys, values, low, high, rows, head, scale, cap, weights, most, total, out)
            for head in range(heads_each):
                for member in range(group):
                    sums[sequence, first_head + head, member] = most[head, member] + np.log(total[head, member])
                    for i in range(size):
                        out[head, member, i] /= total[head, member]

    compiled = cfunc(types.void(types.voidptr), **OPTIONS)(work)
    # The code lives as long as its object.
    _kept.append(compiled)
    address: int = compiled.address
    return address


_kept: list[Any] = []
