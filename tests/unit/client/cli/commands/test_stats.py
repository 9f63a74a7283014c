"""Figures of `pagekv stats` for people and for scripts, and its warnings."""

from __future__ import annotations

import json

import grpc
import pytest
from support.clients.scripted_server import Fails, ScriptedServer

from pagekv.client.cli.commands.stats import graphs_text, ranks_text
from pagekv.client.cli.main import main
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb

STATS = operator_pb.GetStatsResponse(
    block_size=16,
    num_device_blocks=100,
    free_blocks=75,
    cached_free_blocks=20,
    active_blocks=25,
    kv_usage=0.25,
    utilization=0.9,
    prefix_hit_rate=0.5,
    prompt_tokens_total=200,
    cached_tokens_total=100,
    executor_attached=True,
    executor_threads=2,
    executor_busy_us_total=3,
    executor_idle_us_total=1,
    published_blocks=45,
    pinned_blocks=8,
    pins=2,
    watchers=1,
    block_hit_rate=0.4,
    misses_never_seen_total=5,
    misses_evicted_total=4,
    misses_cleared_total=3,
    misses_diverged_total=2,
    misses_partial_tail_total=1,
    num_host_blocks=20,
    host_cached_blocks=21,
    host_held_blocks=22,
    swap_preemptions_total=23,
    swapped_out_blocks_total=24,
    swapped_in_blocks_total=25,
    written_back_blocks_total=26,
    host_evicted_blocks_total=27,
    unread_sequences=3,
)


def test_stats_for_people_and_scripts(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.expect("GetStats", STATS)
    assert main(["stats"]) == 0
    out = capsys.readouterr().out
    for words in (
        "100 of 16 tokens",
        "25 (25.0%), slots filled 90.0%\n",
        "75, of these 20 still cached",
        "50.0% of tokens, 40.0% of blocks",
        "8 by 2 pins",
        "45, watched by 1",
        "20 blocks, 22 held by preempted sequences, 21 cached, 27 evicted",
        "5 never seen, 4 evicted, 3 cleared, 2 diverged, 1 partial tail",
        "200, 100 of them cached",
        "attached, 2 threads, busy 75.0%, 0 restarts\n",
        "0 running, 0 waiting, 3 ended and unread\n",
    ):
        assert words in out
    server.expect("GetStats", STATS)
    assert main(["stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefix_hit_rate"] == 0.5


def test_one_of_a_kind_is_told_as_one(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"pins": 1, "executor_threads": 1, "executor_restarts_total": 1, "executor_rank_differences_total": 1}
    server.expect("GetStats", operator_pb.GetStatsResponse(**one, executor_rank_us=[1]))  # type: ignore[arg-type]  # by name
    assert main(["stats"]) == 0
    out = capsys.readouterr().out
    for words in ("by 1 pin\n", ", 1 thread, ", ", 1 restart\n", ", differed 1 time\n"):
        assert words in out


def test_stats_warn_of_a_pool_with_nothing_to_evict(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for usage, words in (
        (0.80, "0 (80.0%), slots filled -\n"),
        (0.81, "0 (81.0%), slots filled -; above 80% new requests preempt others instead of evicting cached blocks\n"),
    ):
        server.expect("GetStats", operator_pb.GetStatsResponse(kv_usage=usage))
        assert main(["stats"]) == 0
        assert words in capsys.readouterr().out


def test_stats_show_no_share_of_slots_where_no_block_is_in_use(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("GetStats", operator_pb.GetStatsResponse(num_device_blocks=100, block_size=16, utilization=1.0))
    assert main(["stats"]) == 0
    assert "in use     0 (0.0%), slots filled -\n" in capsys.readouterr().out


def test_stats_watch_is_top_for_people_and_lines_for_scripts(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("GetModelInfo", pb.GetModelInfoResponse())
    server.expect("GetStats", STATS)
    server.expect("ListRequests", operator_pb.ListRequestsResponse())
    assert main(["stats", "--watch"]) == 0
    assert "blocks in use" in capsys.readouterr().out
    server.expect("GetStats", STATS)
    server.expect("GetStats", STATS)
    server.expect("GetStats", Fails(grpc.StatusCode.INTERNAL))
    assert main(["stats", "--json", "--watch", "0.1"]) == 1
    assert [json.loads(line)["num_device_blocks"] for line in capsys.readouterr().out.splitlines()] == [100, 100]


def test_graphs_are_told_in_a_line() -> None:
    assert graphs_text(63, 0) == "63 recorded"
    assert graphs_text(0, 63).startswith("0 recorded, 63 FAILED")


def test_ranks_are_told_in_a_line() -> None:
    assert ranks_text([9000, 12500], 0) == "2: 9.00 12.50 ms a step, rank 1 the slowest, skew 3.50 ms"
    assert ranks_text([9000, 9000], 2).endswith("rank 0 the slowest, skew 0.00 ms, differed 2 times")
