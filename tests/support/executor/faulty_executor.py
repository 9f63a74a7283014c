"""An executor process whose device fails: the real one but for the backend. A script with the executor's flags.

FAULTY_BACKEND: oracle, or emulated (the cuda backend on CPU tensors). FAULTY_STEPS: "7,0" loses the device at the
seventh step of the first process, and the second one cannot load; later ones are sound, as -1 is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from pagekv.executor import choose_backend, server
from pagekv.executor.backend.interface import Backend, Launch, Scheduled
from pagekv.executor.config import ExecutorConfig
from pagekv.executor.fresh_process import faults_before
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.world import ALONE, World

WORDS = "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`"


def this_process() -> int | None:
    """The step at which the device fails; None: at none."""
    steps = [int(step) for step in os.environ["FAULTY_STEPS"].split(",")]
    step = steps[faults_before()] if faults_before() < len(steps) else -1
    return None if step < 0 else step


class FaultyOracle(OracleBackend):
    """Every call fails once one has."""

    def __init__(self, model: OracleModel, fails_at: int | None, step_time_s: float) -> None:
        super().__init__(model, step_time_s=step_time_s)
        self._left = fails_at

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                raise RuntimeError(WORDS)
        return super().launch(scheduled)

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        if self._left == 0:
            raise RuntimeError(WORDS)
        super().allocate(block_size, num_device_blocks, num_host_blocks)

    def is_lost(self, error: Exception) -> bool:
        return self._left is not None and self._left <= 0


def emulated(fails_at: int | None) -> Backend:
    """The cuda backend, whose device's marks tell of the fault, as a GPU's do: when the host waits for the step."""
    import torch
    from support.executor.cuda_host import HostDevice, host_backend

    from pagekv.common.models import resolve_model

    torch.set_num_threads(1)  # small work: threads would wait for one another

    class FaultyDevice(HostDevice):
        marks = 0

        def synchronize(self) -> None:
            if fails_at is not None and self.marks >= fails_at:
                raise RuntimeError(WORDS)

        def mark(self) -> Callable[[], None]:
            # A step of the profile has none.
            self.marks += 1
            return self.synchronize

    device = FaultyDevice()
    return host_backend(resolve_model("demo"), device, dtype="float32", kv_memory=2**25)


def load_backend(config: ExecutorConfig, world: World = ALONE, lost: object = None) -> Backend:
    """Instead of the one that flags name."""
    fails_at = this_process()
    if fails_at == 0:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    if os.environ["FAULTY_BACKEND"] == "emulated":
        return emulated(fails_at)
    return FaultyOracle(OracleModel(), fails_at, config.oracle.step_time_ms / 1e3)


if __name__ == "__main__":
    choose_backend.load_backend = load_backend
    sys.exit(server.main())
