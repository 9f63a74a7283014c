"""Products of rows with a model's weights: by the compiled loops, or by torch where the loops are not faster on this
processor. oneDNN is better on a processor without vector instructions that the loops support, or with a matrix unit
that they do not.
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

# The timed products have the row counts of a step of decodes and of a prompt. The fastest of ROUNDS counts. The
# loops win if they take at most MOST times as long as torch: the timed weights stay in cache, and with a model's
# weights, which do not, the loops gain more than that.
TIMED_ROWS = (8, 256)
TIMED_SIZE = 1024
ROUNDS = 8
MOST = 1.25
# The measurement is repeated up to this many times until the loops win, since other processes may slow them down.
ATTEMPTS = 4


class TorchProduct:
    """A `Product` by torch's operators."""

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
    """The faster class of products for weights of this type on this processor, timed once per process on one
    thread.
    """
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
    """Seconds of each product: the least over at most ATTEMPTS attempts, which end once the loops win."""
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
    """CPU seconds of this thread that each product takes. The two take turns, so that other processes slow both
    alike.
    """
    found: tuple[list[float], list[float]] = [], []
    for _ in range(ROUNDS):
        for product, times in zip((ours, theirs), found, strict=True):
            begin = time.thread_time()
            product(rows)
            times.append(time.thread_time() - begin)
    return min(found[0]), min(found[1])
