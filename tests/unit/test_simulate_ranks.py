"""The simulation of ranks over machines: what is known of it without simulating, and that rank 0's part of it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from simulate_ranks import Plant, simulated_s, step_message

ROOT = Path(__file__).resolve().parents[2]
EVEN = replace(Plant(), jitter=0.0)


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_even_ranks_take_the_sum_of_computing_and_collectives(ranks: int) -> None:
    step_s, joined_s = simulated_s(EVEN, ranks, send_s=0.0, steps=10)
    assert joined_s == pytest.approx(2 * EVEN.layers * EVEN.all_reduce_s(ranks))
    # Only the first step is waited for: the others are handed on while the step before them is computed.
    assert step_s == pytest.approx(EVEN.compute_s(ranks) + joined_s + EVEN.outer_latency / 10)


def test_every_collective_waits_for_the_slowest_rank() -> None:
    even_s, _ = simulated_s(EVEN, 8, send_s=0.0)
    # The largest of eight normal values is 1.42 standard deviations above the mean, on average.
    assert simulated_s(Plant(), 8, send_s=0.0)[0] - even_s == pytest.approx(1.42 * 0.03 * EVEN.compute_s(8), rel=0.05)


def test_ranks_wait_for_a_rank_0_that_takes_longer_to_send_than_they_compute() -> None:
    assert simulated_s(EVEN, 8, send_s=1.0)[0] == pytest.approx(1.0, rel=0.01)


def test_a_model_on_one_rank_has_no_collectives_and_its_heads_are_split_until_each_rank_has_one() -> None:
    plant = Plant()
    assert plant.all_reduce_s(1) == 0
    assert [plant.kv_bytes(1) / plant.kv_bytes(ranks) for ranks in (2, 8, 16)] == [2, 8, 8]


def test_every_sequence_gets_a_block_once_in_16_steps() -> None:
    seqs = [seq for number in range(16) for seq in step_message(number, 100).append_seqs]
    assert sorted(seqs) == list(range(100))


def test_rank_0_is_measured_over_ranks_that_answer() -> None:
    """In a process of its own, because the script forks."""
    paths = [str(ROOT / name) for name in ("proto", "executor", "tests/bench")]
    done = subprocess.run(
        [sys.executable, "-c", "from simulate_ranks import measured_us; print([*measured_us(3, 64, steps=60)])"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE, text=True, timeout=60, check=True,
    )  # fmt: skip  # several arguments a line
    whole_us, sending_us = json.loads(done.stdout)
    assert whole_us > 0
    assert sending_us > 0
