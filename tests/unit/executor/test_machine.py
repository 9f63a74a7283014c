"""How much memory and how many cores there are: the kernel's word, and limits of control groups."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from pagekv.executor import machine as machine_module
from pagekv.executor.machine import TooLittleMemory, available_bytes, memory_for, shorten_spinning, usable_cores

MIB = 2**20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """A machine with 1000 MiB available; returns (proc, cgroups)."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", f"MemTotal: 9999 kB\nMemAvailable:  {1000 * 1024} kB\nSwapFree: 5 kB\n")
    return proc, cgroups


def test_without_control_groups(machine: tuple[Path, Path]) -> None:
    assert available_bytes(*machine) == 1000 * MIB


def test_the_tightest_limit_of_version_2_counts(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(proc / "self" / "cgroup", "0::/outer/inner\n")
    write(cgroups / "outer" / "inner" / "memory.max", "max\n")
    write(cgroups / "outer" / "inner" / "memory.current", f"{100 * MIB}\n")
    assert available_bytes(proc, cgroups) == 1000 * MIB
    write(cgroups / "outer" / "memory.max", f"{500 * MIB}\n")
    write(cgroups / "outer" / "memory.current", f"{200 * MIB}\n")
    assert available_bytes(proc, cgroups) == 300 * MIB
    write(cgroups / "outer" / "memory.stat", f"anon 7\nfile 9\ninactive_file {50 * MIB}\nactive_file 3\n")
    assert available_bytes(proc, cgroups) == 350 * MIB


def test_a_container_sees_its_group_as_the_root(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(proc / "self" / "cgroup", "0::/host/side/path\n")
    write(cgroups / "memory.max", f"{256 * MIB}\n")
    write(cgroups / "memory.current", f"{56 * MIB}\n")
    assert available_bytes(proc, cgroups) == 200 * MIB


def test_a_limit_of_version_1_counts(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(proc / "self" / "cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n")
    write(cgroups / "memory" / "x" / "memory.limit_in_bytes", f"{128 * MIB}\n")
    write(cgroups / "memory" / "x" / "memory.usage_in_bytes", f"{28 * MIB}\n")
    write(cgroups / "memory" / "x" / "memory.stat", f"inactive_file 1\ntotal_inactive_file {2 * MIB}\n")
    assert available_bytes(proc, cgroups) == 102 * MIB


def test_a_limit_of_the_address_space_counts(machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    proc, cgroups = machine
    write(proc / "self" / "status", f"Name: x\nVmPeak:   1 kB\nVmSize:   {300 * 1024} kB\n")
    limits = {resource.RLIMIT_AS: (700 * MIB, resource.RLIM_INFINITY)}
    monkeypatch.setattr("resource.getrlimit", limits.__getitem__)
    assert available_bytes(proc, cgroups) == 400 * MIB
    limits[resource.RLIMIT_AS] = (1400 * MIB, 1400 * MIB)
    assert available_bytes(proc, cgroups) == 1000 * MIB
    limits[resource.RLIMIT_AS] = (200 * MIB, 200 * MIB)
    assert available_bytes(proc, cgroups) == 0


def test_beyond_the_limit_nothing_is_left(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(proc / "self" / "cgroup", "0::/\n")
    write(cgroups / "memory.max", "1000\n")
    write(cgroups / "memory.current", "2000\n")
    assert available_bytes(proc, cgroups) == 0


def test_a_quota_limits_cores(machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    proc, cgroups = machine
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert usable_cores(proc, cgroups) == 16
    write(proc / "self" / "cgroup", "0::/box\n")
    write(cgroups / "box" / "cpu.max", "max 100000\n")
    assert usable_cores(proc, cgroups) == 16
    write(cgroups / "box" / "cpu.max", "250000 100000\n")
    assert usable_cores(proc, cgroups) == 3
    write(cgroups / "box" / "cpu.max", "1000 100000\n")
    assert usable_cores(proc, cgroups) == 1


def test_a_quota_of_version_1(machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    proc, cgroups = machine
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    write(proc / "self" / "cgroup", "3:cpu,cpuacct:/\n")
    write(cgroups / "cpu" / "cpu.cfs_quota_us", "-1\n")
    write(cgroups / "cpu" / "cpu.cfs_period_us", "100000\n")
    assert usable_cores(proc, cgroups) == 16
    write(cgroups / "cpu" / "cpu.cfs_quota_us", "400000\n")
    assert usable_cores(proc, cgroups) == 4


def test_this_machine_has_cores_and_memory() -> None:
    assert 1 <= usable_cores() <= 4096
    assert available_bytes() > 2**24


def test_a_wait_policy_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    shorten_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    shorten_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


@pytest.fixture
def no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set first, so that what a test leaves there is undone.
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("pause_s", "spins"), [(25e-9, "4000"), (50e-9, "2000"), (0.0, "4000")])
def test_spinning_is_a_time(no_policy: None, monkeypatch: pytest.MonkeyPatch, pause_s: float, spins: str) -> None:
    monkeypatch.setattr(machine_module, "_pause_s", lambda: pause_s)
    shorten_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == spins


def test_a_turn_of_spinning_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine_module._pause_s()
    # Of a nanosecond on old processors to a hundred on slow new ones; 0 on others than x86-64.
    assert found == 0.0 or 1e-10 < found < 1e-5
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert machine_module._pause_s() == 0.0


def test_where_no_memory_may_be_run_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("execmem")

    monkeypatch.setattr("mmap.mmap", refuse)
    assert machine_module._pause_s() == 0.0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "MemoryError"),
        (MemoryError("Unable to allocate 3.81 GiB for an array"), "Unable to allocate 3.81 GiB for an array"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nat"),
            "DefaultCPUAllocator: can't .*tried",
        ),
    ],
)
def test_too_little_memory_is_told_with_what_there_is_and_what_to_do(error: Exception, said: str) -> None:
    words = rf"^a step needs more memory than there is; \d+\.\d GiB are available \({said}\): lower the budget$"
    # Told once, by who knows most of it.
    with (
        pytest.raises(TooLittleMemory, match=words),
        memory_for("all", "buy"),
        memory_for("a step", "lower the budget"),
    ):
        raise error


def test_another_error_than_of_memory_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), memory_for("a step", "lower the budget"):
        raise RuntimeError("shapes differ")
