"""Faults planted in the text of kernels, to prove that the tests would notice them.

A kernel's test file lists its faults and one deterministic check that passes with the kernel as it is:

    FAULTS = [Fault("a barrier is missing", "pagekv_decode", "__syncthreads();  // tile", "", check)]

    @pytest.mark.parametrize("fault", visible(FAULTS), ids=str)
    def test_planted_faults_are_noticed(fault): assert_noticed(fault)

A fault is planted wherever its text occurs, because a kernel's text holds a header once for each branch of a
conditional that includes the header. A fault whose text does not occur is an error, not a fault that was noticed.

Such a test is marked `sanitize`: faults with `sanitizer=True` only show under AddressSanitizer, and are planted there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from support.kernels.host_build import SANITIZE, Edit, HostKernelError, HostLauncher

from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import KERNELS


@dataclass(frozen=True)
class Fault:
    """One edit of a kernel's text and the check that must fail with it."""

    name: str
    """The fault in words."""
    kernel: str
    old: str
    """Text of the kernel or of a header it includes; replaced wherever it occurs."""
    new: str
    check: Callable[[HostLauncher], None]
    """Launches the kernel and compares; raises AssertionError where the result is wrong."""
    sanitizer: bool = False
    """Whether only AddressSanitizer sees it."""

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"

    def planted(self) -> str:
        """The kernel's text with the fault. Raises ValueError where there is nothing to edit."""
        own = translation_unit(KERNELS[self.kernel].source)
        if self.old not in own or self.old == self.new:
            raise ValueError(f"{self}: nothing to replace: {self.old!r}")
        return own.replace(self.old, self.new)

    def plant(self) -> Edit:
        """Edits this kernel's text; other kernels' stay as they are. Raises ValueError as `planted` does."""
        own, faulty = translation_unit(KERNELS[self.kernel].source), self.planted()
        return lambda text: faulty if text == own else text


def visible(faults: Sequence[Fault]) -> list[Any]:
    """The faults that show in this process. Every eighth is noticed in each run, the first of every file among them;
    the others nightly, because each compiles a kernel anew. Raises ValueError where one has nothing to edit.
    """
    shown = [fault for fault in faults if fault.sanitizer == SANITIZE]
    for fault in shown:
        fault.plant()
    return [pytest.param(fault, marks=() if not at % 8 else pytest.mark.nightly) for at, fault in enumerate(shown)]


def assert_noticed(fault: Fault) -> None:
    """The check passes as the kernel is, and fails in one of both orders with the fault in it.

    Raises ValueError where the fault has nothing to edit, and HostBuildError where the kernel does not compile with it.
    """
    edit = fault.plant()  # what is wrong with the fault itself must not look like a check that failed
    orders = (False, True)
    for reversed_order in orders:
        fault.check(HostLauncher(reversed_order=reversed_order))
    for reversed_order in orders:
        faulty = HostLauncher(reversed_order=reversed_order, edit=edit, seconds=10)
        try:
            fault.check(faulty)
        except (AssertionError, HostKernelError):
            return
    raise AssertionError(f"{fault}: nobody noticed")
