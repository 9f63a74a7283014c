"""The parser of every subcommand, and arguments that several subcommands share."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from textwrap import fill
from typing import Any, NoReturn, TypeAlias

from pagekv.client.cli.terminal import Terminal
from pagekv.client.generation_types import CacheControls
from pagekv.common.flags import FlagParser, help_width

Run: TypeAlias = Callable[[argparse.Namespace, Terminal], int]


class UsageError(Exception):
    """The command line is wrong in a way that only the command itself can see; the message says how."""


class CommandParser(FlagParser):
    """A FlagParser whose help ends with examples, printed unchanged."""

    def __init__(self, prog: str, description: str = "", examples: str = "", **_: Any) -> None:
        # A variable that is empty is none, as in the client library.
        super().__init__(
            prog, fill(description, help_width()), {name: value for name, value in os.environ.items() if value}
        )
        self.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=30, width=help_width()
        )
        self.epilog = f"examples:\n{examples}" if examples else None

    def error(self, message: str) -> NoReturn:
        """Ends like FlagParser; the message does not show a key that was given to a command without --api-key."""
        super().error(re.sub(r"(--api-key[= ])\S+", r"\1...", message))


Subparsers: TypeAlias = "argparse._SubParsersAction[CommandParser]"


def add_command(
    commands: Subparsers, name: str, help: str, run: Run, *, examples: str = "", aliases: Sequence[str] = ()
) -> CommandParser:
    """A subcommand with --json; `help` is one line without a full stop."""
    description = f"{help[0].upper()}{help[1:]}."
    parser = commands.add_parser(name, help=help, description=description, examples=examples, aliases=aliases)
    parser.set_defaults(run=run)
    help = "JSON on standard output, for scripts: keys are added, never renamed"
    # Without a default, because a nested subcommand would set the default again after the flag.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=help)
    return parser


def add_flags(parser: argparse._ActionsContainer, *flags: tuple[str, Callable[[str], Any], Any, str, str]) -> None:
    """Adds flags with a value: name, type, default, metavar, help."""
    for name, kind, default, metavar, help in flags:
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=help)


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
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="text; - reads it from standard input, without the newline at its end",
    )
    parser.add_argument("--token-ids", type=token_ids, metavar="IDS", help="token ids instead of text, such as 5,17,4")


def add_identity(parser: CommandParser) -> None:
    """--namespace and --adapter, which are part of the identity of cached blocks."""
    parser.add_argument("--namespace", default="", metavar="NAME", help="namespace whose cached blocks are used")
    parser.add_argument("--adapter", default="", metavar="ID", help="adapter to use, if the model has it")


def read_identity(args: argparse.Namespace) -> dict[str, Any]:
    """The identity given, as arguments of the client's methods."""
    return {"cache": CacheControls(namespace=args.namespace), "adapter": args.adapter}


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt from the command line, or from standard input without its last newline. Raises UsageError unless
    exactly one prompt is given, and if it cannot be read.
    """
    if (args.prompt is None) == (args.token_ids is None):
        raise UsageError("exactly one of PROMPT and --token-ids is required")
    if args.token_ids is not None:
        ids: list[int] = args.token_ids
        return ids
    # A shell does the same with the output of a command. A newline that is kept would be a token of the prompt.
    return from_input(sys.stdin.read).removesuffix("\n") if args.prompt == "-" else str(args.prompt)


def from_input(read: Callable[[], str]) -> str:
    """The text that `read` takes from standard input. Raises UsageError if the bytes are not in the encoding that
    Python was told to use.
    """
    try:
        return read()
    except ValueError as error:
        raise UsageError(f"standard input cannot be read as {sys.stdin.encoding}: {error}") from error
