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
from contextlib import ExitStack, contextmanager
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


@pytest.fixture(scope="module")
def group() -> Iterator[Stack]:
    """Serves again after every fault."""
    with running_stack(GROUP, ["--step-timeout-s", f"{STEP_TIMEOUT_S}"], ranks=2) as stack:
        yield stack


def check_streams_survive(
    fault: Callable[[dict[int, int]], None], group: Stack, mend: Callable[[], None] = lambda: None
) -> None:
    """`mend`: what has to be done before ranks that start anew can serve."""
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
        mend()

    results, restarts = asyncio.run(generate_all(group, requests, disturb))
    after = group.executor.rank_pids()
    assert restarts > 0 == undisturbed
    assert [result.tokens for result in results] == [result.tokens for result in wanted]
    assert not {*before.values()} & {*after.values()}


@pytest.mark.long
@pytest.mark.parametrize("fault", [hang_last, hang_first])
def test_streams_survive_a_rank_that_hangs(fault: Callable[[dict[int, int]], None], group: Stack) -> None:
    check_streams_survive(fault, group)


@pytest.mark.nightly  # the test above stops ranks of the oracle
def test_streams_survive_a_rank_that_hangs_while_both_compute() -> None:
    """Rank 0 waits for rank 1 in a collective of the model. In float64, as below."""
    with running_stack([*CPU, "--rank-timeout-s", "3"], ["--step-timeout-s", f"{STEP_TIMEOUT_S}"], ranks=2) as group:
        check_streams_survive(hang_last, group)


@contextmanager
def running_group(script: str, args: Sequence[str], directory: Path, **variables: str) -> Iterator[Process]:
    """Two ranks that run this script of tests/support/executor, with these variables in their environment."""
    with ExitStack() as ends:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stack_module, "EXECUTOR", f"support.executor.{script}")
            for name, value in {"PYTHONPATH": str(ROOT / "tests"), **variables}.items():
                patch.setenv(name, value)
            group = ends.enter_context(running_executor(args, directory, ranks=2))
        yield group


@pytest.fixture(scope="module")
def cpu_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Two ranks that compute together. While there is a file `differing`, rank 1's next digest is wrong."""
    directory = tmp_path_factory.mktemp("cpu_group")
    differing = str(directory / "differing")
    with running_group("differing_rank", [*CPU, "--rank-timeout-s", "60"], directory, DIFFERING=differing) as executor:
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


def test_a_difference_ends_the_epoch_and_no_process_and_costs_no_token(cpu_group: Process) -> None:
    """Over ranks that compute together."""

    async def run(stack: Stack) -> tuple[Result, int]:
        async with Caller(stack.target) as caller:
            found = await caller.generate(request_for([1, 5, 7], max_tokens=30, ignore_eos=True))
            return found, (await caller.stats()).executor_rank_differences_total

    with running_manager(cpu_group) as stack:
        before = cpu_group.rank_pids()
        (cpu_group.directory / "differing").touch()
        found, differences = asyncio.run(run(stack))
        again, later = asyncio.run(run(stack))
        assert cpu_group.rank_pids() == before
    assert differences == later == 1
    assert len(found.tokens) == 30
    assert found.tokens == again.tokens
    words = f"rank 1 differs from rank 0 at step {WRONG_STEP}: tables or tokens are not the same"
    assert words in cpu_group.log.read_text()


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


# In a collective the others would wait for longer than a test may take.
WAITS = ("--rank-timeout-s", "1000", "--join-timeout-s", "1000")


@pytest.mark.parametrize(
    ("backend", "fails", "begin", "end"),
    [
        # An error that no rank waits in a collective for takes the same way on every backend.
        (ORACLE, "1 build", f"rank 1: {WHY}", ""),
        (CPU, *LEFT[2]),
        # The other rank and the other call: test_leader.py has each of both, without processes.
        *(pytest.param(CPU, *LEFT[each], marks=pytest.mark.nightly) for each in (0, 1, 3, 4)),
    ],
)
def test_a_rank_that_fails_alone_ends_the_start_of_all(
    backend: Sequence[str], fails: str, begin: str, end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would fail again, however often torchrun started the ranks anew. Each says which rank failed, and why."""
    monkeypatch.setattr(stack_module, "EXECUTOR", "support.executor.failing_rank")
    failing = tmp_path / "failing"
    failing.touch()
    for name, value in {"PYTHONPATH": str(ROOT / "tests"), "FAILS": fails, "FAILING": str(failing)}.items():
        monkeypatch.setenv(name, value)
    executor = Process(stack_module.EXECUTOR, (*backend, *WAITS), tmp_path, ranks=2)
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


@contextmanager
def served_group(backend: Sequence[str], fails: str, directory: Path) -> Iterator[Stack]:
    """Two ranks and a manager. `fails` names a rank and the place where it fails while there is a file `failing`."""
    failing, step_timeout = str(directory / "failing"), ["--step-timeout-s", f"{STEP_TIMEOUT_S}"]
    with (
        running_group("failing_rank", [*backend, *WAITS], directory, FAILS=fails, FAILING=failing) as executor,
        running_manager(executor, step_timeout) as stack,
    ):
        yield stack


@pytest.fixture(scope="module")
def patient_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two ranks of a model whose files can be taken away. Rank 1 fails while there is a file `failing`."""
    directory = tmp_path_factory.mktemp("patient_group")
    model = directory / "model"
    model.mkdir()
    shutil.copy(resolve_model("demo", weights=False) / "config.json", model)
    oracle = ["--backend", "oracle", "--model", str(model), "--step-time-ms", "20"]
    with served_group(oracle, "1 build", directory) as stack:
        yield stack


def check_starts_anew(group: Stack) -> None:
    """Streams go on after a rank is killed and lacks memory when it starts anew, which was there once."""
    failing, log = group.executor.directory / "failing", group.executor.log

    def fault(pids: dict[int, int]) -> None:
        failing.touch()
        kill_last(pids)

    def mend() -> None:
        wait_until(lambda: log.read_text().count(WHY) > 1, WAIT_S, group.executor.tail)
        failing.unlink()

    check_streams_survive(fault, group, mend)


def test_streams_survive_a_rank_and_starts_for_which_it_lacks_memory(patient_group: Stack) -> None:
    check_starts_anew(patient_group)


# Ranks that start anew do the same on every backend; test_a_rank_that_fails_alone has a collective.
@pytest.mark.nightly
@pytest.mark.parametrize("fails", ["1 load", "1 describe"])
def test_streams_survive_a_rank_that_computes_and_starts_for_which_it_lacks_memory(fails: str, tmp_path: Path) -> None:
    with served_group(CPU, fails, tmp_path) as group:
        check_starts_anew(group)


def test_streams_survive_rank_0_and_starts_without_the_files_of_its_model(patient_group: Stack) -> None:
    """As where they are on a network drive. No rank comes so far as to load it."""
    model, away = (patient_group.executor.directory / name for name in ("model", "away"))
    log, words = patient_group.executor.log, "rank 0: --model cannot be used"

    def fault(pids: dict[int, int]) -> None:
        model.rename(away)
        kill_first(pids)

    def mend() -> None:
        wait_until(lambda: log.read_text().count(words) > 2, WAIT_S, patient_group.executor.tail)
        away.rename(model)

    check_streams_survive(fault, patient_group, mend)


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
