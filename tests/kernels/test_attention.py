"""`PagedAttention`: models, pools and rows that are refused, and steps through the whole interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.bench_machine import HostMachine
from support.kernels.host_build import HostKernelError, HostLauncher
from support.kernels.small_step import VARIANT, plan

from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.attention_plan import GraphKey, StepBatch
from pagekv.kernels.bench.scene import Scene, Setup
from pagekv.kernels.variants import UnsupportedVariant, Variant


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene(HostMachine(), Setup(VARIANT, (3, 37)))


def make(pool: torch.Tensor | None = None, **changes: Any) -> PagedAttention:
    pool = torch.zeros(8, 2, 2, 4, 2, 64, dtype=torch.float16) if pool is None else pool
    arguments: dict[str, Any] = {"num_heads": 4, **changes}
    return PagedAttention(HostLauncher(), pool, arguments.pop("variant", VARIANT), **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_heads": 3}, UnsupportedVariant, "num_heads: must be a multiple of the 2 KV heads"),
        ({"num_heads": 256}, UnsupportedVariant, "num_heads: at most"),
        ({"variant": Variant("float16", "float16", 128)}, ValueError, "pool: head size must be the variant's 128"),
        ({"variant": Variant("bfloat16", "bfloat16", 64)}, ValueError, "pool: must be of the variant's bfloat16"),
        ({"windows": [4, 4]}, UnsupportedVariant, "features: window, soft cap and sinks need a variant with"),
        ({"sinks": torch.zeros(2, 4)}, UnsupportedVariant, "features: "),
        ({"sinks": torch.zeros(2, 3)}, ValueError, r"sinks: must be float32 \(2, 4\), got float32 \(2, 3\)"),
        ({"soft_cap": 1.0}, UnsupportedVariant, "features: "),
        ({"soft_cap": -1.0}, ValueError, "soft_cap: must be finite and at least 0"),
        ({"scale": 0.0}, ValueError, "scale: must be finite and more than 0"),
        ({"scale": float("inf")}, ValueError, "scale: must be finite and more than 0"),
        ({"windows": [4]}, ValueError, "windows: must have 2 entries, one a layer, got 1"),
        ({"windows": [4, -1]}, ValueError, r"windows: must be at least 0, got \[4, -1\]"),
    ],
)
def test_an_unsupported_model_is_refused_at_start_by_name(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**changes)


def test_an_unsupported_block_size_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVariant, match="block_size: must be a power of two from 1 to 256, got 3"):
        make(torch.zeros(8, 2, 2, 3, 2, 64, dtype=torch.float16))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (torch.zeros(4, 4, 64, dtype=torch.float16), r"query: must be float16 \(5, 4, 64\), got float16 \(4, 4, 64\)"),
        (torch.zeros(5, 4, 64), "got float32"),
        (torch.zeros(5, 64, 4, dtype=torch.float16).transpose(1, 2), "query: heads must be side by side"),
        (torch.zeros(5 * 260, dtype=torch.float16).view(5, 260)[:, 2:258].view(5, 4, 64), "query: heads must be"),
    ],
)
def test_rows_that_the_kernels_cannot_read_are_refused(query: torch.Tensor, message: str) -> None:
    bound = plan().bind(4096, 4096)
    with pytest.raises(ValueError, match=message):
        make().attend(0, query, query, bound)


def test_a_layer_outside_of_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer: must be in \[0, 2\), got 2"):
        make().attend(2, torch.zeros(5, 4, 64), torch.zeros(5, 4, 64), plan().bind(4096, 4096))


@pytest.mark.long
def test_a_mixed_step_is_its_parts(scene: Scene) -> None:
    # One step with a decode of the first sequence and a chunk of the second equals both done apart.
    counts, contexts = np.array([1, 5], np.int32), scene.lengths
    host = scene.attention.planner.step(
        StepBatch(np.array([0, 1, 6], np.int32), contexts, scene.tables, np.array([True, False]))
    )
    words = torch.from_numpy(host.words)
    rows = np.concatenate([np.arange(end - n, end) for n, end in zip(counts, np.cumsum(contexts), strict=True)])
    query = scene.query[rows].contiguous()
    out = torch.full_like(query, torch.nan)
    scene.attention.attend(1, query, out, host.bind(words.data_ptr()))
    assert torch.equal(out[:1], scene.decode([0]))
    assert torch.equal(out[1:], scene.prefill(1, 32, 37))


def test_a_padded_plan_gives_the_same_bits(scene: Scene) -> None:
    # Replays of a captured graph.
    batch = StepBatch(np.arange(3, dtype=np.int32), scene.lengths, scene.tables, np.array([True, True]))
    host = scene.attention.planner.step(batch, graph=GraphKey(batch=4, table_width=5, items=6))
    words, scratch = torch.from_numpy(host.words), torch.empty(scene.attention.scratch_bytes(6), dtype=torch.uint8)
    query = torch.zeros(4, 8, 64, dtype=torch.float16)
    query[:2] = scene.query[[2, 39]]
    out = torch.full_like(query, torch.nan)
    for _ in range(2):  # a replay finds its counters as the first run did
        scene.attention.attend(1, query, out, host.bind(words.data_ptr(), scratch.data_ptr()))
        assert torch.equal(out[:2], scene.decode([0, 1]))
        # Rows that fill a graph's batch up: what follows attention may mix them with the others.
        assert not out[2:].any()


@pytest.mark.kernels
def test_a_launch_that_failed_leaves_nothing_to_the_next_step(scene: Scene) -> None:
    """Its counter of dealt work is overwritten by the next step's upload; without one it would skip work."""
    sequences, heads = 5, 8
    tables = np.resize(scene.tables[1], (sequences, scene.tables.shape[1]))
    lengths = np.resize(scene.lengths[1:], sequences)
    batch = StepBatch(np.arange(sequences + 1, dtype=np.int32), lengths, tables, np.ones(sequences, bool))
    host = scene.attention.planner.step(batch, work=scene.attention.planner.decodes(batch, share=False))
    words, query = torch.from_numpy(host.words.copy()), scene.query[:sequences].contiguous()
    counter = host.offsets["dealt"]

    def attend(attention: PagedAttention) -> torch.Tensor:
        out = torch.full((sequences, heads, 64), torch.nan, dtype=query.dtype)
        attention.attend(1, query, out, host.bind(words.data_ptr()))
        return out

    whole = attend(scene.attention)
    assert words[counter] == 0
    fails = "if (work.kv_head == 1) *(volatile i32*)(u64)p.num_heads = 0;"
    broken = HostLauncher(edit=lambda text: text.replace("// Merge of the slices.\n", f"{fails}\n"), blocks=2)
    with pytest.raises(HostKernelError, match="wrong address"):
        attend(PagedAttention(broken, scene.pool, VARIANT, num_heads=heads))
    assert words[counter] != 0
    assert attend(scene.attention).isnan().any(), "what the counter says was dealt is skipped"
    words.copy_(torch.from_numpy(host.words))
    assert torch.equal(attend(scene.attention), whole)
