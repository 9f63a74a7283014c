"""`pagekv`: the command line. EXIT_STATUS says what its exit status means."""

from __future__ import annotations

import difflib
import errno
import io
import logging
import os
import sys
from argparse import SUPPRESS, _SubParsersAction
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from textwrap import fill

# gRPC's core writes notices and warnings to standard error, although everything that matters is raised as an exception.
# The variable is read once, while gRPC is imported. Processes that `up` starts inherit it: with ERROR gRPC's core would
# write bytes from any client into their logs.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from pagekv.client.cli.commands import (
    bench,
    certs,
    chat,
    completion,
    demo,
    generate,
    keys,
    plan,
    pool,
    prefix,
    replay,
    server,
    stats,
    tenants,
    tokenize,
    top,
    up,
)
from pagekv.client.cli.connection_flags import VALUE_FLAGS
from pagekv.client.cli.failures import EXIT_STATUS, Failure, as_json, exit_status
from pagekv.client.cli.parser import CommandParser, UsageError
from pagekv.client.cli.terminal import Terminal
from pagekv.client.errors import PageKVError
from pagekv.client.launcher.errors import StackError
from pagekv.common.flags import add_version, help_width

EXAMPLES = """\
  pagekv demo                              see it work: starts everything, generates, stops
  pagekv up                                start an executor and a KV-manager here
  pagekv generate "In the beginning"       text from a prompt, as it arrives
  pagekv explain "In the beginning"        why a prompt hits the prefix cache or misses
  pagekv bench --concurrency 8             measure a running stack
  pagekv plan demo --memory 1GiB           what fits, before anything runs
"""
# Errors of a write to a stream that accepts no more: its reader, such as `head`, has ended, or its disk is full or
# broken.
_TAKES_NO_MORE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
DESCRIPTION = "PageKV: a paged KV cache server for large language models, its client and its tools."
# The commands as the help shows them.
GROUPS = {
    "run": ("demo", "up"),
    "use": ("generate", "chat", "tokenize", "detokenize"),
    "look": (
        "health", "version", "model", "stats", "top", "requests", "tenants", "blocks", "block-table", "lookup",
        "explain", "watch",
    ),
    "steer": ("pin", "pins", "unpin", "abort", "reset-cache"),
    "secure": ("certs", "keys"),
    "tools": ("bench", "plan", "replay", "completion"),
}  # fmt: skip  # several names a line: one each would fill a screen


def make_parser(*, as_json: bool = False) -> CommandParser:
    """The parser of all commands. With `as_json` it reports wrong usage as one line of JSON."""
    parser = CommandParser("pagekv", DESCRIPTION)
    add_version(parser)
    parser.set_defaults(json=False)
    parser.usage = "pagekv [--json] [--target HOST:PORT] [--timeout S] COMMAND ..."
    # Without `prog` the usage of each command would begin with the whole line above.
    commands = parser.add_subparsers(prog="pagekv", metavar="COMMAND", required=True, help=SUPPRESS)
    modules = (
        *(demo, up, generate, chat, tokenize, server, stats, top, pool, prefix, tenants),
        *(certs, keys, bench, plan, replay),
    )
    for module in modules:
        module.add(commands)
    completion.add(commands, parser)
    for each in _parsers(parser):
        each.as_json = as_json
        each.elsewhere = {"other commands": [name.removeprefix("--") for name in VALUE_FLAGS]}
    parser.epilog = "\n".join([*_listed(commands.choices), "examples:", EXAMPLES, fill(EXIT_STATUS, help_width())])
    return parser


def _parsers(parser: CommandParser) -> Iterator[CommandParser]:
    """The parser, and those of its commands at any depth."""
    yield parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for each in action.choices.values():
                yield from _parsers(each)


def _listed(commands: Mapping[str, CommandParser]) -> Iterator[str]:
    yield "commands (pagekv COMMAND --help has the details):"
    for group, names in GROUPS.items():
        yield f"  {group}"
        for name in names:
            text = commands[name].description or ""
            shown = ", ".join((name, *up.ALIASES)) if name == "up" else name
            line = f"{shown:<12} {text[:1].lower()}{text[1:].removesuffix('.')}"
            yield fill(line, help_width(), initial_indent=" " * 4, subsequent_indent=" " * 17)
    yield ""


def command_first(argv: Sequence[str]) -> list[str]:
    """The arguments, with --json and the connection flags moved behind the command if they stood before it."""
    before: list[str] = []
    rest = list(argv)
    while rest and rest[0].partition("=")[0] in ("--json", *VALUE_FLAGS):
        option = rest.pop(0)
        # Flag and value become one argument: a command that does not know the flag must not take the value for its own.
        before.append(f"{option}={rest.pop(0)}" if option in VALUE_FLAGS and rest else option)
    return [*rest[:1], *before, *rest[1:]]


def _check_command(parser: CommandParser, argv: Sequence[str]) -> None:
    """Ends with status 2 if a flag before the command lacks its value, or the command is abbreviated or misspelt."""
    if argv and argv[-1] in VALUE_FLAGS and all(each.startswith("-") for each in argv):
        parser.error(f"argument {argv[-1]}: expected a value, and a command behind it")
    known = [*up.ALIASES, *(name for names in GROUPS.values() for name in names)]
    if argv and not argv[0].startswith("-") and argv[0] not in known:
        begun = [name for name in known if argv[0] and name.startswith(argv[0])]
        near = " or ".join(map(repr, begun or difflib.get_close_matches(argv[0], known, n=1)))
        parser.error(f"no command {argv[0]!r}" + (f"; did you mean {near}?" if near else ""))


def _prepare_streams() -> None:
    """Prepares the standard streams. Streams that were closed (`>&-`), which are None in Python, go to /dev/null. Input
    that is not UTF-8 is accepted here and refused later with the name of its field, like arguments of the command line.
    Characters that the encoding of standard output lacks are written as on standard error, such as \\u6f22.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # until the end of the process
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _ToTerminal(logging.Handler):
    """Warnings of the client library as lines on standard error, in the middle of what a command prints."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(logging.WARNING)
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self._terminal.aside(f"pagekv: {record.getMessage()}")


@contextmanager
def _showing_warnings(terminal: Terminal) -> Iterator[None]:
    library, handler = logging.getLogger("pagekv.client"), _ToTerminal(terminal)
    library.addHandler(handler)
    try:
        yield
    finally:
        library.removeHandler(handler)


def main(argv: Sequence[str] | None = None) -> int:
    given = command_first(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["help"]:
        given = [*given[1:2], "--help"]
    for_scripts = "--json" in given
    _prepare_streams()
    terminal = Terminal()
    try:
        parser = make_parser(as_json=for_scripts)
        _check_command(parser, given)
        args = parser.parse(given)
        # Scripts expect at most one line of JSON on standard error.
        with nullcontext() if for_scripts else _showing_warnings(terminal):
            status: int = args.run(args, terminal)
        return status
    except (UsageError, PageKVError, StackError) as error:
        return _failed(error, terminal, for_scripts)
    except KeyboardInterrupt:
        terminal.clear()
        terminal.end_line()
        return 130
    except OSError as error:
        if error.errno not in _TAKES_NO_MORE:
            raise
        # Nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1 if error.errno == errno.EPIPE else _failed(PageKVError(str(error)), terminal, for_scripts)


def _failed(failure: Failure, terminal: Terminal, for_scripts: bool) -> int:
    """Prints the reason, if standard error accepts it, and returns the exit status."""
    try:
        terminal.error(as_json(failure) if for_scripts else f"pagekv: {failure}")
    except OSError:
        # Otherwise Python would try again at exit, and end with another status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return exit_status(failure)
