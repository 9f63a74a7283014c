"""Asks a gRPC server for its health: `python -m pagekv.common.probe HOST:PORT`.

Exit status 0: serving. 1: not serving, or no answer in time (the reason is on standard error). 2: wrong usage.
Container health checks run it, so it needs no more than the light client's dependencies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagekv.common.flags import FlagParser, address, number


def check(
    target: str, service: str = "", timeout_s: float = 5.0, credentials: grpc.ChannelCredentials | None = None
) -> str:
    """The status name of `service` at `target` ("" is the whole server), such as SERVING; with `credentials` over TLS.
    Raises grpc.RpcError.
    """
    # A proxy configured for the internet cannot reach a server of the local network.
    options = [("grpc.enable_http_proxy", 0)]
    if credentials is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        channel = grpc.secure_channel(target, credentials, options=options)
    with channel:
        request = health_pb2.HealthCheckRequest(service=service)
        response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the reason where the server does not serve; returns the exit status, see the top of this module."""
    parser = FlagParser("python -m pagekv.common.probe", "Asks a gRPC server for its health.", env={})
    parser.epilog = "Exit status: 0 serving, 1 not serving or no answer, 2 wrong usage."
    parser.add_argument("target", type=address, metavar="HOST:PORT", help="where the server listens; or unix:/path")
    parser.flag("service", "full name of one service; empty for the whole server", default="")
    parser.flag("timeout-s", "seconds to wait for an answer", default=5.0, type=number(0.1, 600))
    args: argparse.Namespace = parser.parse(argv)
    try:
        status = check(args.target, args.service, args.timeout_s)
    except grpc.RpcError as error:
        # Every call error of a blocking stub is a grpc.Call too.
        reason = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        print(f"{args.target}: {reason}", file=sys.stderr)
        return 1
    if status != "SERVING":
        print(f"{args.target}: {status}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
