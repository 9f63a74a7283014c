"""`pagekv up`: what it makes of its flags before anything is started, and what it says of what runs."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from support.clients.scripted_server import ScriptedServer
from support.engine.small_tokenizers import byte_level, sentencepiece

from pagekv.client.cli.commands import up
from pagekv.client.cli.main import main, make_parser
from pagekv.client.cli.terminal import Terminal
from pagekv.client.launcher.gateway import GatewayConfig
from pagekv.client.launcher.kv_events import DEFAULT_ENDPOINT, KvEventEndpoints, endpoints_of_pairs
from pagekv.client.launcher.stack import Stack, StackConfig, StackError
from pagekv.kvmanager.observe.flags import ObserveConfig
from pagekv.v1 import inference_service_pb2 as pb


def pairs_of(*args: str, pairs: int = 3, env: dict[str, str] | None = None) -> list[tuple[str, str]]:
    found = endpoints_of_pairs(["--kv-events", *args], env or {}, pairs)
    return [(endpoints.endpoint, endpoints.replay_endpoint) for endpoints in found]


def test_every_pair_publishes_its_events_on_ports_of_its_own() -> None:
    assert ObserveConfig().kv_events_endpoint == DEFAULT_ENDPOINT
    assert pairs_of(pairs=2) == [("tcp://127.0.0.1:5557", ""), ("tcp://127.0.0.1:5558", "")]
    beside = pairs_of("--kv-events-replay-endpoint", "tcp://127.0.0.1:5558")
    assert beside == [(f"tcp://127.0.0.1:{5557 + 2 * pair}", f"tcp://127.0.0.1:{5558 + 2 * pair}") for pair in range(3)]
    assert pairs_of("--kv-events-endpoint=ipc:///tmp/events", pairs=2)[1] == ("ipc:///tmp/events-2", "")
    assert pairs_of("--kv-events-endpoint=tcp://*:0") == [("tcp://*:0", "")] * 3
    # Left to the manager to refuse.
    for wrong in ("127.0.0.1:5557", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:x"):
        assert pairs_of(f"--kv-events-endpoint={wrong}") == [(wrong, "")] * 3
        assert stack_of("--kv-events", f"--kv-events-endpoint={wrong}").kv_events[0].endpoint == wrong


@pytest.mark.parametrize("apart", [*range(1, 13), 30, 60, 64, -2])
def test_no_two_sockets_of_any_pairs_meet(apart: int) -> None:
    for pairs in (1, 2, 7, 64):
        found = pairs_of(f"--kv-events-replay-endpoint=tcp://127.0.0.1:{5557 + apart}", pairs=pairs)
        assert len({address for both in found for address in both}) == 2 * pairs


def test_events_are_found_in_flags_and_variables_and_the_last_flag_wins() -> None:
    env = {"PAGEKV_KV_EVENTS": "On", "PAGEKV_KV_EVENTS_ENDPOINT": "tcp://127.0.0.1:7000"}
    assert endpoints_of_pairs([], env, 2)[1] == KvEventEndpoints("tcp://127.0.0.1:7001")
    assert endpoints_of_pairs(["--no-kv-events"], env, 2) == []
    assert endpoints_of_pairs([], {}, 2) == []
    args = ["--kv-events-endpoint", "tcp://127.0.0.1:1", "--kv-events-endpoint=tcp://127.0.0.1:8000"]
    assert pairs_of(*args, pairs=1, env=env) == [("tcp://127.0.0.1:8000", "")]


def stack_of(*manager_args: str, replicas: int = 2, page_port: int | None = None) -> Stack:
    return Stack(
        StackConfig(port=0, executor_port=0, replicas=replicas, manager_args=manager_args, page_port=page_port)
    )


def test_ports_that_run_out_are_refused_with_the_flag() -> None:
    with pytest.raises(StackError, match=r"--kv-events-endpoint tcp://127\.0\.0\.1:65535: leaves no port for pair 2"):
        stack_of("--kv-events", "--kv-events-endpoint=tcp://127.0.0.1:65535")


def test_a_port_that_is_taken_is_refused_with_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for flag in ("--kv-events-endpoint", "--kv-events-replay-endpoint"):
            with pytest.raises(StackError, match=f"^{flag} {endpoint}: this port cannot be had; choose another"):
                stack_of("--kv-events", f"{flag}={endpoint}", replicas=1)


def announced(stack: Stack, server: ScriptedServer, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What `up` prints of a stack whose first manager is the scripted one."""
    stack.targets[0] = server.target
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="demo", backend="oracle", block_size=16))
    up._announce(stack, make_parser().parse(["up", *flags]), Terminal())
    return capsys.readouterr().out


def test_it_is_said_where_each_manager_publishes(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    free = "tcp://127.0.0.1:0"
    stack = stack_of("--kv-events", f"--kv-events-endpoint={free}", f"--kv-events-replay-endpoint={free}")
    ports = [address for pair in stack.kv_events for address in (pair.endpoint, pair.replay_endpoint)]
    assert len(set(ports)) == 4
    assert free not in ports
    found = json.loads(announced(stack, server, capsys, "--json"))["kv_events"]
    assert found == [
        {"endpoint": ports[0], "replay_endpoint": ports[1]},
        {"endpoint": ports[2], "replay_endpoint": ports[3]},
    ]
    lines = announced(stack, server, capsys).splitlines()
    assert f"  KV events at {ports[2]}, again at {ports[3]}" in lines


@pytest.mark.parametrize("flag", ["--policy=round_robin", "--gateway-port=8000", "--gateway-args=--log-json"])
def test_flags_of_a_gateway_that_nobody_asked_for_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--replicas", "1", flag]) == 2
    name = flag.partition("=")[0]
    assert capsys.readouterr().err == f"pagekv: {name}: has no effect without --gateway, or --replicas 2 or more\n"


def made(*flags: str) -> StackConfig:
    return up.stack_config(make_parser().parse(["up", *flags]), Terminal(), "127.0.0.1", 0, 0)


def test_a_gateway_has_its_flags_and_defaults() -> None:
    assert made("--gateway").gateway == GatewayConfig()
    flags = ("--policy=random", "--gateway-port=0", "--gateway-args=--log-json")
    assert made("--replicas=2", *flags).gateway == GatewayConfig(0, "random", ["--log-json"])


def test_the_page_of_every_pair_is_told(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    stack = stack_of(replicas=3, page_port=0)
    found = json.loads(announced(stack, server, capsys, "--json"))
    assert found["pages"] == [f"http://{target}/" for target in stack.page_targets]
    assert len(set(found["pages"])) == 3
    assert found["page"] == found["pages"][0]


@pytest.mark.parametrize("more", [[], ["--tokenizer=none"], ["--manager-args=--tokenizer auto"]])
def test_a_gateway_in_front_of_an_oracle_without_a_tokenizer_is_refused_before_anything_starts(
    more: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "Stack", None)
    assert main(["up", "--backend", "oracle", "--gateway", *more]) == 2
    assert "add --tokenizer demo, or --model demo" in capsys.readouterr().err


def test_an_oracle_without_a_model_has_the_vocabulary_of_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*flags: str) -> list[str]:
        return [word for word in made("--backend=oracle", *flags).executor_args if word != "--backend=oracle"]

    assert told("--gateway", "--tokenizer=demo") == ["--vocab-size=4096"]
    for tokenizer in (byte_level(), sentencepiece()):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        assert told("--manager-args", f"--tokenizer {tmp_path}") == [f"--vocab-size={size}"]
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}}')
    assert told(f"--tokenizer={tmp_path}") == ["--vocab-size=2"]
    # What is given counts, and what cannot be read is for the manager to say.
    assert told("--tokenizer=demo", "--executor-args=--vocab-size 9") == ["--vocab-size", "9"]
    assert told("--tokenizer=demo", "--model=demo") == ["--model=demo"]
    assert told(f"--tokenizer={tmp_path / 'nothing'}") == []
    monkeypatch.setenv("PAGEKV_MODEL", "demo")
    assert told("--gateway") == []
