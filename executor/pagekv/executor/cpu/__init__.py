"""The CPU backend: transformers models over PageKV's paged block pool, with torch."""

from pagekv.executor.machine import shorten_spinning

shorten_spinning()
