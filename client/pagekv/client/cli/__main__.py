"""`pagekv`, and `python -m pagekv.client.cli`."""

from __future__ import annotations

import sys

from pagekv.common.interrupts import quiet_interrupts, quiet_interrupts_to_the_end
from pagekv.common.paused_collector import paused_collector


def main() -> int:
    with quiet_interrupts(), paused_collector():
        from pagekv.client.cli.main import main as run
    try:
        return run()
    finally:
        quiet_interrupts_to_the_end()


if __name__ == "__main__":
    sys.exit(main())
