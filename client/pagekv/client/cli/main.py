"""`pagekv`: the command line. Exit status 0: done, 1: it failed (one line says why), 2: wrong usage, 130: Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# gRPC's core writes notices and warnings to standard error, although everything that matters is raised as an exception.
# The variable is read once, while gRPC is imported; processes that `up` starts inherit it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from pagekv.client.cli.commands import bench, chat, demo, generate, inspect, plan, prefix, replay, top, up
from pagekv.client.cli.parser import CommandParser, UsageError
from pagekv.client.cli.terminal import Terminal
from pagekv.client.errors import PageKVError
from pagekv.client.launcher.stack import StackError

EXAMPLES = """\
  pagekv demo                              see it work: starts everything, generates, stops
  pagekv up                                start an executor and a KV-manager here
  pagekv generate "In the beginning"       text from a prompt, as it arrives
  pagekv chat                              a conversation
  pagekv stats                             the KV pool, the prefix cache and the load
  pagekv top                               requests, blocks and rates, refreshing in place
  pagekv explain "In the beginning"        why a prompt hits the prefix cache or misses
  pagekv bench --concurrency 8             measure a running stack
  pagekv plan demo --memory 1GiB           what fits, before anything runs
  pagekv replay trace.jsonl --blocks 40000 what a recorded workload would see of a cache

Exit status: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C.
"""
DESCRIPTION = "PageKV: a paged KV cache server for large language models, its client and its tools."


def make_parser() -> CommandParser:
    """The parser of all commands."""
    parser = CommandParser("pagekv", DESCRIPTION, EXAMPLES)
    commands = parser.add_subparsers(
        title="commands (pagekv COMMAND --help has the details)",
        metavar="COMMAND",
        required=True,
        parser_class=CommandParser,
    )
    for module in (demo, up, generate, chat, inspect, top, prefix, bench, plan, replay):
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `pagekv`."""
    args = make_parser().parse(argv)
    terminal = Terminal()
    try:
        status: int = args.run(args, terminal)
        return status
    except UsageError as error:
        terminal.error(f"pagekv: {error}")
        return 2
    except PageKVError as error:
        terminal.error(f"pagekv: {error}")
        return 1
    except StackError as error:
        terminal.error(f"pagekv: {error}")
        return error.exit_status
    except KeyboardInterrupt:
        terminal.clear()
        return 130
    except BrokenPipeError:
        # The reader of our output, such as `head`, has gone. Nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
