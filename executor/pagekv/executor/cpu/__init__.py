"""The CPU backend: transformers models over PageKV's paged block pool, with torch."""

from pagekv.executor.machine import shorten_spinning

shorten_spinning()

from pagekv.executor.cpu.backend import CpuBackend  # noqa: E402 - after the setting that OpenMP reads when torch loads it

__all__ = ["CpuBackend"]
