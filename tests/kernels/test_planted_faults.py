"""Planted faults prove something: one that edits nothing, or that nobody notices, is an error (`planted_faults.py`)."""

from __future__ import annotations

import pytest
from support.kernels.host_build import HostKernelError, HostLauncher
from support.kernels.planted_faults import Fault, assert_noticed

from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import KERNELS


def fails_when_edited(launcher: HostLauncher) -> None:
    assert launcher.edit is None


def fault(old: str, new: str = "") -> Fault:
    return Fault("of this test", "pagekv_decode", old, new, fails_when_edited)


def test_a_fault_without_its_text_is_not_noticed_but_an_error() -> None:
    with pytest.raises(ValueError, match=r"pagekv_decode: of this test: nothing to replace: 'no such text'"):
        assert_noticed(fault("no such text"))
    with pytest.raises(ValueError, match="nothing to replace"):
        assert_noticed(fault("__syncthreads();", "__syncthreads();"))


def test_a_fault_is_planted_wherever_its_text_is() -> None:
    """Both forms of the decode kernel include the same header; a compiler sees the second or the first."""
    text, barrier = translation_unit(KERNELS["pagekv_decode"].source), "__syncthreads();  // the block ids are there"
    assert text.count(barrier) == 2
    assert fault(barrier).plant()(text) == text.replace(barrier, "")
    other = translation_unit(KERNELS["pagekv_prefill"].source)
    assert fault(barrier).plant()(other) == other


def test_a_fault_that_nobody_notices_is_an_error() -> None:
    assert_noticed(fault("__syncthreads();"))
    with pytest.raises(AssertionError, match="nobody noticed"):
        assert_noticed(Fault("of this test", "pagekv_decode", "__syncthreads();", "", lambda launcher: None))


def test_only_a_wrong_result_counts_as_noticed() -> None:
    """A kernel that the emulation stops is one; a check that breaks by itself is none."""

    def stopped(launcher: HostLauncher) -> None:
        if launcher.edit:
            raise HostKernelError("a barrier not reached by all")

    def broken(launcher: HostLauncher) -> None:
        if launcher.edit:
            raise KeyError("of the check")

    assert_noticed(Fault("of this test", "pagekv_decode", "__syncthreads();", "", stopped))
    with pytest.raises(KeyError):
        assert_noticed(Fault("of this test", "pagekv_decode", "__syncthreads();", "", broken))
