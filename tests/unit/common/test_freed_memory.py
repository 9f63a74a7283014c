"""Freed memory stays with the process, up to a bound, until it is given back."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest
from support.clients.stack import environment

from pagekv.common.freed_memory import give_back_freed_memory, keep_freed_memory, share_heaps

CODE = """
from pathlib import Path
from pagekv.common.freed_memory import give_back_freed_memory, keep_freed_memory

def resident_mib():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024

keep_freed_memory(KEPT * 2**20)
before = resident_mib()
for mib in (32, 100):
    buffer = b"x" * (mib * 2**20)
    del buffer
    print((resident_mib() - before) / mib)
give_back_freed_memory()
print((resident_mib() - before) / mib)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
@pytest.mark.parametrize(("kept", "wanted"), [(64, [1.0, 0.32, 0.0]), (1024, [1.0, 1.0, 0.0]), (1, [0.0, 0.0, 0.0])])
def test_as_much_is_kept_as_allowed_until_it_is_given_back(kept: int, wanted: list[float]) -> None:
    """The last share may be below zero: giving back also takes what was free before."""
    command = [sys.executable, "-c", CODE.replace("KEPT", str(kept))]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert [float(share) for share in done.stdout.split()] == pytest.approx(wanted, abs=0.1), done.stderr


HEAPS = """
import ctypes, os, threading
from pagekv.common.freed_memory import share_heaps

if MOST:
    share_heaps(MOST)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.fdopen.restype = ctypes.c_void_p
meet = threading.Barrier(9)

def allocate():
    assert libc.malloc(1000)
    meet.wait(60)
    meet.wait(60)

for _ in range(8):
    threading.Thread(target=allocate).start()
# All of them are there at once.
meet.wait(60)
told, tell = os.pipe()
file = ctypes.c_void_p(libc.fdopen(tell, b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
with os.fdopen(told, "rb") as reader:
    print(reader.read().count(b"<heap "))
meet.wait(60)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_threads_share_heaps() -> None:
    counts = {}
    # As many heaps as the C library itself likes, where nobody asks for fewer.
    env = {key: value for key, value in environment().items() if key not in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")}
    for most in (0, 2):
        command = [sys.executable, "-c", HEAPS.replace("MOST", str(most))]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        counts[most] = int(done.stdout)
    assert counts[2] == 2
    # Without it there are more, on one core, too.
    assert counts[0] > 2


def test_a_library_without_the_setting_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    share_heaps(2)
    keep_freed_memory(2**27)
    give_back_freed_memory()


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
