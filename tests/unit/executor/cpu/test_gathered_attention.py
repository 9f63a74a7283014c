"""Attention over the paged pool, against plain attention over the same keys in one piece."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.gathered_attention import GatheredStepAttention, attend, merge
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.model.attention_interface import Scores
from pagekv.executor.model.loading import BlockGeometry

SINKS = torch.tensor([-1.0, 0.5, 2.0, 4.0], dtype=torch.float64)
LENGTH, CHUNK, BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 23, 9, 4, 4, 2, 8


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
    """`[heads, T, size]` to `[T, heads, size]`, every head over its KV head, position by position."""
    shared = HEADS // KV_HEADS
    weights = torch.einsum("hqd,hkd->hqk", query, key.repeat_interleave(shared, 0)) * scores.scale
    if scores.cap is not None:
        weights = scores.cap * torch.tanh(weights / scores.cap)
    at = torch.arange(LENGTH)
    hidden = at[None] > at[:, None]
    if scores.window is not None:
        hidden |= at[None] <= at[:, None] - scores.window
    weights = weights.masked_fill(hidden, -math.inf)
    if scores.sinks is not None:
        weights = torch.cat([weights, scores.sinks[:, None, None].expand(HEADS, LENGTH, 1)], 2)
    weights = weights.softmax(-1)[:, :, :LENGTH]
    return torch.einsum("hqk,hkd->qhd", weights, value.repeat_interleave(shared, 0))


@pytest.mark.parametrize(
    "scores",
    [
        Scores(0.4),
        Scores(0.4, cap=2.0),
        Scores(0.4, window=6),
        Scores(0.4, 2.0, 6),
        Scores(0.4, None, 6, SINKS),
        Scores(0.4, sinks=SINKS),
    ],
)
def test_chunks_and_decodes_read_what_plain_attention_reads(scores: Scores) -> None:
    torch.manual_seed(0)
    query = torch.randn(HEADS, LENGTH, SIZE, dtype=torch.float64)
    key, value = torch.randn(2, KV_HEADS, LENGTH, SIZE, dtype=torch.float64)
    cache = KvCache(BlockGeometry(1, KV_HEADS, SIZE, torch.float64), BLOCK_SIZE, 8)
    cache.device[:-1] = math.nan
    state = SequenceState(1, [1] * LENGTH, LENGTH, [5, 0, 7, 2, 6, 1], 0, Sampling())
    starts = [*range(0, 18, CHUNK), *range(18, LENGTH)]
    outputs = []
    for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
        scheduled = [Scheduled(state, start, end - start)]
        plan = CpuAttentionPlan(scheduled, BLOCK_SIZE, cache.layer_block_bytes)
        step = GatheredStepAttention(cache, plan)
        outputs.append(step.attend(0, query[:, start:end], key[:, start:end], value[:, start:end], scores))
    assert torch.allclose(torch.cat(outputs), plain(query, key, value, scores))


@pytest.mark.parametrize(
    "scores",
    [Scores(0.4), Scores(0.4, window=6), Scores(0.4, 2.0, 6), Scores(0.4, None, 6, SINKS), Scores(0.4, sinks=SINKS)],
)
def test_chunks_and_decodes_of_one_step_are_each_their_own_rows(scores: Scores) -> None:
    """Two chunks and two decodes, of four sequences with keys and values of their own, in the packed order."""
    torch.manual_seed(0)
    cache = KvCache(BlockGeometry(1, KV_HEADS, SIZE, torch.float64), BLOCK_SIZE, 24)
    cache.device[:-1] = math.nan
    states = [
        SequenceState(which, [1] * LENGTH, LENGTH, [*range(6 * which, 6 * which + 6)], 0, Sampling())
        for which in range(4)
    ]
    query = torch.randn(4, HEADS, LENGTH, SIZE, dtype=torch.float64)
    key, value = torch.randn(2, 4, KV_HEADS, LENGTH, SIZE, dtype=torch.float64)
    wanted = [plain(query[which], key[which], value[which], scores) for which in range(4)]
    counts = [9, 1, 5, 1]
    at = [0] * 4

    def step(scheduled: list[Scheduled], whose: list[int]) -> None:
        plan = CpuAttentionPlan(scheduled, BLOCK_SIZE, cache.layer_block_bytes)
        places = plan.position_ids[0].tolist()
        # Blocks are private, so a row's block tells whose it is.
        rows = [block // 6 for block in plan.slots[0].tolist()]
        assert sorted({*rows}) == sorted(whose)
        at_rows = [*zip(rows, places, strict=True)]
        packed = [
            torch.stack([of[r, :, p] for r, p in zip(rows, places, strict=True)], 1) for of in (query, key, value)
        ]
        out = GatheredStepAttention(cache, plan).attend(0, packed[0], packed[1], packed[2], scores)
        for row, (which, place) in enumerate(at_rows):
            assert torch.allclose(out[row], wanted[which][place])

    # The prompts of the two that decode.
    step([Scheduled(states[which], 0, 16) for which in (1, 3)], [1, 3])
    at[1] = at[3] = 16
    for _ in range(2):
        step([Scheduled(state, at[which], counts[which]) for which, state in enumerate(states)], [0, 1, 2, 3])
        at = [begun + count for begun, count in zip(at, counts, strict=True)]


def plain_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = (query.double() @ key.double().transpose(-1, -2)) * scores.scale
    if scores.cap is not None:
        weights = torch.tanh(weights / scores.cap) * scores.cap
    if mask is not None:
        weights = weights + mask
    return weights.softmax(-1) @ value.double(), weights.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("kind", ["all", "causal", "mask", "row mask"])
def test_attend(dtype: torch.dtype, cap: float | None, kind: str) -> None:
    torch.manual_seed(0)
    rows, keys = (300, 300) if kind == "causal" else (300, 170)
    query = torch.randn(3, 2, rows, 8).to(dtype)
    key, value = (torch.randn(3, 1, keys, 8).to(dtype).expand(3, 2, keys, 8) for _ in range(2))
    mask = None
    if kind == "causal":
        mask = torch.full((rows, keys), -math.inf).triu(1)[None, None]
    elif kind != "all":
        shape = (3, 1, 1, keys) if kind == "mask" else (1, 1, rows, keys)
        mask = torch.zeros(shape).masked_fill(torch.rand(shape) < 0.5, -math.inf)
    given = None if kind in ("all", "causal") or mask is None else mask.to(dtype)
    scores = Scores(0.3, cap)
    out, lse = attend(query, key, value, scores, causal=kind == "causal", mask=given)
    expected, expected_lse = plain_parts(query, key, value, scores, mask)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-5
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("seed", range(8))
def test_parts_merge_to_the_whole(seed: int, size: float) -> None:
    """Keys cut anywhere, parts of one key among them, merged in any order; logits of 1e4 and more do not overflow."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    query, key, value = (torch.randn(1, 2, rows, 8, dtype=torch.float64) for rows in (5, 40, 40))
    key *= size
    scores = Scores(1.0)
    cuts = sorted(chance.sample(range(1, 40), chance.randint(1, 12)))
    parts = [slice(begin, end) for begin, end in zip([0, *cuts], [*cuts, 40], strict=True)]
    chance.shuffle(parts)
    merged = [attend(query, key[:, :, part], value[:, :, part], scores) for part in parts]
    out, lse = merged[0]
    for other, other_lse in merged[1:]:
        out, lse = merge(out, lse, other, other_lse)
    expected, expected_lse = plain_parts(query, key, value, scores, None)
    assert expected_lse.abs().max() > size
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
