"""Kernels under AddressSanitizer, in a process of their own: no access outside of what a launch was given.

Outside of it (the usual session) one test starts that process; inside, tests marked `sanitize` run, here and in the
other files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from host_build import SANITIZE, HostKernelError, HostLauncher, sanitizer_environment
from test_host_emulation import probe

HERE = Path(__file__).resolve().parent

if not SANITIZE:

    def test_kernels_touch_nothing_but_their_own() -> None:
        """Every test marked `sanitize`, under AddressSanitizer."""
        command = [sys.executable, "-m", "pytest", "-q", "-m", "sanitize", "-p", "no:cacheprovider", str(HERE)]
        result = subprocess.run(
            command, env=sanitizer_environment(), cwd=HERE.parents[1], capture_output=True, text=True, timeout=280
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
