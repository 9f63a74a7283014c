"""`pagekv top`: requests, blocks and rates of a running stack, again and again in place."""

from __future__ import annotations

import argparse
import signal
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from pagekv.client.cli.parser import Subparsers, UsageError, add_command, add_target, connect
from pagekv.client.cli.terminal import Terminal
from pagekv.client.client import PageKVClient
from pagekv.client.errors import PageKVError
from pagekv.client.types import ModelInfo
from pagekv.common.flags import number

if TYPE_CHECKING:
    from rich.console import Console

    from pagekv.client.cli.top_view import TopFrame

# Requests to ask for: more than fit on most screens.
REQUESTS = 200
EXAMPLES = """\
  pagekv top
  pagekv top --target gpu-7:50051 --every 0.5
  pagekv top --once
"""


def add(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(
        commands, "top", "watch requests, blocks and rates in the terminal, until q or Ctrl-C", run, examples=EXAMPLES
    )
    add_target(parser)
    parser.add_argument("--every", type=number(0.1, 3600), default=1.0, metavar="S", help="seconds between frames [1]")
    parser.add_argument("--once", action="store_true", help="one frame, as where the output is no terminal")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Frames until q or Ctrl-C, which are the ways to end it: exit status 0."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise UsageError("pagekv top needs rich: pip install 'pagekv[top]'") from error
    with connect(args) as client:
        if args.json:
            terminal.json({"stats": asdict(client.stats()), "requests": asdict(client.list_requests(REQUESTS))})
            return 0
        console = Console(file=terminal.out)
        watcher = _Watcher(client, args.target)
        try:
            if args.once or not console.is_terminal:
                console.print(watcher.frame(fail=True))
            else:
                _watch(watcher, console, args.every)
        except KeyboardInterrupt:
            pass
    return 0


def _watch(watcher: _Watcher, console: Console, every_s: float) -> None:
    from rich.live import Live

    from pagekv.client.cli.keypress import Keys

    for signum in (signal.SIGTERM, signal.SIGHUP):
        # Raises KeyboardInterrupt like Ctrl-C, so that screen and keyboard are given back.
        signal.signal(signum, signal.default_int_handler)
    with Keys() as keys:
        watcher.footer = "q or Ctrl-C ends this" if keys.are_read else "Ctrl-C ends this"
        # Before the screen is touched: a first frame that fails is an ordinary error.
        first = watcher.frame(fail=True)
        live = Live(first, console=console, screen=True, auto_refresh=False)
        try:
            # Not by `with`: an interrupt while that draws its first frame would leave the screen as it is.
            live.start(refresh=True)
            while not keys.wait_for(b"qQ", every_s):
                live.update(watcher.frame(), refresh=True)
        finally:
            live.stop()


class _Watcher:
    """Asks the manager for frames, and keeps the counters from which rates are computed."""

    def __init__(self, client: PageKVClient, target: str) -> None:
        from pagekv.client.cli.top_view import Look, TopRates

        self._client, self._target = client, target
        self._rates = TopRates()
        self._look: Look | None = None
        self._info: ModelInfo | None = None
        # Last line of every frame.
        self.footer = ""

    def frame(self, *, fail: bool = False) -> TopFrame:
        """The present state. A manager that does not answer is named in the frame, or is an error with `fail`."""
        from pagekv.client.cli.top_view import Look, TopFrame

        problem = ""
        try:
            self._info = self._client.model_info()
            self._look = Look(time.monotonic(), self._client.stats(), self._client.list_requests(REQUESTS))
            self._rates.add(self._look)
        except PageKVError as error:
            if fail:
                raise
            problem = f"trying again: {error}"
        return TopFrame(self._target, self._info, self._look, self._rates, problem, self.footer)
