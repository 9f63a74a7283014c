"""Tests that are coroutines, and what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


def in_event_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test, run in an event loop of its own."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def run_bounded(body: Coroutine[Any, Any, None], seconds: float = 120) -> None:
    """Runs the coroutine in an event loop of its own. Raises TimeoutError."""

    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await body

    asyncio.run(bounded())


@asynccontextmanager
async def counted_turns() -> AsyncIterator[Callable[[], int]]:
    """Gives the number of turns that the event loop has made by now."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    try:
        yield lambda: turns
    finally:
        counting.cancel()


async def until(condition: Callable[[], object], seconds: float = 240) -> None:
    """Returns once the condition holds. Raises TimeoutError."""

    async def holds() -> object:
        return condition()

    await until_true(holds, seconds)


async def until_true(condition: Callable[[], Awaitable[object]], seconds: float = 240) -> None:
    """Returns once the condition, a coroutine, holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110  # nothing signals what tests wait for
            await asyncio.sleep(0.005)
