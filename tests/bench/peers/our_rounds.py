"""Our client, a process of its own as users' clients are: all requests at once over gRPC. Answers come whole, as those
of the peer's `LLM` do.

usage: python -m peers.our_rounds TARGET WORKLOAD
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop
from support.clients.calls import Caller, request_for

from pagekv.client import PageKVClient
from peers.answering import own_output, serve
from peers.workload import WORKLOADS


def main() -> None:
    """Connects, says `ready`, plays."""
    target, workload = sys.argv[1], WORKLOADS[sys.argv[2]]
    requests = [
        request_for(prompt, max_tokens=workload.new, ignore_eos=True, **workload.sampling)
        for prompt in workload.prompts()
    ]
    for request in requests:
        request.only_complete = True

    async def run() -> tuple[float, int]:
        async with Caller(target) as caller:
            begun = time.perf_counter()
            results = await caller.generate_many(requests)
            return time.perf_counter() - begun, sum(
                len(result.complete.token_ids) for result in results if result.complete
            )

    def play() -> tuple[float, int]:
        with PageKVClient(target) as client:
            client.reset_prefix_cache()
        # The loop that costs least, since the client shares the cores with what it measures.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())

    serve(play, own_output())


if __name__ == "__main__":
    main()
