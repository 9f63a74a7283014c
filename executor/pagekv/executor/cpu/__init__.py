"""The CPU backend: transformers models over PageKV's paged block pool, with torch."""

from pagekv.executor.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
