"""Products of rows with a model's weights: by compiled loops, or by torch where those are not faster on this processor.

Processors that have no vectors that the loops know, or units that these know nothing of, are better served by oneDNN.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import torch

from pagekv.common.logs import Log
from pagekv.executor.cpu.linear import PackedLinear, is_packable
from pagekv.executor.cpu.native.product import Product
from pagekv.executor.cpu.native.rows import gated
from pagekv.executor.cpu.native.vectors import vector_lanes

log = Log(__name__)

# Timed are a step that decodes and one that reads a prompt. The fastest of a few rounds counts, and the loops win while
# they take at most so much more: over weights that are in no cache, as a model's are, they gain that and more.
TIMED_ROWS = (8, 256)
TIMED_SIZE = 1024
ROUNDS = 8
MOST = 1.25
# Where torch seems to be faster, as often again: others on the machine can slow eight rounds of one way down.
ATTEMPTS = 4


class TorchProduct:
    """The same as a `Product`, by operators of torch."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> None:
        self._activation = activation
        self._multiply: Callable[[torch.Tensor], torch.Tensor]
        if is_packable(weight.dtype):
            self._multiply = PackedLinear(weight, bias)
        else:
            self._multiply = lambda rows: torch.nn.functional.linear(rows, weight, bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        found = self._multiply(rows)
        return found if self._activation is None else gated(found, self._activation)


@cache
def fastest_product(dtype: torch.dtype) -> type[Product] | type[TorchProduct]:
    """The way for weights of this type on this processor, timed on one thread once in a process."""
    if not vector_lanes():
        return TorchProduct
    weight = torch.ones(TIMED_SIZE, TIMED_SIZE, dtype=dtype)
    ours, theirs = Product(weight, None), TorchProduct(weight, None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = [_times(ours, theirs, torch.ones(count, TIMED_SIZE, dtype=dtype)) for count in TIMED_ROWS]
    finally:
        torch.set_num_threads(threads)
    faster = all(_wins(pair) for pair in times)
    log.info(
        "products with weights are computed by " + ("compiled loops" if faster else "torch"),
        dtype=str(dtype),
        vector_bits=32 * vector_lanes(),
        milliseconds=[[round(1e3 * each, 3) for each in pair] for pair in times],
    )
    return Product if faster else TorchProduct


def _times(ours: Product, theirs: TorchProduct, rows: torch.Tensor) -> tuple[float, float]:
    """Seconds of each, the least of as many attempts as it takes the loops to win."""
    best = (math.inf, math.inf)
    for _ in range(ATTEMPTS):
        found = seconds(ours, theirs, rows)
        best = min(best[0], found[0]), min(best[1], found[1])
        if _wins(best):
            break
    return best


def _wins(pair: tuple[float, float]) -> bool:
    mine, other = pair
    return mine <= MOST * other


def seconds(
    ours: Callable[[torch.Tensor], torch.Tensor], theirs: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
) -> tuple[float, float]:
    """Seconds of this thread that each takes, in turns, so that others on the machine cost both alike."""
    found: tuple[list[float], list[float]] = [], []
    for _ in range(ROUNDS):
        for product, times in zip((ours, theirs), found, strict=True):
            begin = time.thread_time()
            product(rows)
            times.append(time.thread_time() - begin)
    return min(found[0]), min(found[1])
