"""`pagekv version`, and --version of every program."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
from support.clients.scripted_server import Fails, ScriptedServer

from pagekv.client.cli.main import main
from pagekv.common.errors import Unavailable
from pagekv.conformance.main import main as judge
from pagekv.executor.config import parse_config as parse_executor
from pagekv.kvmanager.config import parse_config as parse_manager
from pagekv.v1 import inference_service_pb2 as pb


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


def test_both_versions(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.expect("GetModelInfo", pb.GetModelInfoResponse(server_version="9.8.7"))
    assert main(["version"]) == 0
    assert capsys.readouterr().out.split() == ["client", version("pagekv"), "server", "9.8.7"]


def test_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json", "--target", "127.0.0.1:1"]) == 0
    assert json.loads(capsys.readouterr().out) == {"client": version("pagekv"), "server": None}
    assert main(["version", "--target", "127.0.0.1:1"]) == 0
    assert "cannot reach PageKV" in capsys.readouterr().err


def test_a_manager_without_an_executor_has_a_version(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in ([], ["--json"]):
        for _ in range(3):  # the client asks again
            server.expect("GetModelInfo", Fails(Unavailable("no executor is attached yet", server_version="9.8.7")))
        assert main(["version", *args]) == 0
    out, err = capsys.readouterr()
    table, line = out.splitlines()[:-1], out.splitlines()[-1]
    assert " ".join(table).split() == ["client", version("pagekv"), "server", "9.8.7"]
    assert json.loads(line) == {"client": version("pagekv"), "server": "9.8.7"}
    assert err.count("no executor is attached yet") == 1


@pytest.mark.parametrize(
    ("program", "entry"),
    [
        ("pagekv", main),
        ("pagekv-manager", parse_manager),
        ("pagekv-executor", parse_executor),
        ("pagekv-conformance", judge),
    ],
)
def test_every_program_says_its_version(program: str, entry: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        entry(["--version"])  # type: ignore[operator]  # entry points of different types
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"{program} {version('pagekv')}\n"
