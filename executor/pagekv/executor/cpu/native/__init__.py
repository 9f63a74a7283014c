"""Loops that Numba compiles, run on the threads of torch's own OpenMP.

Their machine code is kept in a folder of the user's cache that is named after the sources: Numba itself would take what
is old where a function's own file is unchanged and one that it uses is not.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba


def _cache_folder() -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "pagekv" / f"loops-{digest.hexdigest()[:16]}"


# Takes effect for what is decorated from here on. Where it cannot be written, Numba takes another place, or none.
if not numba.config.CACHE_DIR:
    numba.config.CACHE_DIR = str(_cache_folder())
