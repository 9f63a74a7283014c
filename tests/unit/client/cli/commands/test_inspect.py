"""Small commands that look into a running stack: what they print for people and for scripts."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from support.clients.scripted_server import Fails, ScriptedServer

from pagekv.client.cli.commands.inspect import _pages, graphs_text, ranks_text
from pagekv.client.cli.main import main
from pagekv.client.types import BlockList
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2

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
        "attached, 2 threads, busy 75.0%",
    ):
        assert words in out
    server.expect("GetStats", STATS)
    assert main(["stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefix_hit_rate"] == 0.5


def test_stats_warn_of_a_pool_with_nothing_to_evict(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for usage, words in (
        (0.80, "0 (80.0%), slots filled -\n"),
        (0.81, "0 (81.0%), slots filled -; above 80% new work preempts rather than evicts\n"),
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


@pytest.mark.parametrize(("status", "code"), [("SERVING", 0), ("NOT_SERVING", 3)])
def test_health(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    from grpc_health.v1 import health_pb2

    reply = health_pb2.HealthCheckResponse(status=status)
    server.expect("Check", reply)
    assert main(["health"]) == code
    out, err = capsys.readouterr()
    assert out == f"{target} {status.lower()}\n"
    assert err == (f"pagekv: PageKV at {target} is not serving\n" if code else "")
    server.expect("Check", reply)
    assert main(["health", "--json"]) == code
    out, err = capsys.readouterr()
    assert json.loads(out) == {"target": target, "status": status.lower()}
    assert [json.loads(line)["error"]["code"] for line in err.splitlines()] == ["UNAVAILABLE"] * bool(code)


RUNNING = types_pb2.SEQUENCE_STATE_RUNNING
BLOCK = operator_pb.BlockInfo(
    block_id=3, ref_count=2, state=operator_pb.BLOCK_STATE_ACTIVE, block_hash="ab" * 32, pins=1
)


SMALL = [
    ("model", "GetModelInfo", pb.GetModelInfoResponse(model_id="m", vocab_size=9, has_tokenizer=True), "ids, text\n"),
    ("lookup hi", "LookupPrefix", cache_pb.LookupPrefixResponse(prompt_tokens=8, device_tokens=4, block_ids=[7]),
     "4 of 8 tokens cached (50%): 4 on the device, 0 on the host\nblocks 7\n"),
    ("blocks", "ListBlocks", operator_pb.ListBlocksResponse(blocks=[BLOCK]),
     "    3  active     2     1  abababababababab  -\n"),
    ("blocks", "ListBlocks", operator_pb.ListBlocksResponse(), "no such blocks\n"),
    ("requests", "ListRequests",
     operator_pb.ListRequestsResponse(
         requests=[operator_pb.RequestInfo(request_id="r", state=RUNNING, priority=-2, prompt_tokens=7, namespace="n")]
     ),
     "r        running        -2       7       0          0       0          0  n\n"),
    ("requests", "ListRequests", operator_pb.ListRequestsResponse(), "no live requests\n"),
    ("block-table r", "GetBlockTable",
     operator_pb.GetBlockTableResponse(sequences=[operator_pb.SequenceBlocks(state=RUNNING, block_ids=[5, 2])]),
     "sequence 0: running, 0 tokens, 0 computed; blocks 5 2\n"),
    ("reset-cache --force", "ResetPrefixCache", operator_pb.ResetPrefixCacheResponse(removed_blocks=4),
     "4 blocks removed; 0 sequences preempted, 0 pins ended\n"),
    ("pin hi --lease 60", "PinPrefix", cache_pb.PinPrefixResponse(pin_id="pin-1", pinned_tokens=32),
     "pin-1: 32 tokens pinned for 60 s\n"),
    ("unpin pin-1", "UnpinPrefix", cache_pb.UnpinPrefixResponse(unpinned_tokens=32), "32 tokens unpinned\n"),
    ("unpin pin-1", "UnpinPrefix", cache_pb.UnpinPrefixResponse(), "no such pin, or its lease was over\n"),
    ("abort r", "Abort", pb.AbortResponse(aborted_request_ids=["r"]), "aborted: r\n"),
    ("tokenize hi", "Tokenize", pb.TokenizeResponse(token_ids=[4, 5]), "4,5\n"),
    ("detokenize 4,5", "Detokenize", pb.DetokenizeResponse(text="hi"), "hi\n"),
]  # fmt: skip  # laid out as a table


@pytest.mark.parametrize(("command", "method", "reply", "shown"), SMALL)
def test_small_commands(
    server: ScriptedServer,
    target: str,
    capsys: pytest.CaptureFixture[str],
    command: str,
    method: str,
    reply: Any,
    shown: str,
) -> None:
    server.expect(method, reply)
    assert main(command.split()) == 0
    assert shown in capsys.readouterr().out
    server.expect(method, reply)
    assert main([*command.split(), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_abort_of_nothing_is_no_failure(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Abort", pb.AbortResponse())
    assert main(["abort", "gone"]) == 0


def test_graphs_are_told_in_a_line() -> None:
    assert graphs_text(63, 0) == "63 recorded"
    assert graphs_text(0, 63).startswith("0 recorded, 63 FAILED")


def test_ranks_are_told_in_a_line() -> None:
    assert ranks_text([9000, 12500], 0) == "2: 9.00 12.50 ms a step, rank 1 the slowest, skew 3.50 ms"
    assert ranks_text([9000, 9000], 2).endswith("rank 0 the slowest, skew 0.00 ms, differed 2 times")


class _Entries(tuple[Any, ...]):
    """Counts the entries that are copied."""

    copied = 0

    def __iter__(self) -> Any:
        _Entries.copied += len(self)
        return super().__iter__()

    def __add__(self, other: Any) -> Any:
        _Entries.copied += len(self) + len(other)
        return _Entries([*tuple.__iter__(self), *other])


@pytest.mark.parametrize("num_pages", [10, 40])
def test_entries_of_many_pages_are_copied_a_few_times(num_pages: int) -> None:
    """Not once for each page that follows."""
    pages = iter(range(1, num_pages + 1))

    def ask(size: int, token: str) -> BlockList:
        number = next(pages)
        return BlockList(blocks=_Entries([number] * 5), next_page_token="" if number == num_pages else str(number))

    _Entries.copied = 0
    found: Any = _pages(10**6, "blocks", ask).blocks
    assert found == tuple(number for number in range(1, num_pages + 1) for _ in range(5))
    assert _Entries.copied <= 2 * len(found)
