"""A rank of a group on the cpu backend that fails in the middle of what ranks compute together: the real one but for
that. A script with the executor's flags.

FAILS: the rank, and what it fails in (load, describe, allocate), such as `1 describe`. FAILING: path of a file, while
which is there it fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagekv.executor import server

WHY = "no memory for activations"


def failing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for while it fails."""

    def call(*args: Any, **options: Any) -> Any:
        if Path(os.environ["FAILING"]).exists():
            raise MemoryError(WHY) if function.__name__ == "load_forward" else RuntimeError(WHY)
        return function(*args, **options)

    return call


def main() -> int:
    """One rank."""
    rank, what = os.environ["FAILS"].split()
    if os.environ["RANK"] == rank:
        from pagekv.executor.cpu import backend

        name = {"load": "load_forward", "describe": "profile_step", "allocate": "KvCache"}[what]
        setattr(backend, name, failing(getattr(backend, name)))
    return server.main()


if __name__ == "__main__":
    sys.exit(main())
