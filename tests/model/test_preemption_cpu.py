"""Preemption of every kind over the CPU backend's real pools: bytes come back as they left, and no token changes.

The real scheduler drives the real backend through the messages of the wire, in float64, where no batch tips a near-tie.
At random moments sequences, requests and everything are preempted, in a pool that is too small anyway; with one seed, n
continuations and beams among them. Every block that goes to the host pool is summed there and again when it is back.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
from support.engine.scheduler_driver import output, results
from support.executor.cpu_driver import VOCAB, prompts_of, save_model
from support.executor.wire_driver import WireDriver, WireExecutor

from pagekv.executor.backend.interface import BlockCopies, CopyDirection
from pagekv.executor.cpu.backend import CpuBackend
from pagekv.kvmanager.scheduling.sequence import LiveRequest


class SummingBackend(CpuBackend):
    """Sums every block that is swapped out, and compares when it is back."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "m", dtype="float64", threads=1)
        self.sums: dict[int, str] = {}
        self.compared = 0

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        super().allocate(block_size, num_device_blocks, num_host_blocks)
        self.sums.clear()

    def copy_blocks(self, copies: BlockCopies) -> None:
        if copies.direction is CopyDirection.SWAP_OUT:
            left = [self._sum(self.cache.device[block]) for block in copies.sources]
            super().copy_blocks(copies)
            self.sums.update(zip(copies.destinations, left, strict=True))
            return
        super().copy_blocks(copies)
        if copies.direction is CopyDirection.SWAP_IN:
            for source, destination in zip(copies.sources, copies.destinations, strict=True):
                assert self._sum(self.cache.device[destination]) == self.sums[source]
                assert self._sum(self.cache.host[source]) == self.sums[source]
                self.compared += 1

    @staticmethod
    def _sum(block: Any) -> str:
        return hashlib.sha256(block.numpy().tobytes()).hexdigest()


class CpuDriver(WireDriver):
    """A scheduler over the backend `backend`."""

    backend: SummingBackend

    def _new_executor(self) -> WireExecutor:
        most = self.scheduler.limits.max_running
        pools = self.pool.num_blocks, self.block_size
        return WireExecutor(*pools, self.vocab, most, self.eos, self.host_blocks, self.backend)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> SummingBackend:
    directory = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    return SummingBackend(directory)


def drive(backend: SummingBackend, **options: Any) -> tuple[CpuDriver, list[LiveRequest]]:
    """The requests of every kind, submitted."""
    driver = type("Driver", (CpuDriver,), {"backend": backend})(block_size=4, vocab=VOCAB, **options)
    shared, *own = prompts_of([18, 3, 7, 12, 5, 2])
    drawn = {"temperature": 1.0}
    requests = [
        driver.submit(own[0], max_tokens=14),
        driver.submit(shared + own[1], max_tokens=14, seed=5, **drawn),
        driver.submit(shared + own[2], max_tokens=14, seed=6, n=3, **drawn),
        driver.submit(shared, max_tokens=10, n=2, beam_width=3),
        driver.submit(own[3], max_tokens=14, seed=7, n=2, top_p=0.9, repetition_penalty=1.3, **drawn),
        driver.submit(own[4], max_tokens=14, seed=8, presence_penalty=0.5, frequency_penalty=0.2, **drawn),
    ]
    return driver, requests


def outputs(requests: list[LiveRequest]) -> list[list[list[int]]]:
    return [
        results(request) if request.search else [output(request, index) for index in range(request.command.n)]
        for request in requests
    ]


@pytest.fixture(scope="module")
def wanted(backend: SummingBackend) -> list[list[list[int]]]:
    """Outputs of the same requests when nothing is ever preempted."""
    driver, requests = drive(backend, num_blocks=256)
    driver.drain()
    assert driver.scheduler.counters.preemptions == 0
    return outputs(requests)


def disturb(driver: CpuDriver, rng: random.Random) -> None:
    """To the end, with preemptions in between."""
    for _ in range(10_000):
        scheduler = driver.scheduler
        if scheduler.running and rng.random() < 0.15:
            scheduler.preemption.preempt(rng.choice(scheduler.running))
        elif rng.random() < 0.04:
            scheduler.preempt_all()
        if not driver.step():
            return
    raise AssertionError("not drained")


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_no_preemption_changes_a_token_or_a_byte(
    mode: str, prefix_cache: bool, backend: SummingBackend, wanted: list[list[list[int]]]
) -> None:
    backend.compared = 0
    for seed in range(2):
        driver, requests = drive(
            backend,
            num_blocks=30,
            host_blocks=(60, 11)[seed],
            preemption=mode,
            prefix_cache=prefix_cache,
            write_back=bool(seed),
            max_batch_tokens=(64, 9)[seed],
        )
        disturb(driver, random.Random(seed))
        assert outputs(requests) == wanted
        assert driver.scheduler.counters.preemptions > 10
        assert driver.host.num_held == 0
        driver.lose_executor()
    if mode == "swap":
        assert backend.compared > 20


def test_an_executor_lost_among_preemptions_changes_no_token(
    backend: SummingBackend, wanted: list[list[list[int]]]
) -> None:
    driver, requests = drive(backend, num_blocks=30, host_blocks=60, preemption="swap")
    rng = random.Random(3)
    for round_ in range(4):
        for _ in range(6):
            driver.step()
            if driver.scheduler.running:
                driver.scheduler.preemption.preempt(rng.choice(driver.scheduler.running))
        if round_ % 2:
            driver.lose_executor()
    driver.drain()
    assert outputs(requests) == wanted
