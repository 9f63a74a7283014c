"""The command line: what it prints for people and for scripts, and its exit status."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from support.clients.held_port import held_port
from support.clients.scripted_server import Fails, ScriptedServer
from support.clients.stack import environment

from pagekv.client.cli.commands import up
from pagekv.client.cli.main import GROUPS, main, make_parser
from pagekv.client.cli.terminal import Terminal
from pagekv.common import errors
from pagekv.v1 import inference_service_pb2 as pb

# Commands whose output is a script of its own.
SCRIPTS = ("completion",)


def test_an_error_is_one_line_and_exit_status_1(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Generate", Fails(errors.InvalidRequest("sampling_params.top_p", "must be above 0, got 0.0")))
    assert main(["generate", "x", "--top-p", "0"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "pagekv: sampling_params.top_p: must be above 0, got 0.0"


def test_a_flag_without_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--target", "--timeout"):
        with pytest.raises(SystemExit, match="2"):
            main(["--json", flag] if flag == "--timeout" else [flag])
        assert f"argument {flag}: expected a value, and a command behind it" in capsys.readouterr().err


def test_a_name_that_leads_nowhere_was_never_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--target", "nobody.invalid:5", "--timeout", "60"]) == 3
    words = "pagekv: cannot reach PageKV at nobody.invalid:5: no address is known for this name; check "
    assert capsys.readouterr().err.startswith(words)


def test_grpc_writes_nothing_of_its_own_where_the_command_line_asks_a_server_that_ends() -> None:
    """Such a line would stand before the command's own, as when a manager dies while `up` waits for it."""
    # Frames of HTTP/2: SETTINGS, and GOAWAY with an error.
    settings, goaway = bytes.fromhex("000000040000000000"), bytes.fromhex("0000080700000000000000000000000002")
    script = (
        "import sys, pagekv.client.cli.main, pagekv.client.launcher.stack as p; print(p._serves(sys.argv[1], '', None))"
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(120)
        command = [sys.executable, "-c", script, f"127.0.0.1:{listener.getsockname()[1]}"]
        with subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as popen:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(settings)
                connection.recv(4096)
                connection.sendall(goaway)
                out, err = popen.communicate(timeout=120)
    assert (out, err) == ("False\n", "")


def test_no_process_that_a_command_starts_logs_what_grpc_says() -> None:
    """A process of `up` takes the environment of the command; gRPC's core at ERROR logs bytes of whoever connects."""
    script = "import os, pagekv.client.cli.main; print(os.environ['GRPC_VERBOSITY'])"
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout == "NONE\n"
    env = {**environment(), "GRPC_VERBOSITY": "DEBUG"}
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == "DEBUG\n"


def test_a_stack_that_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    with held_port() as port:
        target = f"127.0.0.1:{port}"
        assert main(["stats", "--target", target]) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"cannot reach PageKV at {target}" in err
    assert "pagekv up" in err


def test_every_command_has_help_and_json(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capfd.readouterr().out
    subparsers: Any = next(action for action in make_parser()._actions if hasattr(action, "choices") and action.choices)
    assert {*subparsers.choices} == {name for names in GROUPS.values() for name in names} | {*up.ALIASES}
    for name in subparsers.choices:
        assert name in up.ALIASES or f"    {name}" in listed
        try:
            status: object = main([name, "--help"])  # replay leaves its flags to the process it starts
        except SystemExit as exit:
            status = exit.code
        assert status == 0
        assert ("--json" in capfd.readouterr().out) == (name not in SCRIPTS)


def test_options_may_stand_before_the_command(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.expect("Tokenize", pb.TokenizeResponse(token_ids=[4]))
    assert main(["--json", "--target", target, "--timeout=500", "tokenize", "x"]) == 0
    assert json.loads(capsys.readouterr().out) == {"token_ids": [4]}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("stat", "no command 'stat'; did you mean 'stats'?"),
        ("gen", "no command 'gen'; did you mean 'generate'?"),
        ("re", "no command 're'; did you mean 'requests' or 'reset-cache' or 'replay'?"),
        ("serv", "no command 'serv'; did you mean 'serve'?"),
        (
            "generate x --max-token 5",
            "pagekv generate: unrecognized arguments: --max-token 5; did you mean --max-tokens?\n",
        ),
        ("generate x --max-token 5", "Try 'pagekv generate --help'.\n"),
        ("generate In the", "pagekv generate: unrecognized arguments: the; an argument with blanks needs quotes\n"),
        ("detokenize 1 2", "pagekv detokenize: unrecognized arguments: 2; an argument with blanks needs quotes\n"),
        ("stats now", "pagekv stats: unrecognized arguments: now\n"),
        ("pin x --lease 0", "got '0'\nTry 'pagekv pin --help'.\n"),
        ("frobnicate", "no command 'frobnicate'\n"),
        (
            "--target 127.0.0.1:1 plan demo",
            "unrecognized arguments: --target=127.0.0.1:1; --target is a flag of other commands\n",
        ),
        ("--timeout 3 bench", "pagekv bench: unrecognized arguments: --timeout=3; --timeout is a flag of other comm"),
        ("generate x -n many", "argument -n/--n: must be a whole number, got 'many'"),
        ("generate x --top-p most", "argument --top-p: must be a number, got 'most'"),
        ("up --executor-args 'a", 'argument --executor-args: No closing quotation: "\'a"'),
    ],
)
def test_the_nearest_name_and_where_help_is(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(command.split())
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["--help", "generate --help"])
def test_help_fits_a_narrow_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what is printed as it is: the usage of all commands, and examples."""
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main(command.split())
    lines = capsys.readouterr().out.partition("\nexamples:\n")[0].splitlines()
    assert len(lines) > 20
    assert [line for line in lines if len(line) > 60] == ([lines[0]] if command == "--help" else [])


def test_a_command_that_is_empty_is_like_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """As of a variable that is not set."""
    with pytest.raises(SystemExit, match="2"):
        main([""])
    assert capsys.readouterr().err == "pagekv: no command ''\nTry 'pagekv --help'.\n"


@pytest.mark.parametrize("command", ["help", "help stats"])
def test_help_is_a_command_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for argv in (command.split(), [*command.split()[1:], "--help"]):
        with pytest.raises(SystemExit) as exit:
            main(argv)
        assert exit.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_usage_begins_with_the_command_as_it_is_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    commands: Any = next(action for action in make_parser()._actions if hasattr(action, "choices") and action.choices)
    for name, parser in commands.choices.items():
        json_flag = "" if name in SCRIPTS else " [--json]"
        assert name in up.ALIASES or parser.format_usage().startswith(f"usage: pagekv {name} [-h]{json_flag}")
    with pytest.raises(SystemExit):
        main(["stats", "--help"])
    line = "usage: pagekv stats [-h] [--json] [--target HOST:PORT] [--timeout S] [--api-key KEY]"
    assert capsys.readouterr().out.splitlines()[0] == line


def test_serve_is_up() -> None:
    assert "    up, serve    start an executor" in make_parser().format_help()
    assert make_parser().parse(["serve"]) == make_parser().parse(["up"])


def test_ctrl_c_is_exit_status_130(
    server: ScriptedServer, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Terminal, text: str) -> None:
        raise KeyboardInterrupt

    server.expect("Tokenize", pb.TokenizeResponse(token_ids=[4]))
    monkeypatch.setattr(Terminal, "print", interrupted)
    assert main(["tokenize", "x"]) == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.parametrize("closed", ["<&- >&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(closed: str) -> None:
    command = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-m", "pagekv.client.cli"]
    with held_port() as port:
        command += ["--target", f"127.0.0.1:{port}", "stats"]
        done = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, text=True, timeout=120)
    # Status 3: the server is not reached.
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("wanted", [[], ["--json"]])
def test_a_full_disk_is_told_in_a_line(wanted: list[str]) -> None:
    command = [sys.executable, "-m", "pagekv.client.cli", "plan", "demo", "--memory", "1GiB", *wanted]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in (json.loads(line)["error"]["message"] if wanted else line)
    assert done.returncode == 1


def test_a_failure_that_cannot_be_told_keeps_its_status() -> None:
    command = [sys.executable, "-m", "pagekv.client.cli", "model", "--target", "localhost:1"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, env=environment(), stderr=full, timeout=120).returncode == 3


def test_a_reader_that_has_gone_is_told_nothing() -> None:
    command = [sys.executable, "-m", "pagekv.client.cli", "plan", "demo", "--memory", "1GiB"]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        done = subprocess.run(command, env=environment(), stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")


def test_input_that_is_no_text_is_refused_by_its_field() -> None:
    command = [sys.executable, "-m", "pagekv.client.cli", "tokenize", "-"]
    env = {**environment(), "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, env=env, input=b"a\xff", capture_output=True, timeout=120)
    assert done.stderr.decode() == r"pagekv: prompt.text: must be text that UTF-8 can encode, is 'a\udcff'" + "\n"
    assert done.returncode == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("command", [["tokenize", "-"], ["chat"]])
def test_input_in_another_encoding_than_wanted_is_refused(
    server: ScriptedServer, encoding: str, command: list[str]
) -> None:
    if command == ["chat"]:
        server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="m", has_chat_template=True))
    line = [sys.executable, "-m", "pagekv.client.cli", *command, "--target", server.target]
    env = {**environment(), "PYTHONIOENCODING": encoding}
    done = subprocess.run(line, env=env, input=b"text", capture_output=True, timeout=120)
    assert done.stderr.decode(encoding).startswith(f"pagekv: standard input cannot be read as {encoding}: ")
    assert (done.returncode, done.stderr.decode(encoding).count("\n")) == (2, 1)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_is_shown_where_the_output_has_not_all_of_its_characters(server: ScriptedServer, encoding: str) -> None:
    server.expect("Detokenize", pb.DetokenizeResponse(text="ä 漢"))
    command = [sys.executable, "-m", "pagekv.client.cli", "detokenize", "4", "--target", server.target]
    env = {**environment(), "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=env, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == "ä 漢\n".encode(encoding, "backslashreplace")
