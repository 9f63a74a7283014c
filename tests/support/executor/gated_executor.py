"""An executor process whose steps wait at a gate (`support/clients/gate.py`): the real one but for that. A script with
the executor's flags.

GATE: path of the gate.
"""

from __future__ import annotations

import os
import sys

from pagekv.executor import server
from pagekv.executor.backend.interface import Backend, Launch, Scheduled
from pagekv.executor.config import ExecutorConfig

_load_backend = server.load_backend
# Not blocking, for to open it would wait for a writer; a read is to wait.
_gate = os.open(os.environ["GATE"], os.O_RDONLY | os.O_NONBLOCK)
os.set_blocking(_gate, True)


def load_backend(config: ExecutorConfig) -> Backend:
    """Instead of the server's."""
    backend = _load_backend(config)
    launch = backend.launch

    def launch_when_open(scheduled: list[Scheduled]) -> Launch:
        os.read(_gate, 1)
        return launch(scheduled)

    backend.launch = launch_when_open  # type: ignore[method-assign]  # whichever backend the flags name
    return backend


if __name__ == "__main__":
    server.load_backend = load_backend
    sys.exit(server.main())
