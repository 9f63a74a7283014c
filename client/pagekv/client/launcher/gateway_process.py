"""The gateway as a process of `pagekv up`. It ends with its parent, and nobody else can add managers to it:

    python -m pagekv.client.launcher.gateway_process launch ARGUMENTS

The key for adding managers is drawn here, because every user of a machine can read the command lines of its processes.
"""

from __future__ import annotations

import secrets
import sys

from pagekv.client.launcher import with_parent

# Flags of the gateway that say who may add and remove managers; its other JWT flags have no effect without an issuer.
# --api-key is not among them: it is for those who generate, and without one of these flags it adds managers, too.
_KEYS = ("--control-plane-api-keys", "--jwt-issuer")


def main() -> None:
    """Runs the gateway and does not return: the process ends with the gateway. Without a key, any page in a browser on
    this machine could redirect prompts, because the gateway answers under any name and to any origin. No key is drawn
    if it is given who may add managers.
    """
    _, command, *args = sys.argv
    if not any(word.startswith(_KEYS) for word in args):
        args.insert(0, f"--control-plane-api-keys=pagekv:pagekv:admin:{secrets.token_urlsafe(32)}")
    sys.argv[1:] = ["smg", command, *args]
    with_parent.main()


if __name__ == "__main__":
    main()
