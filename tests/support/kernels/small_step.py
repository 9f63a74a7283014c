"""A small step for tests of the planner and of `PagedAttention`."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagekv.kernels.attention_plan import HostPlan, StepBatch, StepPlanner
from pagekv.kernels.variants import Variant

VARIANT = Variant("float16", "float16", 64)
NUM_BLOCKS, BLOCK_SIZE = 8, 4
# Two decodes, an idle sequence, and a chunk of three rows behind two cached tokens.
BATCH = StepBatch(
    query_start=np.array([0, 1, 2, 2, 5], np.int32),
    context_lens=np.array([9, 1, 0, 5], np.int32),
    block_tables=np.array([[7, 2, 5], [1, -1, 99], [-1, -1, -1], [0, 6, 88]], np.int32),
    decodes=np.array([True, True, False, False]),
)


def plan(
    batch: StepBatch = BATCH, *, num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE, **how: Any
) -> HostPlan:
    """The plan of `batch` over a pool of so many blocks; `how`: further arguments of `StepPlanner.step`."""
    return StepPlanner(num_blocks, block_size, num_heads=4, num_kv_heads=2, variant=VARIANT).step(batch, **how)
