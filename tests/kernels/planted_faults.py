"""Faults planted in the text of kernels, to prove that the tests would notice them.

A kernel's test file lists its faults and one deterministic check that passes with the kernel as it is:

    FAULTS = [Fault("a barrier is missing", "pagekv_decode", "__syncthreads();  // tile", "", check)]

    @pytest.mark.parametrize("fault", visible(FAULTS), ids=str)
    def test_planted_faults_are_noticed(fault): assert_noticed(fault)

Such a test is marked `sanitize`: faults with `sanitizer=True` only show under AddressSanitizer, and are planted there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from host_build import SANITIZE, Edit, HostKernelError, HostLauncher

from pagekv.kernels.sources import translation_unit
from pagekv.kernels.variants import KERNELS


@dataclass(frozen=True)
class Fault:
    """One edit of a kernel's text and the check that must fail with it."""

    name: str
    """What is wrong with the kernel, in words."""
    kernel: str
    old: str
    """Text of the kernel or of a header it includes; must occur there exactly once."""
    new: str
    check: Callable[[HostLauncher], None]
    """Launches the kernel and compares; raises AssertionError where the result is wrong."""
    sanitizer: bool = False
    """Whether only AddressSanitizer sees it."""

    def __str__(self) -> str:
        return f"{self.kernel}: {self.name}"

    def plant(self) -> Edit:
        """Edits this kernel's text; other kernels' stay as they are."""
        own = translation_unit(KERNELS[self.kernel].source)

        def edit(text: str) -> str:
            if text != own:
                return text
            assert text.count(self.old) == 1, f"{self}: {self.old!r} occurs {text.count(self.old)} times, not once"
            return text.replace(self.old, self.new)

        return edit


def visible(faults: Sequence[Fault]) -> list[Fault]:
    """The faults that this process can see."""
    return [fault for fault in faults if fault.sanitizer == SANITIZE]


def assert_noticed(fault: Fault) -> None:
    """The check passes as the kernel is, and fails in one of both orders with the fault in it."""
    orders = (False, True)
    for reversed_order in orders:
        fault.check(HostLauncher(reversed_order=reversed_order))
    for reversed_order in orders:
        try:
            fault.check(HostLauncher(reversed_order=reversed_order, edit=fault.plant(), seconds=10))
        except (AssertionError, HostKernelError):
            return
    raise AssertionError(f"{fault}: nobody noticed")
