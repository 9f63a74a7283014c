"""A conversation is read from a file, and one of several prompts is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clients.scripted_server import ScriptedServer

from pagekv.client.cli.main import main
from pagekv.v1 import inference_service_pb2 as pb


def test_a_conversation_comes_from_a_file(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "messages.json"
    file.write_text('[{"role": "user", "content": "hi"}]')

    def check(request: pb.TokenizeRequest) -> None:
        assert [(each.role, each.content) for each in request.prompt.chat.messages] == [("user", "hi")]

    server.expect("Tokenize", pb.TokenizeResponse(token_ids=[4, 5]), check=check)
    assert main(["tokenize", "--chat", str(file)]) == 0
    assert capsys.readouterr().out == "4,5\n"


@pytest.mark.parametrize("content", ["no JSON", "[1]", '[{"role": "user"}]', "[" * 100_000])
def test_a_file_that_is_no_conversation_is_refused(
    target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    file = tmp_path / "messages.json"
    file.write_text(content)
    assert main(["tokenize", "--chat", str(file)]) == 2
    assert 'must be a JSON list of {"role": ..., "content": ...}' in capsys.readouterr().err


def test_a_text_and_a_conversation_are_one_prompt_too_many(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "hi", "--chat", "messages.json"]) == 2
    assert "exactly one of PROMPT, --token-ids and --chat is required" in capsys.readouterr().err
