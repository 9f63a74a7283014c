"""Both players as processes that live as long as a workload, and play one round after the other when told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.clients.stack import ROOT, START_TIMEOUT_S, environment

from pagekv.client.launcher.stack import Stack, StackConfig
from pagekv.executor.machine import usable_cores
from peers.answering import READY
from peers.cpu_time import machine_s, tree_s, trees_s

BENCH = Path(__file__).resolve().parents[1]
# In one process, off the network, with every cache below a folder of ours.
PEER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
PEER_CACHES = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True, slots=True)
class Turn:
    """A round. Cores are CPU seconds per second of it."""

    seconds: float
    tokens: int
    # Of the other player, who waits meanwhile, and of everybody else on the machine.
    idle_cores: float
    other_cores: float

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds


class Player:
    """States: ready → playing → ready."""

    def __init__(self, name: str, process: subprocess.Popen[str], pids: Sequence[int]) -> None:
        """Waits until the process is ready. `pids`: of the others that work for it. Raises SystemExit where it ends."""
        self.name, self._process, self.pids = name, process, [process.pid, *pids]
        if (line := self._heard()) != READY:
            raise SystemExit(f"error: {name} said {line!r} instead of {READY!r}")

    def play(self, waiting: Sequence[int]) -> Turn:
        """A round, while the processes `waiting` should do nothing. All of them are below this process."""
        assert self._process.stdin is not None
        machine, all_ours, idle = machine_s(), tree_s(os.getpid()), trees_s(waiting)
        begun = time.perf_counter()
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        found = json.loads(self._heard())
        elapsed = time.perf_counter() - begun
        others = machine_s() - machine - (tree_s(os.getpid()) - all_ours)
        idle = trees_s(waiting) - idle
        return Turn(found["seconds"], found["tokens"], idle / elapsed, max(0.0, others / elapsed))

    def _heard(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"error: {self.name} ended with status {self._process.wait()}; its log is above")
        return line


@contextmanager
def our_player(model: Path, name: str, dtype: str) -> Iterator[Player]:
    """Executor and manager as `pagekv up --no-http` starts them, and a client. Nothing is set by hand but the element
    type, and that no tokenizer is needed.
    """
    executor_args = ["--model", str(model), "--dtype", dtype]
    command = [sys.executable, "-m", "peers.our_rounds"]
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(ROOT / "tests"), str(BENCH)])
    with Stack(StackConfig(port=0, executor_args=executor_args, manager_args=["--tokenizer", ""])) as stack:
        stack.start()
        stack.wait_ready(START_TIMEOUT_S)
        with _process([*command, stack.target, name], env) as process:
            yield Player("pagekv", process, [child.popen.pid for child in stack.children])


@contextmanager
def peer_player(python: Path, model: Path, name: str, caches: Path) -> Iterator[Player]:
    """vllm-cpu with a thread for each core that PageKV uses."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | PEER_ENVIRONMENT
    env |= {"PYTHONPATH": str(BENCH), "OMP_NUM_THREADS": str(usable_cores())}
    env |= {name: str(caches / name.lower()) for name in PEER_CACHES}
    with _process([str(python), "-m", "peers.vllm_rounds", str(model), name], env) as process:
        yield Player("vllm-cpu", process, [])


@contextmanager
def _process(command: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that reads and writes lines, killed at the end."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()
