"""A rank of a group that fails while it starts, on the cpu backend in the middle of what ranks compute together. In all
else it is a real rank. A script with the executor's flags.

FAILS: the rank, and what it fails in (load, describe, allocate; `build` on the oracle), such as `1 describe`. It fails
while there is a file at the path FAILING.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagekv.executor import server

WHY = "no memory for activations"
# By failure: the module, the name there that fails, and the error.
FAILURES = {
    "load": ("pagekv.executor.cpu.backend", "load_forward", MemoryError),
    "describe": ("pagekv.executor.cpu.backend", "profile_step", RuntimeError),
    "allocate": ("pagekv.executor.cpu.backend", "KvCache", RuntimeError),
    "build": ("pagekv.executor.oracle.backend", "OracleBackend", MemoryError),
}


def failing(function: Callable[..., Any], error: type[Exception]) -> Callable[..., Any]:
    """The function, but for while it fails."""

    def call(*args: Any, **options: Any) -> Any:
        if Path(os.environ["FAILING"]).exists():
            raise error(WHY)
        return function(*args, **options)

    return call


def main() -> int:
    """One rank."""
    rank, what = os.environ["FAILS"].split()
    if os.environ["RANK"] == rank:
        # Here, because not every backend imports torch.
        module, name, error = FAILURES[what]
        backend = importlib.import_module(module)
        setattr(backend, name, failing(getattr(backend, name), error))
    return server.main()


if __name__ == "__main__":
    sys.exit(main())
