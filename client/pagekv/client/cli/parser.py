"""The parser that every subcommand is made with, and the arguments several of them share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pagekv.client.channel import DEFAULT_TARGET
from pagekv.client.cli.terminal import Terminal
from pagekv.client.client import PageKVClient
from pagekv.client.errors import PageKVError
from pagekv.client.generation_types import CacheControls
from pagekv.client.settings import DEFAULT_TIMEOUT_S
from pagekv.common.flags import FlagParser, address, number

Run: TypeAlias = Callable[[argparse.Namespace, Terminal], int]


class UsageError(Exception):
    """The command line is wrong in a way that only the command itself can see; the message says how."""


class CommandParser(FlagParser):
    """A FlagParser whose help ends with examples, printed as they are."""

    def __init__(self, prog: str, description: str = "", examples: str = "", **_: Any) -> None:
        # A variable that is empty is none, as in the client library.
        super().__init__(prog, description, {name: value for name, value in os.environ.items() if value})
        self.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100)
        self.epilog = f"examples:\n{examples}" if examples else None


Subparsers: TypeAlias = "argparse._SubParsersAction[CommandParser]"


def add_command(
    commands: Subparsers, name: str, help: str, run: Run, *, examples: str = "", aliases: Sequence[str] = ()
) -> CommandParser:
    """A subcommand with --json; `help` is one line without a full stop."""
    description = f"{help[0].upper()}{help[1:]}."
    parser = commands.add_parser(name, help=help, description=description, examples=examples, aliases=aliases)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--json", action="store_true", help="JSON on standard output, for scripts: keys are added, never renamed"
    )
    return parser


def add_flags(parser: argparse._ActionsContainer, *flags: tuple[str, Callable[[str], Any], Any, str, str]) -> None:
    """Adds flags with a value: name, type, default, what stands for the value, help."""
    for name, kind, default, metavar, help in flags:
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=help)


def add_target(parser: CommandParser, *, timeout: str | None = f"seconds to wait [{DEFAULT_TIMEOUT_S:g}]") -> None:
    """--target, and --timeout with its help unless that is None."""
    parser.flag(
        "target",
        "address of the PageKV manager, or PAGEKV_TARGET",
        default=DEFAULT_TARGET,
        type=address,
        metavar="HOST:PORT",
    )
    if timeout is None:
        parser.set_defaults(timeout=None)
    else:
        parser.add_argument("--timeout", type=number(0.001, 1e6), metavar="S", help=timeout)


@dataclass(frozen=True, slots=True)
class Shown:
    """The answer of a command: a value for --json, text for people, a note beside the text, and the failure that the
    command ends with after it has shown this.
    """

    value: Any
    text: str
    note: str = ""
    failure: PageKVError | None = None


def add_query(
    commands: Subparsers,
    name: str,
    help: str,
    ask: Callable[[PageKVClient, argparse.Namespace, Terminal], Shown],
    *,
    examples: str = "",
) -> CommandParser:
    """A subcommand that asks the manager at --target once and shows the answer."""

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
    add_target(parser)
    return parser


def connect(args: argparse.Namespace) -> PageKVClient:
    """The client for --target and --timeout. It asks once: scripts branch on the exit status, and people see why."""
    return PageKVClient(args.target, timeout=args.timeout or DEFAULT_TIMEOUT_S, max_retries=0)


def token_ids(text: str) -> list[int]:
    """An argparse type: token ids with commas or spaces between them."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids or min(ids) < 0:
        raise argparse.ArgumentTypeError(f"must be token ids with commas between them, such as 5,17,4, got {text!r}")
    return ids


def add_prompt(parser: CommandParser) -> None:
    """PROMPT and --token-ids."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text; - reads it from standard input")
    parser.add_argument("--token-ids", type=token_ids, metavar="IDS", help="token ids instead of text, such as 5,17,4")


def add_identity(parser: CommandParser) -> None:
    """--namespace and --adapter, which are part of the identity of cached blocks."""
    parser.add_argument("--namespace", default="", metavar="NAME", help="share cached prefixes within this namespace")
    parser.add_argument("--adapter", default="", metavar="ID", help="the adapter to answer with, if the model has it")


def read_identity(args: argparse.Namespace) -> dict[str, Any]:
    """The identity given, as arguments of the client's methods."""
    return {"cache": CacheControls(namespace=args.namespace), "adapter": args.adapter}


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt given. Raises UsageError unless there is exactly one."""
    if (args.prompt is None) == (args.token_ids is None):
        raise UsageError("one of PROMPT and --token-ids is required")
    if args.token_ids is not None:
        ids: list[int] = args.token_ids
        return ids
    return sys.stdin.read() if args.prompt == "-" else str(args.prompt)
