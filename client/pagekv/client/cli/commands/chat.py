"""`pagekv chat`: a conversation that keeps its history, so that each turn's prompt is mostly cached."""

from __future__ import annotations

import argparse
import sys

from pagekv.client.cli.connection_flags import add_connection, connect
from pagekv.client.cli.parser import Subparsers, UsageError, add_command, add_identity, from_input
from pagekv.client.cli.sampling_flags import add_sampling, options_of
from pagekv.client.cli.streamed_answer import stream_to, summary
from pagekv.client.cli.terminal import Terminal
from pagekv.client.client import PageKVClient
from pagekv.client.errors import InvalidRequest, PageKVError
from pagekv.client.generation_types import ChatMessage

EXAMPLES = """\
  pagekv chat
  pagekv chat --system "You answer in one sentence." --temperature 0.7
  echo "Who made the heavens?" | pagekv chat --json
"""
HELP = "/help shows this, /reset begins a new conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def add(commands: Subparsers) -> None:
    parser = add_command(commands, "chat", "talk with the model; the history is kept", run, examples=EXAMPLES)
    add_connection(parser, timeout="seconds to wait for the whole answer [no limit]")
    add_identity(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_sampling(parser, max_tokens=256)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    first = [ChatMessage("system", args.system)] if args.system else []
    interactive = sys.stdin.isatty() and not args.json
    with connect(args) as client:
        info = client.model_info()
        if not info.has_chat_template:
            raise UsageError(f"the model {info.model_id or 'served'} has no chat template; use `pagekv generate`")
        if interactive:
            _enable_line_editing()
            terminal.note(f"{info.model_id} at {client.target}. {HELP}.")
        messages = list(first)
        while (line := _read_line(interactive)) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(first)
                if interactive:
                    terminal.note("A new conversation begins.")
            elif line == "/help" or (line.startswith("/") and interactive):
                terminal.note(HELP)
            elif line:
                _turn(client, messages, line, args, terminal, interactive)
    return 0


def _turn(
    client: PageKVClient,
    messages: list[ChatMessage],
    line: str,
    args: argparse.Namespace,
    terminal: Terminal,
    interactive: bool,
) -> None:
    """One exchange, added to `messages` if it succeeds; of an answer stopped by Ctrl-C the part that came is kept."""
    asked = ChatMessage("user", line)
    texts = list[str]()

    def show(text: str) -> None:
        texts.append(text)
        if not args.json:
            terminal.write(text)

    try:
        completion, watch = stream_to(show, client, [*messages, asked], options_of(args))
    except PageKVError as error:
        if not interactive:
            raise
        # An invalid request is usually a conversation longer than the context.
        hint = "/reset starts anew" if isinstance(error, InvalidRequest) else "the history is kept: ask again"
        terminal.error(f"pagekv: {error} ({hint})")
        return
    except KeyboardInterrupt:
        if not interactive:
            raise
        terminal.print()
        terminal.note("[stopped]")
    else:
        if args.json:
            terminal.json(completion)
        else:
            terminal.print()
            terminal.note(summary(completion, watch))
    messages += [asked, ChatMessage("assistant", "".join(texts))]


def _read_line(interactive: bool) -> str | None:
    """A line without blanks at its ends; None at the end of the input."""
    if interactive:
        try:
            return from_input(lambda: input("> ")).strip()
        except EOFError:
            print(file=sys.stderr)
            return None
    line = from_input(sys.stdin.readline)
    return line.strip() if line else None


def _enable_line_editing() -> None:
    try:
        import readline
    except ImportError:  # a Python without it still reads lines
        return
    readline.set_auto_history(True)
