"""The process for texts: one job at a time, and what ends it. Jobs that hang would do so for longer than the test."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import signal
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgpack
import pytest
from support.engine import small_tokenizers
from support.event_loop import run_by

from pagekv.common.errors import Overloaded, Unavailable
from pagekv.kvmanager.access.caller import caller
from pagekv.kvmanager.access.identity import Identity
from pagekv.kvmanager.text import worker_process
from pagekv.kvmanager.text.worker_jobs import JOB
from pagekv.kvmanager.text.worker_process import JobRefused, WorkerProcess, WorkerStopped

FOREVER = (
    "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"
)
SOURCE = "{% if messages[0].content == 'hang' %}" + FOREVER + "{% endif %}{{ messages[0].content }}"
HANG, FINE = (msgpack.packb([{"role": "user", "content": word}]) for word in ("hang", "fine"))
KILLED_PARENT = """
import asyncio, os, signal, sys
sys.path[:] = sys.argv[1:]
from test_worker_process import FINE, hanging, worker

async def main():
    it = worker()
    await it.run("render", FINE)
    begun = await hanging(it)
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def worker(source: str = SOURCE, cpu_s: float = 3600.0, **more: int) -> WorkerProcess:
    setup = json.dumps({"source": source, "special_tokens": {}}).encode()
    return WorkerProcess("template", lambda: setup, cpu_s, 512 * 2**20, **more)


def working(test: Callable[[WorkerProcess], Awaitable[None]], make: Callable[[], WorkerProcess] = worker) -> None:
    """Runs a test of this process, and ends it."""

    async def main() -> None:
        it = make()
        try:
            async with asyncio.timeout(300):
                await test(it)
        finally:
            it.close()

    asyncio.run(main())


async def hanging(it: WorkerProcess) -> asyncio.Task[bytes]:
    """A job under way that never ends."""
    task = asyncio.create_task(it.run("render", HANG))
    while it._current is None:  # noqa: ASYNC110 - nothing signals it
        await asyncio.sleep(0)
    return task


async def gone(task: asyncio.Task[bytes]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@run_by(working)
async def test_jobs_whose_callers_have_gone_end_or_never_begin(it: WorkerProcess) -> None:
    assert await it.run("render", FINE) == b"fine"
    (first,) = it._processes
    begun = await hanging(it)
    waiting = [asyncio.create_task(it.run("render", HANG)) for _ in range(5)]
    last = asyncio.create_task(it.run("render", FINE))
    await asyncio.sleep(0)
    for task in [*waiting, begun]:
        await gone(task)
    # Any of those that hang would keep it for as long as the test may take.
    assert await last == b"fine"
    assert it._processes != [first]


@run_by(working, make=partial(worker, cpu_s=0.2))
async def test_a_job_that_takes_too_long_is_stopped_and_the_next_is_done(it: WorkerProcess) -> None:
    for _ in range(2):
        with pytest.raises(WorkerStopped, match=r"more than 0\.2 s of a processor"):
            await it.run("render", HANG)
        assert await it.run("render", FINE) == b"fine"


@run_by(working)
async def test_a_process_that_was_killed_starts_anew(it: WorkerProcess) -> None:
    assert await it.run("render", FINE) == b"fine"
    it._processes[0].kill()
    it._processes[0].wait()
    assert await it.run("render", FINE) == b"fine"
    begun = await hanging(it)
    it._processes[0].kill()
    with pytest.raises(Unavailable, match="template was ended from outside; try again"):
        await begun


@run_by(working)
async def test_a_process_that_cannot_be_started_is_no_fault_of_the_job(it: WorkerProcess) -> None:
    """Without descriptors left, its callers are told to try again, not that their text is wrong."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(Unavailable, match=r"template cannot be started \(Too many open files\); try again"):
            await it.run("render", FINE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert await it.run("render", FINE) == b"fine"


def test_a_process_ends_with_its_parent_in_the_middle_of_a_job() -> None:
    """Both write to one standard error, which ends when the last of them has gone."""
    command = [sys.executable, "-c", KILLED_PARENT, str(Path(__file__).parent), *sys.path]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, b"")


def test_an_answer_that_nobody_reads_ends_the_process_without_a_word() -> None:
    job = JOB.pack(b"nothing", 3600.0, 0)
    command = [sys.executable, "-c", worker_process._START, "template", str(512 * 2**20), *sys.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, words = process.communicate(job)
    assert (process.returncode, words) == (1, b"")


X = msgpack.packb([{"role": "user", "content": "x" * 1000}])
MOST = len(HANG) + len(X) + 10


def narrow() -> WorkerProcess:
    """With room for one that hangs and one of 1000 characters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "MAX_WAITING_BYTES", MOST)
        return worker()


@run_by(working, make=narrow)
async def test_more_bytes_than_may_wait_are_refused(it: WorkerProcess) -> None:
    """As 1,024 conversations of 4 MB would be."""
    begun = await hanging(it)
    waits = asyncio.create_task(it.run("render", X))
    await asyncio.sleep(0)
    words = f"{MOST - 10} bytes wait .* with the {len(FINE)} of this text the limit for all is {MOST}"
    with pytest.raises(Overloaded, match=words) as refused:
        await it.run("render", FINE)
    assert (refused.value.limit, refused.value.retry_delay_s) == (MOST, 1.0)
    await gone(begun)
    assert await waits == b"x" * 1000
    # A text that has been read waits no more.
    assert await it.run("render", X) == b"x" * 1000


@run_by(working)
async def test_a_text_whose_caller_has_gone_is_not_kept_until_its_turn(it: WorkerProcess) -> None:
    begun, text = await hanging(it), msgpack.packb([{"role": "user", "content": "x" * 1000}])
    alone = sys.getrefcount(text)
    waits = asyncio.create_task(it.run("render", text))
    await asyncio.sleep(0)
    assert sys.getrefcount(text) > alone
    await gone(waits)
    del waits
    await asyncio.sleep(0)  # this task has held the error, and with it the frames
    gc.collect()
    assert sys.getrefcount(text) == alone
    await gone(begun)


@run_by(working, make=partial(worker, "{{ x | nonsense }}"))
async def test_a_setup_that_is_refused_is_not_tried_again(it: WorkerProcess) -> None:
    for number in range(3):
        body = b"%d" % number
        with pytest.raises(JobRefused, match="No filter named") as caught:
            await it.run("nothing", body)
        # An error that is raised again and again would keep the calls before.
        frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        assert [frame.f_locals["body"] for frame in frames if frame.f_code.co_name == "_do"] == [body]
        assert not it._processes


@run_by(working)
async def test_closing_ends_a_job_under_way_and_those_that_wait(it: WorkerProcess) -> None:
    begun = await hanging(it)
    waits = asyncio.create_task(it.run("render", FINE))
    await asyncio.sleep(0)
    it.close()
    for task in (begun, waits):
        with pytest.raises(Unavailable, match="template is being closed"):
            await task
    with pytest.raises(Unavailable):
        await it.run("render", FINE)
    assert not it._processes


@run_by(working)
async def test_a_caller_that_gives_up_waits_for_no_process(
    it: WorkerProcess, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To start one takes milliseconds and to clear away one with gigabytes a tenth of a second, both on the thread."""
    reached, go_on = threading.Event(), threading.Event()
    reap, start = worker_process._reap, WorkerProcess._start

    def slow_reap(processes: list[subprocess.Popen[bytes]]) -> int:
        if processes:
            reached.set()
            go_on.wait()
        return reap(processes)

    def slow_start(self: WorkerProcess) -> subprocess.Popen[bytes]:
        reached.set()
        go_on.wait()
        return start(self)

    async def gives_up() -> None:
        """A caller whose job is not begun goes away while the thread is held."""
        waits = asyncio.create_task(it.run("render", FINE))
        try:
            while not reached.is_set():  # noqa: ASYNC110 - nothing of this loop signals it
                await asyncio.sleep(0.001)
            assert it._lock.acquire(blocking=False), "the event loop would wait"
            it._lock.release()
            await gone(waits)
        finally:
            go_on.set()

    begun = await hanging(it)
    monkeypatch.setattr(worker_process, "_reap", slow_reap)
    await gone(begun)
    await gives_up()
    assert await it.run("render", FINE) == b"fine"
    it._processes[0].kill()
    it._processes[0].wait()
    monkeypatch.undo()
    reached.clear()
    go_on.clear()
    monkeypatch.setattr(WorkerProcess, "_start", slow_start)
    await gives_up()
    assert await it.run("render", FINE) == b"fine"


def encoder() -> WorkerProcess:
    setup = small_tokenizers.byte_level().to_str().encode()
    return WorkerProcess("tokenizer", lambda: setup, 3600.0, 400 * 2**20)


@run_by(working, make=encoder)
async def test_memory_beyond_the_bound_ends_the_job_and_not_the_machine(it: WorkerProcess) -> None:
    """Some allocations of the library end the process when they fail, others are errors in its words."""
    encode = struct.pack("<?Q", False, 2**40)
    words = r"ended with status -?\d+; it may have 400 MiB|memory allocation"
    with pytest.raises((WorkerStopped, JobRefused), match=words):
        await it.run("encode", encode + b"\0" * 8 * 2**20)
    assert len(await it.run("encode", encode + b"\0" * 100)) == 8 + 4 * 100


@run_by(working, make=partial(worker, max_waiting=4))
async def test_texts_of_one_tenant_refuse_none_of_another(it: WorkerProcess) -> None:

    async def ask(tenant: str, body: bytes) -> bytes:
        caller.set(Identity(tenant, frozenset()))
        return await it.run("render", body)

    flood = [asyncio.create_task(ask("flood", HANG)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="4 texts of your tenant wait"):
        await ask("flood", FINE)
    quiet = asyncio.create_task(ask("quiet", FINE))
    await asyncio.sleep(0)
    for task in flood:
        await gone(task)
    assert await quiet == b"fine"
    assert len(it._waiting._jobs) == len(it._waiting._bytes) == 0


@run_by(working)
async def test_a_text_of_one_tenant_waits_for_one_of_another_at_most(it: WorkerProcess) -> None:
    order: list[str] = []

    async def ask(tenant: str) -> None:
        caller.set(Identity(tenant, frozenset()))
        await it.run("render", FINE)
        order.append(tenant)

    flood = [asyncio.create_task(ask("flood")) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.gather(ask("quiet"), *flood)
    assert order.index("quiet") <= 2
