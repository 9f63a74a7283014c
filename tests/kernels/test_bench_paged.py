"""A batch over a paged pool for timing: rounds, contexts, and that it computes attention."""

from __future__ import annotations

import numpy as np
import torch
from support.kernels.bench_machine import HostMachine

from pagekv.kernels.bench.machine import Arena
from pagekv.kernels.bench.paged import Rounds, paged, ragged_lengths
from pagekv.kernels.bench.workload import (
    MIB,
    Heads,
)

SMALL = Heads("GQA 2", 2, 1)


def test_rounds_walk_over_more_memory_than_a_cache_holds_and_take_a_millisecond() -> None:
    room = 1 << 40
    assert Rounds.of(1 * MIB, room, 256) == Rounds(256, 256)
    assert Rounds.of(8 * MIB, room, 256) == Rounds(128, 256)
    assert Rounds.of(256 * MIB, room, 256) == Rounds(4, 16)
    assert Rounds.of(16 << 30, room, 256) == Rounds(2, 2)
    assert Rounds.of(8 * MIB, 20 * MIB, 256).layers == 2
    assert Rounds.of(8 * MIB, room, 2) == Rounds(2, 2)


def test_ragged_contexts_have_the_average_of_equal_ones() -> None:
    lengths = ragged_lengths(64, 4096)
    assert (lengths.min(), lengths.max()) == (1, 8192)
    assert abs(lengths.mean() - 4096) < 1
    assert len(set(lengths.tolist())) == 64


def test_a_timed_batch_computes_attention(machine: HostMachine, arena: Arena) -> None:
    # The timed work is all of attention: its result is that of torch over the same blocks.
    batch = paged(machine, arena, SMALL, batch=2, context=40, seed=3, num_layers=2)
    batch.attend(1)
    pool = batch.held[-1]
    for sequence in range(2):
        blocks = torch.from_numpy(np.random.default_rng(3).permutation(6).reshape(2, 3)[sequence])
        key, value = (pool[blocks, 1, which].flatten(0, 1)[:40].float() for which in (0, 1))
        logits = torch.einsum("hd,kgd->hk", batch.query[sequence].float(), key) / 128**0.5
        expected = torch.einsum("hk,kgd->hd", logits.softmax(-1), value)
        assert (batch.out[sequence].float() - expected).abs().max() < 0.05
