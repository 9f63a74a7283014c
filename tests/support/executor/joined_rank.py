"""A rank that has joined the others and goes on with what a test has written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.executor.split_model import write_to


def run_rank(code: str, variables: dict[str, str], output: Path) -> None:
    """Executes code that knows `torch`, the module `ranks` of Shards, this rank's `world` and its `shards`, and ends
    the process as ranks end (`server.main`), once all have what they wait for. Its output goes to a file.
    """
    import torch

    from pagekv.executor.model import shards as ranks
    from pagekv.executor.ranks.gathering import JoinTime, Meeting
    from pagekv.executor.ranks.rendezvous import join_process_group, open_store
    from pagekv.executor.world import read_world

    def lost(reason: str) -> None:
        print(reason, flush=True)
        os._exit(75)

    os.environ.update(variables)
    write_to(output, sys.stdout)
    world, joining = read_world(os.environ), JoinTime(100.0)
    join_process_group(open_store(world, joining), world, Meeting("", 0, "one"), joining)
    shards = ranks.Shards(world, lost)
    exec(code, {"torch": torch, "ranks": ranks, "world": world, "shards": shards})  # noqa: S102 - of a test
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)
