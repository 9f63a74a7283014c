"""Commands that ask once: what they show to people, to scripts, and of a failure."""

from __future__ import annotations

import json

import pytest
from grpc_health.v1 import health_pb2
from support.clients.scripted_server import ScriptedServer

from pagekv.client.cli.main import main
from pagekv.v1 import operator_service_pb2 as operator_pb


def test_the_note_of_an_answer_is_for_people_alone(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    free = operator_pb.BlockInfo(state=operator_pb.BLOCK_STATE_FREE)
    for flags, note in (([], "there are more: raise --limit\n"), (["--json"], "")):
        server.expect(
            "ListBlocks",
            operator_pb.ListBlocksResponse(blocks=[free], next_page_token="t"),
        )
        assert main(["blocks", "--limit", "1", *flags]) == 0
        assert capsys.readouterr().err == note


def test_a_failure_comes_behind_what_was_found(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Check", health_pb2.HealthCheckResponse(status="NOT_SERVING"))
    assert main(["health", "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {"target": target, "status": "not_serving"}
    assert json.loads(err)["error"]["code"] == "UNAVAILABLE"
