"""An executor whose step raises for one request: that request ends, the others go on. The executor is the one of the
docs, which like most knows no status but what its gRPC library makes of an exception.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from support.clients.calls import Caller, request_for
from support.clients.stack import Process, running_manager
from support.executor.judged import toy

pytestmark = pytest.mark.e2e

POISON, BUDGET = 13, 32
NEXT_TOKEN = "        read = [self.pool"
RAISES = (
    f"        if {POISON} in state.new.token_ids[:{BUDGET}]: raise RuntimeError('no kernel for this')\n" + NEXT_TOKEN
)


def test_a_request_that_no_step_survives_ends_and_others_finish(tmp_path: Path) -> None:
    # The poisoned prompt fills a step, so no other request takes part in it.
    poison = request_for([POISON] * BUDGET, max_tokens=4)
    others = [request_for([100 + index] * 9, max_tokens=20) for index in range(4)]

    async def main(target: str) -> None:
        async with Caller(target) as caller:
            before = [result.tokens for result in await caller.generate_many(others)]
            poisoned = asyncio.create_task(caller.generate(poison))
            await caller.stats_when(lambda stats: stats.requests_total > len(others))
            after = [result.tokens for result in await caller.generate_many(others)]
            with pytest.raises(grpc.aio.AioRpcError, match="its step failed 3 times") as refused:
                await poisoned
            assert refused.value.code() is grpc.StatusCode.INTERNAL
            assert after == before
            assert [len(tokens) for tokens in after] == [20] * 4
            assert (await caller.idle_stats()).executor_restarts_total == 3

    with toy((NEXT_TOKEN, RAISES)) as address:
        executor = Process("pagekv.executor", [], tmp_path, port=int(address.rpartition(":")[2]))
        with running_manager(executor, ["--tokenizer", "none", "--max-batch-tokens", str(BUDGET)]) as stack:
            asyncio.run(main(stack.target))
            log = stack.manager.log.read_text()
    assert log.count("gave up a request") == 1
