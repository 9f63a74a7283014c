"""A part of the first half hour on a GPU with one step, whose process a test writes."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_first import tools
from gpu_first.records import PASSED, status_of
from gpu_first.runner import Run

SCRIPT = """
import sys, time
sys.path.insert(0, {path!r})
from gpu_first.records import Records, StepLog
name, records = sys.argv[1], Records(__import__("pathlib").Path(sys.argv[2]))
log = StepLog(records, name)
{body}
"""


def run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, **options: Any) -> tuple[bool, Run, str]:
    """A part of one step, whose process is this text."""
    script = tmp_path / "step.py"
    script.write_text(SCRIPT.format(path=str(Path(tools.__file__).parents[1]), body=body))

    def command_of(name: str, *args: str) -> list[str]:
        return [sys.executable, str(script), name, args[args.index("--records") + 1]]

    monkeypatch.setattr(tools, "step_command", command_of)
    said = io.StringIO()
    run = Run(1, tmp_path, "test GPU", out=said, only=("smallest",), **options)
    run.all()
    return status_of(run.records.read(), "smallest") == PASSED, run, said.getvalue()
