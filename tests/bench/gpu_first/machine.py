"""The GPU of the bench, with what only its developers ask: power, replays of a recorded step, edited kernels."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch

from pagekv.kernels.bench.machine import CudaMachine
from pagekv.kernels.sources import translation_unit
from pagekv.kernels.swap import Streams


class FirstMachine(CudaMachine):
    """The current CUDA device."""

    def state(self) -> dict[str, float]:
        """As `CudaMachine.state`, with the instantaneous power: the plain figure is an average over a second, longer
        than a measurement takes.
        """
        found = super().state()
        with contextlib.suppress(Exception):  # a failing gauge must not cost a measurement
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByIndex(0)
            power = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0].value.uiVal
            found["watts"] = power / 1000
        return found

    def pinned(self, size: int) -> torch.Tensor:
        """Host memory that the device copies from and to at full speed: uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def streams(self) -> Streams:
        """Streams for swapping blocks."""
        return Streams()

    def edited(self, edit: Callable[[str], str]) -> FirstMachine:
        """The same device, with kernels compiled from `edit` of their text."""
        made = copy.copy(self)
        made.launcher = type(self.launcher)(text=lambda source: edit(translation_unit(source)))
        return made

    def recorded(self, run: Callable[[], object]) -> Callable[[], object]:
        """A CUDA graph of `run`: calling it replays the graph and waits for the end."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # compiles and loads, which a recording cannot include
            self._stream.synchronize()
            replay = self._graph(lambda _: run(), 1)

        def play() -> None:
            with torch.cuda.stream(self._stream):
                replay()
                self._stream.synchronize()

        return play
