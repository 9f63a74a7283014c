"""A rank of a group that once reports another digest than it has, from rank 1: the real one but for that. A script with
the executor's flags.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pagekv.executor import server
from pagekv.executor.backend.interface import SequenceState
from pagekv.executor.session.state_digest import DIGEST_BYTES, StateDigest
from pagekv.executor.session.step import Step

# Of the first epoch.
WRONG_STEP = 7


class OnceWrong(StateDigest):
    """Digests, one of which is wrong in the life of a process."""

    num_launched = 0

    def launched(self, step: Step, live: Mapping[int, SequenceState]) -> bytes:
        """As the base class has it."""
        OnceWrong.num_launched += 1
        found = super().launched(step, live)
        return bytes(DIGEST_BYTES) if OnceWrong.num_launched == WRONG_STEP else found


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        from pagekv.executor.ranks import follower

        # As the follower finds it.
        vars(follower)["StateDigest"] = OnceWrong
    sys.exit(server.main())
