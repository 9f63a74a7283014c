"""Launches of a step with prompts: kernels, thread blocks and bytes of one layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.attention_plan import StepBatch
from pagekv.kernels.launch_config import LaunchConfig
from pagekv.kernels.params import Struct
from pagekv.kernels.tensors import Ints
from pagekv.kernels.variants import KERNELS, Variant


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


class Recorder:
    """A launcher that keeps what it is asked for."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, int]] = []
        self.params: list[Struct] = []

    def launch(self, kernel: str, variant: Variant, config: LaunchConfig, params: Struct) -> None:
        assert kernel in KERNELS
        self.launched.append((kernel, int(np.prod(config.grid))))
        self.params.append(params)


def step(new: int, past: int, *, windows: tuple[int, ...] = (), heads: int = 32, kv_heads: int = 8) -> tuple[Any, ...]:
    """A chunk behind cached tokens: its work, and what one layer of each window launches."""
    recorder, variant = Recorder(), Variant("bfloat16", "bfloat16", 128, features=any(windows))
    layers = max(len(windows), 1)
    pool = torch.empty((-(-(new + past) // 256), layers, 2, 256, kv_heads, 128), dtype=torch.bfloat16, device="meta")
    attention = PagedAttention(recorder, _Placed(pool), variant, num_heads=heads, windows=windows)
    tables = np.arange(len(pool), dtype=np.int32)[None]
    batch = StepBatch(ints(0, new), ints(new + past), tables, np.array([False]))
    host = attention.planner.step(batch)
    scratch = attention.scratch_bytes(host.counts["num_partials"])
    rows = _Placed(torch.empty((new, heads, 128), dtype=torch.bfloat16, device="meta"))
    launched = []
    for layer in range(layers):
        attention.attend(layer, rows, rows, host.bind(4096, 8192 if scratch else 0))
        launched.append(recorder.launched)
        recorder.launched = []
    return attention.planner.prefills(batch), scratch, launched


class _Placed:
    """A tensor without memory that says it has an address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def stride(self) -> Any:
        return self._tensor.stride()

    def data_ptr(self) -> int:
        return 4096


@pytest.mark.parametrize(
    ("new", "past", "tiles", "splits"),
    [
        (32, 8192, 1, 5),  # 32 rows of four heads are one tile
        (32, 65536, 1, 9),  # of 8,192 keys
        (128, 16384, 4, 9),
        (512, 16384, 16, 9),
        (512, 65536, 16, 9),
        (2048, 16384, 64, 9),
    ],
)
def test_thread_blocks_launches_and_bytes(new: int, past: int, tiles: int, splits: int) -> None:
    """Of one layer of 32 query heads and 8 KV heads of 128, as in Llama 3 8B. Without splits a tile has 8 thread
    blocks."""
    work, scratch, (launched,) = step(new, past)
    assert len(work.items) == tiles
    assert launched == [("pagekv_prefill", 8 * tiles * splits), ("pagekv_merge_rows", new * 4)]
    # Written once, and read once.
    assert scratch == work.partial_bytes(32, 128) == new * splits * 32 * (128 + 2) * 4


def test_a_prompt_up_to_the_rule_launches_one_kernel() -> None:
    work, scratch, (launched,) = step(2048, 8192 - 2048)
    assert launched == [("pagekv_prefill", 512)]
    assert not scratch
    assert not len(work.merges)


def test_rows_on_both_sides_of_the_rule_are_in_one_launch() -> None:
    """32 rows of one tile, whole, and 32 of one in five splits."""
    _, _, (launched,) = step(64, 8192 - 32)
    assert launched == [("pagekv_prefill", 8 * (1 + 5)), ("pagekv_merge_rows", 64 * 4)]


def test_layers_of_one_model_split_as_their_windows_say() -> None:
    """The plan is one. A layer that sees 1,024 keys walks them at once, beside one that sees all."""
    _, _, (short, all_keys) = step(512, 16384, windows=(1024, 0))
    assert short == [("pagekv_prefill", 128)]
    assert all_keys == [("pagekv_prefill", 128 * 9), ("pagekv_merge_rows", 512 * 4)]


@pytest.mark.parametrize(("rows", "context"), [(1, 8193), (2048, 131072), (2048, 8192), (17, 40000)])
def test_no_step_takes_more_memory_than_a_profile_counts(rows: int, context: int) -> None:
    _, scratch, _ = step(rows, context - rows)
    recorder, variant = Recorder(), Variant("bfloat16", "bfloat16", 128)
    pool = _Placed(torch.empty((4, 1, 2, 256, 8, 128), dtype=torch.bfloat16, device="meta"))
    most = PagedAttention(recorder, pool, variant, num_heads=32).most_prompt_scratch(rows, context)
    assert scratch <= most <= rows * 16 * 32 * (128 + 2) * 4


def test_sinks_and_fp8_scales_are_those_of_the_layer() -> None:
    """Of every kernel that reads them, each merge included."""
    variant, layers, heads, kv_heads = Variant("float16", "float8_e4m3fn", 64, features=True), 3, 4, 2
    pool = torch.empty((36, layers, 2, 256, kv_heads, 64), dtype=torch.float8_e4m3fn, device="meta")
    sinks, scales = torch.zeros(layers, heads), torch.ones(layers, 2, kv_heads)
    recorder = Recorder()
    attention = PagedAttention(recorder, _Placed(pool), variant, num_heads=heads, sinks=sinks, kv_scales=scales)
    tables = np.arange(36, dtype=np.int32)[None]
    # A prompt whose rows are split, then a decode whose partial results another kernel merges.
    prompt = StepBatch(ints(0, 8), ints(9000), tables, np.array([False]))
    decode = StepBatch(ints(0, 1), ints(9000), tables, np.array([True]))
    seen: set[str] = set()
    for batch in (prompt, decode):
        host = attention.planner.step(batch)
        rows, own = (
            _Placed(torch.empty((int(batch.query_start[-1]), count, 64), dtype=torch.float16, device="meta"))
            for count in (heads, kv_heads)
        )
        for layer in range(layers):
            attention.write(layer, own, own, host.bind(4096, 8192))
            attention.attend(layer, rows, rows, host.bind(4096, 8192))
            for (kernel, _), params in zip(recorder.launched, recorder.params, strict=True):
                seen.add(kernel)
                fields = params.dtype.names or ()
                if "kv_scales" in fields:
                    assert int(params["kv_scales"]) == scales[layer].data_ptr(), kernel
                if "sinks" in fields:
                    assert int(params["sinks"]) == sinks[layer].data_ptr(), kernel
                if "layer" in fields:
                    assert int(params["layer"]) == layer, kernel
            recorder.launched, recorder.params = [], []
    assert seen == {"pagekv_cache_write", "pagekv_prefill", "pagekv_merge_rows", "pagekv_decode", "pagekv_merge"}
