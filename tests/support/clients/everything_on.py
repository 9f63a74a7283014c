"""Everything that watches, publishes and records, switched on: PAGEKV_TEST_EVERYTHING_ON=1 does so for every manager
that tests and chaos start (`make test-everything-on`), and they have to pass as without.
"""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from functools import cache
from pathlib import Path

ASKED_FOR = bool(os.environ.get("PAGEKV_TEST_EVERYTHING_ON"))


def flags(directory: Path, spans: str) -> list[str]:
    """Flags of a manager: sockets and files are in `directory`, which no other manager uses; spans go to `spans`. Not
    --page-text, which shows what tests of the page want hidden.
    """
    return [
        *("--gateway-api", "--kv-events", "--kv-events-endpoint", f"ipc://{directory}/events"),
        *("--kv-events-replay-endpoint", replays(directory), "--record-steps", str(directory / "steps")),
        *("--record", str(directory / "trace.jsonl"), "--otlp-endpoint", spans),
        *("--http-listen", "127.0.0.1:0"),
    ]


def replays(directory: Path) -> str:
    """Where events can be asked for again."""
    return f"ipc://{directory}/replays"


@cache
def spans_url() -> str:
    """A collector in this process, for as long as it lasts."""
    # Here, because a machine that starts managers and watches nothing may lack OpenTelemetry.
    from support.clients.otlp_collector import collector

    opened = ExitStack()
    atexit.register(opened.close)
    return opened.enter_context(collector()).url
