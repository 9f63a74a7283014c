"""Flag, variable, file: which one counts, and which one a refusal names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from support.clients.scripted_server import ScriptedServer

from pagekv.client.channel import DEFAULT_TARGET
from pagekv.client.cli.connection_flags import connect
from pagekv.client.cli.main import GROUPS, main, make_parser
from pagekv.client.identity import FILE_VARIABLES
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb

INFO = pb.GetModelInfoResponse(model_id="m", vocab_size=50, block_size=16, max_sequence_tokens=100, server_version="1")
STATS = operator_pb.GetStatsResponse()
# Commands that ask no manager that is there.
ALONE = {"demo", "up", "certs", "keys", "plan", "replay", "completion"}


def flags_of(directory: Path) -> list[str]:
    return [f"--ca={directory / 'ca.pem'}", f"--client-cert={directory / 'client.pem'}",
            f"--client-key={directory / 'client.key'}"]  # fmt: skip  # two lines


@pytest.fixture
def config(stranger: Path) -> Path:
    """Where the configuration file is."""
    (stranger / "pagekv").mkdir()
    return stranger / "pagekv" / "config.toml"


def write(config: Path, **values: object) -> None:
    config.write_text("".join(f'{key} = "{value}"\n' for key, value in values.items()))
    config.chmod(0o600)


def test_every_command_that_asks_has_the_flags() -> None:
    for name in {name for names in GROUPS.values() for name in names} - ALONE:
        needed = {"lookup": ["x"], "block-table": ["r"], "abort": ["r"], "unpin": ["p"], "detokenize": ["1"]}.get(
            name, []
        )
        args = make_parser().parse(
            [name, *needed, "--api-key=k", "--act-for=t", "--ca=a", "--client-cert=c", "--client-key=d"]
        )
        assert (args.api_key, args.act_for, args.ca, args.client_cert, args.client_key) == ("k", "t", "a", "c", "d")


@pytest.mark.parametrize("command", ["health", "version", "model", "stats"])
def test_flags_make_the_connection(
    secure_server: ScriptedServer, certificates: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: dict[str, tuple[str, Any]] = {
        "health": ("Check", health_pb2.HealthCheckResponse(status="SERVING")),
        "stats": ("GetStats", STATS),
    }
    method, answer = answers.get(command, ("GetModelInfo", INFO))
    secure_server.expect(method, answer)
    before = ["--target", secure_server.target, "--api-key", "k", *flags_of(certificates)]
    assert main([*before, "--json", command]) == 0
    assert secure_server.metadata == [{"authorization": "Bearer k"}]


def test_a_tenant_is_named_for_a_call(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.expect("GetStats", STATS)
    assert main(["--act-for", "team-a", "stats", "--target", server.target]) == 0
    assert server.metadata == [{"pagekv-tenant": "team-a"}]
    assert main(["stats", "--act-for", "a b"]) == 2
    assert capsys.readouterr().err.startswith("pagekv: --act-for: must be 1 to 64 of the characters")


def test_bench_has_the_same_connection(
    secure_server: ScriptedServer, certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secure_server.expect("GetModelInfo", INFO)
    where = ["--target", secure_server.target, "--api-key", "k", *flags_of(certificates)]
    # More than the model holds: it ends behind the first call.
    assert main(["bench", *where]) == 2
    assert secure_server.metadata == [{"authorization": "Bearer k"}]


def test_the_order_of_flag_variable_and_file(
    server: ScriptedServer, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PAGEKV_TARGET", raising=False)

    def key_sent(*flags: str) -> object:
        server.expect("GetStats", STATS)
        assert main(["stats", *flags]) == 0, capsys.readouterr().err
        return server.metadata[-1].get("authorization")

    write(config, target=server.target, api_key="of-file")
    assert key_sent() == "Bearer of-file"
    monkeypatch.setenv("PAGEKV_API_KEY", "")
    assert key_sent() == "Bearer of-file"
    monkeypatch.setenv("PAGEKV_API_KEY", "of-variable")
    assert key_sent() == "Bearer of-variable"
    assert key_sent("--api-key", "of-flag") == "Bearer of-flag"


def test_what_the_file_says_of_its_manager_is_for_no_other(
    server: ScriptedServer, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flags, variable in ((["--target", server.target], ""), ([], server.target)):
        monkeypatch.setenv("PAGEKV_TARGET", variable)
        for target, sent in (("gpu-7:50051", {}), (server.target, {"authorization": "Bearer k"})):
            write(config, target=target, api_key="k")
            server.expect("GetStats", STATS)
            assert main(["stats", *flags]) == 0
            assert server.metadata[-1] == sent
    write(config, api_key="k")
    server.expect("GetStats", STATS)
    assert main(["stats", "--target", server.target]) == 0
    assert server.metadata[-1] == {"authorization": "Bearer k"}


def test_without_any_it_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, ""):
        monkeypatch.delenv("PAGEKV_TARGET", raising=False)
        if value is not None:
            monkeypatch.setenv("PAGEKV_TARGET", value)
        with connect(make_parser().parse(["health"])) as client:
            assert client.target == DEFAULT_TARGET


def test_a_refusal_names_its_source(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*flags: str) -> str:
        assert main(["stats", *flags]) == 2
        return capsys.readouterr().err

    assert refusal("--ca", "/nowhere") == "pagekv: --ca: /nowhere: cannot be read: No such file or directory\n"
    assert refusal("--client-cert", "/nowhere").startswith("pagekv: --client-cert: /nowhere: ")
    plain = refusal("--target", "gpu-7:1", "--api-key", "secret")
    assert plain.startswith("pagekv: --api-key: would cross the network in plain text: ")
    assert "secret" not in plain
    for name, variable in FILE_VARIABLES.items():
        write(config, **{name: "nowhere"})
        assert refusal().startswith(f"pagekv: {config}: {name}: {config.parent}/nowhere: cannot be read")
        monkeypatch.setenv(variable, "/nowhere")
        assert refusal().startswith(f"pagekv: {variable}: /nowhere: cannot be read")
        monkeypatch.delenv(variable)
    write(config, target="nowhere")
    assert refusal().startswith(f"pagekv: {config}: target: must be host:port")
    write(config, frobnicate=1)
    assert json.loads(refusal("--json"))["error"]["code"] == "USAGE"


def test_no_help_shows_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PAGEKV_API_KEY", "secret")
    with pytest.raises(SystemExit):
        main(["stats", "--help"])
    shown = capsys.readouterr().out
    assert "secret" not in shown
    assert "other users of this machine can read command lines" in " ".join(shown.split())
