"""Keys of what --json prints: scripts read them, so they are added, never renamed nor taken away."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from support.clients.scripted_server import Fails, ScriptedServer, chunk, complete

from pagekv.client import PageKVClient
from pagekv.client.cli import stack_announcement
from pagekv.client.cli.commands import demo
from pagekv.client.cli.main import GROUPS, main, make_parser
from pagekv.client.cli.terminal import Terminal
from pagekv.client.launcher.certificates import StackCertificates
from pagekv.client.launcher.stack import Stack, StackConfig
from pagekv.common import errors
from pagekv.kvmanager.replay.cli import main as replay
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2

DATA = Path(__file__).parents[3] / "data"
# Command to the keys of its objects by the path where they stand; "[]" is an entry of a list. "error" is what a failure
# prints on standard error.
PROMISED: dict[str, dict[str, list[str]]] = json.loads((DATA / "json_keys.json").read_text())
INFO = pb.GetModelInfoResponse(
    model_id="m", vocab_size=50, block_size=16, max_sequence_tokens=100, has_chat_template=True, server_version="1"
)
DEVICE = types_pb2.TIER_DEVICE
EVENTS = [
    operator_pb.CacheEvent(stored=operator_pb.BlockStored(block_hash="aa", token_ids=[5], tier=DEVICE)),
    operator_pb.CacheEvent(removed=operator_pb.BlockRemoved(block_hash="bb", tier=DEVICE)),
    operator_pb.CacheEvent(cleared=operator_pb.AllBlocksCleared()),
]
# Command line, and the calls that it makes with their answers, in order.
Calls = list[tuple[str, list[Any]]]
ASKING: dict[str, tuple[str, Calls]] = {
    "health": ("health", [("Check", [health_pb2.HealthCheckResponse(status="SERVING")])]),
    "version": ("version", [("GetModelInfo", [INFO])]),
    "model": ("model", [("GetModelInfo", [INFO])]),
    "stats": ("stats", [("GetStats", [operator_pb.GetStatsResponse()])]),
    "top": (
        "top --once",
        [
            ("GetStats", [operator_pb.GetStatsResponse()]),
            ("ListRequests", [operator_pb.ListRequestsResponse(requests=[operator_pb.RequestInfo()])]),
        ],
    ),
    "requests": (
        "requests",
        [("ListRequests", [operator_pb.ListRequestsResponse(requests=[operator_pb.RequestInfo()])])],
    ),
    "tenants": (
        "tenants",
        [("ListTenants", [operator_pb.ListTenantsResponse(tenants=[operator_pb.TenantInfo()])])],
    ),
    "blocks": ("blocks", [("ListBlocks", [operator_pb.ListBlocksResponse(blocks=[operator_pb.BlockInfo()])])]),
    "block-table": (
        "block-table r",
        [("GetBlockTable", [operator_pb.GetBlockTableResponse(sequences=[operator_pb.SequenceBlocks()])])],
    ),
    "lookup": ("lookup x", [("LookupPrefix", [cache_pb.LookupPrefixResponse()])]),
    "explain": (
        "explain x",
        [("ExplainPrefix", [cache_pb.ExplainPrefixResponse(blocks=[cache_pb.BlockExplanation()])])],
    ),
    "watch": (
        "watch --limit 1",
        [("WatchEvents", [operator_pb.WatchEventsResponse(sequence=1, snapshot=True, events=EVENTS, revision=1)])],
    ),
    "pin": ("pin x", [("PinPrefix", [cache_pb.PinPrefixResponse(pin_id="p", pinned_tokens=16)])]),
    "pins": ("pins", [("ListPins", [cache_pb.ListPinsResponse(pins=[cache_pb.PinInfo(pin_id="p")])])]),
    "unpin": ("unpin p", [("UnpinPrefix", [cache_pb.UnpinPrefixResponse()])]),
    "abort": ("abort r", [("Abort", [pb.AbortResponse(aborted_request_ids=["r"])])]),
    "reset-cache": ("reset-cache", [("ResetPrefixCache", [operator_pb.ResetPrefixCacheResponse()])]),
    "tokenize": ("tokenize x", [("Tokenize", [pb.TokenizeResponse(token_ids=[4])])]),
    "detokenize": ("detokenize 4", [("Detokenize", [pb.DetokenizeResponse(text="x")])]),
    "generate": ("generate x", [("Generate", [chunk(4), complete(4)])]),
    "chat": ("chat", [("GetModelInfo", [INFO]), ("Generate", [chunk(4), complete(4)])]),
    "bench": (
        "bench --requests 1 --prompt-tokens 2 --output-tokens 2",
        [("GetModelInfo", [INFO]), ("Generate", [chunk(4), chunk(5, done=1), complete(4, 5)])],
    ),
    "plan": (
        "plan --layers 2 --kv-heads 2 --head-size 8 --context 64 --memory 1MiB --lengths 10 --shared-prefix 16",
        [],
    ),
}


def _of_up(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The announcement of two pairs behind a gateway, with a page, events and recordings."""
    certificates = StackCertificates(Path("certificates"))
    stack = Stack(StackConfig(port=0, executor_port=0, replicas=2, page_port=0, certificates=certificates))
    stack.target = stack.targets[0] = server.target
    stack.gateway_target = "127.0.0.1:8000"
    listening: dict[str, Any] = {
        "http": ["127.0.0.1:8080"],
        "kv_events": [{"endpoint": "tcp://*:1", "replay_endpoint": ""}],
        "recordings": [["a"]],
    }
    monkeypatch.setattr(stack, "listening", listening.__getitem__)
    # No manager of these certificates is there to be asked.
    monkeypatch.setattr(stack_announcement, "_model_info", lambda stack: None)
    stack_announcement.announce(stack, make_parser().parse(["up", "--json"]), Terminal())


def _of_demo(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.expect("GetModelInfo", INFO)
    server.expect("Generate", chunk(4), complete(4))
    for _ in range(2):
        server.expect("Generate", chunk(7, cached=16), complete(7, cached=16))
    server.expect("GetStats", operator_pb.GetStatsResponse())
    with PageKVClient(server.target) as client:
        demo._show(client, make_parser().parse(["demo", "--json", "--prompt", "x"]), Terminal(), 0.5)


def _of_replay(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replay([str(DATA / "traces" / "mooncake_sample.jsonl"), "--limit", "5", "--json"]) == 0


def _of_certs(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory() as directory:
        assert main(["certs", "--json", directory]) == 0


def _of_keys(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory() as directory:
        assert main(["--json", "keys", "add", "alice", "--role", "observe", "--file", f"{directory}/f"]) == 0


# Of commands that start processes: their output alone; and of commands that make files.
STARTING: dict[str, Callable[[ScriptedServer, pytest.MonkeyPatch], None]] = {
    "up": _of_up,
    "demo": _of_demo,
    "replay": _of_replay,
    "certs": _of_certs,
    "keys": _of_keys,
}


def keys_of(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every key of the objects in a value, with the path of its object."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield path, key
            yield from keys_of(below, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for below in value:
            yield from keys_of(below, f"{path}[]")


def promised(command: str) -> set[tuple[str, str]]:
    return {(path, key) for path, keys in PROMISED[command].items() for key in keys}


@pytest.mark.parametrize("command", [*ASKING, *STARTING])
def test_promised_keys_are_printed(
    server: ScriptedServer,
    target: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    if command in ASKING:
        line, calls = ASKING[command]
        for method, replies in calls:
            server.expect(method, *replies)
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))  # of chat
        assert main(["--json", *line.split()]) == 0
    else:
        STARTING[command](server, monkeypatch)
    printed = {*keys_of(json.loads(capsys.readouterr().out))}
    assert promised(command) - printed == set()


def test_promised_keys_of_a_failure_are_printed(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = set()
    for failure in (errors.InvalidRequest("prompt", "must be set"), errors.Overloaded("full", 2.0)):
        server.expect("Tokenize", Fails(failure))
        assert main(["--json", "tokenize", "x"]) != 0
        printed |= {*keys_of(json.loads(capsys.readouterr().err))}
    assert promised("error") - printed == set()


def test_every_command_is_judged() -> None:
    # All but those whose output is a script of its own.
    commands = {name for names in GROUPS.values() for name in names} - {"completion"}
    assert {*ASKING, *STARTING} == commands
    assert PROMISED.keys() == commands | {"error"}
    assert all(promised(command) for command in PROMISED)
