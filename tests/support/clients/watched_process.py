"""A server process with a clock in its event loop, from outside; `support.clients.watched_server` runs in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.clients.stack import ROOT, START_TIMEOUT_S, environment, port_of
from support.clients.watched_server import Figures

from pagekv.common.port_file import read_port_file


@dataclass
class WatchedProcess:
    """A running server with a clock."""

    popen: subprocess.Popen[str]
    target: str
    # Address of the HTTP port; empty without one.
    http: str
    log: Path

    def figures(self) -> Figures:
        """Figures of the time since the last call. Raises RuntimeError when the process has ended."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        try:
            self.popen.stdin.write("\n")
            self.popen.stdin.flush()
            line = self.popen.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.log.stem} ended with {self.popen.wait(60)}:\n{self.log.read_text()[-4000:]}")
        return Figures(*json.loads(line))


@contextmanager
def running_watched(module: str, args: Sequence[str], directory: Path, name: str = "") -> Iterator[WatchedProcess]:
    """A server on a free port, listening; `name` of its log and port file, by default that of the module."""
    name = name or module
    port_file, log_file = directory / f"{name}.port", directory / f"{name}.log"
    env = environment()
    env["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests'}"
    command = [
        sys.executable,
        "-m",
        "support.clients.watched_server",
        module,
        "--listen",
        "127.0.0.1:0",
        "--port-file",
        str(port_file),
    ]
    with log_file.open("wb") as log:
        popen = subprocess.Popen(
            [*command, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "listen" not in (listening := read_port_file(port_file)):
            assert popen.poll() is None, log_file.read_text()
            assert time.monotonic() < deadline, f"{name} does not listen after {START_TIMEOUT_S:g} s"
            time.sleep(0.05)
        yield WatchedProcess(popen, f"127.0.0.1:{port_of(listening)}", listening.get("http", ""), log_file)
    finally:
        popen.terminate()
        try:
            popen.wait(60)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
