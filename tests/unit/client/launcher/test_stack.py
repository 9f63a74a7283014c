"""Starting, watching and stopping the two processes, with stand-ins that only serve health."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pagekv.client.cli.commands import up
from pagekv.client.cli.main import main, make_parser
from pagekv.client.cli.terminal import Terminal
from pagekv.client.launcher.gateway import GatewayConfig
from pagekv.client.launcher.stack import Child, Stack, StackConfig, StackError
from pagekv.common.logs import _Formatter
from pagekv.kvmanager.observe.recording.file import RecordingFile

FAKE = Path(__file__).with_name("fake_process.py")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    path.touch()
    return path


def config(journal: Path, executor: str = "serve", manager: str = "serve", **changes: object) -> StackConfig:
    values: dict[str, object] = {
        "port": 0,
        "executor_port": 0,
        "executor_command": [sys.executable, str(FAKE), executor, str(journal)],
        "manager_command": [sys.executable, str(FAKE), manager, str(journal)],
    }
    return StackConfig(**(values | changes))  # type: ignore[arg-type]  # checked by the test's own use


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_both_start_and_the_manager_stops_first(journal: Path) -> None:
    logs: list[tuple[str, str]] = []
    stack = Stack(
        config(
            journal,
            executor_args=["--backend=oracle"],
            manager_args=["--block-size=8"],
            on_log=lambda name, line: logs.append((name, line)),
        )
    )
    waited: list[str] = []
    with stack:
        stack.start()
        assert stack.wait_ready(20, on_wait=lambda name, seconds: waited.append(name))
        stack.check()
        pids = [child.popen.pid for child in stack.children]
    assert not any(is_alive(pid) for pid in pids)
    lines = journal.read_text().splitlines()
    assert lines[-2:] == ["manager stopped", "executor stopped"]
    assert ("executor", f"hello from executor --listen {stack.executor_target} --backend=oracle") in logs
    assert (
        "manager",
        f"hello from manager --listen {stack.target} --executor {stack.executor_target} --block-size=8",
    ) in logs
    assert "executor" in waited


def test_a_process_that_dies_at_the_start_is_reported_with_its_last_words(journal: Path) -> None:
    with Stack(config(journal, manager="die")) as stack:
        stack.start()
        with pytest.raises(StackError, match=r"manager exited with status 7; its last lines:\n(.*\n)*  error: out of"):
            stack.wait_ready(20)
    assert journal.read_text().splitlines()[-1] == "executor stopped"


def test_a_process_that_dies_later_is_noticed(journal: Path) -> None:
    with Stack(config(journal, executor="dielater")) as stack:
        stack.start()
        stack.wait_ready(20)
        with journal.open("a") as file:
            file.write("now die\n")
        stack.children[0].popen.wait(10)
        with pytest.raises(StackError, match="executor exited with status 3"):
            stack.check()


def test_a_killed_process_is_reported_by_signal(journal: Path) -> None:
    with Stack(config(journal)) as stack:
        stack.start()
        stack.wait_ready(20)
        stack.children[1].popen.kill()
        stack.children[1].popen.wait(10)
        with pytest.raises(StackError, match="manager was killed by SIGKILL"):
            stack.check()


def test_a_deaf_process_is_killed_in_the_end(journal: Path) -> None:
    with Stack(config(journal, manager="deaf", stop_timeout_s=0.3)) as stack:
        stack.start()
        stack.wait_ready(20)
    assert [child.popen.returncode for child in stack.children] == [0, -signal.SIGKILL]


def test_a_start_that_takes_too_long(journal: Path) -> None:
    # `sleep` never serves health.
    with Stack(config(journal, manager_command=["sleep", "60", "#"])) as stack:
        stack.start()
        with pytest.raises(StackError, match="the manager"):
            stack.wait_ready(0.5)


def test_a_command_that_does_not_exist(journal: Path) -> None:
    with (
        Stack(config(journal, executor_command=["/no/such/program"])) as stack,
        pytest.raises(StackError, match="cannot"),
    ):
        stack.start()


def test_waiting_ends_when_asked(journal: Path) -> None:
    stop = threading.Event()
    stop.set()
    with Stack(config(journal)) as stack:
        stack.start()
        assert not stack.wait_ready(20, stop)


def test_a_taken_port_is_a_clear_error(journal: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StackError, match=rf"port {port} of 127.0.0.1 cannot be used .*--executor-port 0"):
            Stack(config(journal, executor_port=port))
    with pytest.raises(StackError, match="two processes cannot have one port"):
        Stack(config(journal, port=50000 + os.getpid() % 1000, executor_port=50000 + os.getpid() % 1000))


def test_signals_ask_first_and_kill_second(journal: Path) -> None:
    with Stack(config(journal, manager="deaf")) as stack:
        stack.start()
        stack.wait_ready(20)
        before = signal.getsignal(signal.SIGINT)
        with up.StopSignals(stack) as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.asked.wait(5)
            assert stack.children[1].popen.poll() is None
            os.kill(os.getpid(), signal.SIGINT)
            assert stack.children[1].popen.wait(5) == -signal.SIGKILL
        assert signal.getsignal(signal.SIGINT) is before


def test_up_refuses_taken_ports_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["up", "--port", str(taken.getsockname()[1])]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "is PageKV running already?" in err


def test_flags_go_to_the_process_that_knows_them() -> None:
    command = ["up", "--model", "m", "--backend=oracle", "--block-size", "8", "--executor-args=--threads 2"]
    args = make_parser().parse([*command, "--manager-args", "--max-queue 4 --no-prefix-cache"])
    made = up.stack_config(args, Terminal(), "127.0.0.1", 1, 2)
    assert made.executor_args == ["--model=m", "--backend=oracle", "--threads", "2"]
    assert made.manager_args == ["--block-size=8", "--max-queue", "4", "--no-prefix-cache"]


def test_several_pairs_have_ports_of_their_own_and_their_executors_stop_last(journal: Path) -> None:
    with Stack(config(journal, replicas=2)) as stack:
        stack.start()
        assert stack.wait_ready(20)
        names = [child.name for child in stack.children]
    assert names == ["executor 1", "executor 2", "manager 1", "manager 2"]
    assert len({*stack.targets, *stack.executor_targets}) == 4
    stopped = [line for line in journal.read_text().splitlines() if line.endswith("stopped")]
    assert stopped == ["manager stopped"] * 2 + ["executor stopped"] * 2


def test_each_manager_is_told_where_to_publish_after_all_else_it_is_told(journal: Path) -> None:
    with Stack(config(journal, replicas=2, manager_args=["--kv-events"])) as stack:
        stack.start()
        assert stack.wait_ready(20)
        first, second = (child.lines[0] for child in stack.children if child.name.startswith("manager"))
    assert first.endswith(" --kv-events --kv-events-endpoint=tcp://127.0.0.1:5557")
    assert second.endswith(" --kv-events --kv-events-endpoint=tcp://127.0.0.1:5558")


def test_of_several_pairs_one_may_die(journal: Path) -> None:
    with Stack(config(journal, replicas=2)) as stack:
        stack.start()
        assert stack.wait_ready(20)
        assert stack.news() == []
        first, second = stack.children[0].popen, stack.children[3].popen
        first.kill()
        first.wait()
        (report,) = stack.news()
        assert report.startswith("the executor 1 was killed by SIGKILL")
        assert stack.news() == []
        second.kill()
        second.wait()
        with pytest.raises(StackError, match="the manager 2 was killed by SIGKILL"):
            stack.news()


def test_a_gateway_that_is_not_installed_is_a_clear_error(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagekv.client.launcher.stack.is_installed", lambda: False)
    with pytest.raises(StackError, match=r"pip install 'pagekv\[gateway\]'"):
        Stack(config(journal, gateway=GatewayConfig(port=0)))


def test_the_gateway_is_started_once_the_managers_serve_and_killed_if_it_lingers(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagekv.client.launcher.stack.serves", lambda target, managers: managers == 2)
    monkeypatch.setattr("pagekv.client.launcher.stack.has_tokenizer", lambda manager: True)
    script = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(sys.argv[1:], flush=True)"
    gateway = GatewayConfig(
        port=0, policy="round_robin", args=["--extra"], command=[sys.executable, "-c", f"{script}; time.sleep(60)"]
    )
    logs: list[str] = []

    def keep(name: str, line: str) -> None:
        logs.append(f"{name}: {line}")

    with Stack(config(journal, replicas=2, gateway=gateway, on_log=keep)) as stack:
        stack.start()
        assert len(stack.children) == 4
        assert stack.wait_ready(20)
        while not any(line.startswith("gateway: [") for line in logs):
            time.sleep(0.01)
    told = next(line for line in logs if line.startswith("gateway: ["))
    for word in ("--policy=round_robin", "--extra", *(f"grpc://{target}" for target in stack.targets)):
        assert f"'{word}'" in told
    assert stack.children[-1].popen.returncode == -signal.SIGKILL


def test_the_page_has_the_port_asked_for_or_a_free_one_where_that_is_taken(journal: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        stack = Stack(config(journal, page_port=port, replicas=2))
        assert stack.page_moved
    assert len({*stack.page_targets, f"127.0.0.1:{port}", *stack.targets}) == 5
    again = Stack(config(journal, page_port=port))
    assert (again.page_targets, again.page_moved) == ([f"127.0.0.1:{port}"], False)
    with again:
        again.start()
        assert again.wait_ready(30)
    assert f"--http-listen 127.0.0.1:{port}" in again.children[1].lines[0]


@pytest.mark.parametrize("as_json", [False, True])
def test_files_that_a_manager_records_to_are_known(
    as_json: bool, journal: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the manager's own code logs them: the second time there is a file of that name."""
    caplog.set_level(logging.INFO)
    for name in ("trace", "trace", "a name"):
        RecordingFile(tmp_path / name, "requests").close()
    stack, formatter = Stack(config(journal)), _Formatter("kvmanager", as_json)
    with subprocess.Popen([sys.executable, "-c", ""], text=True) as popen:
        child = Child("manager", stack.target, popen, lambda: True)
    child.lines.extend(["hello", *map(formatter.format, caplog.records)])
    stack.children.append(child)
    assert stack.recordings() == [str(tmp_path / name) for name in ("trace", "trace.1", "a name")]


def test_up_serves_no_page_where_the_manager_has_its_own_address_or_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def page_port(*flags: str) -> int | None:
        args = make_parser().parse(["up", *flags])
        return up.stack_config(args, Terminal(), "127.0.0.1", 0, 0).page_port

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


def test_of_a_gateways_usage_only_what_is_wrong_is_told(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagekv.client.launcher.stack.has_tokenizer", lambda manager: True)
    with Stack(config(journal, gateway=GatewayConfig(port=0, args=["--nonsense"]))) as stack:
        stack.start()
        with pytest.raises(StackError) as caught:
            stack.wait_ready(60)
    assert str(caught.value) == "the gateway refuses its command line: unrecognized arguments: --nonsense"
