"""Asks a gRPC server for its health: `python -m pagekv.common.probe HOST:PORT`.

Exit status 0: serving. 1: not serving, or no answer in time (the reason is on standard error). 2: wrong usage.
Container health checks run it, so it needs no more than the light client's dependencies.

Health needs no identity. But a server with mutual TLS accepts no connection without a certificate; any certificate that
its authority signed will do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekv.common.flags import FlagParser, address, number, variable_of
from pagekv.common.loopback import authority_options

# Flags of TLS; their environment variables are the same for every client.
_FILES = ("ca", "client-cert", "client-key")


def check(
    target: str,
    service: str = "",
    timeout_s: float = 5.0,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
) -> str:
    """The status name of `service` at `target` ("" is the whole server), such as SERVING; with `credentials` over TLS.
    `server_name`: the name that the server's certificate has to bear, where that is not the host of `target`. Raises
    grpc.RpcError.
    """
    # A proxy that is configured for the internet cannot reach a server of the local network.
    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0), *authority_options(target)]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    if credentials is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        channel = grpc.secure_channel(target, credentials, options=options)
    with channel:
        request = health_pb2.HealthCheckRequest(service=service)
        response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the reason if the server does not serve; returns the exit status, see the top of this module."""
    # An empty variable counts as not set.
    env = {name: text for name in map(variable_of, _FILES) if (text := os.environ.get(name))}
    parser = FlagParser("python -m pagekv.common.probe", "Asks a gRPC server for its health.", env=env)
    variables = ", ".join(map(variable_of, _FILES))
    parser.epilog = f"Exit status: 0 serving, 1 not serving or no answer, 2 wrong usage. Environment: {variables}."
    parser.add_argument("target", type=address, metavar="HOST:PORT", help="where the server listens; or unix:/path")
    parser.flag("service", "full name of one service; empty for the whole server", default="")
    parser.flag("timeout-s", "seconds to wait for an answer", default=5.0, type=number(0.1, 600))
    words = "authority that signed the server's certificate (PEM); this flag or a certificate means TLS"
    parser.flag("ca", words, default="", metavar="FILE")
    words = "certificate to present (PEM), if the server requires one (mutual TLS)"
    parser.flag("client-cert", words, default="", metavar="FILE")
    parser.flag("client-key", "private key of the certificate, without a passphrase (PEM)", default="", metavar="FILE")
    words = "name that the server's certificate must have; empty: the host of the address"
    parser.flag("server-name", words, default="", metavar="NAME")
    args: argparse.Namespace = parser.parse(argv)
    try:
        status = check(args.target, args.service, args.timeout_s, _credentials(parser, vars(args)), args.server_name)
    except grpc.RpcError as error:
        # Every call error of a blocking stub is a grpc.Call too.
        reason = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        print(f"{args.target}: {reason}", file=sys.stderr)
        return 1
    if status != "SERVING":
        print(f"{args.target}: {status}", file=sys.stderr)
        return 1
    return 0


def _credentials(parser: FlagParser, given: Mapping[str, Any]) -> grpc.ChannelCredentials | None:
    """Credentials from the files that the flags name; None without files. Ends the process with status 2 if a file
    cannot be read, or if only one of certificate and key is given.
    """
    pem: dict[str, bytes] = {}
    for name in _FILES:
        path = given[name.replace("-", "_")]
        try:
            if path:
                pem[name] = Path(path).read_bytes()
        except OSError as error:
            parser.error(f"argument --{name}: {path}: {error.strerror}")
    for name, other in (("client-cert", "client-key"), ("client-key", "client-cert")):
        if name in pem and other not in pem:
            parser.error(f"argument --{name}: needs --{other}, too")
    if not pem:
        return None
    return grpc.ssl_channel_credentials(pem.get("ca"), pem.get("client-key"), pem.get("client-cert"))


if __name__ == "__main__":
    sys.exit(main())
