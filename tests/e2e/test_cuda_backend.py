"""A manager process over the CUDA backend, through gRPC: steps sent ahead, sequences that come and go, swaps; and over
two ranks of it.

No GPU: the executor runs on CPU tensors, with the kernels in their emulation, where it is one in this process.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.clients import stack as stack_module
from support.clients.calls import Caller, Result, request_for
from support.clients.stack import (
    CPU,
    ROOT,
    START_TIMEOUT_S,
    Process,
    Stack,
    port_of,
    running_executor,
    running_manager,
)
from support.executor.cuda_host import HostDevice, host_backend

from pagekv.common.models import resolve_model
from pagekv.common.port_file import read_port_file
from pagekv.executor import server
from pagekv.executor.backend.interface import Backend, Launch, Scheduled
from pagekv.executor.config import parse_config
from pagekv.v1 import operator_service_pb2 as operator_pb

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NEW = 8


@contextmanager
def emulated_executor(directory: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> Iterator[Process]:
    """An executor of this process that runs no step before `gate` is set; the `Process` has only its address."""

    def load() -> Backend:
        torch.set_num_threads(1)
        backend = host_backend(resolve_model("demo"), HostDevice(), dtype="float32", kv_memory=2**25)
        launch = backend.launch

        def launch_behind_gate(scheduled: list[Scheduled]) -> Launch:
            assert gate.wait(START_TIMEOUT_S)
            return launch(scheduled)

        monkeypatch.setattr(backend, "launch", launch_behind_gate)
        return backend

    port_file = directory / "port"
    config = parse_config(["--listen", "127.0.0.1:0", "--port-file", str(port_file)], env={})
    stop, loop = asyncio.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        await server.Executor(config, load).run(stop)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not port_file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield Process("pagekv.executor", [], directory, port=port_of(read_port_file(port_file)))
    finally:
        gate.set()
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_TIMEOUT_S)
        loop.close()


def test_requests_of_every_kind_give_what_the_cpu_backend_gives(
    cpu_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool of four blocks three sequences run at once: the first of their blocks is shared, the second is not. The
    one that came first has the longest prompt and is the first to need a third block, for which the latest one is
    swapped out in the middle of its second. No step runs before all requests are there, so at most the two steps that
    are sent ahead come before the second and third sequence enter.
    """
    rng = random.Random(7)
    prefix = [rng.randrange(1, 3000) for _ in range(20)]
    requests = [
        request_for(
            prefix + [rng.randrange(1, 3000) for _ in range(own)],
            max_tokens=NEW,
            ignore_eos=True,
            temperature=index % 2,
            seed=index,
            frequency_penalty=0.3 * (index % 3),
        )
        for index, own in enumerate([6, 2, 1, 1, 1, 1])
    ]

    gate = threading.Event()

    async def run(target: str) -> tuple[list[list[int]], operator_pb.GetStatsResponse]:
        async with Caller(target) as caller:
            calls: list[asyncio.Task[Result]] = []
            for request in requests:
                calls.append(asyncio.create_task(caller.generate(request)))
                while (await caller.stats()).requests_total < len(calls):
                    pass  # every call gives way to the others
            gate.set()
            results = await asyncio.gather(*calls)
            return [result.tokens for result in results], await caller.idle_stats()

    small = ["--num-device-blocks", "4", "--watermark", "0", "--preemption", "swap", "--max-batch-tokens", "64"]
    with emulated_executor(tmp_path, monkeypatch, gate) as executor, running_manager(executor, small) as emulated:
        outputs, stats = asyncio.run(run(emulated.target))
    wanted, _ = asyncio.run(run(cpu_stack.target))
    assert outputs == wanted
    assert stats.preemptions_total > 0
    assert stats.swapped_in_blocks_total > 0
    assert stats.host_held_blocks == 0


def test_two_ranks_answer_as_one_cpu(cpu_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched before the tokens of the ones before are known to any host, and rank 1 never knows the
    penalties by which rank 0 draws.
    """
    requests = [
        request_for([5, 7, 11 + index], max_tokens=NEW, ignore_eos=True, temperature=index % 2, seed=index,
                    frequency_penalty=0.3 * index, logprobs=2)
        for index in range(4)
    ]  # fmt: skip  # as above

    async def run(target: str) -> list[Result]:
        async with Caller(target) as caller:
            return list(await asyncio.gather(*(caller.generate(request) for request in requests)))

    wanted = asyncio.run(run(cpu_stack.target))
    monkeypatch.setattr(stack_module, "EXECUTOR", "support.executor.emulated_rank")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    small = ["--num-device-blocks", "8", "--max-batch-tokens", "64"]
    args = [*CPU, "--backend", "cpu", "--rank-timeout-s", "60"]
    with running_executor(args, tmp_path, ranks=2) as executor, running_manager(executor, small) as emulated:
        found = asyncio.run(run(emulated.target))
        log = executor.log.read_text()
    assert [result.tokens for result in found] == [result.tokens for result in wanted]
    assert log.count("steps are computed in fused layers") == 2
    assert "differs" not in log
