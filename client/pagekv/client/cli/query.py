"""Commands that call the manager once and show the answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from pagekv.client.cli.connection_flags import add_connection, connect
from pagekv.client.cli.parser import CommandParser, Subparsers, add_command
from pagekv.client.cli.terminal import Terminal
from pagekv.client.client import PageKVClient
from pagekv.client.errors import PageKVError


@dataclass(frozen=True, slots=True)
class Shown:
    """The answer of a command: a value for --json, text for people, a note after the text, and the failure with which
    the command ends after it has shown the answer.
    """

    value: Any
    text: str
    note: str = ""
    failure: PageKVError | None = None


Ask: TypeAlias = Callable[[PageKVClient, argparse.Namespace, Terminal], Shown]


def add_query(commands: Subparsers, name: str, help: str, ask: Ask, *, examples: str = "") -> CommandParser:
    def run(args: argparse.Namespace, terminal: Terminal) -> int:
        with connect(args) as client:
            shown = ask(client, args, terminal)
        if args.json:
            terminal.json(shown.value)
        else:
            terminal.print(shown.text)
            if shown.note:
                terminal.note(shown.note)
        if shown.failure is not None:
            raise shown.failure
        return 0

    parser = add_command(commands, name, help, run, examples=examples)
    add_connection(parser)
    return parser
