"""How the clients connect: address, credentials, channel options."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from pagekv.common.errors import InvalidRequest
from pagekv.common.keepalive import keepalive_options
from pagekv.common.loopback import authority_options, is_local

DEFAULT_TARGET = "127.0.0.1:50051"
TARGET_VARIABLE = "PAGEKV_TARGET"
# Schemes of addresses for other programs, such as the gateway's: gRPC would take the whole address for a host name.
_URL = re.compile(r"(https?|grpcs?|tcp)://", re.IGNORECASE)
# gRPC uses 443 if the port is missing, and for a port out of bounds it only says that nothing is there.
_WITHOUT_PORT = re.compile(r"[\w.-]+:?|\[[^]]*\]:?")
_PORT = re.compile(r"(?!unix:)(?:[\w.-]+|\[[^]]*\]):(\d+)")

# Most milliseconds between two connection attempts (gRPC adds up to a fifth at random), and most milliseconds of one
# attempt, which may hang if a machine accepts the connection but no process answers. A stream that is resumed waits for
# both.
LONGEST_BACKOFF_MS = 500
ATTEMPT_MS = 2_000
# Calls that gRPC itself repeats when the connection fails. Abort and UnpinPrefix could be repeated, too, but if the
# connection broke after the first had been carried out, the answer would say that nothing was there to end.
_REPEATED = {
    "InferenceService": ("Tokenize", "Detokenize", "GetModelInfo"),
    "CacheService": ("LookupPrefix", "ExplainPrefix", "PinPrefix", "ListPins"),
    # WatchEvents only until its first message has come.
    "OperatorService": ("GetStats", "ListRequests", "GetBlockTable", "ListBlocks", "WatchEvents", "ListTenants"),
}
_RETRY = {
    "maxAttempts": 3,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_RETRIED = [
    {"service": f"pagekv.v1.{service}", "method": method}
    for service, methods in _REPEATED.items()
    for method in methods
]
_SERVICE_CONFIG = {"methodConfig": [{"name": _RETRIED, "retryPolicy": _RETRY}]}


def target_or_default(target: str | None) -> str:
    """The address given, else that of the environment, else the default. Raises InvalidRequest."""
    source = ""
    if target is None:
        # A variable that is empty is none.
        target, source = os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET, f" (from {TARGET_VARIABLE})"
    # A path of its own would be looked up as the name of a host.
    if not isinstance(target, str) or not target or target.startswith("/") or not target.isprintable():
        raise InvalidRequest("target", f"must be host:port or unix:/path, is {target!r:.80}{source}")
    if scheme := _URL.match(target):
        problem = f"must be host:port or unix:/path, without {scheme[0]}, is {target!r:.80}{source}"
        raise InvalidRequest("target", problem)
    port = _PORT.fullmatch(target)
    if _WITHOUT_PORT.fullmatch(target) or (port and not 1 <= int(port[1][:6]) <= 65535):
        problem = f"must be host:port with a port from 1 to 65535, or unix:/path, is {target!r:.80}{source}"
        raise InvalidRequest("target", problem)
    return target


def channel_options(target: str) -> list[tuple[str, Any]]:
    """Options of a channel to `target`, for sync and asyncio channels alike."""
    options: list[tuple[str, Any]] = [
        # The longest answer has every token with its log-probabilities; the server bounds both.
        ("grpc.max_receive_message_length", 64 * 2**20),
        # Also in the middle of a stream, a host that dies is noticed within half a minute, a process that hangs within
        # 40 s.
        *keepalive_options(20_000),
        # gRPC's own pauses between connection attempts grow to two minutes; a restarted server is back in seconds.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", LONGEST_BACKOFF_MS),
        # In spite of its name this is the time limit of one attempt.
        ("grpc.min_reconnect_backoff_ms", ATTEMPT_MS),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
        *authority_options(target),
    ]
    if is_local(target):
        # A proxy configured for the internet cannot reach this machine's own loopback.
        options.append(("grpc.enable_http_proxy", 0))
    return options
