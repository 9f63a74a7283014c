"""Kernels under AddressSanitizer, in a process of their own: no access outside of what a launch was given.

In the usual session one test starts that process; in it, the tests of this folder that are marked `sanitize` run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.kernels.host_build import SANITIZE, HostKernelError, HostLauncher, sanitizer_environment
from test_host_emulation import probe

HERE = Path(__file__).resolve().parent

if not SANITIZE:
    MARK = "@pytest.mark.sanitize"
    # Every kernel's own file in each run, in one order of threads: without AddressSanitizer the same tests run in both.
    # Nightly both orders, and the files that vary descriptors and splits.
    NIGHTLY = {"test_decode_faults", "test_decode_wide", "test_prefill_faults", "test_prefill_split"}
    NIGHTLY |= {"test_prefill_split_faults"}
    MARKED = [path for path in sorted(HERE.glob("test_*.py")) if MARK in path.read_text(encoding="utf-8")]
    # One process for all: six seconds of each go by before its first test.
    FILES = [
        pytest.param([path for path in MARKED if path.stem not in NIGHTLY], "not reversed", id="each run"),
        pytest.param(MARKED, "", id="nightly", marks=pytest.mark.nightly),
    ]

    @pytest.mark.long
    @pytest.mark.timeout(1800)  # every kernel is compiled once more
    @pytest.mark.parametrize(("files", "which"), FILES)
    def test_kernels_touch_nothing_but_their_own(files: list[Path], which: str) -> None:
        """The files' tests that are marked `sanitize`, under AddressSanitizer."""
        command = [sys.executable, "-m", "pytest", "-q", "-m", "sanitize", "-k", which, "-p", "no:cacheprovider"]
        environment = sanitizer_environment()
        result = subprocess.run(
            [*command, *map(str, files)], env=environment, cwd=HERE.parents[1], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-4000:]
        assert "passed" in result.stdout


if SANITIZE:
    READ = "out[0] = static_cast<const float*>(p.a)[p.which];"

    @pytest.mark.sanitize
    @pytest.mark.parametrize("index", [-1, 100, 10_000_000])
    def test_reading_beside_an_array_is_an_error(index: int) -> None:
        source = np.zeros(100, np.float32)
        for _ in range(2):  # the same place twice
            with pytest.raises(HostKernelError, match=r"AddressSanitizer: load|wrong address"):
                probe(READ, np.zeros(1, np.float32), source, which=index)
        probe(READ, np.zeros(1, np.float32), source, which=99)

    @pytest.mark.sanitize
    @pytest.mark.parametrize("body", [READ, "cp_async_16(shared, static_cast<const float*>(p.a) + p.which);"])
    def test_what_is_forbidden_is_an_error(body: str) -> None:
        """Blocks of a pool that a launch does not own."""
        launcher = HostLauncher()
        pool = np.zeros((4, 16), np.float32)
        with launcher.forbidden(pool[1], pool[3]):
            probe(body, np.zeros(1, np.float32), pool, which=2 * 16 + 12)
            with pytest.raises(HostKernelError, match=r"AddressSanitizer: (.|\n)*probe"):
                probe(body, np.zeros(1, np.float32), pool, which=16)
        probe(body, np.zeros(1, np.float32), pool, which=16)
