"""`pagekv replay`: replays a recorded workload on the manager's scheduler, in another process and without a server."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from importlib.util import find_spec
from types import FrameType

from pagekv.client.cli.parser import Subparsers, add_command
from pagekv.client.cli.terminal import Terminal
from pagekv.client.errors import PageKVError
from pagekv.client.launcher.stop_signals import end_signals

# -P: not with modules from the working directory.
COMMAND = (sys.executable, "-P", "-m", "pagekv.kvmanager.replay")
# Modules that the replay imports beyond those of the light client.
NEEDED = ("numpy", "msgpack")


def add(commands: Subparsers) -> None:
    """Adds the subcommand. All flags, including --help, are passed to the process that does the work."""
    parser = add_command(commands, "replay", "replay a recorded workload without a model, to size a deployment", run)
    # No argument begins with this character, so nothing is parsed as an option and everything is passed on.
    parser.prefix_chars = "\0"
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Exit status of the replay. Signals that end this process end the replay, too. Raises PageKVError when it is not
    installed.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise PageKVError(f"replay needs {' and '.join(missing)}: pip install 'pagekv[manager]'")
    child: subprocess.Popen[bytes] | None = None
    asked: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        if child is not None:
            child.send_signal(signum)

    before = {signum: signal.signal(signum, forward) for signum in end_signals()}
    try:
        with subprocess.Popen([*COMMAND, *args.arguments]) as child:
            # Signals from before there was a child to forward them to.
            for signum in asked:
                child.send_signal(signum)
            try:
                status = child.wait()
            except KeyboardInterrupt:
                # Ctrl-C in a terminal has reached the child too; a signal sent only to this process has not.
                child.send_signal(signal.SIGINT)
                child.wait()
                raise
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    # The exit status that a shell reports for a process ended by a signal.
    return status if status >= 0 else 128 - status
