"""`pagekv top`: requests, blocks and rates of a running stack, updated in place."""

from __future__ import annotations

import argparse

from pagekv.client.cli.connection_flags import add_connection, connect
from pagekv.client.cli.keypress import pause
from pagekv.client.cli.parser import Subparsers, UsageError, add_command
from pagekv.client.cli.terminal import Terminal
from pagekv.common.flags import number

EXAMPLES = """\
  pagekv top
  pagekv top --target gpu-7:50051 --every 0.5
  pagekv top --once
  pagekv top --json --every 5             an object every 5 seconds
"""


def add(commands: Subparsers) -> None:
    parser = add_command(
        commands, "top", "watch requests, blocks and rates in the terminal, until q or Ctrl-C", run, examples=EXAMPLES
    )
    add_connection(parser)
    parser.add_argument("--every", type=number(0.1, 3600), default=1.0, metavar="S", help="seconds between frames [1]")
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one frame and end; without --json also if the output is not a terminal",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Shows frames until q or Ctrl-C; exit status 0. With --json Ctrl-C ends with 130."""
    try:
        from rich.console import Console

        from pagekv.client.cli.top_view import REQUESTS, TopWatcher, watch
    except ImportError as error:
        raise UsageError("pagekv top needs rich: pip install 'pagekv[top]'") from error
    with connect(args) as client:
        while args.json:
            terminal.json({"stats": client.stats(), "requests": client.list_requests(REQUESTS)})
            if args.once:
                return 0
            pause(args.every)
        console = Console(file=terminal.out)
        watcher = TopWatcher(client, client.target)
        try:
            if args.once or not console.is_terminal:
                console.print(watcher.frame(fail=True))
            else:
                watch(watcher, console, args.every)
        except KeyboardInterrupt:
            pass
    return 0
