"""`pagekv chat`: what it sends and prints, for people and for scripts."""

from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Callable

import grpc
import pytest
from support.clients.scripted_server import Fails, Hangs, ScriptedServer, chunk, complete
from support.terminal import TerminalStream

from pagekv.client.cli.commands import chat
from pagekv.client.cli.connection_flags import connect
from pagekv.client.cli.main import main
from pagekv.client.cli.terminal import Terminal
from pagekv.common import errors
from pagekv.v1 import inference_service_pb2 as pb


def test_chat_keeps_the_history(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[tuple[str, str]]] = []

    def check(request: pb.GenerateRequest) -> None:
        sent.append([(message.role, message.content) for message in request.prompt.chat.messages])

    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n/help\ntwo\n/reset\nthree\n/exit\nnever\n"))
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="m", has_chat_template=True))
    for token in (4, 5, 6):
        server.expect("Generate", chunk(token, cached=token), complete(token, cached=token), check=check)
    assert main(["chat", "--system", "be brief"]) == 0
    system = ("system", "be brief")
    assert sent == [
        [system, ("user", "one")],
        [system, ("user", "one"), ("assistant", "t4 "), ("user", "two")],
        [system, ("user", "three")],
    ]
    out, err = capsys.readouterr()
    assert out == "t4 \nt5 \nt6 \n"
    assert "(5 cached)" in err
    assert "/reset begins a new conversation" in err


def test_chat_json_and_a_failing_turn(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="m", has_chat_template=True))
    server.expect("Generate", chunk(4), complete(4))
    server.expect("Generate", Fails(errors.InvalidRequest("chat", "too long")))
    assert main(["chat", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["text"] == "t4 "
    assert json.loads(err)["error"]["message"] == "chat: too long"


def test_chat_needs_a_template(server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="m"))
    assert main(["chat"]) == 2
    assert "m has no chat template" in capsys.readouterr().err


def type_lines(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], sent: list[list[str]]
) -> Callable[[pb.GenerateRequest], None]:
    """A person types these lines. Returns what appends the messages of a request to `sent`."""
    left = iter(lines)

    def read(prompt: str) -> str:
        if (line := next(left, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr(sys, "stdin", TerminalStream())
    monkeypatch.setattr(builtins, "input", read)
    return lambda request: sent.append([message.content for message in request.prompt.chat.messages])


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (errors.Overloaded("the queue is full", 90.0), "the queue is full"),
        (grpc.StatusCode.UNAVAILABLE, "the connection to PageKV at"),
    ],
)
def test_of_a_person_a_failure_ends_a_turn_and_no_history(
    server: ScriptedServer,
    target: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: errors.PageKVError | grpc.StatusCode,
    told: str,
) -> None:
    lines, sent = ["one", "two", "two"], list[list[str]]()

    check = type_lines(monkeypatch, lines, sent)

    # Not after half a minute.
    monkeypatch.setattr(chat, "connect", lambda args: connect(args).with_options(resume_timeout=0))
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="m", has_chat_template=True))
    server.expect("Generate", chunk(4), complete(4), check=check)
    server.expect("Generate", chunk(5), Fails(failure), check=check)
    server.expect("Generate", chunk(6), complete(6), check=check)
    assert main(["chat"]) == 0
    assert sent == [["one"], ["one", "t4 ", "two"], ["one", "t4 ", "two"]]
    out, err = capsys.readouterr()
    assert out == "t4 \nt5 \nt6 \n"
    (line,) = [line for line in err.splitlines() if line.startswith("pagekv:")]
    assert told in line
    assert line.endswith(" (the history is kept: ask again)")


def test_of_a_person_ctrl_c_ends_an_answer_and_a_refusal_a_turn(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, sent = ["one", "too long", "/reset", "two"], list[list[str]]()

    check = type_lines(monkeypatch, lines, sent)

    def write(terminal: Terminal, text: str) -> None:
        written(terminal, text)
        if text == "t4 ":
            raise KeyboardInterrupt

    written = Terminal.write
    monkeypatch.setattr(Terminal, "write", write)
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="m", has_chat_template=True))
    server.expect("Generate", chunk(4), Hangs(), check=check)
    server.expect("Generate", Fails(errors.InvalidRequest("chat", "too long")), check=check)
    server.expect("Generate", chunk(5), complete(5), check=check)
    assert main(["chat"]) == 0
    server.wait_cancelled("Generate")
    # The answer is kept as far as it came.
    assert sent == [["one"], ["one", "t4 ", "too long"], ["two"]]
    out, err = capsys.readouterr()
    assert out == "t4 \nt5 \n"
    assert "[stopped]" in err
    assert "pagekv: chat: too long (/reset starts anew)" in err
