"""A kernel fault in service (DESIGN 7): the executor comes back as a fresh process at the same address; the manager
stays, and no stream loses or repeats a token."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support.clients.calls import Caller, Result, request_for
from support.clients.stack import Process, port_of, running_manager, running_stand_in

from pagekv.common.port_file import read_port_file

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# A step that the emulation can profile.
SMALL = ["--max-batch-tokens", "64"]


def faulty_executor(
    directory: Path, backend: str, steps: str, args: Sequence[str] = ()
) -> AbstractContextManager[Process]:
    return running_stand_in("faulty_executor.py", args, directory, FAULTY_BACKEND=backend, FAULTY_STEPS=steps)


def run(target: str, num_requests: int, new: int) -> tuple[list[Result], int]:
    """Streams at once, greedy and sampled; and how often the manager lost its executor."""
    requests = [
        request_for([index + 1, 5, 7], max_tokens=new, ignore_eos=True, temperature=index % 2, seed=index)
        for index in range(num_requests)
    ]

    async def all_of_them() -> tuple[list[Result], int]:
        async with Caller(target) as caller:
            results = await asyncio.gather(*(caller.generate(request) for request in requests))
            return results, (await caller.idle_stats()).executor_restarts_total

    return asyncio.run(all_of_them())


def test_streams_go_on_through_faults_and_a_start_that_fails(tmp_path: Path) -> None:
    """Two faults in the middle of eight streams, with a process between them that cannot load: the second, which pauses
    before the third.
    """
    slow = ["--step-time-ms", "5"]
    (tmp_path / "sound").mkdir()
    with (
        faulty_executor(tmp_path / "sound", "oracle", "-1", slow) as executor,
        running_manager(executor, SMALL) as stack,
    ):
        wanted, restarts = run(stack.target, 8, 100)
        assert restarts == 0
    with faulty_executor(tmp_path, "oracle", "30,0,40", slow) as executor, running_manager(executor, SMALL) as stack:
        assert executor.popen is not None
        pid, port, manager_pid = executor.pid, executor.port, stack.manager.pid
        results, restarts = run(stack.target, 8, 100)
        assert [result.tokens for result in results] == [result.tokens for result in wanted]
        assert all(len(result.tokens) == 100 for result in results)
        # The same processes, by their ids, and the same address; it serves again.
        assert executor.popen.poll() is None
        assert (executor.pid, stack.manager.pid) == (pid, manager_pid)
        assert port_of(read_port_file(tmp_path / "port")) == port
        assert restarts >= 2
        log = executor.log.read_text()
        assert log.count("restarting in a fresh process") == 3
        assert log.count("step 30: RuntimeError: CUDA error: an illegal memory access was encountered") == 1
        assert "it could not start: CUDA error: CUDA-capable device(s) is/are busy" in log
        assert "faults_in_a_row=2 pause_s=1.0" in log
        assert "Traceback" not in log
        assert run(stack.target, 1, 20)[0][0].tokens == wanted[0].tokens[:20]
        assert executor.stop() == 0


def test_a_fault_in_the_middle_of_the_cuda_backend(tmp_path: Path) -> None:
    """The emulated one: the fault shows when a step is waited for, while the next one is on its way, and the backend
    finds out that its device is lost by asking it.
    """
    with faulty_executor(tmp_path, "emulated", "5") as executor, running_manager(executor, SMALL) as stack:
        results, restarts = run(stack.target, 4, 8)
        assert restarts >= 1
        # The fresh process has a sound device.
        wanted, later = run(stack.target, 4, 8)
        assert later == restarts
        assert [result.tokens for result in results] == [result.tokens for result in wanted]
        log = executor.log.read_text()
        assert log.count("restarting in a fresh process") == 1
        assert re.search(r"is lost to this process: step \d: RuntimeError: CUDA error: an illegal memory access", log)
        assert "Traceback" not in log
