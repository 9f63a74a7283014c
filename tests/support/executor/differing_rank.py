"""A rank of a group that once reports another digest than it has, from rank 1: the real one but for that. A script with
the executor's flags.

DIFFERING: path of a file. The next wrong digest takes it away.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pagekv.executor import server
from pagekv.executor.backend.interface import SequenceState
from pagekv.executor.session.state_digest import DIGEST_BYTES, StateDigest
from pagekv.executor.session.step import Step

# Of an epoch.
WRONG_STEP = 7


class OnceWrong(StateDigest):
    """Digests, one of which is wrong if the file is there."""

    def launched(self, step: Step, live: Mapping[int, SequenceState]) -> bytes:
        """As the base class has it."""
        found = super().launched(step, live)
        differing = Path(os.environ["DIFFERING"])
        if step.step == WRONG_STEP and differing.exists():
            differing.unlink()
            return bytes(DIGEST_BYTES)
        return found


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        from pagekv.executor.ranks import follower

        # As the follower finds it.
        vars(follower)["StateDigest"] = OnceWrong
    sys.exit(server.main())
