"""Command lines that are refused, and what is read from those that are not."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from pagekv.client.cli.main import main
from pagekv.client.cli.parser import token_ids


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "required: COMMAND"),
        ("generate", "exactly one of PROMPT and --token-ids is required"),
        ("generate x --token-ids 1", "exactly one of PROMPT and --token-ids is required"),
        ("tokenize", "exactly one of PROMPT, --token-ids and --chat is required"),
        ("tokenize x --token-ids 1", "exactly one of PROMPT, --token-ids and --chat is required"),
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


def test_no_key_is_shown_where_a_command_takes_none(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--api-key", "secret", "plan", "demo"], ["plan", "demo", "--api-key", "secret"]):
        with pytest.raises(SystemExit):
            main(given)
        err = capsys.readouterr().err
        assert "unrecognized arguments: --api-key" in err
        assert "secret" not in err


def test_token_ids_have_commas_or_spaces_between_them() -> None:
    assert token_ids("5,17 4") == [5, 17, 4]
    for wrong in ("", "a", "5,-1", "5;4"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be token ids with commas between them"):
            token_ids(wrong)
