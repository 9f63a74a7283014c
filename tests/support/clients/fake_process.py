"""Stands in for a server process in tests of `pagekv up`: serves health, and writes when it stops.

Usage: fake_process.py MODE JOURNAL --listen HOST:PORT [anything]. Modes: serve, die (after a line), deaf (ignores
SIGTERM), late (stops a second after SIGTERM), dielater (dies once the journal says so), refuse (says in the port file
why it cannot start), slow (says in the port file what it does until the journal says "go on"). The port file says as a
manager's what the flags ask for.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagekv.common.port_file import write_port_file


def value(flag: str) -> str:
    """The last word on the command line; empty where the flag is not given."""
    given = [word for before, word in zip(sys.argv, sys.argv[1:], strict=False) if before == flag]
    given += [word.partition("=")[2] for word in sys.argv if word.startswith(f"{flag}=")]
    return given[-1] if given else ""


def main() -> int:
    mode, journal = sys.argv[1], Path(sys.argv[2])
    listen = value("--listen")
    name = "manager" if "--executor" in sys.argv else "executor"
    print(f"hello from {name} {' '.join(sys.argv[3:])}", flush=True)
    if mode == "die":
        # A manager waits for the executor, so that a test finds one that can say how it was stopped.
        while name == "manager" and "executor started" not in journal.read_text():
            time.sleep(0.01)
        print("error: out of luck", file=sys.stderr, flush=True)
        return 7
    if mode == "refuse":
        write_port_file(Path(value("--port-file")), {"cannot_start": "--some-flag 7: must be less"})
        return 1
    if mode == "slow":
        write_port_file(Path(value("--port-file")), {"phase": {"name": "loading the weights", "percent": 34}})
        while not journal.exists() or "go on" not in journal.read_text():
            time.sleep(0.01)
    # Not an Event: its lock is not free where the handler interrupts a wait at the wrong moment.
    stops: list[int] = []
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else lambda signum, _: stops.append(signum))
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(listen)
    server.start()
    found: dict[str, object] = {"listen": listen}
    found |= {"http": value("--http-listen")} if value("--http-listen") else {}
    if endpoint := value("--kv-events-endpoint"):
        found["kv_events"] = {"endpoint": endpoint, "replay_endpoint": value("--kv-events-replay-endpoint")}
    found |= {"recordings": [value("--record")]} if value("--record") else {}
    write_port_file(Path(value("--port-file")), found)
    with journal.open("a") as file:
        file.write(f"{name} started {os.getpid()}\n")
    # Not before: a process that serves has said where it listens.
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    while not stops:
        time.sleep(0.02)
        if mode == "dielater" and "now die" in journal.read_text():
            return 3
    server.stop(0)
    time.sleep(1 if mode == "late" else 0.05)
    with journal.open("a") as file:
        file.write(f"{name} stopped\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
