"""Starts a rank of a group, from its flags to a loaded backend: rank 0, which serves the manager, or another rank."""

from __future__ import annotations

import platform
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pagekv.common.logs import Log
from pagekv.common.models import check_model_files, resolve_model
from pagekv.common.paused_collector import paused_collector
from pagekv.common.phases import phase
from pagekv.common.port_file import add_to_port_file
from pagekv.common.version import pagekv_version
from pagekv.executor.backend.fingerprint import model_fingerprint
from pagekv.executor.backend.interface import Backend
from pagekv.executor.config import ExecutorConfig, refuse_cuda_flags
from pagekv.executor.machine import usable_cores
from pagekv.executor.model.files import read_model_files
from pagekv.executor.model.start_check import check_ranks
from pagekv.executor.model.torch_import import import_torch
from pagekv.executor.ranks.agreement import FAILURE
from pagekv.executor.ranks.follower import LEADER, Follower
from pagekv.executor.ranks.gathering import Gathering, JoinTime, Meeting, NoGroup, join
from pagekv.executor.ranks.leader import GroupBackend, Leader
from pagekv.executor.ranks.link import Kind
from pagekv.executor.ranks.rendezvous import (
    connect_gpus,
    end_meeting,
    find_leader,
    has_served,
    join_process_group,
    limit_collectives,
    listen_as_leader,
    open_store,
    tell_complete,
    tell_served,
)
from pagekv.executor.ranks.start_errors import CannotStart, can_pass, expected_words, words_of
from pagekv.executor.ranks.watch import RankWatch, end_start
from pagekv.executor.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = Log(__name__)

# Loads the share of a rank. The argument is a function that ends the rank with a reason when a collective fails.
Load = Callable[[Callable[[str], None]], Backend]

# Packages whose versions must be the same on all ranks, by backend.
_MODEL_PACKAGES = ("numpy", "torch", "transformers", "accelerate")
_PACKAGES = {"oracle": ("numpy",), "cpu": (*_MODEL_PACKAGES, "numba"), "cuda": _MODEL_PACKAGES}
# The oldest transformers that ranks can use. In 5.17 plans have other styles, and two and four ranks of a Llama gave
# other tokens than one process.
_LEAST_TRANSFORMERS = (5, 23)


def settled(config: ExecutorConfig, world: World) -> ExecutorConfig:
    """The configuration of a rank, with --backend auto resolved: cuda if torch and CuPy can use a GPU for each rank of
    this machine, else cpu.
    """
    if config.backend != "auto":
        return config
    gpus = world.local_rank is not None and _has_gpus(world.local_size)
    return replace(config, backend="cuda" if gpus else "cpu")


def _has_gpus(count: int) -> bool:
    from pagekv.executor.cuda.preflight import UnusableGpu, usable_gpu

    try:
        usable_gpu(count - 1)
    except UnusableGpu:
        return False
    return True


def check_group(config: ExecutorConfig, world: World) -> None:
    """Raises ValueError for flags that a rank of a group cannot have, or a transformers version that splits models in
    another way.
    """
    if config.backend == "cuda" and world.local_rank is None:
        raise ValueError(
            f"LOCAL_RANK: must be from 0 to {world.local_size - 1} with --backend cuda, since it names the rank's GPU; "
            "it is unset: start ranks with torchrun"
        )
    if config.backend != "cuda":
        refuse_cuda_flags(config)
    if config.backend != "oracle":
        _check_transformers()


def _check_transformers() -> None:
    with suppress(PackageNotFoundError):
        found = version("transformers")
        if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < _LEAST_TRANSFORMERS:
            least = ".".join(map(str, _LEAST_TRANSFORMERS))
            raise ValueError(
                f"transformers {found} splits models in another way: ranks need {least} or later "
                f"(pip install 'transformers>={least}'), or serve the model with one rank"
            )


def lead(config: ExecutorConfig, world: World, load: Load) -> GroupBackend:
    """Waits for all ranks, loads rank 0's share with `load` and returns the group's backend. `config` is `settled`.
    Raises CannotStart, or an error that may be gone after another start (`can_pass`).
    """
    facts, joining, store, served = _prepared(config, world)
    with _start(world, served):
        listener, meeting = listen_as_leader(store, world)
        try:
            with phase("waiting for the other ranks" if world.size > 2 else "waiting for rank 1"):
                links = Gathering(listener, meeting, world, facts).gather(joining)
            tell_complete(store, world)
        finally:
            end_meeting(store, meeting)
    log.info("all ranks are there", ranks=world.size)

    def cannot_start(reason: str) -> None:
        add_to_port_file(config.port_file, cannot_start=reason)
        end_start(reason, world)

    watch = RankWatch(links, config.rank_timeout_s, cannot_start=cannot_start, with_parent=world.has_store)
    leader = Leader(watch, serves=None if served else lambda: tell_served(store))
    with _start(world, served, lambda reason, kind: watch.end(reason, kind=kind)):
        _join_collectives(config, store, world, meeting, joining)
        backend = load(watch.lose)
    return GroupBackend(backend, leader)


def follow(config: ExecutorConfig, world: World, load: Load) -> int:
    """Runs a rank other than rank 0 until it ends; returns the exit status. Raises as `lead`."""
    facts, joining, store, served = _prepared(config, world)
    with _start(world, served):
        link, meeting = join(lambda: find_leader(store, world, joining), world, facts, joining)
    # torchrun signals all ranks at once, but rank 0 ends the others after it has finished the step under way.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    watch = RankWatch(
        {LEADER: link},
        config.rank_timeout_s,
        cannot_start=lambda reason: end_start(reason, world),
        with_parent=world.has_store,
    )
    follower = Follower(watch)
    log.info("joined the group", rank=world.rank, ranks=world.size)
    with _start(world, served, follower.end):
        _join_collectives(config, store, world, meeting, joining)
        backend = load(watch.lose)
    follower.run(backend)
    log.info("stopped", rank=world.rank)
    return 0


@contextmanager
def _start(world: World, served: bool = False, tell: Callable[[str, Kind], None] = lambda *_: None) -> Iterator[None]:
    """Runs a part of a rank's start. An error in it ends this rank, and the other ranks are told by `tell`. An error
    that would come again at another start is raised as CannotStart. If the group has served before, it is raised as
    NoGroup instead: whatever is missing was there once.
    """
    try:
        yield
    except Exception as error:
        reason = words_of(error)
        if can_pass(error):
            tell(reason, Kind.ENDS)
            raise
        if not expected_words(error):
            log.exception("this rank failed")
        if served:
            tell(reason, Kind.ENDS)
            raise NoGroup(reason) from error
        if not isinstance(error, CannotStart):
            reason = f"rank {world.rank}: {reason}"
        tell(reason, Kind.CANNOT_START)
        raise CannotStart(reason) from error


def _prepared(config: ExecutorConfig, world: World) -> tuple[dict[str, Any], JoinTime, Store, bool]:
    """The facts of this rank, the time to join, the store, and whether ranks of this store have served before."""
    # If ranks of this torchrun have run before, they may have served: until the store is read, assume that they have.
    with _start(world, world.anew):
        facts = _facts_or_failure(config, world)
        # Before the time to join begins, because the import takes longer on some ranks.
        _import_torch(config.backend)
        joining = JoinTime(config.join_timeout_s)
        store = open_store(world, joining)
        return facts, joining, store, has_served(store)


def _facts_or_failure(config: ExecutorConfig, world: World) -> dict[str, Any]:
    """The facts of this rank, or the reason why it cannot start, which all ranks learn when they meet."""
    try:
        check_group(config, world)
        return rank_facts(config, world)
    except Exception as error:
        # Raised at once without torchrun's store; and on rank 0 if one torchrun has all ranks, which ends the others.
        # But if ranks have run before, the store first has to tell whether they have served.
        if not world.has_store or (world.rank == 0 and world.local_size == world.size and not world.anew):
            raise
        return {FAILURE: words_of(error)}


def _import_torch(backend: str) -> None:
    if "torch" in sys.modules:
        return
    with phase("importing torch"), paused_collector():
        # An oracle's ranks need only torch's store.
        import_torch(meta_kernels=backend != "oracle")


def _join_collectives(config: ExecutorConfig, store: Store, world: World, meeting: Meeting, joining: JoinTime) -> None:
    # Oracles have no tensors to exchange.
    if config.backend == "oracle":
        return
    join_process_group(store, world, meeting, joining, gpus=config.backend == "cuda")
    if config.backend == "cuda":
        assert world.local_rank is not None  # `check_group`
        with phase("connecting the GPUs"):
            connect_gpus(world.local_rank)
    # A long timeout, because some ranks take longer to load than others.
    limit_collectives(config.join_timeout_s)


def rank_facts(config: ExecutorConfig, world: World) -> dict[str, Any]:
    """The facts that must be equal on all ranks, by a name for users. `config` is `settled`. Raises ValueError for a
    model that cannot be split over this many ranks.
    """
    backend = config.backend
    facts: dict[str, Any] = {"PageKV": pagekv_version(), "python": platform.python_version(), "--backend": backend}
    facts |= {name: _version(name) for name in _PACKAGES[backend]}
    if config.model:
        directory = resolve_model(config.model, weights=backend != "oracle")
        check_model_files(directory, weights=backend != "oracle")
        check_ranks(directory, read_model_files(directory), world.size)
        facts["the model's fingerprint"] = model_fingerprint(directory)
    if backend == "oracle":
        oracle = config.oracle
        facts |= {"--vocab-size": oracle.vocab_size, "--max-model-len": oracle.max_model_len}
        facts["--eos"] = None if oracle.eos_token_ids is None else list(oracle.eos_token_ids)
        return facts
    # Every rank computes the norms and the routers of experts, and the results must have the same bits.
    facts |= {"--dtype": config.dtype, "--fused": config.fused}
    return facts | (_gpu_facts(config, world) if backend == "cuda" else _cpu_facts(config, world))


def _cpu_facts(config: ExecutorConfig, world: World) -> dict[str, Any]:
    _import_torch(config.backend)
    import torch

    return {
        "compute threads": rank_threads(config, world),
        "the processor's vector instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _gpu_facts(config: ExecutorConfig, world: World) -> dict[str, Any]:
    """The facts of the cuda backend. Raises ValueError if this rank has no GPU."""
    from pagekv.executor.cuda.preflight import UnusableGpu, cupy_version, find_gpu

    try:
        gpu = find_gpu(index=world.local_rank or 0)
    except UnusableGpu as error:
        raise ValueError(f"--backend {config.backend}: {error}") from error
    # The shapes of graphs and profiled steps, which ranks compute together, depend on these values.
    return {
        "--kv-dtype": config.kv_dtype,
        "--cuda-graphs": config.cuda_graphs,
        "--wgmma-prefill": config.wgmma_prefill,
        "--max-sequences": config.max_sequences,
        "--kv-memory": config.kv_memory,
        "CuPy": cupy_version(),
        "the GPU": gpu.name,
    }


def rank_threads(config: ExecutorConfig, world: World) -> int:
    """The number of compute threads of this rank: the flag's value, or its share of the machine's cores."""
    return config.threads or max(1, usable_cores() // world.local_size)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
