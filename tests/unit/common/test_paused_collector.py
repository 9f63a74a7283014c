"""Imports without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pagekv.common.paused_collector import paused_collector


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """Leaves the collector on."""
    yield
    gc.enable()


def test_nothing_is_collected_within_it_and_all_that_was_made_is_hidden_afterwards() -> None:
    before = gc.get_freeze_count()
    with paused_collector():
        assert not gc.isenabled()
        made: list[dict[str, int]] = [{} for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_an_error_starts_it_again() -> None:
    with pytest.raises(ImportError), paused_collector():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()
