"""DESIGN 7: faults of every kind under 32 clients, and not a token lost. `make chaos` goes on longer.

The seeds are fixed, the moments are not: whatever they hit, the answers must be those of the undisturbed run.
"""

from __future__ import annotations

import asyncio

import pytest
from chaos.faults import FAULTS, RANK_FAULTS
from chaos.run import Account, Options, chaos

# Minutes on a machine that does much besides: each fault is waited out, and loading torch takes its time.
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(2400)]


def nothing_was_lost(account: Account) -> None:
    print(account.table())
    assert not account.lost, account.table()
    assert account.streams["whole"] > 0


@pytest.mark.nightly  # the next one has the same faults
def test_every_fault_once() -> None:
    account = asyncio.run(chaos(Options(seconds=1500, seed=1, count=len(FAULTS)), say=False))
    nothing_was_lost(account)
    assert not account.short(FAULTS)


def test_every_fault_once_with_tls_and_a_key() -> None:
    account = asyncio.run(chaos(Options(seconds=1500, seed=3, count=len(FAULTS), tls=True), say=False))
    nothing_was_lost(account)
    assert not account.short(FAULTS)


@pytest.mark.nightly  # test_ranks.py kills and stops ranks one at a time
def test_every_fault_of_ranks_once() -> None:
    account = asyncio.run(chaos(Options(seconds=1500, seed=4, count=len(RANK_FAULTS), faults=(*RANK_FAULTS,), ranks=2)))
    nothing_was_lost(account)
    assert not account.short(RANK_FAULTS)


@pytest.mark.nightly  # tests/model/test_preemption_cpu.py loses this backend too, without the processes
def test_the_model_on_the_cpu_loses_its_process() -> None:
    killed = ("executor-killed",)
    options = Options(seconds=1500, seed=2, backend="cpu", lanes=12, faults=killed, count=1, requests=6)
    account = asyncio.run(chaos(options, say=False))
    nothing_was_lost(account)
    assert not account.short(killed)
