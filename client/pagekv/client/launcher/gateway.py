"""The gateway `smg` as a process in front of managers: its command line, and whether it serves.

The extra `gateway` installs it. Only its command line is used; the HTTP API is the gateway's.
"""

from __future__ import annotations

import json
import math
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from pagekv.client.channel import channel_options
from pagekv.client.errors import from_rpc_error

# Policies to choose a manager; the gateway has more, which need further arguments.
POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", "least_load", "prefix_hash", "consistent_hashing")
DEFAULT_PORT = 8000
COMMAND = (sys.executable, "-P", "-m", "pagekv.client.launcher.gateway_process", "launch")
_ANSWER_S = 2.0
_GET_TOKENIZER = "/vllm.grpc.engine.VllmEngine/GetTokenizer"
# Seconds that a manager may take to read and pack the files of its tokenizer.
_TOKENIZER_S = 60.0


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """A gateway to be started in front of the managers."""

    # 0 takes a free one.
    port: int = DEFAULT_PORT
    policy: str = POLICIES[0]
    # Further arguments (`smg launch --help`).
    args: Sequence[str] = ()
    command: Sequence[str] = COMMAND


def gateway_args(
    config: GatewayConfig, target: str, metrics_target: str, managers: Sequence[str], grace_s: float
) -> list[str]:
    """The arguments to serve at `target`, with metrics at `metrics_target`, in front of `managers` (each host:port),
    which give running requests `grace_s` seconds at a stop, as the gateway then does.

    The gateway's defaults suit a fleet: three minutes for running requests, a minute between health checks and before a
    manager is tried again. On one machine with Ctrl-C these are too slow.
    """
    (host, _, port), (metrics_host, _, metrics_port) = target.rpartition(":"), metrics_target.rpartition(":")
    return [
        f"--host={host}",
        f"--port={port}",
        f"--prometheus-host={metrics_host}",
        f"--prometheus-port={metrics_port}",
        f"--policy={config.policy}",
        f"--shutdown-grace-period-secs={math.ceil(grace_s)}",
        "--health-check-interval-secs=5",
        "--cb-timeout-duration-secs=5",
        *config.args,
        "--worker-urls",
        *(f"grpc://{manager}" for manager in managers),
    ]


def serves(target: str, managers: int) -> bool:
    """Whether the gateway at host:port lists a model, has its tokenizer and knows this number of healthy managers."""
    try:
        state = _get(target, "/readiness")
        return int(state["healthy_workers"]) >= managers and bool(_get(target, "/v1/models")["data"])
    except (OSError, ValueError, KeyError):
        return False


def has_tokenizer(manager: str) -> bool:
    """Whether the manager at host:port has a tokenizer, which the gateway needs. The question uses the gateway's
    protocol, because the address may serve no other. Raises PageKVError if the manager refuses it.
    """
    options = [*channel_options(manager), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(manager, options=options) as channel:
        # Any: without a serializer the type stubs know no request type. The request is empty bytes, a message without
        # fields.
        begin: Any = channel.unary_stream(_GET_TOKENIZER)
        call = begin(b"", timeout=_TOKENIZER_S)
        try:
            # A manager that sends no answer has no tokenizer.
            if next(call, None) is None:
                return False
        except grpc.RpcError as error:
            if call.code() is grpc.StatusCode.FAILED_PRECONDITION:
                return False
            raise from_rpc_error(error, manager) from error
        finally:
            call.cancel()
    return True


def _get(target: str, path: str) -> Any:
    # Without proxies: a proxy from the environment cannot reach this machine's loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{target}{path}", timeout=_ANSWER_S) as answer:
        return json.load(answer)
