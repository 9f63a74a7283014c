"""Turns of the event loop between pieces of long work."""

from __future__ import annotations

import asyncio


async def let_others_run() -> None:
    """Two turns: what is due is seen in the first and runs in the second. With one, a timer that became due in a piece
    of work waits for the next piece too.
    """
    await asyncio.sleep(0)
    await asyncio.sleep(0)
