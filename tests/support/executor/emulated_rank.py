"""A rank of a group on the cuda backend without a GPU: kernels are emulated, and gloo joins its tensors. A script with
the executor's flags, and `--backend cpu`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from pagekv.executor import choose_backend, server
from pagekv.executor.backend.interface import Backend
from pagekv.executor.config import ExecutorConfig
from pagekv.executor.ranks.watch import end_process
from pagekv.executor.world import ALONE, World


def load_backend(config: ExecutorConfig, world: World = ALONE, lost: Callable[[str], None] = end_process) -> Backend:
    """Instead of the one that flags name."""
    import torch
    from support.executor.cuda_host import HostDevice, host_backend

    from pagekv.common.models import resolve_model
    from pagekv.executor.model.shards import Shards

    torch.set_num_threads(1)
    shards = Shards(world, lost)
    options = {"dtype": "float32", "kv_memory": 2**25, "max_sequences": 8}
    backend = host_backend(resolve_model(config.model), HostDevice(), shards=shards, **options)
    shards.limit_waits(config.rank_timeout_s)
    return backend


if __name__ == "__main__":
    choose_backend.load_backend = load_backend
    sys.exit(server.main())
