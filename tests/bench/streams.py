"""The process of `stream_load.py` from outside: start it, open and close its window, read its report."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from stream_load import Order, Report
from support.clients.stack import environment

LOAD = Path(__file__).with_name("stream_load.py")
# Before the window: prompts are computed, and every stream has had a message.
SETTLE_S = 0.5


class Streams:
    """Client streams that are going. `begin` once, then `end` once."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self) -> None:
        """Opens the window that is measured."""
        self._tell("begin")

    def end(self) -> Report:
        """Closes it and ends the streams. Where their process died the benchmark ends with one line: no figures."""
        self._tell("end")
        line = heard(self._process)
        if not line:
            raise SystemExit(f"error: the clients' process ended with {self._process.wait()} within the window")
        return Report(**json.loads(line))

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        # One that died is noticed where its answer is read.
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()


@contextmanager
def streaming(order: Order) -> Iterator[Streams]:
    """A process of clients, with every stream going."""
    with speaking([sys.executable, str(LOAD), json.dumps(asdict(order))]) as process:
        if heard(process) != "ready":
            raise SystemExit("the clients did not get their streams")
        time.sleep(SETTLE_S)
        yield Streams(process)


@contextmanager
def speaking(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that reads and writes lines, killed at the end."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str]) -> str:
    """The next line it wrote; empty when it has ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
