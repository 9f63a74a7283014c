"""Command lines that are refused, and what is read from those that are not."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from support.clients.scripted_server import ScriptedServer

from pagekv.client.channel import DEFAULT_TARGET
from pagekv.client.cli.main import main, make_parser
from pagekv.client.cli.parser import token_ids
from pagekv.v1 import operator_service_pb2 as operator_pb


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "required: COMMAND"),
        ("generate", "one of PROMPT and --token-ids is required"),
        ("generate x --token-ids 1", "one of PROMPT and --token-ids is required"),
        ("generate --token-ids 1,a", "--token-ids: must be token ids with commas between them"),
        ("generate x --temperature hot", "--temperature"),
        ("stats --target nowhere", "--target: must be host:port"),
        ("bench --requests 0", "--requests: must be a whole number from 1 to 1000000"),
        ("bench --prompt-tokens 9:3", "--prompt-tokens: must be N or LO:HI with LO not above HI"),
        ("bench --rate 3 --concurrency 4", "not allowed with argument"),
        ("up --port 99999", "--port: must be a whole number from 0 to 65535"),
        ("up --port 0 --executor-port 0 --manager-args=--listen=x", "--manager-args: set addresses with"),
        ("up --gateway --gateway-args=--host=0.0.0.0", "--gateway-args: set addresses with"),
        ("blocks --limit 0", "--limit"),
    ],
)
def test_wrong_usage_is_exit_status_2(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = main(command.split())
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_bad_environment_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEKV_TARGET", "nowhere")
    with pytest.raises(SystemExit) as caught:
        main(["health"])
    assert caught.value.code == 2
    assert "PAGEKV_TARGET" in capsys.readouterr().err


def test_an_address_on_the_command_line_is_blamed_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEKV_TARGET", "127.0.0.1:5")
    with pytest.raises(SystemExit):
        main(["--target", "nonsense", "health"])
    assert capsys.readouterr().err.startswith("pagekv health: argument --target: must be host:port")


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKV_TARGET", "")
    assert make_parser().parse(["health"]).target == DEFAULT_TARGET


def test_token_ids_have_commas_or_spaces_between_them() -> None:
    assert token_ids("5,17 4") == [5, 17, 4]
    for wrong in ("", "a", "5,-1", "5;4"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be token ids with commas between them"):
            token_ids(wrong)


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
