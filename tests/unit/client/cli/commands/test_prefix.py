"""`pagekv explain`, `pin` and `watch`: what they print for people and for scripts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from support.clients.scripted_server import Hangs, ScriptedServer
from support.clients.stack import environment

from pagekv.client.cli.main import main
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2


@pytest.mark.parametrize(("partial", "which"), [(1, "1 more token is"), (3, "3 more tokens are")])
def test_lookup_tells_what_a_copied_block_adds(
    partial: int, which: str, server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = cache_pb.LookupPrefixResponse(
        prompt_tokens=20, device_tokens=8, host_tokens=4, partial_tokens=partial, block_ids=[7, 3]
    )
    server.expect("LookupPrefix", found)
    assert main(["lookup", "hi"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "12 of 20 tokens cached (60%): 8 on the device, 4 on the host",
        f"{which} at the beginning of a cached block, and would be reused by copying that block",
        "blocks 7 3",
    ]


def test_explain_tells_blocks_with_the_same_story_in_one_row(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hit, unreachable = cache_pb.BLOCK_OUTCOME_HIT, cache_pb.BLOCK_OUTCOME_UNREACHABLE

    def block(number: int, outcome: Any, reason: str, **more: Any) -> cache_pb.BlockExplanation:
        return cache_pb.BlockExplanation(start=4 * number, end=4 * number + 4, outcome=outcome, reason=reason, **more)

    pages = [
        [
            *(block(i, hit, f"cached in block {i + 7}", block_id=i + 7) for i in range(2)),
            block(2, hit, "cached in the host pool"),
            block(3, cache_pb.BLOCK_OUTCOME_EVICTED, "evicted 2 steps and 0.5 s ago"),
        ],
        [block(i, unreachable, f"cached in block {9 - i}, but", block_id=9 - i) for i in (4, 5)]
        + [cache_pb.BlockExplanation(start=24, end=25, outcome=cache_pb.BLOCK_OUTCOME_PARTIAL_TAIL, reason="1 of 4")],
    ]

    def expect() -> None:
        def first(request: cache_pb.ExplainPrefixRequest) -> None:
            assert (request.prompt.text, request.page_token) == ("hi", "")
            assert (request.cache.namespace, request.adapter) == ("n", "a")

        def second(request: cache_pb.ExplainPrefixRequest) -> None:
            assert request.page_token == "t"

        one, other = (
            cache_pb.ExplainPrefixResponse(blocks=page, next_page_token=token, prompt_tokens=25, cached_tokens=12)
            for page, token in zip(pages, ("t", ""), strict=True)
        )
        server.expect("ExplainPrefix", one, check=first)
        server.expect("ExplainPrefix", other, check=second)

    expect()
    command = ["explain", "hi", "--namespace", "n", "--adapter", "a"]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines() == [
        "12 of 25 tokens cached in full blocks (48%)",
        "blocks  tokens  outcome       why",
        "0-1     0-7     hit           cached in blocks 7 to 8",
        "2       8-11    hit           cached in the host pool",
        "3       12-15   evicted       evicted 2 steps and 0.5 s ago",
        "4-5     16-23   unreachable   cached in blocks 5 4, but a block before them is not",
        "6       24-24   partial tail  1 of 4",
    ]
    expect()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [b["outcome"] for b in found["blocks"]][2:4] == ["hit", "evicted"]
    assert (len(found["blocks"]), found["next_page_token"]) == (7, "")


def test_a_pin_of_nothing_is_exit_status_1(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("PinPrefix", cache_pb.PinPrefixResponse())
    assert main(["pin", "new"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pagekv: nothing pinned: no full block of this prompt is cached")
    server.expect("PinPrefix", cache_pb.PinPrefixResponse())
    assert main(["--json", "pin", "new"]) == 1
    out, err = capsys.readouterr()
    assert (out, json.loads(err)["error"]["code"]) == ("", "NOT_FOUND")


def test_pins_are_renewed_by_name_listed_and_released(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(request: cache_pb.PinPrefixRequest) -> None:
        assert (request.pin_id, request.lease_seconds) == ("mine", 600)

    server.expect("PinPrefix", cache_pb.PinPrefixResponse(pin_id="mine", pinned_tokens=32), check=check)
    assert main(["pin", "hi", "--pin-id", "mine"]) == 0
    assert capsys.readouterr().out == "mine: 32 tokens pinned for 600 s\n"
    info = cache_pb.PinInfo(pin_id="mine", pinned_tokens=32, namespace="n")
    info.expire_time.FromSeconds(86_400)
    server.expect("ListPins", cache_pb.ListPinsResponse(pins=[info]))
    assert main(["pins"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert (head.split(), row.split()[:4]) == (
        ["pin", "tokens", "namespace", "adapter", "until"],
        ["mine", "32", "n", "-"],
    )
    server.expect("ListPins", cache_pb.ListPinsResponse(pins=[info]))
    assert main(["pins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pins"][0]["expire_time"] == "1970-01-02T00:00:00+00:00"
    server.expect("ListPins", cache_pb.ListPinsResponse())
    assert main(["pins"]) == 0
    assert capsys.readouterr().out == "no pins\n"
    for tokens, text in ((32, "32 tokens unpinned"), (0, "no such pin, or its lease has ended")):
        server.expect("UnpinPrefix", cache_pb.UnpinPrefixResponse(unpinned_tokens=tokens))
        assert main(["unpin", "mine"]) == 0
        assert capsys.readouterr().out == f"{text}\n"


def _event(name: str, parent: str = "") -> operator_pb.CacheEvent:
    stored = operator_pb.BlockStored(block_hash=name, parent_hash=parent, token_ids=[5, 17], tier=types_pb2.TIER_DEVICE)
    return operator_pb.CacheEvent(stored=stored)


TABLE = "blocks in the device's prefix table"
QUIET = "nothing changed since revision 8"
BATCHES = [
    operator_pb.WatchEventsResponse(sequence=1, snapshot=True, events=[_event("aa")], more=True),
    operator_pb.WatchEventsResponse(sequence=2, snapshot=True, events=[_event("bb", "aa")], revision=7),
    operator_pb.WatchEventsResponse(
        sequence=3,
        events=[
            operator_pb.CacheEvent(removed=operator_pb.BlockRemoved(block_hash="bb", tier=types_pb2.TIER_HOST)),
            operator_pb.CacheEvent(cleared=operator_pb.AllBlocksCleared()),
            _event("cc", "aa"),
        ],
        revision=8,
    ),
    operator_pb.WatchEventsResponse(sequence=4, revision=8),
]


def test_watch_prints_a_line_for_each_event(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, lines in (
        ("", [f"2 {TABLE}; revision 7", "removed  host    bb", "cleared", "stored   device  cc after aa", QUIET]),
        ("--tokens", ["stored   device  aa after : 5 17", f"2 {TABLE}; revision 7",
                      "stored   device  bb after aa: 5 17",
                      "removed  host    bb", "cleared", "stored   device  cc after aa: 5 17", QUIET]),
    ):  # fmt: skip  # laid out as a table
        server.expect("WatchEvents", *BATCHES)
        assert main(["watch", *options.split()]) == 0
        assert capsys.readouterr().out.splitlines() == lines


def test_watch_counts_the_blocks_of_both_tiers(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = operator_pb.CacheEvent(stored=operator_pb.BlockStored(block_hash="aa", tier=types_pb2.TIER_HOST))
    server.expect(
        "WatchEvents", operator_pb.WatchEventsResponse(sequence=1, snapshot=True, events=[_event("aa"), kept])
    )
    assert main(["watch", "--limit", "1"]) == 0
    assert capsys.readouterr().out == f"1 {TABLE}, 1 in the host pool's; revision 0\n"


def test_watch_json_ends_after_as_many_batches_as_asked_for(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("WatchEvents", *BATCHES, Hangs())
    assert main(["watch", "--json", "--limit", "2"]) == 0
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    names = {"namespace": "", "adapter": ""}
    tokens = {"parent_hash": "", "token_ids": [5, 17]}
    stored = {"event": "stored", "block_hash": "aa", "tier": "device", **tokens, **names}
    assert first == {
        "sequence": 1,
        "snapshot": True,
        "more": True,
        "events": [stored],
        "revision": 0,
        "instance_id": "",
    }
    assert not second["more"]
    assert second["revision"] == 7
    assert [event["event"] for event in third["events"]] == ["removed", "cleared", "stored"]


def test_a_quiet_watch_asks_for_signs_of_life_and_does_not_count_them(server: ScriptedServer, target: str) -> None:
    def check(request: operator_pb.WatchEventsRequest) -> None:
        assert request.progress_interval.ToMilliseconds() == 2500

    first = operator_pb.WatchEventsResponse(sequence=1, snapshot=True, revision=7)
    quiet = operator_pb.WatchEventsResponse(sequence=2, revision=7)
    change = operator_pb.WatchEventsResponse(sequence=3, events=[_event("aa")], revision=8)
    server.expect("WatchEvents", first, quiet, change, Hangs(), check=check)
    assert main(["watch", "--progress", "2.5", "--limit", "2"]) == 0


# Where the tests themselves run in the background of a shell, SIGINT is ignored, and inherited so. A `preexec_fn` would
# change that in a copy of this process, whose threads are gRPC's: such copies die at times.
HEARS_SIGINT = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("pagekv.client.cli", run_name="__main__", alter_sys=True)
"""


def test_ctrl_c_ends_a_watch_without_a_word(target: str, server: ScriptedServer) -> None:
    server.expect("WatchEvents", BATCHES[1], Hangs())
    command = [sys.executable, "-c", HEARS_SIGINT, "watch", "--target", target]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        # Its end closes standard error too.
        assert first == f"1 {TABLE}; revision 7\n", process.communicate(timeout=120)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    # gRPC's own threads may complain on their way out; what we print has no such mark before it.
    ours = [line for line in err.splitlines() if not re.match(r"[EIW]\d{4} \d\d:\d\d", line)]
    assert (process.returncode, out, ours) == (130, "", [])
