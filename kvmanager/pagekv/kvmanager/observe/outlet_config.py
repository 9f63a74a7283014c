"""Flags of what the manager publishes and records for other programs. All of it is off by default."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from pagekv.common.flags import FlagParser, integer

MAX_TOPIC_BYTES = 255


@dataclass(frozen=True, slots=True)
class OutletConfig:
    """Checked values; meanings and bounds as in `pagekv-manager --help`. Empty: off."""

    kv_events: bool = False
    kv_events_endpoint: str = "tcp://127.0.0.1:5557"
    kv_events_replay_endpoint: str = ""
    kv_events_topic: str = ""
    kv_events_buffer: int = 10_000
    kv_events_token_ids: bool = True
    record: str = ""
    record_steps: str = ""


_OFF = OutletConfig()


def add_flags(parser: FlagParser) -> None:
    """Adds them to the manager's."""
    parser.switch(
        "kv-events",
        "publish what enters and leaves the prefix tables over ZeroMQ as vLLM's KV events; every namespace's, with "
        "token ids unless --no-kv-events-token-ids (needs pagekv[observe])",
        default=False,
    )
    parser.flag(
        "kv-events-endpoint",
        "where to publish them; port 0 takes a free one",
        default=_OFF.kv_events_endpoint,
        type=zmq_endpoint,
        metavar="tcp://HOST:PORT",
        needs="kv-events",
    )
    parser.flag(
        "kv-events-replay-endpoint",
        "where subscribers ask for events that they missed; empty: nowhere",
        default="",
        type=zmq_endpoint,
        metavar="tcp://HOST:PORT",
        needs="kv-events",
    )
    parser.flag(
        "kv-events-topic",
        "topic of the events, up to 255 bytes",
        default="",
        type=_topic,
        metavar="TOPIC",
        needs="kv-events",
    )
    parser.flag(
        "kv-events-buffer",
        "batches of events, 1 to 1000000, that can be asked for again",
        default=_OFF.kv_events_buffer,
        type=integer(1, 10**6),
        metavar="N",
        needs="kv-events",
    )
    parser.switch("kv-events-token-ids", "events name the tokens of each block", default=True, needs="kv-events")
    parser.flag(
        "record",
        "file to write a trace of the requests to, as JSONL in Mooncake's format, with salted hashes in place of "
        "prompts; a file that is there is kept, and this one gets a number behind its name",
        default="",
        metavar="FILE",
    )
    parser.flag(
        "record-steps",
        "file to write every decision to, for `pagekv replay --steps`; it holds the token ids of all prompts and "
        "outputs; as with --record a file that is there is kept",
        default="",
        metavar="FILE",
    )


def from_args(args: argparse.Namespace) -> OutletConfig:
    """What was parsed."""
    return OutletConfig(**{name: getattr(args, name) for name in OutletConfig.__slots__})


def zmq_endpoint(text: str) -> str:
    """A type for `tcp://host:port`, or `ipc://path`; empty for none."""
    kind, found, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    is_tcp = kind == "tcp" and host and port.isascii() and port.isdigit() and int(port) <= 65535
    if text and not (found and (is_tcp or (kind == "ipc" and rest))):
        raise argparse.ArgumentTypeError(
            f"must be tcp://host:port with a port from 0 to 65535, or ipc://path, got {text!r}"
        )
    return text


def _topic(text: str) -> str:
    if len(text.encode()) > MAX_TOPIC_BYTES:
        raise argparse.ArgumentTypeError(f"must be up to {MAX_TOPIC_BYTES} bytes, has {len(text.encode())}")
    return text
