"""`pagekv lookup`, `explain`, `pin`, `pins`, `unpin` and `watch`: the prefix cache in detail."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from itertools import groupby

from pagekv.client.cli.connection_flags import add_connection, connect
from pagekv.client.cli.parser import (
    CommandParser,
    Subparsers,
    add_command,
    add_identity,
    add_prompt,
    read_identity,
    read_prompt,
)
from pagekv.client.cli.query import Ask, Shown, add_query
from pagekv.client.cli.terminal import Terminal, table
from pagekv.client.client import PageKVClient
from pagekv.client.errors import NotFound
from pagekv.client.types import (
    BlockExplanation,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    TableCleared,
    Tier,
    UnknownEvent,
)
from pagekv.common.flags import integer, number

# Number of block ids shown if they are not consecutive, and digits of a hash.
SHOWN_IDS = 8
SHOWN_HASH = 16

WATCH_EXAMPLES = """\
  pagekv watch
  pagekv watch --tokens --progress 60
  pagekv watch --limit 1 --json        the prefix tables now, and no more
"""


def add(commands: Subparsers) -> None:
    text = '"In the beginning God created the heaven"'
    _add_about_prompt(commands, "lookup", "say how much of a prompt is cached now", lookup, text)
    help = "say block by block why a prompt hits the cache or misses"
    _add_about_prompt(commands, "explain", help, explain, text)
    text = '"You are a helpful assistant." --lease 3600'
    parser = _add_about_prompt(commands, "pin", "protect the cached blocks of a prompt from eviction", pin, text)
    parser.add_argument(
        "--lease",
        type=integer(1, 86_400),
        default=600,
        metavar="S",
        help="seconds until the pin ends, 1 to 86400 [600]",
    )
    parser.add_argument("--pin-id", default="", metavar="ID", help="id of the pin; a pin with this id is renewed")
    add_query(commands, "pins", "list the pins that have not ended", pins)
    parser = add_query(commands, "unpin", "end a pin before its lease is over", unpin)
    parser.add_argument("pin_id", metavar="PIN_ID")
    parser = add_command(
        commands, "watch", "show what enters and leaves the prefix tables, until Ctrl-C", watch, examples=WATCH_EXAMPLES
    )
    add_connection(parser, timeout=None)
    parser.add_argument(
        "--progress", type=number(1, 3600), metavar="S", help="after S seconds without a change print a line, 1 to 3600"
    )
    parser.add_argument("--tokens", action="store_true", help="also print the token ids of each block")
    parser.add_argument(
        "--limit", type=integer(1, 2**31), metavar="N", help="end after N batches; the snapshot is the first"
    )


def _add_about_prompt(commands: Subparsers, name: str, help: str, ask: Ask, example: str) -> CommandParser:
    parser = add_query(commands, name, help, ask, examples=f"  pagekv {name} {example}\n")
    add_prompt(parser)
    add_identity(parser)
    return parser


def lookup(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    found = client.lookup_prefix(read_prompt(args), **read_identity(args))
    cached = found.device_tokens + found.host_tokens
    lines = [
        f"{cached} of {found.prompt_tokens} tokens cached ({cached / max(found.prompt_tokens, 1):.0%}): "
        f"{found.device_tokens} on the device, {found.host_tokens} on the host"
    ]
    if found.partial_tokens:
        which = "1 more token is" if found.partial_tokens == 1 else f"{found.partial_tokens} more tokens are"
        lines.append(f"{which} at the beginning of a cached block, and would be reused by copying that block")
    if found.block_ids:
        lines.append(f"blocks {' '.join(map(str, found.block_ids))}")
    return Shown(found, "\n".join(lines))


def explain(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """Explains a prompt. Neighbouring blocks with the same outcome and reason share a row."""
    found = client.explain_prefix(read_prompt(args), **read_identity(args))
    share = found.cached_tokens / max(found.prompt_tokens, 1)
    runs = (list(run) for _, run in groupby(enumerate(found.blocks), key=lambda item: _story(item[1])))
    rows = [_row([index for index, _ in run], [block for _, block in run]) for run in runs]
    head = f"{found.cached_tokens} of {found.prompt_tokens} tokens cached in full blocks ({share:.0%})"
    return Shown(found, f"{head}\n{table(rows, ('blocks', 'tokens', 'outcome', 'why'), width=terminal.out_columns)}")


def _story(block: BlockExplanation) -> tuple[str, str]:
    """Outcome and reason of a block; equal for blocks that share a row."""
    numbered = block.outcome in ("hit", "unreachable") and block.block_id is not None
    return block.outcome, "" if numbered else block.reason


def _row(indices: list[int], blocks: list[BlockExplanation]) -> tuple[str, str, str, str]:
    first, last = blocks[0], blocks[-1]
    where = str(indices[0]) if len(blocks) == 1 else f"{indices[0]}-{indices[-1]}"
    why = first.reason
    if len(blocks) > 1 and first.block_id is not None:
        why = f"cached in blocks {_ids([block.block_id for block in blocks if block.block_id is not None])}"
        if first.outcome == "unreachable":
            why += ", but a block before them is not"
    return where, f"{first.start}-{last.end - 1}", first.outcome.replace("_", " "), why


def _ids(ids: list[int]) -> str:
    if ids == list(range(ids[0], ids[0] + len(ids))):
        return f"{ids[0]} to {ids[-1]}"
    shown = " ".join(map(str, ids[:SHOWN_IDS]))
    return shown if len(ids) <= SHOWN_IDS else f"{shown} and {len(ids) - SHOWN_IDS} more"


def pin(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    """Raises NotFound when nothing of the prompt was cached."""
    made = client.pin_prefix(read_prompt(args), args.lease, pin_id=args.pin_id, **read_identity(args))
    if not made.pin_id:
        raise NotFound(
            "nothing pinned: no full block of this prompt is cached; generate from it first (a manager with "
            "--no-prefix-cache caches nothing)"
        )
    return Shown(made, f"{made.pin_id}: {made.pinned_tokens} tokens pinned for {args.lease} s")


def pins(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    found = client.list_pins()
    rows = [
        (pin.pin_id, pin.pinned_tokens, pin.namespace or "-", pin.adapter or "-", _until(pin.expire_time))
        for pin in found
    ]
    text = table(rows, ("pin", "tokens", "namespace", "adapter", "until")) if rows else "no pins"
    return Shown({"pins": found}, text)


def _until(time: datetime | None) -> str:
    """A time in the local time zone."""
    return time.astimezone().strftime("%Y-%m-%d %H:%M:%S") if time is not None else "-"


def unpin(client: PageKVClient, args: argparse.Namespace, terminal: Terminal) -> Shown:
    tokens = client.unpin_prefix(args.pin_id)
    text = f"{tokens} tokens unpinned" if tokens else "no such pin, or its lease has ended"
    return Shown({"unpinned_tokens": tokens}, text)


def watch(args: argparse.Namespace, terminal: Terminal) -> int:
    """A line for each event after the snapshot; a JSON value for each message."""
    ended = 0
    blocks: Counter[Tier] = Counter()
    with connect(args) as client:
        # Scripts read JSON, and can skip fields that they do not want.
        watched = client.watch_events(
            token_ids=args.tokens or args.json, snapshot_only=args.limit == 1, progress_interval=args.progress
        )
        for batch in watched:
            if args.json:
                terminal.json({**asdict(batch), "events": [_event_json(event) for event in batch.events]})
            elif batch.snapshot:
                blocks.update(event.tier for event in batch.events if isinstance(event, BlockStored))
                if not batch.more:
                    on_host = f", {blocks['host']} in the host pool's" if blocks["host"] else ""
                    terminal.print(
                        f"{blocks['device']} blocks in the device's prefix table{on_host}; revision {batch.revision}"
                    )
            elif not batch.events:
                terminal.print(f"nothing changed since revision {batch.revision}")
            if not args.json and (args.tokens or not batch.snapshot):
                for line in _lines(batch, args.tokens):
                    terminal.print(line)
            ended += not batch.more and (batch.snapshot or bool(batch.events))
            if ended == args.limit:
                watched.close()
    return 0


_EVENTS = {BlockStored: "stored", BlockRemoved: "removed", TableCleared: "cleared", UnknownEvent: "unknown"}


def _event_json(event: Event) -> dict[str, object]:
    return {"event": _EVENTS[type(event)], **asdict(event)}


def _lines(batch: EventBatch, tokens: bool) -> Iterator[str]:
    for event in batch.events:
        if isinstance(event, BlockStored):
            ids = f": {' '.join(map(str, event.token_ids))}" if tokens else ""
            after = event.parent_hash[:SHOWN_HASH]
            yield f"stored   {event.tier:<6}  {event.block_hash[:SHOWN_HASH]} after {after}{ids}"
        elif isinstance(event, BlockRemoved):
            yield f"removed  {event.tier:<6}  {event.block_hash[:SHOWN_HASH]}"
        else:
            yield _EVENTS[type(event)]
