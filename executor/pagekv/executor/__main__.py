"""`pagekv-executor`, and `python -m pagekv.executor`."""

from __future__ import annotations

import sys

from pagekv.common.interrupts import quiet_interrupts
from pagekv.common.paused_collector import paused_collector


def main() -> int:
    """Entry point of `pagekv-executor`. The event loop takes SIGINT over once it runs."""
    with quiet_interrupts():
        with paused_collector():
            from pagekv.executor.server import main as serve
        return serve()


if __name__ == "__main__":
    sys.exit(main())
