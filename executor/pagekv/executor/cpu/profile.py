"""Measures what is left for KV memory, and how fast this machine is."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pagekv.executor.backend import Sampling, Scheduled, SequenceState
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.model import LoadedModel
from pagekv.executor.cpu.runner import run_step

COPY_BYTES = 16 * 2**20
COPY_ROUNDS = 4
V1_LIMIT_AND_USAGE = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2_LIMIT_AND_USAGE = ("memory.max", "memory.current")


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What one step of a full token budget takes."""

    # Bytes of memory at the peak beyond what was held before.
    activation_bytes: int
    prefill_tokens_per_s: int


def profile_step(loaded: LoadedModel, block_size: int, token_budget: int) -> StepProfile:
    """Runs a step of `token_budget` prompt tokens, in sequences as long as the model allows, over a pool of its own."""
    _run_prompts(loaded, block_size, min(token_budget, 16))  # first calls set things up; they are not what is measured
    _reset_peak()
    before = _process_bytes("VmRSS")
    begin = time.perf_counter()
    pool_bytes = _run_prompts(loaded, block_size, token_budget)
    seconds = time.perf_counter() - begin
    growth = max(0, _process_bytes("VmHWM") - before - pool_bytes)
    return StepProfile(growth, int(token_budget / seconds))


def _run_prompts(loaded: LoadedModel, block_size: int, num_tokens: int) -> int:
    """Returns the bytes of the pool it used."""
    lengths = []
    while num_tokens > 0:
        lengths.append(min(num_tokens, loaded.max_model_len))
        num_tokens -= lengths[-1]
    scheduled, used = [], 0
    for seq_id, length in enumerate(lengths):
        num_blocks = -(-length // block_size)
        table = list(range(used, used + num_blocks))
        used += num_blocks
        state = SequenceState(seq_id, [0] * length, length, table, 0, Sampling())
        scheduled.append(Scheduled(state, 0, length))
    cache = KvCache(loaded.geometry, block_size, used)
    run_step(loaded.model, cache, scheduled)
    return cache.num_bytes


def copy_bandwidth() -> int:
    """Bytes per second of copying block-sized pieces from memory to memory: the pools are in the same memory here."""
    source, destination = torch.zeros(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    best = float("inf")
    for _ in range(COPY_ROUNDS):
        begin = time.perf_counter()
        destination.copy_(source)
        best = min(best, time.perf_counter() - begin)
    return int(COPY_BYTES / best)


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory this process can still get: what the kernel calls available, or less where its control group limits it."""
    found = _kib(proc / "meminfo", "MemAvailable")
    return max(0, min([found, *_cgroup_rooms(proc, cgroups)]))


def _cgroup_rooms(proc: Path, cgroups: Path) -> list[int]:
    """Bytes below the limit of the control group and of each of its ancestors, version 2 and version 1."""
    rooms = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # Version 1 lists its controllers and mounts each in a folder; version 2 does neither.
        root = cgroups / "memory" if controllers else cgroups
        names = V1_LIMIT_AND_USAGE if controllers else V2_LIMIT_AND_USAGE
        group = root / path.strip("/")
        # Inside a container the path may be the host's; its own group is then the root of what it sees.
        for level in (group, *group.parents):
            limit, usage = _read(level / names[0]).strip(), _read(level / names[1]).strip()
            if limit.isdecimal() and usage.isdecimal():
                # Cached file pages count as usage and are given back under pressure.
                cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", _read(level / "memory.stat"), re.MULTILINE)
                rooms.append(int(limit) - int(usage) + max(map(int, cached), default=0))
            if level == root:
                break
    return rooms


def _reset_peak() -> None:
    """Makes VmHWM start again from here; where that is refused, the peak of loading counts, which errs on caution."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _process_bytes(name: str) -> int:
    return _kib(Path("/proc/self/status"), name)


def _kib(path: Path, name: str) -> int:
    """The value of a line such as `VmRSS:   123 kB`, in bytes; raises OSError where there is none."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", _read(path), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} does not say {name}")
    return int(found[1]) * 1024


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
