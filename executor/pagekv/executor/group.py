"""A rank of a group, from its flags to a loaded backend: rank 0, which serves the manager, or another one."""

from __future__ import annotations

import platform
import signal
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pagekv.common.logs import Log
from pagekv.common.models import check_model_files, resolve_model
from pagekv.common.phases import phase
from pagekv.common.version import pagekv_version
from pagekv.executor.backend.fingerprint import model_fingerprint
from pagekv.executor.backend.interface import Backend
from pagekv.executor.config import ExecutorConfig
from pagekv.executor.machine import usable_cores
from pagekv.executor.ranks.follower import Follower
from pagekv.executor.ranks.gathering import Gathering, join
from pagekv.executor.ranks.leader import GroupBackend, Leader
from pagekv.executor.ranks.rendezvous import (
    end_meeting,
    find_leader,
    join_process_group,
    listen_as_leader,
    open_store,
)
from pagekv.executor.world import World

log = Log(__name__)

# Packages of which all ranks need the same version, as far as a backend imports them.
_PACKAGES = {"oracle": ("numpy",), "cpu": ("numpy", "torch", "transformers", "accelerate", "numba")}


def check_group(config: ExecutorConfig) -> None:
    """Raises ValueError for flags that a rank of a group cannot have."""
    if config.backend == "cuda":
        raise ValueError("--backend cuda: serves on one GPU; a group of ranks (WORLD_SIZE) has cpu and oracle")
    if config.kv_dtype != "auto":
        raise ValueError(f"--kv-dtype {config.kv_dtype} needs --backend cuda, which a group of ranks has not")


def lead(config: ExecutorConfig, world: World, load: Callable[[], Backend]) -> GroupBackend:
    """Rank 0's backend, once all ranks are there and it has loaded its own by `load`. Raises NoGroup, RanksDisagree,
    or what `load` does.
    """
    check_group(config)
    facts = rank_facts(config, world)
    store = open_store(world, config.join_timeout_s)
    listener, meeting = listen_as_leader(store, world)
    try:
        with phase(f"waiting for {world.size - 1} other ranks"):
            links = Gathering(listener, meeting, world, facts).gather(config.join_timeout_s)
    finally:
        end_meeting(store, meeting)
    leader = Leader(links, config.rank_timeout_s, with_parent=world.has_store)
    log.info("all ranks are there", ranks=world.size)
    if _backend(config) != "oracle":
        join_process_group(store, world, meeting, config.join_timeout_s)
    return GroupBackend(load(), leader)


def follow(config: ExecutorConfig, world: World, load: Callable[[], Backend]) -> int:
    """The life of another rank than rank 0; returns its exit status. Raises as `lead`."""
    check_group(config)
    facts = rank_facts(config, world)
    store = open_store(world, config.join_timeout_s)
    link, meeting = join(lambda: find_leader(store), world, facts, config.join_timeout_s)
    # Rank 0 finishes the step under way and ends the others; torchrun asks all of them at once.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    follower = Follower(link, config.rank_timeout_s, with_parent=world.has_store)
    log.info("joined the group", rank=world.rank, ranks=world.size)
    if _backend(config) != "oracle":
        join_process_group(store, world, meeting, config.join_timeout_s)
    follower.run(load())
    log.info("stopped", rank=world.rank)
    return 0


def rank_facts(config: ExecutorConfig, world: World) -> dict[str, Any]:
    """Facts that all ranks need alike, by the name that people know."""
    backend = _backend(config)
    facts: dict[str, Any] = {"PageKV": pagekv_version(), "python": platform.python_version(), "--backend": backend}
    facts |= {name: _version(name) for name in _PACKAGES[backend]}
    if config.model:
        directory = resolve_model(config.model, weights=backend != "oracle")
        check_model_files(directory, weights=backend != "oracle")
        facts["the model's fingerprint"] = model_fingerprint(directory)
    if backend == "oracle":
        oracle = config.oracle
        facts |= {"--vocab-size": oracle.vocab_size, "--max-model-len": oracle.max_model_len}
        facts["--eos"] = None if oracle.eos_token_ids is None else list(oracle.eos_token_ids)
    else:
        import torch

        # Norms and routers of experts, which each rank computes, have to be the same to the bit.
        facts |= {"--dtype": config.dtype, "--fused": config.fused, "compute threads": rank_threads(config, world)}
        facts["the processor's vector instructions"] = torch.backends.cpu.get_cpu_capability()
    return facts


def rank_threads(config: ExecutorConfig, world: World) -> int:
    """Compute threads of this rank: as the flag says, or its share of the cores."""
    return config.threads or max(1, usable_cores() // world.local_size)


def _backend(config: ExecutorConfig) -> str:
    return "cpu" if config.backend == "auto" else config.backend


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
