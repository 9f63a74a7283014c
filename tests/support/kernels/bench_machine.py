"""The bench's machine without a GPU: emulated kernels and a made-up clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_first.machine import FirstMachine
from support.kernels.host_build import HostLauncher

from pagekv.kernels.bench.machine import KernelTiming
from pagekv.kernels.bench.workload import MIB
from pagekv.kernels.swap import CopyStream, Streams


class FakeStreams(Streams):
    """Copies at once, in order, so that no events are needed."""

    def __init__(self) -> None: ...
    def mark(self, stream: CopyStream) -> None: ...
    def wait(self, stream: CopyStream, event: None) -> None: ...
    def done(self, event: None) -> bool:
        return True

    def copy(self, stream: CopyStream, destination: Any, source: Any) -> None:
        destination.copy_(source)


class HostMachine(FirstMachine):
    """The emulated kernels, with a clock that says a millisecond for everything."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.most_rounds = 2
        self.launcher = HostLauncher()  # type: ignore[assignment]  # the emulation in its place

    def timed(self, run: Callable[[int], object], rounds: int = 1, *, capture: bool = True) -> KernelTiming:
        for index in range(min(rounds, 2)):
            run(index)
        return KernelTiming(1e-3, 0.9e-3, 1.2e-3, {"sm_mhz": 1980.0, "watts": 600.0})

    def edited(self, edit: Callable[[str], str]) -> HostMachine:
        made = HostMachine()
        made.launcher = HostLauncher(edit=edit)  # type: ignore[assignment]  # as above
        return made

    def recorded(self, run: Callable[[], object]) -> Callable[[], object]:
        return run

    def synchronize(self) -> None:
        pass

    def versions(self) -> dict[str, str]:
        return {"gpu": "none"}

    def memory(self) -> int:
        return 4 * MIB

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def streams(self) -> FakeStreams:
        return FakeStreams()
