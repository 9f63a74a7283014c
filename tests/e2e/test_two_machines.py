"""Ranks on two machines, as docs/deployment.md has it: two network namespaces of this one, with a cable between them
that is pulled and plugged in again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.clients.stack import environment

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

WAIT_S = 400.0
ADDRESSES = ("10.231.77.1", "10.231.77.2")
TORCHRUN = ("torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1000", "--rdzv-backend=c10d")
EXECUTOR = ("pagekv.executor", "--listen=127.0.0.1:50052", "--rank-timeout-s=4")
ORACLE = ("--backend=oracle", "--model=demo", "--step-time-ms=20")
CPU = ("--model=demo", "--dtype=float64", "--threads=1", "--kv-memory=256MiB")
GENERATE = (
    "pagekv.client.cli", "generate", "--json", "--ignore-eos", "--temperature=0", "--max-tokens=200",
    "--target=127.0.0.1:50051", "In the beginning",
)  # fmt: skip  # as typed


@dataclass
class Machine:
    """A network namespace, and what runs in it. Addresses of a loopback are its own."""

    name: str
    address: str
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        """Starts Python with a module and its arguments; what it says goes to a file."""
        with (self.folder / f"{self.name}-{log}.log").open("ab") as output:
            command = ["ip", "netns", "exec", self.name, sys.executable, "-m", *words]
            # gloo, too, goes by this machine's name otherwise.
            env = {**environment(), "GLOO_SOCKET_IFNAME": "cable"}
            made = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        self.processes.append(made)
        return made

    def said(self, log: str) -> str:
        path = self.folder / f"{self.name}-{log}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def generate(self) -> list[int]:
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", *GENERATE]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=True)
        return tokens_of(done.stdout)


def tokens_of(output: str) -> list[int]:
    found: list[int] = json.loads(output.splitlines()[-1])["completions"][0]["token_ids"]
    return found


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    names = [f"pagekv{os.getpid()}{side}" for side in "ab"]
    if os.geteuid() or subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, check=False).returncode:
        pytest.skip("needs root and `ip netns`, for network namespaces")
    machines = [Machine(name, address, folder) for name, address in zip(names, ADDRESSES, strict=True)]
    with ExitStack() as stack:
        stack.callback(ip, "netns", "del", names[0])
        ip("netns", "add", names[1])
        stack.callback(ip, "netns", "del", names[1])
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for machine in machines:
            ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", machine.name, "link", "set", device, "up")
        try:
            yield machines[0], machines[1]
        finally:
            for process in [process for machine in machines for process in machine.processes]:
                process.terminate()
            for process in [process for machine in machines for process in machine.processes]:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def until(condition: Callable[[], bool], machines: Sequence[Machine]) -> float:
    begin = time.monotonic()
    while not condition():
        if time.monotonic() > begin + WAIT_S:
            raise AssertionError("\n".join(each.said("executor")[-3000:] for each in machines))
        time.sleep(0.05)
    return time.monotonic() - begin


# Ranks that compute a model together have a collective to leave, besides, and take longer to start.
@pytest.mark.parametrize("backend", [pytest.param(CPU, marks=pytest.mark.nightly), ORACLE], ids=["cpu", "oracle"])
def test_a_group_over_two_machines_outlives_a_cable(backend: tuple[str, ...], tmp_path: Path) -> None:
    with two_machines(tmp_path) as machines:
        one = machines[0]

        def torchrun(machine: Machine) -> subprocess.Popen[bytes]:
            # Both have this machine's name, by which torchrun would know whose the endpoint is.
            where = [f"--rdzv-endpoint={one.address}:29400", f"--rdzv-conf=is_host={int(machine is one)}"]
            where += ["--rdzv-id=pagekv", f"--local-addr={machine.address}"]
            return machine.start("executor", *TORCHRUN, *where, "-m", *EXECUTOR, *backend)

        running = {machine.name: torchrun(machine) for machine in machines}
        one.start("manager", "pagekv.kvmanager", "--executor=127.0.0.1:50052", "--step-timeout-s=15")
        until(lambda: " serving" in one.said("manager"), machines)
        assert "have neither TLS nor a login" in one.said("executor")
        wanted = one.generate()
        one.start("generate", *GENERATE)
        time.sleep(1.5)
        ip("-n", one.name, "link", "set", "cable", "down")
        lost = "the group of ranks is broken"
        took = until(lambda: all(lost in machine.said("executor") for machine in machines), machines)
        print(f"both ranks had left {took:.1f} s after the cable was pulled")
        ip("-n", one.name, "link", "set", "cable", "up")

        def ended() -> bool:
            # As a supervisor does: a torchrun that has lost the rendezvous ends.
            for machine in machines:
                if running[machine.name].poll() is not None:
                    print(f"torchrun of {machine.address} ended with {running[machine.name].returncode}")
                    running[machine.name] = torchrun(machine)
            return one.said("generate").strip().endswith("}")

        print(f"the stream ended {until(ended, machines):.1f} s after the cable was there again")
        assert tokens_of(one.said("generate")) == wanted
