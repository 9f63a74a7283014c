"""Attention of decoding sequences over blocks that are read straight from the block pool, one after the other, without
gathering them first.

The softmax is computed online: with a running maximum and sum, and an output that is rescaled when the maximum grows
(Milakov and Gimelshein, arXiv:1805.02867; by blocks as in FlashAttention, arXiv:2205.14135).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.native.intrinsics import float_of_bits, pointer, take_ticket
from pagekv.executor.cpu.native.numbers import STORED, address_of, exp, widen
from pagekv.executor.cpu.native.openmp import bits_of, empty, run
from pagekv.executor.cpu.native.slots import lanes_of, score_slots, weigh_slots
from pagekv.executor.cpu.paged_reads import PagedDecodes
from pagekv.executor.model.attention_interface import Scores

# Slots of one head that are read before the next head's. With fewer slots, queries and sums are loaded more often. The
# same slots of the next block are prefetched in the order of their addresses, because memory answers fastest in order.
# On a 2-core AMD EPYC (Zen 3), 32 sequences of 200 tokens in float32 take 0.73 of the time that they took with 8 slots
# and with the prefetches of one head after the other; in bfloat16 0.9 to 1.0.
AT_ONCE = 16


def decode_attention(
    pools: KvCache,
    layer: int,
    query: torch.Tensor,
    decodes: PagedDecodes,
    scores: Scores,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention of the rows [decodes.first, decodes.last) of `query` `[T, num_heads, head_size]` over the slots that
    `decodes` names. The output goes to the same rows of `out` `[T, num_heads, head_size]`, the log-sum-exp of the
    scores to those of `lse` `[T, num_heads]`; both are float32 and contiguous. `scores.window` is ignored, because
    `decodes` has applied it.
    """
    _, num_heads, size = query.shape
    count = decodes.last - decodes.first
    keys, values = pools.layer(layer)
    kv_heads = keys.shape[2]
    group = num_heads // kv_heads
    query, out, lse = (tensor[decodes.first : decodes.last] for tensor in (query, out, lse))
    threads = torch.get_num_threads()
    # Memory streams best if a thread reads whole sequences. With few sequences, each KV head is an item of its own, so
    # that all threads have work.
    parts = kv_heads if count < 4 * threads else 1
    # Each thread's scratch memory, for every query head of an item: the weights of one block, the maximum before that
    # block and with it, the sum of weights, and the query.
    scratch = empty(threads, num_heads // parts * (pools.block_size + 3 + size))
    run(
        _compiled(STORED[keys.dtype], group, size),
        (
            *(count, kv_heads, parts, pools.block_size),
            *(keys.data_ptr(), values.data_ptr() - keys.data_ptr(), keys.stride(0), keys.stride(1)),
            *(query.data_ptr(), query.stride(0), query.stride(1), out.data_ptr(), lse.data_ptr()),
            *(decodes.tables.data_ptr(), decodes.offsets.data_ptr()),
            *(decodes.begins.data_ptr(), decodes.ends.data_ptr()),
            *(bits_of(scores.scale), bits_of(scores.cap or 0.0), scratch.data_ptr(), 4 * scratch.stride(0)),
            threads,
        ),
        held=(query, out, lse, scratch, *decodes.tensors),
    )


@cache
def _compiled(stored: Any, group: int, size: int) -> int:
    """Address of the function for `group` query heads to a KV head, of `size` elements each."""
    width = np.dtype(stored).itemsize
    lanes = lanes_of(size)

    def work(raw: Any) -> None:
        args = carray(raw, 23, np.int64)
        count, kv_heads, parts, block_size = args[1], args[2], args[3], args[4]
        num_heads = kv_heads // parts
        offsets = carray(pointer(args[15]), count + 1, np.int64)
        tables = carray(pointer(args[14]), offsets[count], np.int64)
        begins, ends = carray(pointer(args[16]), count, np.int64), carray(pointer(args[17]), count, np.int64)
        scale, cap = float_of_bits(np.int32(args[18])), float_of_bits(np.int32(args[19]))
        slot_bytes = args[8] * width
        # The second ticket is the number of the thread.
        scratch = args[20] + take_ticket(args[0] + 8) * args[21]
        found = scratch
        scratch += num_heads * group * block_size * 4
        before = carray(pointer(scratch), (num_heads, group), np.float32)
        tops = scratch + num_heads * group * 4
        most = carray(pointer(tops), (num_heads, group), np.float32)
        scratch = tops
        total = carray(pointer(scratch + num_heads * group * 4), (num_heads, group), np.float32)
        queries = scratch + 2 * num_heads * group * 4
        query = carray(pointer(queries), (num_heads, group, size), np.float32)
        while True:
            item = take_ticket(args[0])
            if item >= count * parts:
                return
            # Longer sequences come last in a batch. Threads take them first, so that all threads end together.
            sequence, first = count - 1 - item // parts, item % parts * num_heads
            behind = sequence * kv_heads + first
            out_at = args[12] + behind * group * size * 4
            out = carray(pointer(out_at), (num_heads, group, size), np.float32)
            lse = carray(pointer(args[13] + behind * group * 4), (num_heads, group), np.float32)
            for head in range(num_heads):
                for member in range(group):
                    at = sequence * args[10] + ((first + head) * group + member) * args[11]
                    row = carray(pointer(args[9] + at * width), size, stored)
                    for i in range(size):
                        query[head, member, i] = widen(row[i]) * scale
                        out[head, member, i] = 0
                    most[head, member] = -np.inf
                    total[head, member] = 0
            begin, end = begins[sequence], ends[sequence]
            last = (end - 1) // block_size
            # If the item has all heads, the next block is prefetched in the order of addresses.
            ahead_head, ahead_slot = size * width, slot_bytes
            if parts == 1:
                ahead_head, ahead_slot = AT_ONCE * size * width, size * width
            # The thread will probably take this sequence next; its first block is prefetched.
            following_sequence = max(sequence - max(1, args[22] // parts), 0)
            next_table = offsets[following_sequence] + begins[following_sequence] // block_size
            for index in range(begin // block_size, last + 1):
                low, high = max(begin - index * block_size, 0), min(end - index * block_size, block_size)
                block = args[5] + (tables[offsets[sequence] + index] * args[7] + first * size) * width
                here = high - low
                block += low * slot_bytes
                place = offsets[sequence] + index + 1 if index < last else next_table
                following = args[5] + (tables[place] * args[7] + first * size) * width
                for head in range(num_heads):
                    for member in range(group):
                        before[head, member] = most[head, member]
                for slot in range(0, here, AT_ONCE):
                    for head in range(num_heads):
                        offset, row = slot * slot_bytes + head * size * width, head * group * block_size + slot
                        score_slots(
                            lanes,
                            size,
                            group,
                            width,
                            block + offset,
                            slot_bytes,
                            min(AT_ONCE, here - slot),
                            queries + head * group * size * 4,
                            found + row * 4,
                            block_size * 4,
                            tops + head * group * 4,
                            following + slot * slot_bytes + head * ahead_head,
                            ahead_slot,
                        )
                for head in range(num_heads):
                    for member in range(group):
                        row = (head * group + member) * block_size
                        weights = carray(pointer(found + row * 4), here, np.float32)
                        top, earlier = most[head, member], before[head, member]
                        if cap != 0:
                            top, earlier = cap * np.tanh(top / cap), cap * np.tanh(earlier / cap)
                            for slot in range(here):
                                weights[slot] = cap * np.tanh(weights[slot] / cap)
                        added = np.float32(0)
                        for slot in range(here):
                            weights[slot] = exp(weights[slot] - top)
                            added += weights[slot]
                        if top != earlier:
                            shrink = exp(earlier - top)
                            total[head, member] *= shrink
                            for i in range(size):
                                out[head, member, i] *= shrink
                        total[head, member] += added
                block, following = block + args[6], following + args[6]
                for slot in range(0, here, AT_ONCE):
                    for head in range(num_heads):
                        offset, row = slot * slot_bytes + head * size * width, head * group * block_size + slot
                        weigh_slots(
                            lanes,
                            size,
                            group,
                            width,
                            block + offset,
                            slot_bytes,
                            min(AT_ONCE, here - slot),
                            found + row * 4,
                            block_size * 4,
                            out_at + head * group * size * 4,
                            following + slot * slot_bytes + head * ahead_head,
                            ahead_slot,
                        )
            for head in range(num_heads):
                for member in range(group):
                    top = most[head, member]
                    if cap != 0:
                        top = cap * np.tanh(top / cap)
                    lse[head, member] = top + np.log(total[head, member])
                    for i in range(size):
                        out[head, member, i] /= total[head, member]

    return address_of(work)
