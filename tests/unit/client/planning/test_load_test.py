"""The load generator's workload and arithmetic."""

from __future__ import annotations

import asyncio
import errno
import itertools

import pytest
from support.clients.scripted_server import Hangs, ScriptedServer, chunk

from pagekv.client.aio import AsyncPageKVClient
from pagekv.client.planning.load_test import (
    Diagnosis,
    LatencySpread,
    LoadOutcome,
    Objectives,
    Workload,
    make_jobs,
    run_jobs,
    summarise,
)


def workload(**changes: object) -> Workload:
    values: dict[str, object] = {
        "requests": 400,
        "concurrency": 4,
        "rate": None,
        "prompt_tokens": (3, 5),
        "output_tokens": (1, 2),
        "shared_prefix": 0,
        "temperature": 0.0,
        "seed": 1,
    }
    return Workload(**(values | changes))  # type: ignore[arg-type]  # checked by the test's own use


def test_jobs_are_drawn_from_the_seed_alone() -> None:
    assert make_jobs(workload(), 50) == make_jobs(workload(), 50)
    assert make_jobs(workload(), 50) != make_jobs(workload(seed=2), 50)


def test_jobs_keep_to_their_bounds() -> None:
    jobs = make_jobs(workload(shared_prefix=7), 50, avoid=[0, 49])
    assert {len(job.prompt_ids) for job in jobs} == {10, 11, 12}
    assert {job.output_tokens for job in jobs} == {1, 2}
    assert {token for job in jobs for token in job.prompt_ids} == set(range(1, 49))
    assert len({tuple(job.prompt_ids[:7]) for job in jobs}) == 1
    assert len({tuple(job.prompt_ids[7:]) for job in jobs}) == len(jobs)
    assert {job.due_s for job in jobs} == {0.0}


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    jobs = make_jobs(workload(rate=10.0, requests=2000), 50)
    due = [job.due_s for job in jobs]
    assert due == sorted(due)
    assert due[-1] == pytest.approx(200, rel=0.1)
    gaps = [b - a for a, b in itertools.pairwise(due)]
    mean = sum(gaps) / len(gaps)
    # Exponential gaps: the standard deviation is the mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.15)


def test_prompts_from_a_text_are_cuts_of_it() -> None:
    text = list(range(100, 130))
    for job in make_jobs(workload(requests=20), 50, text_ids=text):
        start = job.prompt_ids[0] - 100
        assert job.prompt_ids == text[start : start + len(job.prompt_ids)]
    with pytest.raises(ValueError, match="has 4 tokens"):
        make_jobs(workload(), 50, text_ids=[1, 2, 3, 4])


def test_percentiles_lie_between_neighbours() -> None:
    assert LatencySpread.of([]) is None
    assert LatencySpread.of([2.0]) == LatencySpread(2, 2, 2, 2, 2)
    spread = LatencySpread.of([float(i) for i in range(100, -1, -1)])
    assert spread == LatencySpread(50, 90, 99, 50, 100)
    between = LatencySpread.of([0.0, 1.0])
    assert between is not None
    assert (between.p50, between.p90, between.p99) == pytest.approx((0.5, 0.9, 0.99))


def test_a_report_leaves_failures_out_of_everything_but_errors() -> None:
    good = LoadOutcome(
        prompt_tokens=10, cached_tokens=4, output_tokens=3, ttft_s=0.5, total_s=1.0, inter_token_s=[0.2, 0.3]
    )
    bad = LoadOutcome(prompt_tokens=99, output_tokens=99, ttft_s=9.0, total_s=9.0, error="Overloaded")
    report = summarise([good, bad, bad], seconds=2.0)
    assert (report.completed, report.errors) == (1, {"Overloaded": 2})
    assert (report.prompt_tokens, report.cached_tokens, report.output_tokens) == (10, 4, 3)
    assert (report.hit_rate, report.requests_per_s) == (0.4, 0.5)
    assert (report.output_tokens_per_s, report.total_tokens_per_s) == (1.5, 6.5)
    assert report.ttft_s == LatencySpread(0.5, 0.5, 0.5, 0.5, 0.5)
    assert report.inter_token_s is not None
    assert report.inter_token_s.max == 0.3
    assert summarise([bad], 1.0).hit_rate == 0


@pytest.mark.parametrize("how", [{"concurrency": 2}, {"concurrency": None, "rate": 1000.0}])
def test_a_progress_that_cannot_be_shown_ends_it_as_itself(server: ScriptedServer, how: dict[str, object]) -> None:
    """As on a full disk: a group of errors would be a traceback."""
    server.expect("Generate", chunk(4), Hangs())
    sent = workload(requests=1, prompt_tokens=(3, 3), output_tokens=(2, 2), **how)

    def full(requests: int, tokens: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        async with AsyncPageKVClient(server.target) as client:
            await run_jobs(client, sent, make_jobs(sent, 50), full)

    with pytest.raises(OSError, match="No space left on device"):
        asyncio.run(run())
    server.wait_cancelled("Generate")


def test_shapes_in_words() -> None:
    assert workload().shape() == (
        "400 requests, closed loop of 4, prompts of 3 to 5 tokens, 1 to 2 output tokens, greedy, seed 1"
    )
    assert workload(rate=2.5, shared_prefix=9, output_tokens=(4, 4), temperature=0.5).shape() == (
        "400 requests, Poisson arrivals at 2.5/s, prompts of 3 to 5 tokens after a shared prefix of 9, "
        "4 output tokens, temperature 0.5, seed 1"
    )


@pytest.mark.parametrize(
    ("ttft_ms", "inter_token_ms", "diagnosis"),
    [
        (780, 22, Diagnosis.PREFILL),  # 8,000 prompt tokens
        (48, 23, Diagnosis.WITHIN),  # 200
        (51, 61, Diagnosis.DECODE),  # 220
        (780, 61, Diagnosis.PREFILL),
        (500, 50, Diagnosis.WITHIN),
    ],
)
def test_late_first_tokens_and_slow_ones_have_different_causes(
    ttft_ms: float, inter_token_ms: float, diagnosis: Diagnosis
) -> None:
    assert Objectives().diagnose(ttft_ms, inter_token_ms) is diagnosis


def test_objectives_can_be_set() -> None:
    assert Objectives(ttft_ms=1000, inter_token_ms=100).diagnose(780, 61) is Diagnosis.WITHIN


def test_a_report_counts_its_requests_by_what_they_point_to() -> None:
    outcomes = [
        LoadOutcome(ttft_s=0.78, inter_token_s=[0.022]),
        LoadOutcome(ttft_s=0.048, inter_token_s=[0.002, 0.002, 0.065]),  # the mean counts
        LoadOutcome(ttft_s=0.051, inter_token_s=[0.002, 0.12]),
        LoadOutcome(ttft_s=0.05),
        LoadOutcome(error="Overloaded"),
        LoadOutcome(),  # no token, so no latency to judge
    ]
    report = summarise(outcomes, 1.0, Objectives())
    assert report.diagnoses == {Diagnosis.PREFILL.value: 1, Diagnosis.WITHIN.value: 2, Diagnosis.DECODE.value: 1}
    assert sum(report.diagnoses.values()) == 4
