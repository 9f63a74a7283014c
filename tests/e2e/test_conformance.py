"""Executors of this repository, and that of the docs, keep every rule of the contract of steps.

Of the cpu backend tests/unit/conformance/test_sampling_rules.py shows it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.clients.stack import ORACLE, Process, environment
from support.executor.cuda_host import HostDevice, host_backend, save_small_model
from support.executor.judged import BACKEND, TOY, broken, served_backend, verdicts
from support.executor.rank_group import running_group

from pagekv.executor.oracle.backend import OracleBackend, OracleModel

pytestmark = pytest.mark.e2e


def test_the_oracle_keeps_every_rule_with_each_vocabulary() -> None:
    begin = time.process_time()
    for vocab, length in ((512, 4096), (50257, 200)):
        model = OracleModel(vocab_size=vocab, max_model_len=length)
        with served_backend(OracleBackend(model, kv_bytes=12 * 2**18)) as address:
            found = verdicts(address)
        assert broken(found) == {}
        skipped = {number for number, verdict in found.items() if verdict.outcome == "skipped"}
        assert skipped - {"P13"} == {"M14", "M16", "M17"}
        assert ("P13" in skipped) == (length == 200)
    print(f"two runs with their executors: {time.process_time() - begin:.1f} s of CPU time")


def test_two_ranks_of_the_oracle_keep_every_rule() -> None:
    model = OracleModel()
    with (
        running_group(*(OracleBackend(model, kv_bytes=12 * 2**18) for _ in range(2))) as group,
        served_backend(group.backend) as address,
    ):
        found = verdicts(address)
    assert broken(found) == {}
    assert {number for number, verdict in found.items() if verdict.outcome == "skipped"} <= {"M14", "M16", "M17", "P13"}
    assert group.lost == []


@pytest.mark.long
def test_the_cuda_backend_keeps_every_rule(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_small_model("llama", tmp_path)
    with served_backend(host_backend(tmp_path, HostDevice(), kv_memory=2**25)) as address:
        found = verdicts(address)
    assert broken(found) == {}
    assert {number for number, verdict in found.items() if verdict.outcome == "skipped"} <= {"M17", "P13", "R33"}


def judge(port: int) -> dict[str, object]:
    """The command's verdicts of an executor that keeps every rule."""
    command = [sys.executable, "-m", "pagekv.conformance", "--executor", f"127.0.0.1:{port}", "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.mark.long
def test_the_command_judges_processes(tmp_path: Path) -> None:
    # The command speaks no TLS, so neither does what it judges, also under PAGEKV_TEST_TLS.
    executor = Process("pagekv.executor", [*ORACLE, "--insecure"], tmp_path)
    executor.start()
    executor.wait_serving()
    # At once, since each mostly waits.
    with example(TOY) as toy, example(BACKEND) as backend, ThreadPoolExecutor() as judges:
        answers = list(judges.map(judge, (executor.port, toy, backend)))
    executor.stop()
    assert [(answer["backend"], answer["failed"]) for answer in answers] == [("oracle", 0), ("toy", 0), ("toy", 0)]


@contextmanager
def example(path: Path) -> Iterator[int]:
    """The port of an example that runs where torch cannot be imported."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(path), "127.0.0.1:0"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    line = next(line for line in process.stdout if "listening" in line)
    port = int(re.findall(r"port[ =](\d+)", line)[0])
    # A pipe that nobody reads would fill, and the process wait.
    reader = threading.Thread(target=process.stdout.read, daemon=True)
    reader.start()
    yield port
    process.kill()
    process.wait()
    reader.join()
