"""Row-wise operators of a decoder between its matrix products. Each loop reads and writes every row once.

Tensors have one row per token, and their last dimension is contiguous. One thread computes few rows alone, because
waking the others would take longer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from pagekv.executor.cpu.native.intrinsics import float_of_bits, pointer, take_ticket
from pagekv.executor.cpu.native.numbers import STORED, address_of, exp, narrow, widen
from pagekv.executor.cpu.native.openmp import bits_of, empty, run
from pagekv.executor.model.decoder import Embedding, RmsNorm

# Up to so many elements one thread computes alone.
ALONE = 2**16
# Rows that a thread takes at a time.
ROWS = 8


def add_norm(
    rows: torch.Tensor,
    added: torch.Tensor | None,
    factor: float,
    added_norm: RmsNorm | None,
    norm: RmsNorm | None,
) -> torch.Tensor:
    """`rows += factor * added_norm(added)` in place; then `norm(rows)` as a new tensor, or `rows` without a norm. All
    are `[T, n]`.
    """
    size = rows.shape[1]
    out = rows if norm is None else empty(*rows.shape, dtype=rows.dtype)
    if added is None and norm is None:
        return rows
    arguments = [
        *(rows.data_ptr(), 0 if added is None else added.data_ptr(), out.data_ptr(), size, bits_of(factor)),
        *(_weight(added_norm), _weight(norm), _eps(added_norm), _eps(norm)),
    ]
    held = (rows, out) if added is None else (rows, added, out)
    _run(_add_norm(STORED[rows.dtype]), rows.shape[0], size, arguments, held)
    return out


def embed(embedding: Embedding, token_ids: torch.Tensor) -> torch.Tensor:
    """The scaled embeddings `[T, hidden_size]` of ids, int64 `[T]`."""
    table = embedding.weight
    # Not the recorder's memory: every layer adds to these rows. No id is checked here: those of a step are below the
    # vocabulary's size, and a table with fewer rows is refused when the model is loaded.
    out = torch.empty(len(token_ids), table.shape[1], dtype=table.dtype)
    factor = bits_of(embedding.factor)
    arguments = [table.data_ptr(), token_ids.data_ptr(), out.data_ptr(), table.shape[1], factor]
    _run(_embed(STORED[table.dtype]), out.shape[0], out.shape[1], arguments, (table, token_ids, out))
    return out


def gated(both: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(gate) * up` `[T, n]`. Each row of `both` `[T, 2 * n]` has the gate first. `activation`: silu or
    gelu_tanh.
    """
    size = both.shape[1] // 2
    out = empty(both.shape[0], size, dtype=both.dtype)
    _run(
        _gated(STORED[both.dtype], activation == "silu"),
        both.shape[0],
        2 * size,
        [both.data_ptr(), out.data_ptr(), size],
        (both, out),
    )
    return out


def rotate(
    heads: torch.Tensor,
    num_heads: tuple[int, int],
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    numbers: torch.Tensor,
    query_norm: RmsNorm | None,
    key_norm: RmsNorm | None,
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Applies norms and RoPE to queries and keys in `heads` `[T, query + key + value heads, head_size]`, in place, and
    stores keys and values in the pools.

    `num_heads`: of queries and of keys. `rotation`: cosines and sines `[N, R]` for the first R elements of each head
    (Su et al., arXiv:2104.09864; pairs as in transformers' `rotate_half`). `numbers` `[T]`: the one of N that each row
    has. `keys`, `values`: pools `[num_blocks, block_size, key heads, head_size]`. `places` `[T]`: the slot of each row,
    in elements from the beginning of a pool.
    """
    size = heads.shape[2]
    cos, sin = rotation if rotation is not None else (None, None)

    def whole(norm: RmsNorm | None) -> int:
        return 0 if norm is None or norm.weight.numel() == size else 1

    arguments = [
        *(heads.data_ptr(), num_heads[0], num_heads[1], size),
        *(
            0 if cos is None else cos.data_ptr(),
            0 if sin is None else sin.data_ptr(),
            0 if cos is None else cos.shape[1],
        ),
        *(_weight(query_norm), whole(query_norm), _weight(key_norm), whole(key_norm)),
        *(_eps(query_norm), _eps(key_norm), places.data_ptr(), keys.data_ptr(), values.data_ptr()),
        numbers.data_ptr(),
    ]
    held = (heads, numbers, places, keys, values, *(() if rotation is None else rotation))
    _run(_rotate(STORED[heads.dtype]), heads.shape[0], heads.shape[1] * size, arguments, held)


def narrowed(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 `rows` `[T, n]`, rounded to `dtype`; `rows` itself if `dtype` is float32."""
    if dtype == rows.dtype:
        return rows
    out = empty(*rows.shape, dtype=dtype)
    arguments = [rows.data_ptr(), out.data_ptr(), rows.shape[1]]
    _run(_narrowed(STORED[dtype]), rows.shape[0], rows.shape[1], arguments, (rows, out))
    return out


def _weight(norm: RmsNorm | None) -> int:
    return 0 if norm is None else norm.weight.data_ptr()


def _eps(norm: RmsNorm | None) -> int:
    return 0 if norm is None else bits_of(norm.eps)


def _run(function: int, num_rows: int, row_elements: int, arguments: list[int], held: tuple[torch.Tensor, ...]) -> None:
    """Calls a function of this module, whose first arguments are the ticket and the number of rows."""
    run(function, (num_rows, *arguments), alone=num_rows * row_elements <= ALONE, held=held)


@cache
def _add_norm(stored: Any) -> int:
    width = np.dtype(stored).itemsize

    def work(raw: Any) -> None:
        args = carray(raw, 11, np.int64)
        count, size = args[1], args[5]
        factor = float_of_bits(np.int32(args[6]))
        added_eps, eps = float_of_bits(np.int32(args[9])), float_of_bits(np.int32(args[10]))
        added_weight = carray(pointer(args[7]), size, np.float32)
        weight = carray(pointer(args[8]), size, np.float32)
        while True:
            first = take_ticket(args[0]) * ROWS
            if first >= count:
                return
            for at in range(first, min(first + ROWS, count)):
                row = carray(pointer(args[2] + at * size * width), size, stored)
                if args[3] != 0:
                    added = carray(pointer(args[3] + at * size * width), size, stored)
                    if args[7] != 0:
                        squares = np.float32(0)
                        for i in range(size):
                            squares += widen(added[i]) * widen(added[i])
                        scale = factor / np.sqrt(squares / np.float32(size) + added_eps)
                        for i in range(size):
                            row[i] = narrow(widen(row[i]) + widen(added[i]) * scale * added_weight[i], row[i])
                    else:
                        for i in range(size):
                            row[i] = narrow(widen(row[i]) + widen(added[i]) * factor, row[i])
                if args[8] != 0:
                    out = carray(pointer(args[4] + at * size * width), size, stored)
                    squares = np.float32(0)
                    for i in range(size):
                        squares += widen(row[i]) * widen(row[i])
                    scale = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
                    for i in range(size):
                        out[i] = narrow(widen(row[i]) * scale * weight[i], out[i])

    return address_of(work)


@cache
def _embed(stored: Any) -> int:
    width = np.dtype(stored).itemsize

    def work(raw: Any) -> None:
        args = carray(raw, 7, np.int64)
        count, size, factor = args[1], args[5], float_of_bits(np.int32(args[6]))
        token_ids = carray(pointer(args[3]), count, np.int64)
        while True:
            first = take_ticket(args[0]) * ROWS
            if first >= count:
                return
            for at in range(first, min(first + ROWS, count)):
                row = carray(pointer(args[2] + token_ids[at] * size * width), size, stored)
                out = carray(pointer(args[4] + at * size * width), size, stored)
                for i in range(size):
                    out[i] = narrow(widen(row[i]) * factor, row[i])

    return address_of(work)


@cache
def _gated(stored: Any, silu: bool) -> int:
    width = np.dtype(stored).itemsize
    # gelu(x) = x * sigmoid(2 * z), z = sqrt(2 / pi) * (x + 0.044715 * x^3), by tanh(z) = 2 * sigmoid(2 * z) - 1.
    outer, inner = np.float32(2 * np.sqrt(2 / np.pi)), np.float32(0.044715)

    def work(raw: Any) -> None:
        args = carray(raw, 5, np.int64)
        count, size = args[1], args[4]
        while True:
            first = take_ticket(args[0]) * ROWS
            if first >= count:
                return
            for at in range(first, min(first + ROWS, count)):
                gate = carray(pointer(args[2] + 2 * at * size * width), size, stored)
                up = carray(pointer(args[2] + (2 * at + 1) * size * width), size, stored)
                out = carray(pointer(args[3] + at * size * width), size, stored)
                for i in range(size):
                    x = widen(gate[i])
                    z = x if silu else outer * (x + inner * x * x * x)
                    out[i] = narrow(x / (np.float32(1) + exp(-z)) * widen(up[i]), out[i])

    return address_of(work)


@cache
def _rotate(stored: Any) -> int:
    width = np.dtype(stored).itemsize

    def work(raw: Any) -> None:
        args = carray(raw, 19, np.int64)
        count, queries, pairs, size, turned = args[1], args[3], args[4], args[5], args[8]
        query_eps, key_eps = float_of_bits(np.int32(args[13])), float_of_bits(np.int32(args[14]))
        places = carray(pointer(args[15]), count, np.int64)
        numbers = carray(pointer(args[18]), count, np.int64)
        half = turned // 2
        row_bytes = (queries + 2 * pairs) * size * width
        while True:
            first = take_ticket(args[0]) * ROWS
            if first >= count:
                return
            for at in range(first, min(first + ROWS, count)):
                begin = args[2] + at * row_bytes
                cos = carray(pointer(args[6] + numbers[at] * turned * 4), turned, np.float32)
                sin = carray(pointer(args[7] + numbers[at] * turned * 4), turned, np.float32)
                for head in range(queries + pairs):
                    of_key = head >= queries
                    norm, whole = (args[11], args[12]) if of_key else (args[9], args[10])
                    vector = carray(pointer(begin + head * size * width), size, stored)
                    if norm != 0:
                        start = queries if of_key else 0
                        members = (pairs if of_key else queries) * size
                        if whole == 0:
                            scale_of = vector
                            length = size
                            weight = carray(pointer(norm), size, np.float32)
                        else:
                            scale_of = carray(pointer(begin + start * size * width), members, stored)
                            length = members
                            weight = carray(pointer(norm + (head - start) * size * 4), size, np.float32)
                        # A norm over all heads sums their squares before it changes the first of them.
                        if whole == 0 or head == start:
                            squares = np.float32(0)
                            for i in range(length):
                                squares += widen(scale_of[i]) * widen(scale_of[i])
                            scale = np.float32(1) / np.sqrt(
                                squares / np.float32(length) + (key_eps if of_key else query_eps)
                            )
                        for i in range(size):
                            vector[i] = narrow(widen(vector[i]) * scale * weight[i], vector[i])
                    for i in range(half):
                        left, right = widen(vector[i]), widen(vector[i + half])
                        vector[i] = narrow(left * cos[i] - right * sin[i], vector[i])
                        vector[i + half] = narrow(right * cos[i + half] + left * sin[i + half], vector[i + half])
                place = places[at] * width
                keys = carray(pointer(args[16] + place), pairs * size, stored)
                values = carray(pointer(args[17] + place), pairs * size, stored)
                new_keys = carray(pointer(begin + queries * size * width), pairs * size, stored)
                new_values = carray(pointer(begin + (queries + pairs) * size * width), pairs * size, stored)
                for i in range(pairs * size):
                    keys[i] = new_keys[i]
                for i in range(pairs * size):
                    values[i] = new_values[i]

    return address_of(work)


@cache
def _narrowed(stored: Any) -> int:
    width = np.dtype(stored).itemsize

    def work(raw: Any) -> None:
        args = carray(raw, 5, np.int64)
        count, size = args[1], args[4]
        while True:
            first = take_ticket(args[0]) * ROWS
            if first >= count:
                return
            for at in range(first, min(first + ROWS, count)):
                row = carray(pointer(args[2] + at * size * 4), size, np.float32)
                out = carray(pointer(args[3] + at * size * width), size, stored)
                for i in range(size):
                    out[i] = narrow(row[i], out[i])

    return address_of(work)
