"""The merge of a layer: one launch at most, whatever left partial results, and results as if each row were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.executor.launch_count import CountingLauncher
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.attention_plan import StepBatch
from pagekv.kernels.bench.scene import LAYER, Scene, Setup
from pagekv.kernels.prefill_splits import SPLIT_RULE
from pagekv.kernels.variants import Variant

HALF = Variant("float16", "float16", 64)
LONG = SPLIT_RULE.most_whole
LENGTHS = (LONG + 600, LONG + 3, 600)
"""A decode of the first has 18 splits, and one of the last 3; the last rows of the second one's prompt are split."""


@pytest.fixture(scope="module")
def scene() -> Scene:
    machine = HostMachine()
    machine.launcher = CountingLauncher(machine.launcher)  # type: ignore[assignment]  # in its place
    return Scene(machine, Setup(HALF, LENGTHS, num_heads=2, num_kv_heads=1))


def attend(scene: Scene, counts: list[int], decodes: list[bool]) -> tuple[torch.Tensor, list[str]]:
    """The last counts[s] rows of each sequence that has any."""
    chosen = np.flatnonzero(counts)
    counted, contexts = np.array(counts, np.int32)[chosen], scene.lengths[chosen]
    ends = np.cumsum(scene.lengths)[chosen]
    rows = np.concatenate([np.arange(end - n, end) for n, end in zip(counted, ends, strict=True)])
    starts = np.concatenate([[0], np.cumsum(counted)]).astype(np.int32)
    host = scene.attention.planner.step(StepBatch(starts, contexts, scene.tables[chosen], np.array(decodes)[chosen]))
    words = torch.from_numpy(host.words)
    size = scene.attention.scratch_bytes(host.counts["num_partials"])
    scratch = torch.full((max(size, 16),), 0xFF, dtype=torch.uint8)
    query = scene.query[rows].contiguous()
    out = torch.full_like(query, torch.nan)
    launcher = scene.machine.launcher
    assert isinstance(launcher, CountingLauncher)
    launcher.counts.clear()
    scene.attention.attend(LAYER, query, out, host.bind(words.data_ptr(), scratch.data_ptr()))
    return out, list(launcher.counts.elements())


def test_decodes_and_prompts_are_merged_in_one_launch(scene: Scene) -> None:
    """A decode of many splits, a prompt with rows on both sides of the rule, and a short one: each as it is alone."""
    together, launched = attend(scene, [1, 6, 5], [True, False, False])
    assert launched == ["pagekv_decode", "pagekv_prefill", "pagekv_merge_rows"]
    decode, of_decode = attend(scene, [1, 0, 0], [True, False, False])
    long, of_long = attend(scene, [0, 6, 0], [True, False, False])
    short, of_short = attend(scene, [0, 0, 5], [True, False, False])
    assert of_decode == ["pagekv_decode", "pagekv_merge"]
    assert of_long == ["pagekv_prefill", "pagekv_merge_rows"]
    assert of_short == ["pagekv_prefill"]
    assert torch.equal(together, torch.cat([decode, long, short]))
    assert together.isfinite().all()


def test_decodes_beside_prompts_that_are_not_split_have_their_own(scene: Scene) -> None:
    together, launched = attend(scene, [1, 0, 5], [True, False, False])
    assert launched == ["pagekv_decode", "pagekv_prefill", "pagekv_merge"]
    assert torch.equal(together[:1], attend(scene, [1, 0, 0], [True, False, False])[0])


def test_decodes_of_few_splits_are_merged_by_their_own_kernel(scene: Scene) -> None:
    """Their partial results lie in front of those of prompts, and no other launch touches them."""
    together, launched = attend(scene, [0, 6, 1], [True, False, True])
    assert launched == ["pagekv_decode", "pagekv_prefill", "pagekv_merge_rows"]
    assert torch.equal(together[6:], attend(scene, [0, 0, 1], [True, False, True])[0])
    assert torch.equal(together[:6], attend(scene, [0, 6, 0], [True, False, False])[0])
