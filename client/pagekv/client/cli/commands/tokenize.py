"""`pagekv tokenize` and `detokenize`: text to token ids and back, with the tokenizer of the served model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pagekv.client.cli.parser import Subparsers, UsageError, add_prompt, read_prompt, token_ids
from pagekv.client.cli.query import Shown, add_query
from pagekv.client.cli.terminal import Terminal
from pagekv.client.client import PageKVClient
from pagekv.client.generation_types import ChatMessage

EXAMPLES = """\
  pagekv tokenize "In the beginning"
  pagekv tokenize - < story.txt
  pagekv tokenize --chat messages.json
"""


def add(commands: Subparsers) -> None:
    parser = add_query(
        commands, "tokenize", "show the token ids of a text or a conversation", tokenize, examples=EXAMPLES
    )
    add_prompt(parser)
    parser.add_argument(
        "--chat",
        type=Path,
        metavar="FILE",
        help='conversation instead of PROMPT: a JSON list of {"role": ..., "content": ...}',
    )
    parser = add_query(commands, "detokenize", "show the text of token ids", detokenize)
    parser.add_argument("token_ids", type=token_ids, metavar="IDS", help="token ids, such as 5,17,4")


def tokenize(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """Raises UsageError."""
    if (args.prompt, args.token_ids, args.chat).count(None) != 2:
        raise UsageError("exactly one of PROMPT, --token-ids and --chat is required")
    ids = client.tokenize(read_prompt(args) if args.chat is None else _conversation(args))
    return Shown({"token_ids": ids}, ",".join(map(str, ids)))


def _conversation(args: argparse.Namespace) -> list[ChatMessage]:
    """The messages of --chat. Raises UsageError."""
    try:
        return [ChatMessage(each["role"], each["content"]) for each in json.loads(args.chat.read_text("utf-8"))]
    except OSError as error:
        raise UsageError(f"--chat: {args.chat}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f'--chat: {args.chat}: must be a JSON list of {{"role": ..., "content": ...}}') from error


def detokenize(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    text = client.detokenize(args.token_ids)
    return Shown({"text": text}, text)
