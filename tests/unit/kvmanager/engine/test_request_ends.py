"""Whichever way a request ends, observers hear of it once, and its blocks and its tenant's place are free."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.engine import engine_harness
from support.engine.engine_harness import Bench, command, expect, read, until

from pagekv.common.errors import SequenceFailed
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.observer import Observer, RequestEnd
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand
from pagekv.kvmanager.scheduling.sequence import LiveRequest
from pagekv.kvmanager.tenants.accounts import Accounts


class Ends(Observer):
    """Notes ends by request id."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, RequestEnd]] = []

    def ended(self, request: LiveRequest, end: RequestEnd) -> None:
        self.seen.append((request.command.request_id, end))


def test_every_end_is_told_once_and_leaves_nothing() -> None:
    ends, accounts = Ends(), Accounts()

    async def body(engine: EngineLoop, bench: Bench) -> None:
        def made(name: str, tokens: int = 6) -> GenerateCommand:
            return replace(command(name, [1, 2, 3], tokens), tenant=accounts.tenant("alice"))

        finished = engine.submit(made("finished"))
        assert await read(finished) == expect([1, 2, 3])
        assert accounts.of("alice").live == 0
        bench.step_s = 0.05
        aborted = engine.submit(made("aborted", 20))
        failed = engine.submit(made("failed", 20))
        steps = len(bench.plans)
        await until(lambda: len(bench.plans) > steps + 2)
        assert accounts.of("alice").live == 2
        assert engine.abort("aborted", "alice")
        assert (await read(aborted))[1] is FinishReason.ABORT
        (request,) = engine._live.named("failed")
        engine._ends.fail(request, SequenceFailed("no numbers"))
        with pytest.raises(SequenceFailed, match="no numbers"):
            await read(failed)
        # Nothing is left of it that could end once more.
        assert not engine.abort("failed", "alice")
        assert accounts.of("alice").live == 0
        assert engine.statistics.stats().aborted_requests_total == 1
        for stream in (finished, aborted, failed):
            engine.release(stream)

    engine_harness.run(body, observers=[ends], accounts=accounts)
    assert ends.seen == [
        ("finished", RequestEnd.FINISHED),
        ("aborted", RequestEnd.ABORTED),
        ("failed", RequestEnd.FAILED),
    ]
