"""Freed memory stays with the process, up to a bound."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest
from support.clients.stack import environment

from pagekv.common.freed_memory import keep_freed_memory

CODE = """
from pathlib import Path
from pagekv.common.freed_memory import keep_freed_memory

def resident_mib():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024

keep_freed_memory(KEPT * 2**20)
before = resident_mib()
for mib in (8, 100):
    buffer = b"x" * (mib * 2**20)
    del buffer
    print(round((resident_mib() - before) / mib, 1))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
@pytest.mark.parametrize(("kept", "wanted"), [(64, ["1.0", "0.1"]), (1024, ["1.0", "1.0"]), (1, ["0.0", "0.0"])])
def test_as_much_is_kept_as_allowed(kept: int, wanted: list[str]) -> None:
    command = [sys.executable, "-c", CODE.replace("KEPT", str(kept))]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == wanted, done.stderr


def test_an_older_library_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes nothing is left as it is."""
    for most, wanted in ((2**30, [(-3, 2**27), (-1, 2**27)]), (2**25, [(-3, 2**25), (-1, 2**27)]), (0, [])):
        taken: list[tuple[int, int]] = []

        class Library:
            def mallopt(self, name: int, value: int, most: int = most, taken: list[tuple[int, int]] = taken) -> int:
                if name == -3 and value > most:
                    return 0
                taken.append((name, value))
                return 1

        monkeypatch.setattr(ctypes, "CDLL", lambda _, library=Library: library())
        keep_freed_memory(2**27)
        assert taken == wanted
