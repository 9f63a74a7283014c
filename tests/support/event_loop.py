"""Tests that are coroutines, and what they wait for."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


def in_event_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test, run in an event loop of its own for two minutes at most. Raises TimeoutError."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(120):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


def run_by(
    run: Callable[..., object], **how: Any
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Makes a test of a coroutine that `run` calls, with `how`. Its parameters before `*` are what `run` gives it, the
    first of these if it has fewer; those behind are pytest's.
    """

    def decorated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        parameters = inspect.signature(test).parameters.values()
        fixtures = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        taken = len(parameters) - len(fixtures)

        @wraps(test)
        def called(**arguments: Any) -> None:
            ended = False

            async def body(*given: Any) -> None:
                nonlocal ended
                await test(*given[:taken], **arguments)
                ended = True

            run(body, **how)
            assert ended, f"{run} did not wait for the test"

        vars(called)["__signature__"] = inspect.Signature(fixtures)
        return called

    return decorated


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
