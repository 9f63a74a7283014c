"""FlashInfer 0.6.6 at the shapes of the bench's cases."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from pagekv.kernels.bench.machine import Arena, CudaMachine
from pagekv.kernels.bench.speed import PREFILL_ROUNDS, layers_and_rounds
from pagekv.kernels.bench.workload import BLOCK_SIZE, HEAD_SIZE, AttentionCase


def load() -> Any:
    """The module, told to compile for this GPU alone: every other architecture would take as long again."""
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
    return importlib.import_module("flashinfer")


def page_table(case: AttentionCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indptr, indices, last page's length): pages in random order, as many for each sequence as it has blocks."""
    width = -(-case.context // BLOCK_SIZE)
    indptr = torch.arange(0, (case.batch + 1) * width, width, dtype=torch.int32, device=device)
    indices = torch.randperm(case.batch * width, device=device).to(torch.int32)
    last = torch.full((case.batch,), (case.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=device)
    return indptr, indices, last


def seconds(machine: CudaMachine, arena: Arena, flashinfer: Any, workspace: torch.Tensor, case: AttentionCase) -> float:
    """Median seconds of one layer."""
    heads, rows = case.heads, case.batch * case.new
    layers, rounds = layers_and_rounds(case.kv_bytes, arena.size, machine.most_rounds)
    width = -(-case.context // BLOCK_SIZE)
    shape = (layers, case.batch * width, 2, BLOCK_SIZE, heads.num_kv_heads, HEAD_SIZE)
    cache = arena.view(torch.bfloat16, *shape)
    query = torch.randn(rows, heads.num_heads, HEAD_SIZE, device=machine.device).to(torch.bfloat16)
    pages = page_table(case, machine.device)
    common = (*pages, heads.num_heads, heads.num_kv_heads, HEAD_SIZE, BLOCK_SIZE)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if case.new == 1:
        # FlashInfer's own advice: tensor cores pay from four query heads a KV head.
        grouped = heads.num_heads // heads.num_kv_heads >= 4
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped)
        wrapper.plan(*common, **types)
    else:
        starts = torch.arange(0, rows + 1, case.new, dtype=torch.int32, device=machine.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(starts, *common, causal=True, **types)
        rounds = min(layers, PREFILL_ROUNDS)
    out = torch.empty_like(query)
    return machine.timed(lambda index: wrapper.run(query, cache[index % layers], out=out), rounds).seconds
