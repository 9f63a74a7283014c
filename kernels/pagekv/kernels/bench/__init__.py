"""Measures the kernels on a GPU: `python -m pagekv.kernels.bench` (see `__main__.py`)."""
