"""An executor process whose steps wait at a gate (`support/clients/gate.py`): the real one but for that. A script with
the executor's flags.

GATE: path of the gate.
"""

from __future__ import annotations

import os
import sys

from pagekv.executor import server
from pagekv.executor.session.epoch import Epoch, LaunchedStep
from pagekv.executor.session.step import Step

_launch = Epoch.launch
# Not blocking, for to open it would wait for a writer; a read is to wait.
_gate = os.open(os.environ["GATE"], os.O_RDONLY | os.O_NONBLOCK)
os.set_blocking(_gate, True)


def launch(epoch: Epoch, step: Step) -> LaunchedStep:
    """Instead of the epoch's; on the worker thread, so that everything but steps goes on."""
    os.read(_gate, 1)
    return _launch(epoch, step)


if __name__ == "__main__":
    # Steps of every backend.
    Epoch.launch = launch  # type: ignore[assignment,method-assign]  # a method, whose first argument is the epoch
    sys.exit(server.main())
