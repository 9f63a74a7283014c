"""Torch's OpenMP runtime: it is found, and its threads sleep or spin as they are told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagekv.executor.cpu import openmp_runtime
from pagekv.executor.cpu.openmp_runtime import Waiting, runtime

# A process whose threads spin for ever: the kernel calls a thread that spins running, whether it has a core or not.
SCRIPT = """
import ctypes, os, sys, time
from pathlib import Path
library = ctypes.CDLL(sys.argv[1])
from pagekv.executor.cpu.openmp_runtime import Waiting, runtime
nothing = ctypes.cast(ctypes.CDLL(None).getppid, ctypes.c_void_p)
def threads():
    return {int(task) for task in os.listdir("/proc/self/task")}
def states():
    return {Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()[0] for task in others}
def work():
    runtime().GOMP_parallel(nothing, None, count, 0)
def asleep():
    work()
    return any(states() == {"S"} for _ in range(20) if not time.sleep(0.01))
count = max(2, library.omp_get_num_procs())
before = threads()
work()
others = threads() - before
waiting = Waiting()
assert len(others) == count - 1 and waiting.can_sleep(count)
said = []
for _ in range(2):
    said.append(asleep())
    waiting.sleep(count)
    waiting.sleep(count)
    while not asleep():
        pass
    assert threads() - others - before
    waiting.spin()
    waiting.spin()
    while threads() - others - before:
        time.sleep(0.01)
said.append(asleep())
print(said)
"""


def libgomp() -> str:
    torch.get_num_threads()
    found = runtime()
    if found is None or "libgomp" not in found._name:
        pytest.skip("torch is built with another runtime")
    return str(found._name)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two threads on one core never spin for long")
def test_threads_sleep_and_spin_as_told() -> None:
    path = os.pathsep.join(sys.path)
    env = {**os.environ, "GOMP_SPINCOUNT": "infinity", "PYTHONPATH": path}
    env.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, libgomp()], env=env, capture_output=True, text=True, timeout=240
    )
    assert (done.stdout, done.returncode) == ("[False, False, False]\n", 0), done.stderr


def test_where_waiting_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    libgomp()
    # One idle thread is enough on a machine of any size.
    threads = max(2, len(os.sched_getaffinity(0)))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert Waiting().can_sleep(threads)
    # Threads sleep at once already, as the environment says.
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert not Waiting().can_sleep(threads)
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(openmp_runtime, "MOST_IDLE", 0)
    assert not Waiting().can_sleep(threads)
    monkeypatch.setattr(openmp_runtime, "runtime", lambda: None)
    assert not Waiting().can_sleep(threads)


def test_no_maps_no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> str:
        raise OSError("no /proc")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert runtime.__wrapped__() is None
