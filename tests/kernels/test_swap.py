"""Swapping: runs of blocks, and the order of copies on three streams that each run as late or as early as they may.

Bytes before are bytes after, and a copy neither overtakes nor is overtaken where it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagekv.kernels.swap import BlockSwapper, CopyStream, Run, Streams, runs

Pairs = list[tuple[int, int]]
pairs_of_blocks = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=13, unique_by=lambda pair: pair[1]
)


@given(pairs_of_blocks)
def test_runs_copy_every_pair_and_nothing_else(pairs: Pairs) -> None:
    found = runs([source for source, _ in pairs], [destination for _, destination in pairs])
    copied = [(run.source + i, run.destination + i) for run in found for i in range(run.count)]
    assert sorted(copied) == sorted(pairs)


@given(pairs_of_blocks)
def test_runs_are_as_few_as_can_be(pairs: Pairs) -> None:
    """A run ends only where no pair goes on behind it."""
    found = runs([source for source, _ in pairs], [destination for _, destination in pairs])
    for run in found:
        assert (run.source + run.count, run.destination + run.count) not in pairs


def test_blocks_named_in_any_order_are_one_run() -> None:
    assert runs([9, 7, 8], [2, 0, 1]) == [Run(7, 0, 3)]
    assert runs([], []) == []
    assert runs([4, 5], [1, 0]) == [Run(5, 0, 1), Run(4, 1, 1)]


def test_a_destination_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="destinations: names a block twice"):
        runs([1, 2], [3, 3])
    with pytest.raises(ValueError, match="destinations: must have 2 entries"):
        runs([1, 2], [3])


@dataclass
class LateStreams(Streams):
    """Three streams whose work runs when `run` says so, in any order that their waits allow."""

    queues: dict[CopyStream, list[Callable[[], bool]]] = field(
        default_factory=lambda: {stream: [] for stream in CopyStream}
    )
    copies: int = 0

    def enqueue(self, stream: CopyStream, work: Callable[[], None]) -> None:
        def finish() -> bool:
            work()
            return True

        self.queues[stream].append(finish)

    def mark(self, stream: CopyStream) -> list[bool]:
        event: list[bool] = []
        self.enqueue(stream, lambda: event.append(True))
        return event

    def wait(self, stream: CopyStream, event: list[bool]) -> None:
        self.queues[stream].append(lambda: bool(event))

    def done(self, event: list[bool]) -> bool:
        return bool(event)

    def copy(self, stream: CopyStream, destination: Any, source: Any) -> None:
        self.copies += 1
        self.enqueue(stream, lambda: destination.__setitem__(slice(None), source))

    def run(self, random: Random, most: int) -> None:
        """Up to `most` pieces of work, each of a stream that may go on, chosen at random."""
        for _ in range(most):
            streams = [stream for stream, queue in self.queues.items() if queue]
            random.shuffle(streams)
            for stream in streams:
                if self.queues[stream][0]():
                    self.queues[stream].pop(0)
                    break
            else:
                assert not any(self.queues.values()), "every stream waits for another"
                return


DEVICE_BLOCKS, HOST_BLOCKS = 6, 4
Array = npt.NDArray[np.int64]


@dataclass
class Pools:
    device: Array = field(default_factory=lambda: np.arange(2 * DEVICE_BLOCKS).reshape(DEVICE_BLOCKS, 2))
    host: Array = field(default_factory=lambda: -np.ones((HOST_BLOCKS, 2), np.int64))

    def compute(self, blocks: list[int], number: int) -> None:
        """A step: reads its blocks and writes them."""
        self.device[blocks] = self.device[blocks] * 31 + number


@given(st.data(), st.randoms(use_true_random=False))
def test_any_history_ends_as_if_it_had_run_in_order(data: st.DataObject, random: Random) -> None:
    """Swaps both ways and steps between them, over few blocks; steps wait for the blocks they use, or for all."""
    pools, expected, streams = Pools(), Pools(), LateStreams()
    swapper = BlockSwapper(streams, pools.device, pools.host)
    for number in range(data.draw(st.integers(1, 12), label="length")):
        kind = data.draw(st.sampled_from(["out", "in", "step", "run"]), label="kind")
        device = data.draw(st.lists(st.integers(0, DEVICE_BLOCKS - 1), max_size=4, unique=True), label="device")
        if kind == "run":
            streams.run(random, data.draw(st.integers(1, 20), label="most"))
        elif kind == "step":
            swapper.before_compute(data.draw(st.sampled_from([device, None]), label="waits for"))
            streams.enqueue(CopyStream.COMPUTE, partial(pools.compute, device, number))
            expected.compute(device, number)
        else:
            order = data.draw(st.permutations(range(HOST_BLOCKS)), label="host")
            host = list(order[: len(device)])
            if kind == "out":
                swapper.swap_out(device, host)
                expected.host[host] = expected.device[device]
            else:
                swapper.swap_in(host, device)
                expected.device[device] = expected.host[host]
    streams.run(random, 10_000)
    np.testing.assert_array_equal(pools.device, expected.device)
    np.testing.assert_array_equal(pools.host, expected.host)


@pytest.mark.parametrize(
    ("out", "back"),
    [(([1], [0]), ([2], [1])), (([1], [0]), ([0], [3]))],
    ids=["its device block is being read", "its host block is being written"],
)
def test_a_copy_in_waits_for_the_copy_out_of_its_block(
    out: tuple[list[int], list[int]], back: tuple[list[int], list[int]]
) -> None:
    pools, streams = Pools(), LateStreams()
    swapper = BlockSwapper(streams, pools.device, pools.host)
    swapper.swap_out(*out)
    swapper.swap_in(*back)
    incoming = streams.queues[CopyStream.IN]
    streams.queues[CopyStream.COMPUTE] = [work for work in streams.queues[CopyStream.COMPUTE] if not work()]
    while incoming and incoming[0]():
        incoming.pop(0)
    assert incoming, "the copy out has not run yet"
    streams.run(Random(1), 100)
    assert not incoming
    saved = np.array([2, 3])
    np.testing.assert_array_equal(pools.host[0], saved)
    np.testing.assert_array_equal(pools.device[back[1][0]], saved if back[0] == [0] else [-1, -1])


def test_a_step_runs_beside_the_copy_of_blocks_that_it_does_not_use() -> None:
    pools, streams = Pools(), LateStreams()
    swapper = BlockSwapper(streams, pools.device, pools.host)
    assert swapper.swap_out([2, 1], [1, 0]) == 1
    assert streams.copies == 1
    assert swapper.swap_out([DEVICE_BLOCKS - 1], [2]) == 1
    swapper.before_compute(np.array([[0, 3], [3, -1]], np.int32))
    steps: list[str] = []
    streams.enqueue(CopyStream.COMPUTE, lambda: steps.append("beside"))
    swapper.before_compute([1])
    streams.enqueue(CopyStream.COMPUTE, lambda: steps.append("after"))
    queue = streams.queues[CopyStream.COMPUTE]
    while queue and queue[0]():
        queue.pop(0)
    assert steps == ["beside"], "the copy stream has not run yet"
    streams.run(Random(1), 100)
    assert steps == ["beside", "after"]


def test_ids_outside_of_a_pool_are_refused_with_nothing_enqueued() -> None:
    pools, streams = Pools(), LateStreams()
    swapper = BlockSwapper(streams, pools.device, pools.host)
    for sources, destinations, name in (
        ([DEVICE_BLOCKS], [0], "sources"),
        ([0], [HOST_BLOCKS], "destinations"),
        ([-1], [0], "sources"),
        ([0, 1], [2, 2], "destinations"),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            swapper.swap_out(sources, destinations)
    assert not any(streams.queues.values())


def test_pools_of_different_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^host_pool"):
        BlockSwapper(LateStreams(), np.zeros((2, 4)), np.zeros((2, 5)))


class FakeCuda:
    """torch's streams and events: notes what is enqueued, and on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.current, self._made = "current", 0
        self.has_run = False
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self._stream(self.current))
        monkeypatch.setattr(torch.cuda, "stream", self._switched)
        monkeypatch.setattr(torch.cuda, "Event", self._event)

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_event=lambda event: self.log.append(("wait", name, event.recorded)))

    def _new_stream(self) -> Any:
        self._made += 1
        return self._stream(f"new {self._made}")

    @contextmanager
    def _switched(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def _event(self) -> Any:
        event = SimpleNamespace(recorded="", query=lambda: self.has_run)
        event.record = lambda stream: setattr(event, "recorded", stream.name)
        return event

    def destination(self) -> Any:
        """A tensor that is copied to."""
        return SimpleNamespace(copy_=lambda source, non_blocking: self.log.append((self.current, source, non_blocking)))


def test_work_is_enqueued_on_the_stream_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: copies out and in on a stream each, and computation on the one that is current when it is asked for."""
    cuda = FakeCuda(monkeypatch)
    streams = Streams()
    for stream in (CopyStream.OUT, CopyStream.IN):
        streams.copy(stream, cuda.destination(), stream)
    assert cuda.log == [("new 1", CopyStream.OUT, True), ("new 2", CopyStream.IN, True)]
    assert cuda.current == "current"
    cuda.log.clear()
    cuda.current = "another"
    events = [streams.mark(stream) for stream in (CopyStream.COMPUTE, CopyStream.OUT, CopyStream.IN)]
    assert [event.recorded for event in events] == ["another", "new 1", "new 2"]
    streams.wait(CopyStream.COMPUTE, events[2])
    streams.wait(CopyStream.OUT, events[0])
    assert cuda.log == [("wait", "another", "new 2"), ("wait", "new 1", "another")]
    assert not streams.done(events[0])
    cuda.has_run = True
    assert streams.done(events[0])
