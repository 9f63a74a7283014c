"""`pagekv top`: what a frame says, how it fits, and how it ends."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console
from support.clients.scripted_server import Fails, ScriptedServer
from support.clients.top_answers import INFO, LISTED, STATS

from pagekv.client import FailedPrecondition, PageKVClient
from pagekv.client.cli.top_view import SPARKS, Look, TopFrame, TopRates, TopWatcher, rates_between, spark
from pagekv.client.types import ModelInfo, RequestList, Stats
from pagekv.client.wire import flat
from pagekv.v1 import operator_service_pb2 as operator_pb


def look(at: float, **changes: float) -> Look:
    stats = operator_pb.GetStatsResponse()
    stats.CopyFrom(STATS)
    for name, value in changes.items():
        setattr(stats, name, value)
    return Look(at, flat(Stats, stats), flat(RequestList, LISTED))


def drawn(
    rates: Sequence[TopRates], now: Look, width: int = 100, height: int | None = None, footer: str = ""
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    frame = TopFrame("here:1", flat(ModelInfo, INFO), now, rates, footer=footer)
    console.print(frame, height=height)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_rates_are_those_since_the_look_before() -> None:
    changes = {"prompt_tokens_total": 1100, "cached_tokens_total": 590, "generated_tokens_total": 340}
    first, second = look(0.0), look(2.0, **changes, steps_total=60, executor_busy_us_total=700_000)
    totals, rates = rates_between(None, first), rates_between(first, second)
    assert (totals.hit_rate, totals.tokens_per_s, totals.step_s) == (0.5, None, 0.01)
    assert (rates.hit_rate, rates.tokens_per_s, rates.step_s) == (0.9, 20, 0.02)
    # Another manager counts from 0 again.
    again = rates_between(second, look(3.0, steps_total=1, executor_busy_us_total=4000))
    assert (again.step_s, again.tokens_per_s) == (0.004, None)


def test_a_frame_has_rates_blocks_and_requests() -> None:
    lines = drawn([rates_between(None, look(0.0))], look(0.0))
    text = "\n".join(lines)
    assert lines[0].split() == ["PageKV", "here:1", "demo", "on", "oracle"]
    assert "50%" in next(line for line in lines if "prefix hit rate" in line)
    assert "10.0 ms" in next(line for line in lines if "step time" in line)
    assert "100: ■ 40 in use  ■ 40 cached  ■ 20 free  3 of these pinned" in text
    assert "20: ■ 2 held  ■ 5 cached  ■ 13 free" in text
    assert next(line for line in lines if "request-1" in line).split() == ["request-1", "running", "64", "48", "1", "5"]


def test_a_group_of_ranks_shows_the_slowest() -> None:
    of_one = drawn([rates_between(None, look(0.0))], look(0.0))
    plain = look(0.0)
    state = replace(plain, stats=replace(plain.stats, executor_rank_us=(9000, 12_500, 8000)))
    for width, beside in ((100, "of 3 ranks"), (60, "")):
        (line,) = [line for line in drawn([rates_between(None, state)], state, width) if "slowest rank" in line]
        assert line.split() == f"slowest rank 12.5 ms rank 1, skew 4.5 ms {beside}".split()
    assert not any("slowest rank" in line for line in of_one)


def test_no_slots_are_filled_of_no_block() -> None:
    busy, idle = look(0.0), look(0.0, active_blocks=0, kv_usage=0.0, utilization=1.0)
    rates = [rates_between(None, idle)]
    assert any(line.rstrip().endswith("90% of their slots filled") for line in drawn(rates, busy))
    assert any(line.rstrip().endswith("- of their slots filled") for line in drawn(rates, idle))


@pytest.mark.parametrize(("width", "height"), [(100, 24), (60, 18), (50, 24), (40, 16)])
def test_a_frame_fits_its_screen(width: int, height: int) -> None:
    now = look(0.0)
    looks = [look(at, generated_tokens_total=300 + at, steps_total=50 + at) for at in range(SPARKS + 1)]
    rates = [rates_between(before, after) for before, after in pairwise(looks)]
    many = RequestList(requests=now.requests.requests * 40, total=120, next_page_token="")
    lines = drawn(rates, Look(0.0, now.stats, many), width, height, "the end")
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert any("more" in line for line in lines)
    assert (lines[-1].rstrip() == "the end") == (height > 16)


def test_fifty_columns_show_what_matters_whole() -> None:
    """Nothing of it is cut off; less important columns are left out."""
    now = look(0.0)
    lines = drawn([rates_between(None, now)], now, 50)
    assert max(map(len, lines)) <= 50
    assert not any("…" in line for line in lines)
    text = "\n".join(lines)
    for words in ("request-0", "prompt", "output", "blocks", " free", " cached", "sequences running"):
        assert words in text
    assert "preempted" not in text
    assert "preempted" in "\n".join(drawn([rates_between(None, now)], now, 80))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_an_id_gives_way_to_the_state(width: int) -> None:
    now = look(0.0)
    long = tuple(replace(each, request_id="req-92bb28708ee98948bab0e538") for each in now.requests.requests)
    now = replace(now, requests=replace(now.requests, requests=long))
    text = "\n".join(drawn([rates_between(None, now)], now, width))
    assert "req-" in text
    assert "…" in text
    assert "running" in text


def test_nothing_from_the_server_controls_the_screen() -> None:
    now = look(0.0)
    named = tuple(replace(each, request_id="[bold]x\x1b[2J") for each in now.requests.requests)
    now = replace(now, requests=replace(now.requests, requests=named))
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    info = replace(flat(ModelInfo, INFO), model_id="a\x1b[2J")
    console.print(TopFrame("here:1", info, now, [rates_between(None, now)], problem="b\x1b[2J"))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b" not in text
    for words in ("a\\x1b[2J on", "b\\x1b[2J", "[bold]x\\x1b[2J "):
        assert words in text


def test_a_spark_line_leaves_out_what_is_not_known() -> None:
    assert spark([0.0, None, 0.5, 1.0, 9.0], 1.0) == "▁ ▅██"
    assert spark([0.0, None]) == "▁ "
    assert spark([2.0, 4.0]) == "▅█"


def test_a_manager_that_goes_is_waited_for(server: ScriptedServer) -> None:
    with PageKVClient(server.target) as client:
        watcher = TopWatcher(client, server.target)
        server.expect("GetModelInfo", INFO)
        server.expect("GetStats", STATS)
        server.expect("ListRequests", LISTED)
        watcher.frame(fail=True)
        server.expect("GetModelInfo", Fails(FailedPrecondition("not now")))
        frame = watcher.frame()
        assert "trying again" in frame.problem
