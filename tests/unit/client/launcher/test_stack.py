"""Starting, watching and stopping the two processes, with stand-ins that only serve health."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.clients.stack import environment
from support.clients.stand_ins import config

from pagekv.client.cli.commands import replay
from pagekv.client.launcher.errors import StackError
from pagekv.client.launcher.gateway import COMMAND, GatewayConfig
from pagekv.client.launcher.stack import EXECUTOR_COMMAND, MANAGER_COMMAND, Stack, StackConfig


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
        assert stack.wait_ready(120, on_wait=lambda name, seconds: waited.append(name))
        stack.check()
        pids = [child.popen.pid for child in stack.children]
    assert not any(is_alive(pid) for pid in pids)
    lines = journal.read_text().splitlines()
    assert lines[-2:] == ["manager stopped", "executor stopped"]
    told = dict(line for line in logs if line[1].startswith("hello from"))
    assert re.fullmatch(
        rf"hello from executor --listen {stack.executor_targets[0]} --port-file \S+ --backend=oracle", told["executor"]
    )
    assert re.fullmatch(
        rf"hello from manager --executor {stack.executor_targets[0]} --listen {stack.target} --port-file \S+ "
        "--block-size=8",
        told["manager"],
    )
    assert "executor" in waited


def test_no_room_for_temporary_files_is_an_error_of_one_line(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a limit of the size of files."""

    def nowhere(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("pagekv.client.launcher.stack.OwnFolder", lambda prefix: nowhere(prefix))
    stack = Stack(config(journal))
    with (
        pytest.raises(StackError, match=r"temporary files: No usable .* in \['/tmp'\]: free some space .* TMPDIR"),
        stack,
    ):
        pass
    # Nothing keeps the ports that were chosen.
    Stack(replace(config(journal), port=int(stack.target.rpartition(":")[2])))


def test_a_process_that_dies_at_the_start_is_reported_with_its_last_words(journal: Path) -> None:
    with Stack(config(journal, manager="die")) as stack:
        stack.start()
        with pytest.raises(StackError, match=r"manager exited with status 7; its last lines:\n(.*\n)*  error: out of"):
            stack.wait_ready(120)
    assert journal.read_text().splitlines()[-1] == "executor stopped"


def test_the_reason_that_a_process_gives_is_told_without_its_log(journal: Path) -> None:
    with Stack(config(journal, manager="refuse")) as stack:
        stack.start()
        with pytest.raises(StackError) as caught:
            stack.wait_ready(120)
    assert str(caught.value) == "the manager cannot start: --some-flag 7: must be less"


@pytest.mark.parametrize("before", ['{"listen": "127.0.0.1:1", "cannot_start": "of yesterday"}\n', "no JSON"])
def test_what_a_process_before_left_in_the_port_file_is_not_told(journal: Path, before: str) -> None:
    own = journal.with_name("ports")
    own.write_text(before)
    with Stack(config(journal, manager="die", manager_args=["--port-file", str(own)])) as stack:
        stack.start()
        assert stack.phases() == []
        with pytest.raises(StackError, match="manager exited with status 7"):
            stack.wait_ready(120)


def test_a_port_file_is_for_one_process_and_no_directory(journal: Path) -> None:
    """Both are refused before anything starts."""
    own, folder = str(journal.with_name("ports")), str(journal.parent)
    for args, words in (
        ({"manager_args": [f"--port-file={own}"], "replicas": 2}, f"--port-file {own}: 2 processes would write"),
        ({"executor_args": ["--port-file", own], "replicas": 3}, f"--port-file {own}: 3 processes would write"),
        ({name: ["--port-file", own] for name in ("executor_args", "manager_args")}, "2 processes would write"),
        ({"manager_args": ["--port-file", folder]}, f"--port-file {folder}: is a directory"),
        ({"executor_args": ["--port-file", folder]}, f"--port-file {folder}: is a directory"),
    ):
        with pytest.raises(StackError, match=words):
            Stack(replace(config(journal), **args))


def test_the_part_of_a_start_that_is_under_way(journal: Path) -> None:
    with Stack(config(journal, executor="slow")) as stack:
        stack.start()
        seen: list[tuple[str, str, int | None]] = []

        def on_wait(name: str, seconds: float) -> None:
            if stack.phases() and not seen:
                seen.extend(stack.phases())
                with journal.open("a") as file:
                    file.write("go on\n")

        assert stack.wait_ready(120, on_wait=on_wait)
    assert seen == [("executor", "loading the weights", 34)]


def test_a_process_that_dies_later_is_noticed(journal: Path) -> None:
    with Stack(config(journal, executor="dielater")) as stack:
        stack.start()
        stack.wait_ready(120)
        with journal.open("a") as file:
            file.write("now die\n")
        stack.children[0].popen.wait(60)
        with pytest.raises(StackError, match="executor exited with status 3"):
            stack.check()


def test_a_killed_process_is_reported_by_signal(journal: Path) -> None:
    with Stack(config(journal)) as stack:
        stack.start()
        stack.wait_ready(120)
        stack.children[1].popen.kill()
        stack.children[1].popen.wait(60)
        with pytest.raises(StackError, match="manager was killed by SIGKILL"):
            stack.check()


def test_a_deaf_process_is_killed_in_the_end(journal: Path) -> None:
    at_once = ["--grace-s=0"]
    with Stack(
        config(journal, manager="deaf", stop_timeout_s=0.3, manager_args=at_once, executor_args=at_once)
    ) as stack:
        stack.start()
        stack.wait_ready(120)
    executor, manager = (child.popen.returncode for child in stack.children)
    assert manager == -signal.SIGKILL
    # In time or not, which is a matter of the machine.
    assert executor in (0, -signal.SIGKILL)


def test_nothing_is_left_running_where_stopping_is_interrupted(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    stack = Stack(config(journal))
    monkeypatch.setattr(stack, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt), stack:
        stack.start()
    assert [child.popen.wait(60) for child in stack.children] == [-signal.SIGKILL] * 2


def test_a_process_gets_the_grace_of_its_flags(journal: Path) -> None:
    with Stack(config(journal, manager="late", stop_timeout_s=0, manager_args=["--grace-s", "100"])) as stack:
        stack.start()
        stack.wait_ready(120)
    assert stack.children[1].popen.returncode == 0


def test_a_start_that_takes_too_long(journal: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Stack(config(journal, executor_command=sleeper)) as stack:
        stack.start()
        with pytest.raises(StackError, match="the executor was not ready within 0 s; its last lines:"):
            stack.wait_ready(0)


def test_waiting_ends_when_asked(journal: Path) -> None:
    with Stack(config(journal)) as stack:
        stack.start()
        assert not stack.wait_ready(120, lambda seconds: True)


def test_several_pairs_have_ports_of_their_own_and_their_executors_stop_last(journal: Path) -> None:
    with Stack(config(journal, replicas=2)) as stack:
        stack.start()
        assert stack.wait_ready(120)
        names = [child.name for child in stack.children]
    assert names == ["executor 1", "executor 2", "manager 1", "manager 2"]
    assert len({*stack.targets, *stack.executor_targets}) == 4
    stopped = [line for line in journal.read_text().splitlines() if line.endswith("stopped")]
    assert stopped == ["manager stopped"] * 2 + ["executor stopped"] * 2


@pytest.mark.parametrize("own", [False, True])
def test_files_that_a_manager_records_to_are_known(journal: Path, own: bool) -> None:
    port_file = ["--port-file", str(journal.with_name("ports"))] if own else []
    with Stack(config(journal, manager_args=["--record", "a file", *port_file])) as stack:
        stack.start()
        assert stack.wait_ready(120)
        assert stack.listening("recordings") == [["a file"]]


def test_of_several_pairs_one_may_die(journal: Path) -> None:
    with Stack(config(journal, replicas=2)) as stack:
        stack.start()
        assert stack.wait_ready(120)
        assert stack.new_deaths() == []
        first, second = stack.children[0].popen, stack.children[3].popen
        first.kill()
        first.wait()
        (report,) = stack.new_deaths()
        assert report.startswith("the executor 1 was killed by SIGKILL")
        assert stack.new_deaths() == []
        second.kill()
        second.wait()
        left = stack.children[2].popen.stdin
        assert left is not None
        assert not left.closed
        with pytest.raises(StackError, match="the manager 2 was killed by SIGKILL"):
            stack.new_deaths()
        # So it ends as without its parent.
        assert left.closed


def test_where_nobody_can_finish_a_stream_nobody_waits_for_it() -> None:
    """A manager whose executor was killed would give its streams the whole of its grace."""
    oracle = ["--backend=oracle", "--model=demo", "--step-time-ms=20"]
    with Stack(StackConfig(port=0, executor_args=oracle)) as stack:
        stack.start()
        assert stack.wait_ready(120)
        command = [sys.executable, "-m", "pagekv.client.cli", "--target", stack.target, "generate", "x"]
        with subprocess.Popen([*command, "--max-tokens=2000", "--ignore-eos"], stdout=subprocess.PIPE) as caller:
            assert caller.stdout is not None
            assert caller.stdout.read(1)
            executor, manager = stack.children
            executor.popen.kill()
            executor.popen.wait()
            with pytest.raises(StackError, match="the executor was killed by SIGKILL"):
                stack.new_deaths()
            # The grace is 30 s.
            assert manager.popen.wait(20) == 0
            caller.kill()


def test_a_gateway_that_is_not_installed_is_a_clear_error(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagekv.client.launcher.stack.find_spec", lambda name: None)
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
        assert stack.wait_ready(120)
        while not any(line.startswith("gateway: [") for line in logs):
            time.sleep(0.01)
    told = next(line for line in logs if line.startswith("gateway: ["))
    for word in ("--policy=round_robin", "--extra", *(f"grpc://{target}" for target in stack.targets)):
        assert f"'{word}'" in told
    assert stack.children[-1].popen.returncode == -signal.SIGKILL


def test_a_dead_gateway_leaves_managers_their_own_streams(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers of gRPC have them without a gateway; `stop` gives these the grace."""
    monkeypatch.setattr("pagekv.client.launcher.stack.serves", lambda target, managers: True)
    monkeypatch.setattr("pagekv.client.launcher.stack.has_tokenizer", lambda manager: True)
    gateway = GatewayConfig(port=0, command=[sys.executable, "-c", "import time; time.sleep(60)"])
    with Stack(config(journal, gateway=gateway)) as stack:
        stack.start()
        assert stack.wait_ready(120)
        *servers, dead = (child.popen for child in stack.children)
        dead.kill()
        dead.wait()
        with pytest.raises(StackError, match="the gateway was killed by SIGKILL"):
            stack.new_deaths()
        assert [server.stdin is not None and server.stdin.closed for server in servers] == [False, False]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("argument --block-size: must be a power of two", "argument --block-size: must be a power of two"),
        ("two\nlines", "two\nlines"),
        # In a log in JSON.
        ('{"level": "error", "message": "cannot start", "reason": "--x: too large"}', "--x: too large"),
        ("[1]", "[1]"),
    ],
)
def test_a_usage_error_is_passed_through_without_the_usage(journal: Path, written: str, words: str) -> None:
    told = f"usage: x [-h]\n  [--y]\n{written}\nTry 'x --help'."
    script = f"import sys; print({told!r}, file=sys.stderr); sys.exit(2)"
    with Stack(config(journal, manager_command=[sys.executable, "-c", script])) as stack:
        stack.start()
        with pytest.raises(StackError) as caught:
            stack.wait_ready(120)
    assert str(caught.value) == f"the manager refuses its command line: {words}"
    assert caught.value.exit_status == 2


def test_of_a_gateways_usage_only_what_is_wrong_is_told(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagekv.client.launcher.stack.has_tokenizer", lambda manager: True)
    with Stack(config(journal, gateway=GatewayConfig(port=0, args=["--nonsense"]))) as stack:
        stack.start()
        with pytest.raises(StackError) as caught:
            stack.wait_ready(120)
    assert str(caught.value).startswith("the gateway refuses its command line: ")
    assert str(caught.value).endswith(" error: unrecognized arguments: --nonsense")
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("command", [EXECUTOR_COMMAND, MANAGER_COMMAND, COMMAND, replay.COMMAND])
def test_modules_of_the_working_directory_are_not_imported(command: tuple[str, ...], tmp_path: Path) -> None:
    """As a torch.py of somebody who calls torch, or a types.py that another user has left in /tmp."""
    for name in ("argparse", "random", "runpy", "smg", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    done = subprocess.run([*command, "--help"], env=environment(), cwd=tmp_path, capture_output=True, check=False)
    assert b"the wrong module" not in done.stderr
    # The gateway is not installed everywhere.
    assert done.returncode == 0 or command == COMMAND


def test_interpreters_of_torchrun_have_their_path_from_its_environment(journal: Path) -> None:
    stack = Stack(replace(config(journal), ranks=2, executor_command=EXECUTOR_COMMAND))
    assert [*stack._executor_command()][-3:] == ["--nproc-per-node=2", "-m", "pagekv.executor"]
