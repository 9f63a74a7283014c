"""The words of `pagekv up` once a stack serves."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clients.scripted_server import Fails, ScriptedServer

from pagekv.client.cli.main import make_parser
from pagekv.client.cli.stack_announcement import announce
from pagekv.client.cli.terminal import Terminal
from pagekv.client.launcher.certificates import StackCertificates
from pagekv.client.launcher.gateway import GatewayConfig
from pagekv.client.launcher.stack import Stack, StackConfig
from pagekv.v1 import inference_service_pb2 as pb


def announced(
    server: ScriptedServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *flags: str,
    **listening: Any,
) -> str:
    """The output of `up` for two pairs whose port files have `listening`; the first manager is the scripted one."""
    stack = Stack(StackConfig(port=0, executor_port=0, replicas=2, page_port=0))
    stack.target = stack.targets[0] = server.target
    monkeypatch.setattr(stack, "listening", lambda key: listening.get(key, []))
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="demo", backend="oracle", block_size=16))
    announce(stack, make_parser().parse(["up", *flags]), Terminal())
    return capsys.readouterr().out


def test_addresses_and_files_are_told(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [
        {"endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2"},
        {"endpoint": "tcp://*:3", "replay_endpoint": ""},
    ]
    listening = {
        "kv_events": events,
        "http": ["127.0.0.1:8080", "127.0.0.1:9"],
        "recordings": [["a"], ["b", "c"]],
    }
    found = json.loads(announced(server, capsys, monkeypatch, "--json", **listening))
    assert found["kv_events"] == events
    assert (found["page"], found["pages"]) == (
        "http://127.0.0.1:8080/",
        ["http://127.0.0.1:8080/", "http://127.0.0.1:9/"],
    )
    assert found["recordings"] == ["a", "b", "c"]
    lines = announced(server, capsys, monkeypatch, **listening).splitlines()
    for line in (
        "  KV events at tcp://*:1, missed ones at tcp://*:2",
        "  KV events at tcp://*:3",
        "  watch the blocks: http://127.0.0.1:8080/  http://127.0.0.1:9/",
        "  recording to c",
    ):
        assert line in lines


def test_ranks_are_told(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    for ranks, words in ((2, "backend oracle over 2 ranks, "), (1, "backend oracle, ")):
        stack = Stack(StackConfig(port=0, ranks=ranks))
        stack.target = server.target
        server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="demo", backend="oracle", block_size=16))
        announce(stack, make_parser().parse(["up"]), Terminal())
        assert f"  model demo, {words}0 blocks of 16 tokens" in capsys.readouterr().out


def test_what_other_machines_reach_is_told(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [{"endpoint": "tcp://*:1", "replay_endpoint": ""}]
    stack = Stack(StackConfig(port=0))
    stack.target = server.target
    found: dict[str, list[Any]] = {"http": ["127.0.0.1:8080", "0.0.0.0:9"], "kv_events": events}
    monkeypatch.setattr(stack, "listening", lambda key: found.get(key, []))
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="demo", backend="oracle", block_size=16))
    announce(stack, make_parser().parse(["up"]), Terminal())
    assert "other machines can connect, without TLS or a login: 0.0.0.0:9, tcp://*:1\n" in capsys.readouterr().err
    found.clear()
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="demo", backend="oracle", block_size=16))
    announce(stack, make_parser().parse(["up"]), Terminal())
    assert "other machines" not in capsys.readouterr().err


@pytest.mark.parametrize("gateway", [True, False])
def test_a_gateway_is_reached_without_tls_also_where_there_are_certificates(
    gateway: bool, certificates: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEKV_API_KEY", raising=False)
    config = StackConfig(
        host="0.0.0.0",
        port=0,
        gateway=GatewayConfig(port=0) if gateway else None,
        manager_args=["--identities=keys.toml"],
        certificates=StackCertificates(certificates, mutual=False),
    )
    stack = Stack(config)
    monkeypatch.setattr(stack, "listening", lambda key: ["0.0.0.0:8080"] if key == "http" else [])
    announce(stack, make_parser().parse(["up"]), Terminal())
    notes = [line for line in capsys.readouterr().err.splitlines() if "other machines" in line]
    told = f"other machines can connect, without TLS or a login: {stack.gateway_target}"
    assert notes == ([told] if gateway else [])


@pytest.mark.parametrize("known", [True, False])
def test_it_says_how_to_ask_a_manager_with_certificates(
    certificates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """A manager that lets in keys alone does not let this command ask, which has none."""
    monkeypatch.delenv("PAGEKV_API_KEY", raising=False)
    pair = (certificates / "manager.key").read_bytes(), (certificates / "manager.pem").read_bytes()
    server = ScriptedServer(credentials=grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        found = StackCertificates(certificates, mutual=known)
        stack = Stack(StackConfig(host="0.0.0.0", port=0, executor_port=0, page_port=0, certificates=found))
        stack.target = stack.targets[0] = f"0.0.0.0:{server.target.rpartition(':')[2]}"
        monkeypatch.setattr(stack, "listening", lambda key: ["0.0.0.0:8080"] if key == "http" else [])
        for flags in ([], ["--json"]):
            answer: Any = pb.GetModelInfoResponse(model_id="demo", has_tokenizer=True)
            server.expect("GetModelInfo", answer if known else Fails(grpc.StatusCode.UNAUTHENTICATED))
            announce(stack, make_parser().parse(["up", *flags]), Terminal())
    finally:
        server.stop()
    out, err = capsys.readouterr()
    asked = next(line for line in out.splitlines() if line.startswith("  try: "))
    target = f"--target localhost:{server.target.rpartition(':')[2]}"
    files = f"--ca {certificates}/ca.pem"
    if known:
        files += f" --client-cert {certificates}/client.pem --client-key {certificates}/client.key"
    assert asked.endswith(f'generate {target} {files} "In the beginning"')
    assert ("PAGEKV_API_KEY=KEY " in asked) == (not known)
    assert "without TLS" not in err
    said = json.loads(out.splitlines()[-1])
    assert (said["target"], said["page"]) == (target.partition(" ")[2], "https://localhost:8080/")
    assert said["ca"] == f"{certificates}/ca.pem"
    assert ("client_key" in said) == known


def test_a_manager_with_identities_is_asked_only_with_one(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call without would be refused, and stand in the audit log of every start."""
    monkeypatch.delenv("PAGEKV_API_KEY", raising=False)
    stack = Stack(StackConfig(port=0, manager_args=["--identities=keys.toml"]))
    stack.target = server.target
    monkeypatch.setattr(stack, "listening", lambda _: [])
    announce(stack, make_parser().parse(["up"]), Terminal())
    assert not server.metadata
    assert "PAGEKV_API_KEY=KEY " in capsys.readouterr().out
    monkeypatch.setenv("PAGEKV_API_KEY", "k")
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="demo", backend="oracle", block_size=16))
    announce(stack, make_parser().parse(["up"]), Terminal())
    assert server.metadata == [{"authorization": "Bearer k"}]
    assert "model demo, backend oracle" in capsys.readouterr().out


def test_a_tokenizer_that_cannot_be_used_is_told(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEKV_TOKENIZER", raising=False)

    def told(model: str, *manager_args: str, has_tokenizer: bool = False) -> bool:
        stack = Stack(StackConfig(port=0, manager_args=manager_args))
        stack.target = server.target
        server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id=model, has_tokenizer=has_tokenizer))
        announce(stack, make_parser().parse(["up"]), Terminal())
        return f"cannot use the tokenizer of {model}; --verbose shows why" in capsys.readouterr().err

    # A directory without a tokenizer has been told of before the start.
    assert not told(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("not JSON")
    assert told(str(tmp_path))
    assert told("owner/model")
    assert not told(str(tmp_path), has_tokenizer=True)
    assert not told(str(tmp_path), "--tokenizer=none")
    assert not told("")


def test_an_executor_without_a_socket_is_told(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    for folder, noted in (("/tmp", False), (str(long), True)):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        server.expect("GetModelInfo", pb.GetModelInfoResponse())
        with Stack(StackConfig(port=0)) as stack:
            stack.target = server.target
            announce(stack, make_parser().parse(["up"]), Terminal())
            (target,) = stack.executor_targets
        assert (f"other users of this machine can reach {target}," in capsys.readouterr().err) is noted
