"""The step of part 1 that runs a model as the only rank of a group. One GPU has room for no other, since NCCL takes one
rank a device: so the calls are tried, in graphs and eager, and not what ranks make of each other's parts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from gpu_first.in_process import GREEDY, REHEARSED, TOP_P, InProcess, Sizes, allocate, prompts_for
from gpu_first.llama import two_layers, write_model
from gpu_first.serving_steps import backend_of, give_memory_back
from gpu_first.step import Context
from pagekv.executor.cuda.fused_decoder import FusedLayers
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World

BATCH, TOKENS, WAIT_S = 5, 40, 30.0


class OneRank(Shards):
    """Counts sums. CPU tensors are left as they are, since the stub's graphs do not replay gloo's collectives."""

    def __init__(self) -> None:
        super().__init__(World(0, 1, 1), self._fail)
        self.num_joined = 0

    @staticmethod
    def _fail(reason: str) -> None:
        raise RuntimeError(reason)

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """As the base class has it."""
        self.num_joined += 1
        return super().sum(rows) if rows.is_cuda else rows

    def gather(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """As the base class has it."""
        return super().gather(rows, width) if rows.is_cuda else rows


def step_one_rank(context: Context) -> None:
    """Tokens, greedy and drawn, are those of a model that is not split."""
    torch.manual_seed(3)
    directory = context.folder / "one-rank"
    write_model(directory, two_layers(), torch.device("cpu"), spread=0.3)
    sizes = Sizes(prompt_tokens=40, short=1, long=TOKENS, batches=(8,), chunk=1)
    batch = BATCH
    if context.small:
        sizes, batch = replace(REHEARSED, prompt_tokens=3, long=4, batches=(8,)), 2
    wanted = _tokens(context, directory, batch, sizes)
    backend = "gloo" if context.small else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        for graphs in (True, False):
            shards = OneRank()
            found = _tokens(context, directory, batch, sizes, shards=shards, graphs=graphs)
            way = "in graphs" if graphs else "eager"
            context.log.check(f"tokens of one rank, {way}, are those of none", found == wanted)
            context.log.check(f"layers were summed, {way}", shards.num_joined > 0, error=shards.num_joined)
    finally:
        dist.destroy_process_group()


def _tokens(context: Context, directory: Path, batch: int, sizes: Sizes, **options: Any) -> list[list[int]]:
    backend = backend_of(context, directory, dtype="float32", **{"kv_memory": 2**26, **options})
    if (shards := options.get("shards")) is not None:
        context.log.check("layers of a rank are fused", isinstance(backend.forward, FusedLayers))
        shards.limit_waits(WAIT_S)
    allocate(backend, sizes)
    outputs: list[list[int]] = []
    for sampling in (GREEDY, TOP_P):
        driven = InProcess(backend, prompts_for(batch, sizes.prompt_tokens, 512, 7), sizes.long, sizes, sampling)
        driven.run()
        outputs += driven.outputs.values()
    if options.get("graphs", True):
        replayed = backend.runner.graphs.num_replayed
        context.log.check("graphs were replayed", replayed > 0, error=replayed)
    del backend
    give_memory_back()
    return outputs
