"""Ranks join what they computed: sums and tokens are the same on each, and one that does not come ends the others."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support.clients.held_port import held_port
from support.executor.joined_rank import run_rank
from support.executor.split_model import fork_context

from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World

# Bounds a hang alone.
WAIT_S = 240.0


@dataclass
class Rank:
    """A process that goes on with what a test has written (`joined_rank`)."""

    process: BaseProcess
    said: Path

    def output(self) -> str:
        """Its output, once it has ended."""
        self.process.join(WAIT_S)
        said = self.said.read_text()
        assert self.process.exitcode is not None, f"it runs on: {said}"
        return said


@contextmanager
def ranks_running(code: str, size: int) -> Iterator[list[Rank]]:
    """Processes that have joined in `shards` of one `world`, and go on with `code`; forked from one that has imported
    torch, which takes more than all that they do themselves.
    """
    with held_port() as port, tempfile.TemporaryDirectory() as folder:
        env = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = []
        for rank in range(size):
            said = Path(folder, str(rank))
            given = (code, {**env, "RANK": str(rank)}, said)
            ranks.append(Rank(fork_context().Process(target=run_rank, args=given, daemon=True), said))
        try:
            for each in ranks:
                each.process.start()
            yield ranks
        finally:
            for each in ranks:
                if each.process.pid is not None:  # or it was not started
                    each.process.kill()
                    each.process.join()


@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_every_size_are_the_same_on_each_rank(size: int) -> None:
    code = """
import zlib
digest = 0
for count in (1, 7, ranks.GATHERED_BYTES // 256 + 1):
    parts = [torch.randn(count, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
    found = shards.sum(parts[world.rank].clone())
    assert torch.allclose(found, sum(parts), atol=1e-5), count
    digest = zlib.crc32(found.numpy().tobytes(), digest)
    # A view of every other column is summed, too.
    wide = parts[world.rank].repeat_interleave(2, 1)
    assert torch.equal(shards.sum(wide[:, ::2]), found), count
first = shards.sum(parts[world.rank][:1].clone())
few = shards.sum(parts[world.rank][:9].clone())
assert torch.equal(few[:1], first)
print(digest, flush=True)
"""
    with ranks_running(code, size) as ranks:
        outputs = [each.output() for each in ranks]
    assert [each.process.exitcode for each in ranks] == [0] * size
    assert outputs[0].strip()
    assert len({*outputs}) == 1


def test_a_rank_that_does_not_come_to_a_collective_is_given_up_in_time() -> None:
    code = (
        "import time\n"
        "shards.limit_waits(5.0)\n"
        "print(shards.sum(torch.ones(2)).tolist(), flush=True)\n"
        "shards.sum(torch.ones(2)) if world.rank == 0 else time.sleep(1000)\n"
    )
    with ranks_running(code, 2) as ranks:
        output = ranks[0].output()
        assert output.startswith("[2.0, 2.0]\na collective failed: ")
        assert ranks[0].process.exitcode == 75


def test_a_rank_that_failed_is_lost_by_its_failure_if_others_do_not_come() -> None:
    """Others wait for it in another collective. If all have failed, they agree on it."""
    code = (
        "shards.limit_waits(100.0)\n"
        "short = RuntimeError('out of memory')\n"
        "print(shards.least(1 + world.rank, failure=short), shards.least(2, failure=None), flush=True)\n"
        "shards.least(0, failure=short) if world.rank else shards.sum(torch.ones(2))\n"
    )
    begun = time.monotonic()
    with ranks_running(code, 2) as ranks:
        outputs = [each.output() for each in ranks]
    assert outputs[1] == "1 2\nthis rank failed while others waited for it: out of memory\n"
    # Its end breaks what the other one waits in.
    assert outputs[0].startswith("1 2\na collective failed: ")
    assert [each.process.exitcode for each in ranks] == [75, 75]
    assert time.monotonic() - begun < 90


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_on_a_way_to_compute_unless_one_alone_fails_in_it(size: int) -> None:
    """The others wait for that one in a collective. Its error is one of its own, which ends the start of all."""
    code = """
import os
large, last = torch.ones(ranks.GATHERED_BYTES), world.rank == world.size - 1
ranks.OTHERS_COMPILE_S = 3.0
print(shards.why_not_all("", "go", failed=False))
print(shards.why_not_all("mine" if world.rank else "", "go", failed=False))
print(shards.why_not_all(f"failed {world.rank}", "go", failed=True))
try:
    shards.why_not_all("no compiler", "start anew", failed=True) if last else shards.sum(large)
except ValueError as error:
    print("FOUND", error, error.__cause__, flush=True)
    os._exit(1)
"""
    with ranks_running(code, size) as ranks:
        outputs = [each.output() for each in ranks]
    assert outputs[0].startswith("\nanother rank cannot\nfailed 0\na collective failed: ")
    found = "FOUND no compiler, on this rank alone: start anew None"
    assert outputs[-1] == f"\nmine\nfailed {size - 1}\n{found}\n"


def test_tensors_of_gpus_are_joined_by_the_group_that_has_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of every size, and with no limit of this group: NCCL would know nothing of it in a graph."""
    joined: list[Any] = []

    def join(rows: Any, *_: object, group: Any, **__: object) -> Any:
        joined.append((rows, group))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", join)
    monkeypatch.setattr(dist, "all_to_all_single", join)
    monkeypatch.setattr(dist, "new_group", lambda *, timeout, backend: (timeout.total_seconds(), backend))
    shards = Shards(World(0, 2, 2), pytest.fail)
    shards.limit_waits(7.0)
    rows: Any = SimpleNamespace(is_cuda=True, is_contiguous=lambda: True)
    assert shards.sum(rows) is rows
    shards.all_say(True)
    shards.all_say(True, patient=True)
    assert [group for _, group in joined] == [None, (7.0, "gloo"), None]
    assert shards.limit_s == 7.0


def test_all_have_the_rows_of_rank_0_and_the_least_number() -> None:
    code = """
told = shards.share(torch.tensor([5, -1], dtype=torch.int32) if world.rank == 0 else torch.empty(2, dtype=torch.int32))
print("FOUND", told.tolist(), shards.least(7 - world.rank), shards.all_say(world.rank == 0))
"""
    with ranks_running(code, 3) as ranks:
        outputs = [each.output() for each in ranks]
    assert [output.strip().splitlines()[-1] for output in outputs] == ["FOUND [5, -1] 5 False"] * 3


def test_a_collective_that_no_graph_can_have_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its failure is told to whoever records; that of a step, or of gloo, ends the rank."""

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(dist, "all_reduce", failing)
    monkeypatch.setattr(dist, "all_to_all_single", failing)
    lost: list[str] = []
    shards = Shards(World(0, 2, 2), lost.append)
    rows: Any = SimpleNamespace(is_cuda=True, is_contiguous=lambda: True)
    with shards.recording():
        with pytest.raises(RuntimeError, match="not permitted"):
            shards.sum(rows)
        assert lost == []
        with pytest.raises(RuntimeError, match="not permitted"):
            shards.all_say(True)
        assert len(lost) == 1
    with pytest.raises(RuntimeError, match="not permitted"):
        shards.sum(rows)
    assert len(lost) == 2
