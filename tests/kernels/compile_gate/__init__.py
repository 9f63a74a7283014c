"""The compile gate: `python -m compile_gate` (see `__main__.py`)."""
