"""`pagekv-manager`, and `python -m pagekv.kvmanager`: runs the manager, or names the packages that are missing."""

from __future__ import annotations

import sys

from pagekv.common.extras import refuse_without
from pagekv.common.interrupts import quiet_interrupts
from pagekv.common.paused_collector import paused_collector
from pagekv.common.version import pagekv_version


def main() -> int:
    """Imports the server only if its packages are installed; --version needs none of them."""
    with quiet_interrupts():
        if sys.argv[1:] == ["--version"]:
            print(f"pagekv-manager {pagekv_version()}")
            return 0
        refuse_without("pagekv-manager", "manager")
        with paused_collector():
            from pagekv.kvmanager.server import main as serve
        return serve()


if __name__ == "__main__":
    sys.exit(main())
