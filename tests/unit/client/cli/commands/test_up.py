"""`pagekv up`: what it makes of its flags before anything is started, and what it says of what runs."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.clients.stand_ins import config
from support.documentation import ROOT

from pagekv.client.cli.commands import up
from pagekv.client.cli.failures import EXIT_STATUS
from pagekv.client.cli.identities_file import add_key
from pagekv.client.cli.main import main, make_parser
from pagekv.client.cli.parser import UsageError
from pagekv.client.cli.terminal import Terminal
from pagekv.client.launcher.certificates import StackCertificates
from pagekv.client.launcher.child_flags import flag_value
from pagekv.client.launcher.errors import StackError
from pagekv.client.launcher.gateway import GatewayConfig
from pagekv.client.launcher.stack import Stack, StackConfig


@pytest.mark.parametrize("flag", ["--policy=round_robin", "--gateway-port=8000", "--gateway-args=--log-json"])
def test_flags_of_a_gateway_that_nobody_asked_for_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--replicas", "1", flag]) == 2
    name = flag.partition("=")[0]
    assert capsys.readouterr().err == f"pagekv: {name}: has no effect without --gateway, or --replicas 2 or more\n"


def made(*flags: str) -> StackConfig:
    return up.stack_config(make_parser().parse(["up", *flags]), Terminal())


def test_a_gateway_has_its_flags_and_defaults() -> None:
    assert made("--gateway").gateway == GatewayConfig()
    flags = ("--policy=random", "--gateway-port=0", "--gateway-args=--log-json")
    assert made("--replicas=2", *flags).gateway == GatewayConfig(0, "random", ["--log-json"])


@pytest.mark.parametrize("more", [[], ["--tokenizer=none"], ["--manager-args=--tokenizer auto"]])
def test_a_gateway_in_front_of_an_oracle_without_a_tokenizer_is_refused_before_anything_starts(
    more: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "Stack", None)
    assert main(["up", "--backend", "oracle", "--gateway", *more]) == 2
    assert "add --tokenizer demo, or --model demo" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1:50051", "", "http://127.0.0.1"])
def test_a_host_of_another_form_is_refused_before_any_port(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", f"--host={host}"])
    assert ended.value.code == 2
    words = f"argument --host: must be a name or an IP address, without a port, got {host!r}"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "gpu1"])
def test_a_host_that_other_machines_reach_has_to_be_accepted(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "Stack", lambda _: pytest.fail("started"))
    assert main(["up", "--host", host]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"pagekv: --host: other machines could connect to {host}, without TLS or a login: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("accepted", [True, False])
def test_processes_are_told_whether_other_machines_may_connect(accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made("--host=0.0.0.0", "--insecure") if accepted else made()
    assert ("--insecure" in found.executor_args, "--insecure" in found.manager_args) == (accepted, accepted)
    monkeypatch.setenv("PAGEKV_INSECURE", "on")
    assert make_parser().parse(["up"]).insecure
    # The flag wins, in the processes too, which would read the variable.
    found = made("--no-insecure")
    assert ("--no-insecure" in found.executor_args, "--no-insecure" in found.manager_args) == (True, True)
    found = up.stack_config(make_parser().parse(["demo"]), Terminal())
    assert "--no-insecure" not in [*found.executor_args, *found.manager_args]


def test_an_oracle_is_told_the_vocabulary_of_the_tokenizer() -> None:
    assert made("--backend=oracle", "--tokenizer=demo").executor_args == ["--backend=oracle", "--vocab-size=4096"]
    assert made("--backend=oracle", "--model=demo").executor_args == ["--model=demo", "--backend=oracle"]


def test_up_refuses_taken_ports_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["up", "--port", str(taken.getsockname()[1])]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "is PageKV running already?" in err


def test_flags_go_to_the_process_that_knows_them() -> None:
    flags = ["--model", "m", "--backend=oracle", "--block-size", "8", "--executor-args=--threads 2"]
    found = made(*flags, "--manager-args", "--max-queue 4 --no-prefix-cache")
    assert found.executor_args == ["--model=m", "--backend=oracle", "--threads", "2"]
    assert found.manager_args == ["--block-size=8", "--max-queue", "4", "--no-prefix-cache"]


def test_up_serves_no_page_where_the_manager_has_its_own_address_or_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def page_port(*flags: str) -> int | None:
        return made(*flags).page_port

    monkeypatch.delenv("PAGEKV_HTTP_LISTEN", raising=False)
    assert page_port() == 8080
    assert page_port("--http-port", "0") == 0
    assert page_port("--no-http") is None
    assert page_port("--manager-args=--http-listen=127.0.0.1:9") is None
    for missing in up.HTTP_NEEDS:
        monkeypatch.setattr(up, "find_spec", lambda name, missing=missing: None if name == missing else name)
        assert page_port() is None
        assert f"no live page: it needs {missing}: pip install" in capsys.readouterr().err
    monkeypatch.setenv("PAGEKV_HTTP_LISTEN", "127.0.0.1:9")
    assert page_port() is None


def test_without_http_the_manager_does_not_take_the_address_of_the_variable() -> None:
    assert made("--no-http").manager_args == ["--http-listen="]
    assert made("--no-http", "--manager-args=--http-listen=127.0.0.1:9").manager_args[-1] == "--http-listen=127.0.0.1:9"
    assert made().manager_args == []


def test_a_model_without_a_tokenizer_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"{tmp_path} has no tokenizer.json, so only token ids can be served; name a tokenizer with --tokenizer"
    # No model directory at all, which the executor says.
    assert up.without_tokenizer(made("--model", str(tmp_path))) == ""
    (tmp_path / "config.json").touch()
    assert up.without_tokenizer(made("--model", str(tmp_path))) == words
    for given in (["--tokenizer", "demo"], ["--tokenizer", "none"]):
        assert up.without_tokenizer(made("--model", str(tmp_path), *given)) == ""
    assert up.without_tokenizer(made()) == up.without_tokenizer(made("--model", "owner/model")) == ""
    assert up.without_tokenizer(made("--model", "x" * 300)) == up.without_tokenizer(made("--model", "~no-user/x")) == ""
    monkeypatch.setattr(up, "Stack", lambda _: pytest.fail("started"))
    for command, why in (("up --gateway", "--gateway needs a tokenizer"), ("demo", "the demo shows text")):
        assert main([*command.split(), "--model", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"pagekv: {why}: {words}\n"
    (tmp_path / "tokenizer.json").touch()
    assert up.without_tokenizer(made("--model", str(tmp_path))) == ""


def run_up(
    monkeypatch: pytest.MonkeyPatch, wanted: StackConfig, on_ready: Callable[[Stack], None], ready: bool = True
) -> Stack:
    """`pagekv up` over stand-ins for the processes; `on_ready` is told instead of the user."""
    stacks: list[Stack] = []

    def start(_: StackConfig) -> Stack:
        stacks.append(Stack(wanted))
        return stacks[0]

    monkeypatch.setattr(up, "Stack", start)
    monkeypatch.setattr(up, "announce", lambda stack, args, terminal: on_ready(stack))
    if not ready:
        monkeypatch.setattr(up, "wait_ready", lambda *_: False)
    try:
        assert up.run(make_parser().parse(["up", "--no-http", "--port", "0"]), Terminal()) == 0
    finally:
        assert all(child.popen.poll() is not None for child in stacks[0].children)
    return stacks[0]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_signals_that_the_documentation_names_end_up_with_status_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under `nohup` ignore it
    try:
        run_up(monkeypatch, config(tmp_path / "journal"), lambda stack: os.kill(os.getpid(), signum))
    finally:
        signal.signal(signal.SIGHUP, before)
    [row] = [line for line in (ROOT / "docs" / "cli.md").read_text().splitlines() if line.startswith("| 0 |")]
    name = "Ctrl-C" if signum == signal.SIGINT else signum.name
    assert re.search(rf"{name} (or SIGHUP )?of `pagekv up`", row)
    assert "after Ctrl-C of pagekv up, and" in EXIT_STATUS


@pytest.mark.parametrize("moment", ["starting", "serving"])
def test_the_end_of_the_terminal_ends_up_with_status_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Nothing can be written any more, and the signal comes a little later."""
    ours, theirs = os.openpty()
    known = Stack.phases

    def close() -> None:
        os.close(ours)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGHUP)).start()

    def phases(stack: Stack) -> list[tuple[str, str, int | None]]:
        if moment == "starting" and (found := known(stack)):
            monkeypatch.setattr(Stack, "phases", known)
            close()
            return found
        return known(stack)

    monkeypatch.setattr(Stack, "phases", phases)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under `nohup` ignore it
    try:
        # Closing it flushes it, as the end of a process does, whose status a failure would change.
        with open(theirs, "w") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            wanted = config(tmp_path / "journal", executor="slow" if moment == "starting" else "serve")
            run_up(monkeypatch, wanted, lambda stack: close() if moment == "serving" else pytest.fail("ready"))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stack_runs_until_a_signal_and_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []

    def note(self: Terminal, text: str) -> None:
        noted.append(text)
        if "go on" in text:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Terminal, "note", note)
    wanted = config(tmp_path / "journal", replicas=2)
    stack = run_up(monkeypatch, wanted, lambda stack: stack.children[0].popen.kill())
    last = stack.children[0].lines[0]
    assert noted[-3:] == [
        f"the executor 1 was killed by SIGKILL; its last lines:\n  {last}\nthe other pairs go on",
        "stopping: running streams may finish (Ctrl-C again kills)",
        "stopped",
    ]


def test_a_start_says_what_the_processes_do_and_how_long_it_has_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a pipe too."""
    journal = tmp_path / "journal"
    known = Stack.phases

    def phases(stack: Stack) -> list[tuple[str, str, int | None]]:
        found = known(stack)
        if found:
            with journal.open("a") as file:
                file.write("go on\n")
        return found

    monkeypatch.setattr(Stack, "phases", phases)
    run_up(monkeypatch, config(journal, executor="slow"), lambda stack: os.kill(os.getpid(), signal.SIGTERM))
    lines = [line.split(" s  ", 1) for line in capsys.readouterr().err.splitlines() if " s  " in line]
    assert [words for _, words in lines][:2] == [
        "starting the executor and the KV-manager",
        "executor: loading the weights, 34 %",
    ]
    assert lines[-1][1] == "ready"
    seconds = [float(number) for number, _ in lines]
    assert seconds == sorted(seconds)


def test_progress_is_a_line_every_five_seconds_where_there_is_no_status_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Starting:
        percent = 0

        def phases(self) -> list[tuple[str, str, int | None]]:
            return [("executor", "loading the weights", self.percent), ("manager", "waiting", None)]

        def wait_ready(self, timeout_s: float, pause: object, on_wait: Callable[[str, float], None]) -> bool:
            for self.percent in (10, 11, 14, 15, 16, 20):
                on_wait("executor", float(self.percent))
            return True

    stack: Any = Starting()
    assert up.wait_ready(stack, argparse.Namespace(json=False, start_timeout=60.0), Terminal())
    lines = [line.split(" s  ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    loading = [f"executor: loading the weights, {percent} %" for percent in (10, 15, 20)]
    assert lines == ["starting the executor and the KV-manager", loading[0], "manager: waiting", *loading[1:], "ready"]


def test_a_stack_of_which_nothing_is_left_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StackError, match="the manager was killed by SIGKILL"):
        run_up(monkeypatch, config(tmp_path / "journal"), lambda stack: stack.children[1].popen.kill())


def test_a_signal_before_anything_is_ready_stops_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_up(monkeypatch, config(tmp_path / "journal"), lambda stack: pytest.fail("told too early"), ready=False)
    assert "stopping" in capsys.readouterr().err


@pytest.mark.parametrize("process", ["manager", "executor"])
def test_tls_comes_with_a_directory(process: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", "0", f"--{process}-args=--tls-cert a.pem"]) == 2
    assert "--tls-cert (PAGEKV_TLS_CERT): not with this command; pagekv up has --certs DIR" in capsys.readouterr().err


def identities_of_keys(folder: Path) -> Path:
    path = folder / "keys.toml"
    add_key(path, "alice", "alice-key", ["generate"])
    return path


def test_processes_have_the_certificates_of_a_directory(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port asks for certificates where the identities file has some; variables for other processes yield."""
    monkeypatch.setenv("PAGEKV_TLS_CERT", "of-others.pem")
    ours = made("--certs", str(certificates))
    assert f"--identities={certificates}/identities.toml" in ours.manager_args
    assert ours.certificates == StackCertificates(certificates, mutual=True)
    assert ours.certificates.executor_args() == [
        *(f"--tls-cert={certificates}/executor.pem", f"--tls-key={certificates}/executor.key"),
        f"--tls-client-ca={certificates}/ca.pem",
    ]
    own = [f"--tls-cert={certificates}/manager.pem", f"--tls-key={certificates}/manager.key"]
    client_ca, executor_ca = f"--tls-client-ca={certificates}/ca.pem", f"--executor-ca={certificates}/ca.pem"
    assert ours.certificates.manager_args() == [*own, client_ca, executor_ca]
    keys = identities_of_keys(tmp_path)
    for flag in (f"--identities={keys}", f"--manager-args=--identities {keys}"):
        with_keys = made("--certs", str(certificates), flag)
        assert flag_value("identities", with_keys.manager_args, {}) == str(keys)
        assert with_keys.certificates is not None
        assert with_keys.certificates.manager_args() == [*own, executor_ca]


def test_with_certificates_other_machines_may_connect(certificates: Path) -> None:
    assert made("--certs", str(certificates), "--host=0.0.0.0").host == "0.0.0.0"


def test_certificates_that_are_not_there(
    certificates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "Stack", lambda _: pytest.fail("started"))
    assert main(["up", "--certs", str(tmp_path)]) == 2
    words = f"--certs: {tmp_path}/ca.pem: cannot be read: No such file or directory; pagekv certs {tmp_path} makes"
    assert words in capsys.readouterr().err
    assert main(["up", "--certs", str(certificates), "--identities", str(tmp_path / "gone")]) == 2
    assert f"--identities {tmp_path}/gone: cannot be read" in capsys.readouterr().err


def test_an_identities_file_that_cannot_be_read_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --certs or --gateway the manager had to be started for it, and named no flag."""
    monkeypatch.setattr(up, "Stack", lambda _: pytest.fail("started"))
    for flag in (f"--identities={tmp_path}/gone", f"--manager-args=--identities {tmp_path}/gone"):
        assert main(["up", flag]) == 2
        words = f"pagekv: --identities {tmp_path}/gone: cannot be read: No such file or directory; pagekv keys add and"
        assert capsys.readouterr().err.startswith(words)
    (tmp_path / "bad").write_text("keys = 3")
    assert main(["up", f"--identities={tmp_path}/bad"]) == 2
    assert capsys.readouterr().err == f"pagekv: --identities {tmp_path}/bad: keys: must be a table, is a int\n"


def test_a_gateway_needs_an_identity_where_others_do(
    certificates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = identities_of_keys(tmp_path)
    for flags in (["--certs", str(certificates)], ["--identities", str(keys)]):
        assert main(["up", "--gateway", *flags]) == 2
        assert (
            "--gateway: the gateway passes no identity on; give it one with a table [gateway] in"
            in capsys.readouterr().err
        )
    keys.write_text(keys.read_text() + '[gateway]\nroles = ["generate"]\n')
    flags = ["--gateway", "--certs", str(certificates), "--identities", str(keys)]
    ours = made(*flags)
    assert "--gateway-listen=127.0.0.1:0" in ours.manager_args
    assert "--gateway-api" not in ours.manager_args
    # The gateway itself asks nobody.
    for more, refused in (([], True), (["--insecure"], False)):
        with pytest.raises(UsageError, match="--gateway: the gateway has neither TLS") if refused else nullcontext():
            made(*flags, "--host=0.0.0.0", *more)


def test_without_identities_a_gateway_uses_the_port_of_all() -> None:
    assert "--gateway-api" in made("--gateway").manager_args
