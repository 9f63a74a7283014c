"""The first half hour on a GPU in tests: a part of one step whose process a test writes, and the whole as rehearsed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_first import tools
from gpu_first.records import PASSED, status_of
from gpu_first.rehearsal import SOURCES
from gpu_first.runner import ROOT, Run
from gpu_first.step import REHEARSAL

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


def rehearse(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Starts `python -m gpu_first` with these words as a rehearsal."""
    paths = os.pathsep.join(str(ROOT / name) for name in SOURCES)
    variables = {**os.environ, REHEARSAL: "1", "PYTHONPATH": paths, **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "gpu_first", *words],
        env=variables,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
