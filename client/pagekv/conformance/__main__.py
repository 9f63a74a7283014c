"""`pagekv-conformance`, and `python -m pagekv.conformance`."""

from __future__ import annotations

import sys

from pagekv.common.interrupts import quiet_interrupts


def main() -> int:
    with quiet_interrupts():
        from pagekv.conformance.main import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
