"""The folder of a process, and those of processes that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.clients.stack import environment

from pagekv.client.launcher import own_folder
from pagekv.client.launcher.own_folder import OwnFolder

PREFIX = "pagekv-test-"
# Makes a folder with a file in it, names it, and lives until its input ends.
OTHER = f"""
import sys
from pagekv.client.launcher.own_folder import OwnFolder
folder = OwnFolder({PREFIX!r})
(folder.path / "port").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR, in which folders are old at once."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(own_folder, "NEW_S", 0.0)
    return tmp_path


def test_a_folder_is_there_until_it_is_removed(temporary: Path) -> None:
    folder = OwnFolder(PREFIX)
    assert folder.path.parent == temporary
    (folder.path / "port").touch()
    for _ in range(2):
        folder.remove()
        assert list(temporary.iterdir()) == []


def test_the_folder_of_a_process_that_was_killed_is_removed(temporary: Path) -> None:
    """It stayed for ever."""
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        OwnFolder(PREFIX).remove()
        assert (left / "port").exists()
        other.kill()
    OwnFolder(PREFIX).remove()
    assert list(temporary.iterdir()) == []


def test_what_is_not_this_programs_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{PREFIX}file").touch()
    (temporary / f"{PREFIX}others").mkdir()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    OwnFolder(PREFIX).remove()
    assert len(list(temporary.iterdir())) == 4
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    # A new folder may be one that is not locked yet.
    OwnFolder(PREFIX).remove()
    assert len(list(temporary.iterdir())) == 4
    monkeypatch.setattr(own_folder, "NEW_S", 0.0)
    OwnFolder(PREFIX).remove()
    assert sorted(path.name for path in temporary.iterdir()) == ["elsewhere", f"{PREFIX}file", f"{PREFIX}link"]
