"""A backend over ranks does on all of them what it is asked; differences end the epoch, with rank and step."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from unittest import mock

import pytest
from support.executor.rank_group import LIMITS, MODEL, TIMEOUT_S, RankGroup, message, rank_group, running_group
from support.waiting import wait_until

from pagekv.common.errors import InvalidRequest, OutOfMemory
from pagekv.executor.backend.interface import BackendDescription, Finished, Launch, Sampled, Scheduled
from pagekv.executor.oracle.backend import OracleBackend
from pagekv.executor.ranks import calls
from pagekv.executor.ranks.follower import Follower
from pagekv.executor.ranks.leader import GroupBackend, Leader
from pagekv.executor.ranks.link import RankLink
from pagekv.executor.ranks.watch import RankWatch
from pagekv.executor.rpc import wire
from pagekv.executor.session.attach_check import AttachOrder
from pagekv.executor.session.epoch import Epoch, LaunchedStep, RanksDiffer
from pagekv.executor.session.session import Session
from pagekv.executor.session.state_digest import StateDigest
from pagekv.executor.session.step import ExecutedStep
from pagekv.executor.session.worker_thread import WorkerThread
from pagekv.steps.v1 import executor_service_pb2 as pb

SLOT = 12


class Other(OracleBackend):
    """An oracle that samples another token in one step."""

    def __init__(self, wrong_step: int) -> None:
        super().__init__(MODEL)
        self._left = wrong_step

    def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
        found = super().execute(scheduled)
        self._left -= 1
        return {seq: Sampled((one.token_id + 1) % 64) for seq, one in found.items()} if not self._left else found


class Breaks(OracleBackend):
    """An oracle that breaks."""

    def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
        raise RuntimeError("no memory left")


def epoch_of(group: RankGroup, number: int = 5) -> Epoch:
    group.backend.allocate(4, 20, 0)
    return Epoch(number, "test", LIMITS, group.backend, ranks=group.leader, digest=StateDigest())


def launch(epoch: Epoch, number: int) -> LaunchedStep:
    request = message(number, epoch.epoch)
    return epoch.launch(wire.step(request.SerializeToString()))


def run(epoch: Epoch, number: int) -> ExecutedStep:
    return launch(epoch, number).collect()


def run_all(epoch: Epoch) -> None:
    for number in range(1, 10):
        run(epoch, number)


def test_steps_are_those_of_one_rank_and_the_times_of_all_are_told() -> None:
    alone = OracleBackend(MODEL)
    alone.allocate(4, 20, 0)
    wanted = Epoch(5, "test", LIMITS, alone)
    with running_group(*(OracleBackend(MODEL) for _ in range(3))) as group:
        assert group.leader.size == 3
        epoch = epoch_of(group)
        for number in range(1, 40):
            found = run(epoch, number)
            assert found.sampled == run(wanted, number).sampled
            assert len(found.rank_us) in ((0, 3) if number == 1 else (3,))
    assert group.lost == []


def test_the_work_of_a_rank_is_without_what_it_waits() -> None:
    class Waits(OracleBackend):
        def launch(self, scheduled: list[Scheduled]) -> Launch:
            return Finished(super().launch(scheduled).collect(), waited_s=1000.0)

    for waiting in (0, 1):
        backends = [(Waits if rank == waiting else OracleBackend)(MODEL) for rank in range(2)]
        with running_group(*backends) as group:
            assert group.backend.describe(4, 64).tensor_parallel_size == 2
            epoch = epoch_of(group)
            for number in (1, 2):
                worked = run(epoch, number).rank_us
        assert worked[waiting] == 0 < worked[1 - waiting]


def test_every_rank_prepares_its_own_steps_while_there_is_nothing_to_do() -> None:
    class Prepares(OracleBackend):
        left = 3

        def prepare(self) -> bool:
            self.left -= 1
            return self.left > 0

    ranks = [Prepares(MODEL) for _ in range(3)]
    with running_group(*ranks) as group:
        epoch = epoch_of(group)
        wait_until(lambda: [rank.left for rank in ranks[1:]] == [0, 0])
        assert [group.backend.prepare() for _ in range(3)] == [True, True, False]
        assert run(epoch, 1).sampled
    assert group.lost == []


def test_a_rank_whose_backend_prepares_nothing_has_nothing_to_do() -> None:
    with running_group(OracleBackend(MODEL), OracleBackend(MODEL)) as group:
        assert not group.backend.prepare()
        assert run(epoch_of(group), 1).sampled


def test_memory_is_that_of_the_smallest_rank() -> None:
    backends = [OracleBackend(MODEL, kv_bytes=SLOT * size) for size in (80, 64, 100)]
    with running_group(*backends) as group:
        assert group.backend.describe(4, 64).device_kv_bytes == SLOT * 64
        group.backend.allocate(4, 16, 0)
        with pytest.raises(MemoryError, match=r"^rank 1: a pool may have 16 blocks"):
            group.backend.allocate(4, 17, 0)
        with pytest.raises(
            MemoryError, match=r"^rank 0: a pool may have 20 blocks.*; rank 1: a pool .*; rank 2: a pool"
        ):
            group.backend.allocate(4, 26, 0)
        group.backend.allocate(4, 16, 16)


def test_what_a_rank_cannot_describe_is_refused_with_its_number() -> None:
    class Narrow(OracleBackend):
        def describe(self, block_size: int, token_budget: int) -> BackendDescription:
            if block_size == 8:
                raise InvalidRequest("block_size", "too large")
            raise RuntimeError("out of order")

    with running_group(OracleBackend(MODEL), Narrow(MODEL)) as group:
        with pytest.raises(InvalidRequest, match=r"block_size: too large \(rank 1\)"):
            group.backend.describe(8, 64)
        with pytest.raises(RuntimeError, match="rank 1 failed to describe: RuntimeError: out of order"):
            group.backend.describe(4, 64)


@pytest.mark.parametrize("call", ["describe", "allocate"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_alone_is_named_and_ends_the_group(
    monkeypatch: pytest.MonkeyPatch, call: str, failing: int
) -> None:
    """Others wait for it in what they compute together, for as long as that may take."""
    monkeypatch.setattr(calls, "OTHERS_S", 0.1)
    given_up = threading.Event()

    class Waits(OracleBackend):
        def describe(self, block_size: int, token_budget: int) -> BackendDescription:
            assert given_up.wait(TIMEOUT_S)
            return super().describe(block_size, token_budget)

        def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
            assert given_up.wait(TIMEOUT_S)

    class Fails(OracleBackend):
        def describe(self, block_size: int, token_budget: int) -> BackendDescription:
            raise RuntimeError("CUDA out of memory")

        def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
            raise RuntimeError("CUDA out of memory")

    backends = [(Fails if rank == failing else Waits)(MODEL) for rank in range(3)]
    with running_group(*backends) as group:
        made = getattr(group.backend, call)
        arguments = (4, 20) if call == "describe" else (4, 20, 0)

        def ask() -> None:
            with suppress(RuntimeError):
                made(*arguments)

        asked = threading.Thread(target=ask)
        asked.start()
        wait_until(lambda: len(group.lost) == 3)
        given_up.set()
        asked.join(TIMEOUT_S)
        assert not asked.is_alive()
    left = [str(rank) for rank in range(3) if rank != failing]
    why = f"rank {failing} failed to {call}: RuntimeError: CUDA out of memory"
    why += f"; left waiting for it: rank {', '.join(left)}"
    assert sorted(group.lost) == sorted([why, f"rank 0 ends: {why}", f"rank 0 ends: {why}"])


def test_a_call_that_fails_gives_a_start_up_and_later_ones_do_not() -> None:
    """Up to the first pools, and unless it can pass."""

    class Failing(OracleBackend):
        fails = True
        why = "out of order"

        def describe(self, block_size: int, token_budget: int) -> BackendDescription:
            if self.fails:
                raise RuntimeError(self.why)
            return super().describe(block_size, token_budget)

    served: list[str] = []
    given_up: list[str] = []
    near, far = socket.socketpair()
    watches = [
        RankWatch({rank: RankLink(end)}, TIMEOUT_S, cannot_start=given_up.append) for rank, end in ((1, near), (0, far))
    ]
    leader, follower = Leader(watches[0], serves=lambda: served.append("served")), Follower(watches[1])
    other = Failing(MODEL)
    threading.Thread(target=follower.run, args=(other,), daemon=True).start()
    backend = GroupBackend(OracleBackend(MODEL), leader)
    words = "rank 1 failed to describe: RuntimeError: out of order"
    other.why = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        backend.describe(4, 64)
    assert given_up == []
    other.why = "out of order"
    with pytest.raises(RuntimeError, match=words):
        backend.describe(4, 64)
    wait_until(lambda: len(given_up) == 2)
    assert given_up == [words] * 2
    other.fails = False
    backend.describe(4, 64)
    assert served == []
    for _ in range(2):
        backend.allocate(4, 20, 0)
    assert served == ["served"]
    other.fails = True
    with pytest.raises(RuntimeError, match=words):
        backend.describe(4, 64)
    assert len(given_up) == 2
    leader.stop()


def test_a_rank_that_ends_says_why() -> None:
    """Such as one that cannot load its share."""
    with running_group(*(OracleBackend(MODEL) for _ in range(3))) as group:
        group.followers[1].watch.end("no room for the weights")
        wait_until(lambda: len(group.lost) == 2)
    why = "rank 2 ends: no room for the weights"
    assert sorted(group.lost) == [f"rank 0 ends: {why}", why]


def test_what_all_ranks_find_out_costs_no_process() -> None:
    class Short(OracleBackend):
        def describe(self, block_size: int, token_budget: int) -> BackendDescription:
            raise OutOfMemory(f"token_budget: {token_budget} tokens do not fit")

    with (
        running_group(Short(MODEL), Short(MODEL)) as group,
        pytest.raises(OutOfMemory, match="64 tokens do not fit"),
    ):
        group.backend.describe(4, 64)
    assert group.lost == []


def test_a_rank_that_samples_another_token_ends_the_epoch_and_another_epoch_begins() -> None:
    with running_group(OracleBackend(MODEL), OracleBackend(MODEL), Other(3)) as group:
        epoch = epoch_of(group)
        with pytest.raises(
            RanksDiffer, match="rank 2 differs from rank 0 at step 3: tables or tokens are not the same"
        ):
            run_all(epoch)
        # At the latest with the step after.
        assert epoch.next_step <= 5
        epoch = epoch_of(group, 6)
        run(epoch, 1)
    assert group.lost == []


def test_no_step_is_begun_behind_a_difference() -> None:
    """Ranks may not come to it, for which rank 0 would wait in the middle of it."""
    known, computed = threading.Event(), []

    class Counts(OracleBackend):
        def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
            computed.append(len(scheduled))
            return super().execute(scheduled)

    class Late(Other):
        def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
            found = super().execute(scheduled)
            # A step that rank 0 has reported by then.
            assert self._left or known.wait(TIMEOUT_S)
            return found

    with running_group(Counts(MODEL), Late(3)) as group:
        epoch = epoch_of(group)
        for number in (1, 2, 3):
            run(epoch, number)
        known.set()
        wait_until(lambda: group.leader._reports._difference is not None)
        with pytest.raises(RanksDiffer, match="rank 1 differs from rank 0 at step 3"):
            launch(epoch, 4)
    assert len(computed) == 3


class Together(OracleBackend):
    """A rank that computes together with others, so that most errors leave some of them waiting."""

    def is_lost(self, error: Exception) -> bool:
        return True


def test_a_difference_costs_no_process_and_is_counted() -> None:
    with running_group(Together(MODEL), Other(3)) as group:
        with pytest.raises(RanksDiffer) as found:
            run_all(epoch_of(group))
        assert not group.backend.is_lost(found.value)
        assert group.backend.is_lost(RuntimeError("a collective failed"))
        assert group.backend.describe(4, 64).rank_differences == 1
        run_all(epoch_of(group, 6))
        assert group.backend.describe(4, 64).rank_differences == 1
    assert group.lost == []


def test_an_order_that_a_rank_cannot_carry_out_costs_no_process() -> None:
    """The manager is told, and may come back with another one."""
    order = AttachOrder("manager", 4, 21, 0, "", False, (), 1)

    async def run_session(group: RankGroup) -> None:
        compute = WorkerThread()
        session = Session(compute)
        session.serve(group.backend, group.leader)
        with pytest.raises(OutOfMemory, match=r"rank 0: a pool may have .*; rank 1: a pool may have"):
            await session._allocate(group.backend, order)
        for refusal in (InvalidRequest("block_size", "too large"), OutOfMemory("token_budget: too large")):
            answer = mock.patch.object(Together, "describe", side_effect=refusal)
            with answer, pytest.raises(type(refusal), match="too large"):
                await session.describe(4, 64)
        assert not session.lost.is_set()
        compute.stop()

    with running_group(Together(MODEL, kv_bytes=SLOT * 80), OracleBackend(MODEL, kv_bytes=SLOT * 80)) as group:
        asyncio.run(run_session(group))
        # Not so in the middle of a step.
        assert group.backend.is_lost(MemoryError("no page-locked memory"))
    assert group.lost == []


def test_a_rank_that_breaks_ends_the_epoch() -> None:
    with running_group(OracleBackend(MODEL), Breaks(MODEL)) as group:
        epoch = epoch_of(group)
        with pytest.raises(RanksDiffer, match="rank 1 differs from rank 0 at step 1: RuntimeError: no memory left"):
            run_all(epoch)


def test_a_step_that_all_refuse_is_refused_as_by_one_rank() -> None:
    with running_group(OracleBackend(MODEL), OracleBackend(MODEL)) as group:
        epoch = epoch_of(group)
        run(epoch, 1)
        request = pb.StepRequest(epoch=5, step=2, finished_seqs=[9])
        with pytest.raises(InvalidRequest, match="R2"):
            epoch.launch(wire.step(request.SerializeToString()))
        run(epoch_of(group, 6), 1)
    assert group.lost == []


def test_steps_of_an_epoch_that_are_collected_in_the_next_one_disturb_it_not() -> None:
    """A manager attaches while steps of the one before still run: a backend need not wait for them to allocate."""
    backends = (OracleBackend(MODEL, step_time_s=0.05) for _ in range(2))
    with running_group(*backends, timeout_s=60.0) as group:
        before = epoch_of(group)
        late = [launch(before, number) for number in (1, 2)]
        epoch = epoch_of(group, 6)
        first = launch(epoch, 1)
        for step in late:
            assert step.collect().rank_us == ()
        first.collect()
        for number in range(2, 6):
            assert len(run(epoch, number).rank_us) == 2
    assert group.lost == []
    assert group.leader.num_differences == 0


def test_a_rank_whose_connection_ends_is_lost_to_all() -> None:
    group = rank_group(OracleBackend(MODEL), OracleBackend(MODEL))
    group.links[0].close()
    wait_until(lambda: len(group.lost) == 2)
    assert sorted(group.lost) == ["rank 0 was lost: the connection ended", "rank 1 was lost: the connection ended"]
    group.close()


def test_a_step_that_all_refuse_leaves_the_results_of_those_under_way() -> None:
    """Rank 0 waits for what the others report of them."""
    with running_group(*(OracleBackend(MODEL, step_time_s=0.2) for _ in range(2))) as group:
        epoch = epoch_of(group)
        launched = [launch(epoch, number) for number in (1, 2)]
        request = pb.StepRequest(epoch=5, step=3, finished_seqs=[9])
        with pytest.raises(InvalidRequest, match="R2"):
            epoch.launch(wire.step(request.SerializeToString()))
        assert [one.collect().step for one in launched] == [1, 2]
    assert group.lost == []
