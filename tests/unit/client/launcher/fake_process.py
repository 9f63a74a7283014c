"""Stands in for a server process in tests of `pagekv up`: serves health, and writes when it stops.

Usage: fake_process.py MODE JOURNAL --listen HOST:PORT [anything]. Modes: serve, die (after a line), deaf (ignores
SIGTERM), dielater (dies once the journal says so).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main() -> int:
    mode, journal = sys.argv[1], Path(sys.argv[2])
    listen = sys.argv[sys.argv.index("--listen") + 1]
    name = "manager" if "--executor" in sys.argv else "executor"
    print(f"hello from {name} {' '.join(sys.argv[3:])}", flush=True)
    if mode == "die":
        # A manager waits for the executor, so that a test finds one that can say how it was stopped.
        while name == "manager" and "executor started" not in journal.read_text():
            time.sleep(0.01)
        print("error: out of luck", file=sys.stderr, flush=True)
        return 7
    stop = threading.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else lambda *_: stop.set())
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(listen)
    server.start()
    with journal.open("a") as file:
        file.write(f"{name} started {os.getpid()}\n")
    while not stop.wait(0.02):
        if mode == "dielater" and "now die" in journal.read_text():
            return 3
    server.stop(0)
    time.sleep(0.05)
    with journal.open("a") as file:
        file.write(f"{name} stopped\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
