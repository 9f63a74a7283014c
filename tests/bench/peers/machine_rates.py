"""The most that this machine does: `python -m peers.machine_rates BYTES DTYPE THREADS`.

A process of its own, because torch fixes how its threads wait when it is loaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Rows of the matrix products: where the rate no longer rises.
ROWS = 2048
SIDES = (2048, 2048)
REPEATS = 15


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Bytes read per second, and floating-point operations of a matrix product per second."""

    bytes_per_s: float
    operations_per_s: float


def measure(num_bytes: int, dtype_name: str, threads: int) -> MachineRates:
    """Reads as many bytes as the weights have, over and over, so that caches help as much as they help a step."""
    import torch

    torch.set_num_threads(threads)
    dtype = getattr(torch, dtype_name)
    weights = torch.ones(num_bytes // 4)
    seconds = _least(lambda: weights.sum())
    # Weights of bfloat16 can be multiplied as float32, which is faster where no instruction multiplies them.
    product_s = min(_least(product) for each in {dtype, torch.float32} for product in _products(each))
    return MachineRates(num_bytes / seconds, 2 * ROWS * SIDES[0] * SIDES[1] / product_s)


def _products(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """One matrix product, in each way that torch has for it."""
    import torch

    left, right = torch.ones(ROWS, SIDES[0], dtype=dtype), torch.ones(SIDES[1], SIDES[0], dtype=dtype)
    yield lambda: torch.nn.functional.linear(left, right)
    if dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # Laid out for oneDNN once, which is what both players multiply with.
        packed = torch.ops.mkldnn._reorder_linear_weight(right, None)
        yield lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")


def _least(call: Callable[[], object]) -> float:
    """Seconds of the fastest of many calls."""
    call()
    best = float("inf")
    for _ in range(REPEATS):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best


def measured(num_bytes: int, dtype: str, threads: int, env: dict[str, str]) -> MachineRates:
    """As `measure`, in a process of its own."""
    command = [sys.executable, "-m", "peers.machine_rates", str(num_bytes), dtype, str(threads)]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return MachineRates(**json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))))
