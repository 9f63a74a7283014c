"""The executor of a rehearsal: the real process with the cuda backend over the emulation."""

from __future__ import annotations

import sys
from pathlib import Path

from support.executor import cuda_stub

from pagekv.executor import choose_backend, server
from pagekv.executor.backend.interface import Backend
from pagekv.executor.config import ExecutorConfig
from pagekv.executor.cuda.backend import CudaBackend
from pagekv.executor.world import ALONE, World


def load(config: ExecutorConfig, world: World = ALONE, lost: object = None) -> Backend:
    """The backend that the flags ask for, on CPU tensors."""
    return CudaBackend(
        Path(config.model), "bench", cuda_stub.device(), dtype="float32", kv_memory=2**26, max_sequences=8
    )


if __name__ == "__main__":
    choose_backend.load_backend = load
    with cuda_stub.installed():
        sys.exit(server.main())
