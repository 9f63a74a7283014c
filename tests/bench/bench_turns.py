"""The longest turn of an event loop in answers and steps that grow with what is live: a block table of a million
tokens, a list of many requests, and steps in which many sequences or long ones enter the executor. In this process,
without gRPC; processor time, the least of five.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.engine.engine_harness import config
from support.engine.scheduler_driver import Driver

from pagekv.client.cli.terminal import table
from pagekv.executor.rpc import wire
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.engine.observer import Observer
from pagekv.kvmanager.engine.snapshots import EngineSnapshots
from pagekv.kvmanager.engine.state import EngineState
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.steps.v1 import executor_service_pb2 as pb

MILLION, REPEATS = 2**20, 5
ROOT = bytes(32)
_ENDED = object()


def longest_ms(ask: Callable[[], Coroutine[Any, Any, object]]) -> float:
    """Milliseconds of a processor between two turns of the event loop, at most; the least of a few answers."""
    found: list[float] = []
    for _ in range(REPEATS):
        turns, worst, going = ask().__await__(), 0.0, True
        while going:
            begun = time.thread_time()
            going = next(turns, _ENDED) is not _ENDED
            worst = max(worst, time.thread_time() - begun)
        found.append(worst)
    return min(found) * 1e3


def snapshots(prompts: list[array[int]]) -> EngineSnapshots:
    """Of a scheduler with these requests, the first of which run."""
    driver = Driver(num_blocks=70_000, block_size=16, depth=1, max_running=256, max_batch_tokens=2 * MILLION)
    cache = CacheAdmin(True, 1.0, lambda: None)
    cache.adopt(driver.pool, driver.scheduler.host, "model", Observer())
    live = LiveRequests(0)
    for number, prompt in enumerate(prompts):
        command = GenerateCommand(str(number), prompt, SamplingParams(max_tokens=9))
        driver.scheduler.add(live.add(command, ROOT))
    driver.scheduler.schedule()
    return EngineSnapshots(EngineState(config(), cache, live, scheduler=driver.scheduler))


def step_of(count: int, tokens: int) -> pb.StepRequest:
    """A step in which so many sequences of so many tokens enter."""
    new = pb.NewSequence(token_ids=range(tokens), block_ids=range(-(-tokens // 16)), sampling=pb.StepSampling())
    return pb.StepRequest(epoch=1, step=1, new_seqs=[new] * count)


def rows() -> Iterator[tuple[str, str]]:
    """Rows of the table: what is asked, and milliseconds."""
    asked = snapshots([array("I", range(MILLION))])
    yield "GetBlockTable of a million tokens", f"{longest_ms(partial(asked.block_tables, '0')):.1f}"
    for count in (1_280, 10_000):
        asked = snapshots([array("I", [number]) for number in range(count)])
        yield f"ListRequests of {count:,}", f"{longest_ms(partial(asked.list_requests_in_slices, 4096)):.1f}"
    for count, tokens in ((1, MILLION), (256, 4096), (4096, 16)):
        step = step_of(count, tokens)
        yield f"a step in which {count:,} of {tokens:,} enter", f"{longest_ms(partial(wire.large_step, step, b'')):.1f}"
    copies = pb.MemoryOp(kind=pb.MEMORY_OP_KIND_COPY, sources=range(2**16), destinations=range(2**16))
    step = pb.StepRequest(memory_ops=[copies])
    yield "a step of 65,536 copies", f"{longest_ms(partial(wire.large_step, step, b'')):.1f}"


if __name__ == "__main__":
    print(table(list(rows()), ("longest turn", "ms")))
