"""The rehearsal in small: real steps over the emulated kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_first import page
from gpu_first.rehearsal import SOURCES, Stage, failing, without_tools
from gpu_first.runner import ROOT, STEP_OF
from gpu_first.step import FAIL, RUNNER
from support.executor.one_step_part import rehearse


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nothing_runs_on_when_the_runner_is_killed_and_no_two_runs_share_a_folder(tmp_path: Path) -> None:
    words = ("--only", "machine", "--folder", str(tmp_path), "--seconds", "3600", "--step-seconds", "3000")
    run = rehearse("1", *words, **{FAIL: "machine=hang"})
    while not _steps_of(tmp_path):
        assert run.poll() is None
        time.sleep(0.05)
    other = rehearse("1", "--folder", str(tmp_path))
    said, _ = other.communicate()
    assert (other.returncode, said) == (2, f"error: another run is under way in {tmp_path}\n")
    run.kill()
    run.communicate()
    while _steps_of(tmp_path):
        time.sleep(0.05)


@pytest.mark.parametrize(("runner", "said"), [(os.getpid(), "goes on\n"), (0, "")], ids=["lives", "killed before"])
def test_a_step_goes_on_only_while_its_runner_lives(runner: int, said: str) -> None:
    code = "from gpu_first import step; step.die_with_the_runner(); print('goes on')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in SOURCES), RUNNER: str(runner)}
    found = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, timeout=240)
    assert (found.returncode, found.stdout) == (0 if said else 1, said)


def _steps_of(folder: Path) -> list[Path]:
    mark = f"{STEP_OF}={folder}".encode()
    return [path for path in Path("/proc").glob("[0-9]*/environ") if mark in _read(path).split(b"\0")]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_rehearsal_in_small(tmp_path: Path) -> None:
    """An import, a fault of the device and a hang, then the same command again; and tools that are missing."""
    stage = Stage(tmp_path)
    faults = {"machine": "import", "smallest": "fault", "swap": "hang"}
    assert failing(1, faults, stage) == []
    assert (tmp_path / "failing-1" / page.PAGE).read_text().startswith("# The first half hour on a GPU")
    # FlashInfer is asked for in one function; `make gpu-rehearsal` plays both of its steps.
    assert without_tools(2, stage, leave_out=["flashinfer_prefill"]) == []
