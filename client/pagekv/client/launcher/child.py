"""A server process as a child of this one, and the end of its log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from pagekv.client.launcher.errors import StackError
from pagekv.common.parent import ENDS_WITH_PARENT
from pagekv.common.port_file import read_port_file

# Lines of each child's log that are kept for the report of its death.
KEPT_LINES = 60
# Part of torchrun's message when a rank has ended it; a traceback of torchrun with 40 lines follows.
_ENDED_BY_RANK = "Received 15 death signal"
# Beginnings of the lines in which torchrun tells its default of one thread for each rank; the others are empty.
_TORCHRUN_SAYS = ("*****", "Setting OMP_NUM_THREADS ")
# The gateway writes colours into its log wherever that goes; shown as escapes they would hide the words.
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
# Exit status of a process whose command line is wrong.
USAGE = 2


class Child:
    """One process and the end of its log. States: running → ended."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        ready: Callable[[], bool],
        port_file: Path,
        on_log: Callable[[str, str], None] | None,
    ) -> None:
        """Starts the process. `ready` says whether it serves now; a gateway writes no port file. Raises StackError."""
        self.name, self.ready, self._port_file, self._on_log = name, ready, port_file, on_log
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        try:
            self.popen = subprocess.Popen(
                command,
                # Kept open until the process has ended: the process ends when this pipe is closed.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                env=_environment(),
                # Ctrl-C in the terminal must reach only this process, which stops its children in order.
                start_new_session=True,
            )
        except OSError as error:
            raise StackError(f"cannot start the {name}: {error}") from error
        # The thread keeps reading, because a full pipe would stall the process.
        self._reader = threading.Thread(target=self._read, name=f"{name}-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as log:
            for written in log:
                line = _COLOURS.sub("", written.rstrip("\n"))
                self.lines.append(line)
                if self._on_log is not None:
                    # Lines that cannot be shown (a full disk, a pipe without a reader) are still read.
                    with suppress(OSError):
                        self._on_log(self.name, line)

    @property
    def listening(self) -> dict[str, Any]:
        """Addresses and files as in `pagekv.common.port_file`; empty until the process listens."""
        return read_port_file(self._port_file)

    def leave(self) -> None:
        """Ends the process at once, as if this parent were gone. Idempotent."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def wait_until(self, deadline: float) -> None:
        """Waits for the end of the process until `deadline`, in seconds of `time.monotonic`, then kills it."""
        try:
            self.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.leave()
        self._reader.join(timeout=2)

    def death(self) -> StackError:
        """How the process ended, and its last log lines."""
        status = self.popen.wait()
        self._reader.join(timeout=2)
        if reason := self.listening.get("cannot_start"):
            return StackError(f"the {self.name} cannot start: {reason}")
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"
        if status == USAGE:
            # argparse prints its usage before the reason, more lines than are kept, and a hint at the process's own
            # --help after it.
            reason = [_reason(line) for line in self.lines if not line.startswith(("usage:", " ", "Try '"))]
            return StackError(f"the {self.name} refuses its command line: " + "\n".join(reason), exit_status=USAGE)
        return StackError(f"the {self.name} {how}" + (self.tail() if self.lines else " and said nothing"))

    def tail(self) -> str:
        """The last lines of the log, as the end of a sentence about the process."""
        lines = [*takewhile(lambda line: _ENDED_BY_RANK not in line, self.lines)]
        lines = [line for line in lines if line and not line.startswith(_TORCHRUN_SAYS)]
        return "; its last lines:" + "".join(f"\n  {line}" for line in lines or self.lines)


def _reason(line: str) -> str:
    """The reason in a line of a log in JSON; any other line as it is."""
    try:
        return str(json.loads(line)["reason"])
    except (ValueError, LookupError, TypeError):
        return line


def _signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL; most real-time signals have no name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _environment() -> dict[str, str]:
    """The environment of the children: this process's, with the same module path, a known encoding, and the variable
    that makes them end with this process.
    """
    # A script's directory or `python -c`, whose entry for the working directory is empty, may have put entries on
    # sys.path, which the children get by environment variable.
    paths = [os.path.abspath(path) for path in sys.path if os.path.isdir(os.path.join(path, "pagekv"))]
    known = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        ENDS_WITH_PARENT: "1",
        # The log is read as UTF-8, also where the user's terminal wants something else.
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*paths, *([known] if known else [])])),
    }
