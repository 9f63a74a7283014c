"""Runs a module of another project so that it ends with the process that started it:

    python -m pagekv.client.launcher.with_parent MODULE ARGUMENTS

It gets SIGTERM when its standard input ends (`pagekv.common.parent`). If this interpreter was started with -P, which
keeps the working directory off the path of modules, so are the interpreters that the module starts.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _watch() -> None:
    # Read by descriptor: the buffered sys.stdin belongs to the module.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Runs the module and does not return: the process ends with the module."""
    threading.Thread(target=_watch, daemon=True).start()
    if sys.flags.safe_path:
        os.environ["PYTHONSAFEPATH"] = "1"
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
