"""A group of ranks behind one endpoint, as torchrun starts it: streams outlive the loss of any rank; starts that cannot
succeed say why in one line.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.clients import stack as stack_module
from support.clients.calls import Caller, Result, request_for
from support.clients.held_port import held_port
from support.clients.processes import runs
from support.clients.stack import (
    CPU,
    EXECUTOR,
    MANAGER,
    ORACLE,
    ROOT,
    Process,
    Stack,
    environment,
    running_executor,
    running_manager,
    running_stack,
)
from support.executor.differing_rank import WRONG_STEP
from support.waiting import wait_until

from pagekv.common.models import resolve_model
from pagekv.common.port_file import read_port_file
from pagekv.v1 import inference_service_pb2 as pb

pytestmark = pytest.mark.e2e

WAIT_S = 240.0
# Longer than a group takes to notice that a rank hangs.
STEP_TIMEOUT_S = 20.0
GROUP = (*ORACLE, "--step-time-ms", "20", "--rank-timeout-s", "3")


def kill_last(pids: dict[int, int]) -> None:
    os.kill(pids[1], signal.SIGKILL)


def kill_first(pids: dict[int, int]) -> None:
    os.kill(pids[0], signal.SIGKILL)


def hang_last(pids: dict[int, int]) -> None:
    os.kill(pids[1], signal.SIGSTOP)


def hang_first(pids: dict[int, int]) -> None:
    os.kill(pids[0], signal.SIGSTOP)


async def generate_all(
    stack: Stack, requests: list[pb.GenerateRequest], disturb: Callable[[], None]
) -> tuple[list[Result], int]:
    """The answers, `disturb` being called when all of them have begun; and how often the manager lost its executor
    meanwhile.
    """
    async with Caller(stack.target) as caller:
        stats = await caller.stats()
        begun, restarts = stats.generated_tokens_total + 10 * len(requests), stats.executor_restarts_total
        calls = [asyncio.ensure_future(caller.generate(request)) for request in requests]
        await caller.stats_when(
            lambda stats: stats.running_sequences == len(requests) and stats.generated_tokens_total >= begun
        )
        await asyncio.to_thread(disturb)
        found = list(await asyncio.gather(*calls))
        return found, (await caller.stats()).executor_restarts_total - restarts


LONG = [pytest.param(fault, marks=pytest.mark.long) for fault in (hang_last, hang_first)]


@pytest.fixture(scope="module")
def group() -> Iterator[Stack]:
    """Serves again after every fault."""
    with running_stack(GROUP, ["--step-timeout-s", f"{STEP_TIMEOUT_S}"], ranks=2) as stack:
        yield stack


def check_streams_survive(fault: Callable[[dict[int, int]], None], group: Stack) -> None:
    requests = [
        request_for([index + 1, 5, 7], max_tokens=100, ignore_eos=True, temperature=index % 2, seed=index)
        for index in range(4)
    ]
    wanted, undisturbed = asyncio.run(generate_all(group, requests, lambda: None))
    before = group.executor.rank_pids()
    assert sorted(before) == [0, 1]

    def disturb() -> None:
        fault(before)
        # The rank that was not touched leaves within the rank timeout, whatever it waits in; so does torchrun with a
        # rank that hangs. The manager has not given up the step yet.
        wait_until(lambda: not any(map(runs, before.values())), STEP_TIMEOUT_S)

    results, restarts = asyncio.run(generate_all(group, requests, disturb))
    after = group.executor.rank_pids()
    assert restarts > 0 == undisturbed
    assert [result.tokens for result in results] == [result.tokens for result in wanted]
    assert not {*before.values()} & {*after.values()}


@pytest.mark.parametrize("fault", [kill_last, kill_first, *LONG])
def test_streams_survive_a_rank(fault: Callable[[dict[int, int]], None], group: Stack) -> None:
    check_streams_survive(fault, group)


@pytest.mark.nightly  # hang_last and hang_first stop ranks of the oracle
def test_streams_survive_a_rank_that_hangs_while_both_compute() -> None:
    """Rank 0 waits for rank 1 in a collective of the model. In float64, as below."""
    with running_stack([*CPU, "--rank-timeout-s", "3"], ["--step-timeout-s", f"{STEP_TIMEOUT_S}"], ranks=2) as group:
        check_streams_survive(hang_last, group)


@pytest.fixture(scope="module")
def cpu_group() -> Iterator[Process]:
    """Two ranks that compute together."""
    with running_executor([*CPU, "--rank-timeout-s", "60"], ranks=2) as executor:
        yield executor


def test_two_ranks_answer_as_one_with_beams_forks_and_preemptions(cpu_group: Process) -> None:
    """In float64, where no sum of parts makes another token likelier."""
    requests = [
        request_for([1, 5, 7], max_tokens=12, beam_width=3, n=2),
        request_for([1, 5, 7, 9], max_tokens=16, n=3, temperature=0.8, seed=4),
        *(request_for([1, 5, 7, index], max_tokens=40, ignore_eos=True) for index in range(6)),
    ]
    small = ["--num-device-blocks", "16", "--num-host-blocks", "8", "--preemption", "swap"]

    async def run(stack: Stack) -> tuple[list[Result], int]:
        async with Caller(stack.target) as caller:
            found = await asyncio.gather(*(caller.generate(request) for request in requests))
            stats = await caller.stats()
        return list(found), stats.preemptions_total

    with running_stack(CPU, small) as stack:
        wanted, _ = asyncio.run(run(stack))
    with running_manager(cpu_group, small) as stack:
        results, preemptions = asyncio.run(run(stack))
    assert [result.tokens for result in results] == [result.tokens for result in wanted]
    assert preemptions > 0


def test_a_difference_ends_the_epoch_and_no_process_and_costs_no_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Over ranks that compute together."""
    monkeypatch.setattr(stack_module, "EXECUTOR", "support.executor.differing_rank")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))

    async def run(stack: Stack) -> tuple[Result, int]:
        async with Caller(stack.target) as caller:
            found = await caller.generate(request_for([1, 5, 7], max_tokens=30, ignore_eos=True))
            return found, (await caller.stats()).executor_rank_differences_total

    args = [*CPU, "--rank-timeout-s", "60"]
    with running_executor(args, tmp_path, ranks=2) as executor, running_manager(executor) as stack:
        before = executor.rank_pids()
        found, differences = asyncio.run(run(stack))
        again, later = asyncio.run(run(stack))
        assert executor.rank_pids() == before
    assert differences == later == 1
    assert len(found.tokens) == 30
    assert found.tokens == again.tokens
    words = f"rank 1 differs from rank 0 at step {WRONG_STEP}: tables or tokens are not the same"
    assert words in executor.log.read_text()


WHY = "no memory for activations"
# Memory has words of ours around it, on the machine of the rank that lacks it.
SHORT = f"GiB are available ({WHY}): use a smaller model, or a machine with more memory"
LEFT = [
    ("1 load", "rank 1: ", SHORT),
    ("0 load", "rank 0: ", SHORT),
    ("1 describe", f"rank 1 failed to describe: RuntimeError: {WHY}", "; left waiting for it: rank 0"),
    ("0 describe", f"rank 0 failed to describe: RuntimeError: {WHY}", "; left waiting for it: rank 1"),
    ("1 allocate", f"rank 1 failed to allocate: RuntimeError: {WHY}", ""),
]


def fail_in(fails: str, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Path:
    """The file while which is there a rank fails so."""
    monkeypatch.setattr(stack_module, "EXECUTOR", "support.executor.failing_rank")
    failing = directory / "failing"
    for name, value in {"PYTHONPATH": str(ROOT / "tests"), "FAILS": fails, "FAILING": str(failing)}.items():
        monkeypatch.setenv(name, value)
    return failing


# In a collective the others would wait for longer than a test may take.
WAITS = ("--rank-timeout-s", "1000", "--join-timeout-s", "1000")
PATIENT = (*CPU, *WAITS)


@pytest.mark.parametrize(
    ("fails", "begin", "end"),
    # The other rank and the other call: test_leader.py has each of both, without processes.
    [LEFT[0], LEFT[2], *(pytest.param(*LEFT[each], marks=pytest.mark.nightly) for each in (1, 3, 4))],
)
def test_a_rank_that_fails_alone_ends_the_start_of_all(
    fails: str, begin: str, end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would fail again, however often torchrun started the ranks anew. Each says which rank failed, and why."""
    fail_in(fails, monkeypatch, tmp_path).touch()
    executor = Process(stack_module.EXECUTOR, PATIENT, tmp_path, ranks=2)
    executor.start()
    manager = Process(MANAGER, ["--executor", executor.target], tmp_path)
    try:
        manager.start()
        assert executor.popen is not None
        assert executor.popen.wait(WAIT_S) == 1
    finally:
        manager.kill()
        if executor.popen is not None and executor.popen.poll() is None:
            executor.kill()
    log = executor.log.read_text()
    said = [line for line in log.splitlines() if "cannot start" in line]
    assert len(said) == 2, log
    assert all(f'reason="{begin}' in line and line.endswith(f'{end}"') for line in said), said
    assert log.count("executor: listening ") == 1
    told = read_port_file(tmp_path / f"{stack_module.EXECUTOR}.port")["cannot_start"]
    assert told.startswith(begin)
    assert told.endswith(end)


async def answer(stack: Stack) -> Result:
    async with Caller(stack.target) as caller:
        return await caller.generate(request_for([1, 5, 7], max_tokens=4, ignore_eos=True))


@pytest.mark.parametrize(
    ("backend", "fails"),
    [
        # Ranks that start anew do the same on every backend; test_a_rank_that_fails_alone has the collectives.
        pytest.param(ORACLE, "1 build", id="1 build"),
        *(pytest.param(CPU, fails, id=fails, marks=pytest.mark.nightly) for fails in ("1 load", "1 describe")),
    ],
)
def test_a_group_that_has_served_is_started_anew_until_it_serves_again(
    backend: Sequence[str], fails: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The memory that a rank lacks then was there once."""
    failing = fail_in(fails, monkeypatch, tmp_path)
    with running_executor([*backend, *WAITS], tmp_path, ranks=2) as executor, running_manager(executor) as stack:
        found = asyncio.run(answer(stack))
        failing.touch()
        kill_last(executor.rank_pids())
        wait_until(lambda: executor.log.read_text().count(WHY) > 1, WAIT_S, executor.tail)
        failing.unlink()
        assert asyncio.run(answer(stack)).tokens == found.tokens


@pytest.mark.long
def test_a_group_that_has_served_waits_for_the_files_of_its_model(tmp_path: Path) -> None:
    """As where they are on a network drive. No rank comes so far as to load it."""
    model, away = tmp_path / "model", tmp_path / "away"
    model.mkdir()
    shutil.copy(resolve_model("demo", weights=False) / "config.json", model)
    words = "rank 0: --model cannot be used"
    oracle = ("--backend", "oracle", "--model", str(model))
    with running_executor(oracle, tmp_path, ranks=2) as executor, running_manager(executor) as stack:
        found = asyncio.run(answer(stack))
        model.rename(away)
        kill_last(executor.rank_pids())
        wait_until(lambda: executor.log.read_text().count(words) > 2, WAIT_S, executor.tail)
        away.rename(model)
        assert asyncio.run(answer(stack)).tokens == found.tokens


def start_by_hand(ranks: list[tuple[dict[str, str], list[str]]], join_s: float = 60.0) -> list[tuple[int, str]]:
    """Exit status and output of ranks that are started with these variables and flags."""
    with held_port() as port:
        env = {**environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", EXECUTOR, "--listen", "127.0.0.1:0", "--join-timeout-s", str(join_s), *flags],
                env={**env, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for variables, flags in ranks
        ]
        try:
            outputs = [process.communicate(timeout=WAIT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def rank(number: int, size: int = 2) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": str(size)}


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([(rank(1), ["--model", "demo"])], "rank 0 and rank 1 differ in the model's fingerprint: nothing and "),
        ([(rank(1, 3), [])], "rank 1 was started with WORLD_SIZE 3, rank 0 with 2"),
    ],
)
def test_a_start_that_cannot_succeed_says_why_on_every_rank(
    others: list[tuple[dict[str, str], list[str]]], words: str
) -> None:
    oracle = ["--backend", "oracle"]
    for status, output in start_by_hand([(rank(0), oracle), *((env, oracle + flags) for env, flags in others)]):
        assert status == 1
        assert [words in line for line in output.splitlines() if "cannot start" in line] == [True], output


def test_missing_ranks_are_named() -> None:
    oracle = ["--backend", "oracle"]
    for status, output in start_by_hand([(rank(0, 4), oracle), (rank(2, 4), oracle)], join_s=8.0):
        assert status == 1
        assert "ranks 1, 3 are missing (of 4): did not connect within 8 s (--join-timeout-s)" in output


def test_models_that_cannot_be_split_are_refused_by_every_rank(tmp_path: Path) -> None:
    from support.executor.cpu_driver import save_model

    save_model("gpt2", tmp_path)
    for status, output in start_by_hand([(rank(each), ["--model", str(tmp_path)]) for each in (0, 1)]):
        # A rank that hears of it from the other has lost that one.
        assert status in (1, 75)
        assert "Traceback" not in output
        if status == 1:
            assert "no tensor-parallel plan for models of type 'gpt2'" in output
    three = start_by_hand([(rank(each, 3), ["--model", str(tmp_path)]) for each in range(3)])
    assert any("do not divide the 4 query heads" in output for _, output in three)


def test_plan_and_a_running_group_agree_on_bytes_of_a_block(cpu_group: Process) -> None:
    from pagekv.client.planning.kv_budget import bytes_per_block, shard_kv_heads
    from pagekv.client.planning.kv_geometry import KvGeometry
    from pagekv.steps.v1 import executor_service_pb2 as steps
    from pagekv.steps.v1 import executor_service_pb2_grpc as steps_grpc

    with cpu_group.channel() as channel:
        stub = steps_grpc.ExecutorServiceStub(channel)
        found = stub.Describe(steps.DescribeRequest(block_size=16, token_budget=64), timeout=WAIT_S)
    geometry = KvGeometry(found.num_layers, found.num_kv_heads, found.head_size, found.kv_dtype)
    heads = shard_kv_heads(found.num_kv_heads, 2).kv_heads
    assert found.tensor_parallel_size == 2
    assert found.bytes_per_block == bytes_per_block(geometry, 16, heads)
    assert 2 * found.bytes_per_block == bytes_per_block(geometry, 16)
