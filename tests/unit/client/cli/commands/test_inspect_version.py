"""`pagekv version`, and --version of every program."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
from support.clients.scripted_server import ScriptedServer

from pagekv.client.cli.main import main
from pagekv.conformance.main import main as judge
from pagekv.executor.config import parse_config as parse_executor
from pagekv.kvmanager.config import parse_config as parse_manager
from pagekv.v1 import inference_service_pb2 as pb


def test_both_versions(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.expect("GetModelInfo", pb.GetModelInfoResponse(server_version="9.8.7"))
    assert main(["version"]) == 0
    assert capsys.readouterr().out.split() == ["client", version("pagekv"), "server", "9.8.7"]


def test_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json", "--target", "127.0.0.1:1"]) == 0
    assert json.loads(capsys.readouterr().out) == {"client": version("pagekv"), "server": None}
    assert main(["version", "--target", "127.0.0.1:1"]) == 0
    assert "cannot reach PageKV" in capsys.readouterr().err


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
