"""`pagekv completion`: a script that completes commands, flags and their values in a shell."""

from __future__ import annotations

import argparse
from functools import partial

from pagekv.client.cli.parser import CommandParser, Subparsers, UsageError
from pagekv.client.cli.terminal import Terminal

EXAMPLES = """\
  source <(pagekv completion bash)                        in this shell
  pagekv completion bash > ~/.local/share/bash-completion/completions/pagekv
  pagekv completion zsh > ~/.zfunc/_pagekv                ~/.zfunc being in $fpath before compinit
"""
SHELLS = ("bash", "zsh")


def add(commands: Subparsers, parser: CommandParser) -> None:
    """Adds the subcommand. `parser` is the main parser with all `commands`."""
    help = "print a script that completes pagekv in a shell"
    own = commands.add_parser("completion", help=help, description=f"{help[0].upper()}{help[1:]}.", examples=EXAMPLES)
    own.add_argument("shell", choices=SHELLS, metavar="SHELL", help=" or ".join(SHELLS))
    own.set_defaults(run=partial(run, commands, parser))


def run(commands: Subparsers, parser: CommandParser, args: argparse.Namespace, terminal: Terminal) -> int:
    try:
        import shtab
    except ImportError as error:
        raise UsageError("pagekv completion needs shtab: pip install 'pagekv[completion]'") from error
    # The text is hidden only in the help, which lists the commands in its own groups.
    commands.help = "command"
    terminal.print(shtab.complete(parser, shell=args.shell))
    return 0
