"""The file of --port-file: one JSON line that says where a process listens, written once that is so.

    {"listen": "127.0.0.1:50051", "http": "127.0.0.1:8080", "kv_events": {"endpoint": "tcp://127.0.0.1:5557",
     "replay_endpoint": ""}, "recordings": ["/tmp/requests.jsonl"]}

Ports are those that were bound, where a flag asks for port 0. `listen` is always there and may be unix:/path; the other
keys are the manager's, each there only where its flag turns it on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def bound_address(listen: str, port: int) -> str:
    """`listen`, host:port or unix:/path, with the port that was bound."""
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"


def write_port_file(path: Path, listening: Mapping[str, Any]) -> None:
    """Writes the line so that a reader sees all of it or no file. Raises OSError."""
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(json.dumps(listening) + "\n")
    draft.replace(path)


def read_port_file(path: Path) -> dict[str, Any]:
    """The line in `path`; empty while there is no such file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    listening: dict[str, Any] = json.loads(text)
    return listening
