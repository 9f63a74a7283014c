"""Usage of earlier compilations, in the user's cache folder, so that the gate compiles only kernels that changed.

The key holds all inputs of a compilation: the text, the options, the compiler's version.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from compile_gate.ptxas_log import Usage
from pagekv.kernels.machine_code import user_cache


class Cache:
    """A small file for each outcome; without a readable file the kernel is compiled again."""

    def __init__(self, version: str, *, folder: Path | None = None, enabled: bool = True) -> None:
        """`version`: the compiler's. `folder`: default $XDG_CACHE_HOME/pagekv/compile_gate."""
        self._folder = folder or user_cache() / "compile_gate"
        self._version, self._enabled = version, enabled

    def _path(self, text: str, options: Sequence[str]) -> Path:
        digest = hashlib.sha256("\0".join([self._version, *options, text]).encode()).hexdigest()
        return self._folder / f"{digest}.json"

    def get(self, text: str, options: Sequence[str]) -> Usage | None:
        if not self._enabled:
            return None
        try:
            return Usage(**json.loads(self._path(text, options).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def put(self, text: str, options: Sequence[str], usage: Usage) -> None:
        if not self._enabled:
            return
        path = self._path(text, options)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(asdict(usage)))
            partial.replace(path)
        except OSError:
            self._enabled = False  # a read-only home only costs time
