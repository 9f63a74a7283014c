"""The gateway as a process of `pagekv up`. It ends with its parent, and nobody else can add managers to it:

    python -m pagekv.client.launcher.gateway_process launch ARGUMENTS

The key for adding managers is drawn here, because every user of a machine can read the command lines of its processes.
"""

from __future__ import annotations

import secrets
import sys

from pagekv.client.launcher import with_parent
from pagekv.client.launcher.child_flags import flag_value


def main() -> None:
    """Runs the gateway and does not return: the process ends with the gateway. Without a key, any page in a browser on
    this machine could redirect prompts, because the gateway answers under any name and to any origin. Keys that the
    gateway is given for this (--control-plane-api-keys) are valid beside it. No key is drawn if an issuer of tokens is
    named; the other JWT flags have no effect without one.
    """
    _, command, *args = sys.argv
    if not flag_value("jwt-issuer", args, {}):
        args.insert(0, f"--control-plane-api-keys=pagekv:pagekv:admin:{secrets.token_urlsafe(32)}")
    sys.argv[1:] = ["smg", command, *args]
    with_parent.main()


if __name__ == "__main__":
    main()
