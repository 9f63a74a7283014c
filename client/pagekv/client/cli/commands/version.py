"""`pagekv version`: the versions of the client and, where one answers, of the manager."""

from __future__ import annotations

import argparse

from pagekv.client.cli.parser import Subparsers, add_command, add_target, connect
from pagekv.client.cli.terminal import Terminal, table
from pagekv.client.errors import PageKVError, Unavailable
from pagekv.common.version import pagekv_version


def add(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "version", "show the versions of client and manager", run)
    add_target(parser)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """The client's version always; the manager's, or why it does not say. Exit status 0 either way."""
    server, why = "", ""
    try:
        with connect(args) as client:
            server = client.model_info().server_version
    except PageKVError as error:
        why = str(error)
        if isinstance(error, Unavailable):
            # A manager without an executor says its own.
            server = error.server_version
    if args.json:
        terminal.json({"client": pagekv_version(), "server": server or None})
        return 0
    terminal.print(table([("client", pagekv_version()), ("server", server or "unknown")]))
    if why:
        terminal.note(why)
    return 0
