"""Turns of the event loop between pieces of work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from pagekv.common.turns import let_others_run


@pytest.mark.parametrize(("pause", "pieces"), [(let_others_run, 1), (partial(asyncio.sleep, 0), 2)])
def test_what_became_due_in_a_piece_of_work_runs_before_the_next(
    pause: Callable[[], Awaitable[None]], pieces: int
) -> None:
    """With one turn it does not, which is why there are two."""
    done, seen = 0, []

    async def work() -> None:
        nonlocal done
        asyncio.get_running_loop().call_later(0.001, lambda: seen.append(done))
        for _ in range(4):
            begun = time.perf_counter()
            while time.perf_counter() < begun + 0.005:
                pass
            done += 1
            await pause()

    asyncio.run(work())
    assert seen == [pieces]
