"""The compile gate: `python -m pagekv.kernels.compile_gate` (see `__main__.py`)."""
