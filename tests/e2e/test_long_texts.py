"""Texts of 4 MB, many at once and given up, beside a short one: manager and its worker processes stay within the
memory that compose.yaml gives them.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
import pytest
from support.clients.calls import Caller
from support.clients.memory import children, resident_mib
from support.clients.stack import ORACLE, ROOT, Stack, running_stack
from support.prompts import as_prompt

from pagekv.v1 import inference_service_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# The limit of a manager in compose.yaml.
LIMIT_MIB = 1024 * int(re.findall(r"PAGEKV_MANAGER_MEMORY:-(\d+)g", (ROOT / "compose.yaml").read_text())[0])
# A context in which no text of 4 MB is refused before it is encoded.
CONTEXT = ["--max-model-len", str(2**20), "--kv-memory", "16MiB"]
LONG = pb.TokenizeRequest(prompt=as_prompt("ab c" * 10**6))
SHORT = pb.TokenizeRequest(prompt=as_prompt("In the beginning"))
# Seconds after which a caller gives a long text up, and for which one waits for a short text, or for all long ones.
GIVEN_UP_S, SHORT_S, LONG_S = 0.5, 60.0, 1200.0
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


@contextmanager
def watched_workers(pid: int) -> Iterator[list[float]]:
    """MiB of all children of a process together, whenever they were looked at: many times a second. Each counts with
    the most that it ever had.
    """
    found, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            sizes = list[float]()
            for child in children(pid):
                with suppress(OSError):  # ended meanwhile
                    sizes.append(resident_mib(child, "VmHWM"))
            found.append(sum(sizes))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


async def status_of(caller: Caller, deadline_s: float) -> grpc.StatusCode:
    """The end of one long text."""
    try:
        await caller.inference.Tokenize(LONG, timeout=deadline_s)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_sixteen_texts_of_4_mb_fit_into_the_memory_of_compose() -> None:
    async def run(stack: Stack) -> None:
        async with Caller(stack.target) as caller, Caller(stack.target, OWN_CONNECTION) as beside:
            wanted = await beside.inference.Tokenize(SHORT, timeout=SHORT_S)
            assert wanted.token_ids
            two = await asyncio.gather(*(status_of(caller, LONG_S) for _ in range(2)))
            assert set(two) <= {grpc.StatusCode.INVALID_ARGUMENT}
            deadlines = [GIVEN_UP_S] * 6 + [LONG_S] * 10
            sixteen = [asyncio.create_task(status_of(caller, deadline)) for deadline in deadlines]
            answered = 0
            # Each encoding takes long: the last five of the ten that wait leave as well.
            while sum(call.done() for call in sixteen[6:]) < 5 or not all(call.done() for call in sixteen[:6]):
                assert await beside.inference.Tokenize(SHORT, timeout=SHORT_S) == wanted
                answered += 1
                await asyncio.sleep(0.05)
            ends = [[call.result() for call in calls if call.done()] for calls in (sixteen[:6], sixteen[6:])]
            for call in sixteen:
                call.cancel()
            print(f"{answered} short texts beside {[Counter(end.name for end in group) for group in ends]}")
            assert set(ends[0]) <= {grpc.StatusCode.DEADLINE_EXCEEDED, *REFUSED}
            assert set(ends[1]) <= {*REFUSED}
            assert await beside.inference.Tokenize(SHORT, timeout=SHORT_S) == wanted

    with running_stack([*ORACLE, *CONTEXT]) as stack:
        pid = stack.manager.pid
        with watched_workers(pid) as workers:
            asyncio.run(run(stack))
        own = resident_mib(pid, "VmHWM")
        assert stack.manager.popen is not None
        assert stack.manager.popen.poll() is None
    print(f"manager {own:.0f} MiB at most, its workers {max(workers):.0f}")
    assert own + max(workers) < LIMIT_MIB
    # The workers were at work, and the watch saw it.
    assert max(workers) > 256
