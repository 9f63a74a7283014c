"""The host machine: the memory and cores that this process may use, and how long OpenMP threads spin. No torch."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Seconds for which a thread spins at a barrier before it sleeps: most serial work between two parallel loops of a step
# takes less.
SPIN_S = 100e-6
# The same as a number of turns of the spin loop, for machines where a turn cannot be measured.
DEFAULT_SPINS = 4000
# Turns in a round of the measurement, and rounds: half a millisecond in all.
PAUSES, PAUSE_ROUNDS = 1000, 16
# The messages of torch's errors for lack of memory, which have no type of their own.
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|unable to mmap")


def shorten_spinning() -> None:
    """Makes OpenMP threads that wait for one another spin for microseconds, not milliseconds. Has no effect once torch
    is imported.

    Threads spin at every barrier of every operator. Meanwhile they hold cores that the manager, or the thread that they
    wait for, needs: with both processes on two busy cores 43 output tokens/s were seen without this and 510 to 620 with
    it.
    """
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        pause = _pause_s()
        os.environ["GOMP_SPINCOUNT"] = str(round(SPIN_S / pause) if pause else DEFAULT_SPINS)


def _pause_s() -> float:
    """Seconds of one turn of a spin loop, 10 to 50 ns depending on the processor; 0 if it cannot be measured."""
    if platform.machine() != "x86_64":
        return 0.0
    try:
        # Some hardened systems refuse memory that is both writable and executable.
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return 0.0
    # void loop(uint64_t turns): `pause; dec rdi; jnz` to the begin; `ret`.
    page.write(bytes.fromhex("f390 48ffcf 75f9 c3"))
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    loop = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(address)
    times = []
    for _ in range(PAUSE_ROUNDS):
        begin = time.perf_counter()
        loop(PAUSES)
        times.append(time.perf_counter() - begin)
    # The least round: other processes can only make a round longer. The call itself costs no more than some turns.
    return min(times) / PAUSES


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still get: the kernel's MemAvailable, or less if a control group or `ulimit -v`
    limits it.
    """
    found = kib_field(proc / "meminfo", "MemAvailable")
    return max(0, min([found, *_cgroup_rooms(proc, cgroups), *_address_room(proc)]))


class TooLittleMemory(MemoryError):
    """Some work needs more memory than there is; the message names the work, the available memory and what to do."""


@contextmanager
def memory_for(work: str, remedy: str) -> Iterator[None]:
    """Raises TooLittleMemory if code within this context gets no memory from Python, NumPy, torch or the kernel."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, TooLittleMemory) or not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
            raise
        said = str(error).partition("\n")[0] or type(error).__name__
        raise TooLittleMemory(
            f"{work} needs more memory than there is; {available_bytes() / 2**30:.1f} GiB are available ({said}): "
            f"{remedy}"
        ) from error


def usable_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use: those of its affinity, or fewer if its control group has a quota, rounded
    up.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for level in _cgroup_levels(proc, cgroups, "cpu"):
        # "max 100000" or "150000 100000": microseconds of time in a period of microseconds.
        quota = _read(level / "cpu.max").split() or [
            _read(level / "cpu.cfs_quota_us").strip(),
            _read(level / "cpu.cfs_period_us").strip(),
        ]
        if len(quota) == 2 and all(part.isdecimal() for part in quota) and int(quota[1]) > 0:
            cores = min(cores, int(quota[0]) / int(quota[1]))
    return max(1, math.ceil(cores))


def _cgroup_rooms(proc: Path, cgroups: Path) -> list[int]:
    """Bytes left below the limit of the control group and of each of its ancestors."""
    rooms = []
    for level in _cgroup_levels(proc, cgroups, "memory"):
        limit = _read(level / "memory.max", level / "memory.limit_in_bytes").strip()
        usage = _read(level / "memory.current", level / "memory.usage_in_bytes").strip()
        if limit.isdecimal() and usage.isdecimal():
            # Cached file pages count as usage, but the kernel drops them under memory pressure.
            cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", _read(level / "memory.stat"), re.MULTILINE)
            rooms.append(int(limit) - int(usage) + max(map(int, cached), default=0))
    return rooms


def _address_room(proc: Path) -> list[int]:
    """Bytes left below the limit of the process's address space; empty if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return [] if limit == resource.RLIM_INFINITY else [limit - kib_field(proc / "self" / "status", "VmSize")]


def _cgroup_levels(proc: Path, cgroups: Path, controller: str) -> list[Path]:
    """The folders of the process's control groups, version 1 or 2, and of their ancestors."""
    levels = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 1 lists its controllers and mounts each in a folder; version 2 does neither.
        root = cgroups / controller if controllers else cgroups
        # Inside a container the path may be the host's. The container's own group is then the root that it sees.
        group = root / path.strip("/")
        for level in (group, *group.parents):
            levels.append(level)
            if level == root:
                break
    return levels


def kib_field(path: Path, name: str) -> int:
    """The value of a line such as `VmRSS:   123 kB`, in bytes. Raises OSError if there is no such line."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", _read(path), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} does not say {name}")
    return int(found[1]) * 1024


def _read(*paths: Path) -> str:
    """The text of the first of these files that can be read; empty if none can."""
    for path in paths:
        with suppress(OSError):
            return path.read_text()
    return ""
