"""The gateway as a process of `pagekv up`: it ends with its parent, and nobody adds managers to it:

    python -m pagekv.client.launcher.gateway_process launch ARGUMENTS

The key for that is drawn here, because every user of a machine can read the command lines of its processes.
"""

from __future__ import annotations

import secrets
import sys

from pagekv.client.launcher import with_parent

# Flags of the gateway that say who may add and remove managers; others of JWT do nothing without an issuer.
_KEYS = ("--api-key", "--tenant-api-key", "--control-plane-api-keys", "--jwt-issuer")


def main() -> None:
    """Does not return: the gateway's end is the process's. Without a key any page in a browser of this machine could
    have prompts sent elsewhere, as the gateway answers to any name and any origin. Keys that are given stay alone.
    """
    _, command, *args = sys.argv
    if not any(word.startswith(_KEYS) for word in args):
        args.insert(0, f"--control-plane-api-keys=pagekv:pagekv:admin:{secrets.token_urlsafe(32)}")
    sys.argv[1:] = ["smg", command, *args]
    with_parent.main()


if __name__ == "__main__":
    main()
