"""Stacks of stand-ins (`fake_process.py`) for tests of what starts, watches and stops processes."""

from __future__ import annotations

import sys
from pathlib import Path

from pagekv.client.launcher.stack import StackConfig

FAKE = Path(__file__).with_name("fake_process.py")


def config(journal: Path, executor: str = "serve", manager: str = "serve", **changes: object) -> StackConfig:
    """An executor and a manager in these modes of the stand-in, on free ports."""
    values: dict[str, object] = {
        "port": 0,
        "executor_command": [sys.executable, str(FAKE), executor, str(journal)],
        "manager_command": [sys.executable, str(FAKE), manager, str(journal)],
    }
    return StackConfig(**(values | changes))  # type: ignore[arg-type]  # checked by the test's own use
