"""The CPU backend: transformers models over PageKV's paged block pool, with torch."""

import os

# Read once, when torch loads its OpenMP runtime. Its threads spin at every barrier of every operator; by default for
# milliseconds, in which they hold the cores that the manager, or the thread they wait for, needs. Measured with both
# processes on two cores: beside other busy processes 510 to 620 output tokens/s with this and once 43 without; on a
# quiet machine no difference beyond noise (570 to 690 against 550 to 640).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # has no effect once torch is imported

from pagekv.executor.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
