"""`python -m pagekv.kvmanager.replay`, which `pagekv replay` starts."""

from __future__ import annotations

import sys

from pagekv.common.interrupts import quiet_interrupts


def main() -> int:
    with quiet_interrupts():
        from pagekv.kvmanager.replay.cli import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
