"""`pagekv tenants`: its table, its JSON, and its sentence where there are none."""

from __future__ import annotations

import json

import pytest
from support.clients.scripted_server import ScriptedServer

from pagekv.client.cli.main import main
from pagekv.v1 import operator_service_pb2 as operator_pb

LIMITED = operator_pb.TenantInfo(
    name="team-a", weight=4, max_running=8, max_waiting=0, floor_blocks=100, running_requests=3, blocks=120,
    requests_total=42, prompt_tokens_total=12_345, cached_tokens_total=6_000, output_tokens_total=777,
    block_seconds_total=1234.56, refusals_total={"max_running": 2, "tokens_per_minute": 17}, adapters=["formal"],
)  # fmt: skip  # several entries a line: one each would fill a screen
FREE = operator_pb.TenantInfo(name="b", weight=0.5, waiting_requests=12, any_adapter=True)


def test_a_table_for_people(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.expect("ListTenants", operator_pb.ListTenantsResponse(tenants=[FREE, LIMITED]))
    assert main(["tenants"]) == 0
    assert capsys.readouterr().out == (
        "tenant  weight  running  waiting  blocks  floor  requests  prompt  cached  output  block s  refused\n"
        "b       0.5     0        12            0      0         0       0       0       0        0  -\n"
        "team-a  4       3/8      0/0         120    100        42   12345    6000     777     1235"
        "  17 tokens_per_minute, 2 max_running\n"
    )


def test_json_for_scripts(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.expect("ListTenants", operator_pb.ListTenantsResponse(tenants=[FREE, LIMITED]))
    assert main(["tenants", "--json"]) == 0
    free, limited = json.loads(capsys.readouterr().out)["tenants"]
    assert (free["max_running"], free["min_priority"], free["any_adapter"], free["refusals_total"]) == (
        *(None, None, True),
        {},
    )
    assert (limited["max_running"], limited["max_waiting"], limited["adapters"]) == (8, 0, ["formal"])
    assert limited["refusals_total"] == {"tokens_per_minute": 17, "max_running": 2}


def test_a_sentence_where_there_are_none(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in (["tenants"], ["tenants", "--json"]):
        server.expect("ListTenants", operator_pb.ListTenantsResponse())
        assert main(line) == 0
    people, scripts = capsys.readouterr().out.splitlines()
    assert people == "no tenants: only a manager with --identities has tenants"
    assert json.loads(scripts) == {"tenants": []}
