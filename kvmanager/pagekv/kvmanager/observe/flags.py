"""Flags of what the manager shows to others beside its gRPC services. All of it is off by default, without a port the
page too.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from pagekv.common.flags import FlagParser, tcp_address
from pagekv.kvmanager.observe import outlet_config
from pagekv.kvmanager.observe.outlet_config import OutletConfig

# A host name without a port.
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    """Checked values; meanings and bounds as in `pagekv-manager --help`. Empty: off."""

    http_listen: str = ""
    gateway_api: bool = False
    otlp_endpoint: str = ""
    outlets: OutletConfig = field(default_factory=OutletConfig)
    page: bool = True
    page_text: bool = False
    http_names: tuple[str, ...] = ()

    @property
    def serves_page(self) -> bool:
        """The page needs a port."""
        return self.page and bool(self.http_listen)


def add_flags(parser: FlagParser) -> None:
    """Adds them to the manager's."""
    parser.flag(
        "http-listen",
        "address to serve HTTP on; port 0 takes a free one; empty: none",
        default="",
        type=tcp_address,
        metavar="HOST:PORT",
    )
    parser.flag(
        "http-names",
        "names that the HTTP port answers to besides this machine's, with commas between them",
        default=(),
        type=_names,
        needs="http-listen",
        metavar="NAME,...",
    )
    parser.switch("page", "serve the live page at / of the HTTP port", default=True)
    parser.switch(
        "page-text",
        "the live page shows what blocks hold, which is what others sent",
        default=False,
        needs="http-listen",
    )
    parser.switch(
        "gateway-api",
        "also serve vllm.grpc.engine.VllmEngine, for an OpenAI gateway in front (needs pagekv[gateway])",
        default=False,
    )
    outlet_config.add_flags(parser)
    parser.flag(
        "otlp-endpoint",
        "OpenTelemetry collector to send spans of every request to, over OTLP/HTTP; without a path /v1/traces is "
        "added; empty: none",
        default="",
        type=_collector,
        metavar="URL",
    )


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


def from_args(args: argparse.Namespace) -> ObserveConfig:
    """What was parsed."""
    return ObserveConfig(
        http_listen=args.http_listen,
        gateway_api=args.gateway_api,
        otlp_endpoint=args.otlp_endpoint,
        outlets=outlet_config.from_args(args),
        page=args.page,
        page_text=args.page_text,
        http_names=args.http_names,
    )
