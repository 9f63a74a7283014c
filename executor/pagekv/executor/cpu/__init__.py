"""The CPU backend: transformers models over PageKV's paged block pool, with torch."""

import os

# Read once, when torch loads its OpenMP runtime. Its threads spin at every barrier of every operator; by default for
# milliseconds, in which they hold the cores that the manager, or the thread they wait for, needs. Measured with both
# processes on two cores: 510 to 620 output tokens/s with this, 43 to 584 without, 400 without any spinning.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # has no effect once torch is imported

from pagekv.executor.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
