"""`pagekv up --tp`: a model over two ranks from one command, and nothing left of it after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.clients.processes import runs
from support.clients.stack import environment
from support.waiting import wait_until

from pagekv.client import PageKVClient

pytestmark = pytest.mark.e2e

WAIT_S = 240.0
CLI = [sys.executable, "-m", "pagekv.client.cli"]


def family(pid: int) -> dict[int, str]:
    """The process and all below it: command lines by id."""
    try:
        found = {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")}
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return found | {child: line for each in children for child, line in family(int(each)).items()}


@pytest.mark.parametrize(
    "backend",
    # test_ranks.py lets two ranks of the other backend answer and end.
    [["--backend", "oracle", "--model", "demo"], pytest.param(["--threads", "1"], marks=pytest.mark.nightly)],
    ids=["oracle", "cpu"],
)
def test_a_text_over_two_ranks_and_nothing_is_left_after_ctrl_c(backend: list[str]) -> None:
    command = [*CLI, "up", "--json", "--tp", "2", "--kv-memory", "64MiB", *backend]
    command += ["--port", "0", "--http-port", "0"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True) as up:
        assert up.stdout is not None
        try:
            told = json.loads(up.stdout.readline())
            ranks = family(told["pids"]["executor"])
            assert sum("-m pagekv.executor" in line and "torch.distributed" not in line for line in ranks.values()) == 2
            with PageKVClient(told["target"]) as client:
                done = client.generate("In the beginning", max_tokens=8, ignore_eos=True)
                assert len(done.token_ids) == 8
                assert len(client.stats().executor_rank_us) == 2
            everything = {**ranks, **family(told["pids"]["manager"])}
            # As a terminal does it: to every process of the group.
            os.killpg(up.pid, signal.SIGINT)
            assert up.wait(WAIT_S) == 0
        finally:
            up.kill()
    wait_until(lambda: not any(map(runs, everything)), why=lambda: [everything[pid] for pid in everything if runs(pid)])


def test_a_wrong_flag_of_ranks_ends_it_by_name() -> None:
    """torchrun would start them for ever."""
    command = [*CLI, "up", "--tp", "2", "--port", "0", "--executor-args=--no-such-flag"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert "pagekv-executor: unrecognized arguments: --no-such-flag" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_ranks_still_come_together_leaves_nothing() -> None:
    command = [*CLI, "up", "--json", "--tp", "2", "--backend", "oracle", "--model", "demo"]
    command += ["--port", "0", "--no-http"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, start_new_session=True) as up:
        try:
            # up, both processes of a pair, and the ranks below torchrun.
            wait_until(lambda: len(family(up.pid)) >= 5)
            everything = family(up.pid)
            os.killpg(up.pid, signal.SIGINT)
            up.wait(WAIT_S)
        finally:
            up.kill()
    wait_until(lambda: not any(map(runs, everything)), why=lambda: [everything[pid] for pid in everything if runs(pid)])
