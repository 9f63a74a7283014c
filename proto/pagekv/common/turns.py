"""Turns of the event loop between pieces of long work."""

from __future__ import annotations

import asyncio


async def let_others_run() -> None:
    """Gives the event loop two turns. A timer that became due during a piece of work is noticed in the first turn and
    runs in the second; after a single turn it would wait for the next piece of work, too.
    """
    await asyncio.sleep(0)
    await asyncio.sleep(0)
