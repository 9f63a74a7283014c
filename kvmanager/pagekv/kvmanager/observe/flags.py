"""Flags of the HTTP port, the gateway's API, KV events, recordings and tracing. Everything is off by default."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from pagekv.common.flags import flag, tcp_address

# A host name without a port.
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def _names(text: str) -> tuple[str, ...]:
    """A type for host names, in lower case; empty for none."""
    names = tuple(name.strip().lower() for name in text.split(",")) if text else ()
    if not all(_NAME.fullmatch(name) for name in names):
        raise argparse.ArgumentTypeError(f"must be names such as gpu1.example, with commas between them, got {text!r}")
    return names


def _collector(text: str) -> str:
    """A type for an http or https URL; empty for none."""
    if not text:
        return ""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"must be a URL such as http://127.0.0.1:4318, or empty, got {text!r}")
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else text


def zmq_endpoint(text: str) -> str:
    """A type for `tcp://host:port`, or `ipc://path`; empty for none."""
    tcp = re.fullmatch(r"tcp://.+:([0-9]+)", text)
    if text and not (re.fullmatch(r"ipc://.+", text) or (tcp and int(tcp[1]) <= 65535)):
        raise argparse.ArgumentTypeError(
            f"must be tcp://host:port with a port from 0 to 65535, or ipc://path, got {text!r}"
        )
    return text


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    """Checked values. Empty: off."""

    http_listen: str = flag(
        "address to serve HTTP on: the live page and /metrics; port 0 takes a free one; empty: none",
        default="",
        type=tcp_address,
        metavar="HOST:PORT",
    )
    # Requests have to name this host by a name that it knows, against DNS rebinding. Other names need this flag.
    http_names: tuple[str, ...] = flag(
        "further names of this machine that requests to the HTTP port may use, separated by commas",
        default="",
        type=_names,
        needs="http-listen",
        metavar="NAME,...",
    )
    page_text: bool = flag(
        "show the text in blocks on the live page, which is what others sent", default=False, needs="http-listen"
    )
    gateway_api: bool = flag(
        "also serve vllm.grpc.engine.VllmEngine, for an OpenAI gateway in front (needs pagekv[gateway])",
        default=False,
    )
    kv_events: bool = flag(
        "publish changes of the prefix tables over ZeroMQ as vLLM's KV events: of all namespaces, with token ids "
        "(needs pagekv[observe])",
        default=False,
    )
    kv_events_endpoint: str = flag(
        "address to publish KV events at; port 0 takes a free one",
        default="tcp://127.0.0.1:5557",
        type=zmq_endpoint,
        metavar="tcp://HOST:PORT",
        needs="kv-events",
    )
    kv_events_replay_endpoint: str = flag(
        "address where subscribers ask for events that they missed; empty: none",
        default="",
        type=zmq_endpoint,
        metavar="tcp://HOST:PORT",
        needs="kv-events",
    )
    record: str = flag(
        "file to write a workload trace to, as JSONL in Mooncake's format, with salted hashes instead of prompts; "
        "an existing file is kept, and the new one gets a number",
        default="",
        metavar="FILE",
    )
    record_steps: str = flag(
        "file to write every decision to, for `pagekv replay --steps`; it holds the token ids of all prompts and "
        "outputs; an existing file is kept, as with --record",
        default="",
        metavar="FILE",
    )
    otlp_endpoint: str = flag(
        "OpenTelemetry collector to send spans of every request to, over OTLP/HTTP; without a path /v1/traces is "
        "added; empty: none",
        default="",
        type=_collector,
        metavar="URL",
    )

    def event_endpoints(self) -> dict[str, str]:
        """Addresses of KV events and their replays, by the names of their flags. An empty address is none."""
        names = ("kv_events_endpoint", "kv_events_replay_endpoint") if self.kv_events else ()
        return {name.replace("_", "-"): getattr(self, name) for name in names}
