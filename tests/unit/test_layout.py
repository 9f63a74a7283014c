"""Tests mirror the packages: every module's test is found by its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The folder of a source root's modules, and the folder of their tests.
MIRRORED = {
    "proto/pagekv/common": "tests/unit/common",
    "kvmanager/pagekv/kvmanager": "tests/unit/kvmanager",
    "executor/pagekv/executor": "tests/unit/executor",
    "client/pagekv/client": "tests/unit/client",
    "client/pagekv/conformance": "tests/unit/conformance",
}
KERNELS = "kernels/pagekv/kernels"


def modules(folder: Path) -> set[str]:
    """Modules directly in a folder."""
    return {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}


def untested(names: set[str], tests: set[str]) -> set[str]:
    """Modules without a `test_<module>` or `test_<module>_<aspect>`. A test belongs to the longest module name in its
    own, so that `test_step_check` says nothing of a module `step`.
    """
    found = set()
    for test in tests:
        stem = test.removeprefix("test_")
        owners = [name for name in names if stem == name or stem.startswith(f"{name}_")]
        found |= {max(owners, key=len)} if owners else set()
    return names - found


def folders(source: Path) -> Iterator[Path]:
    """The package in a folder and every package below."""
    for init in sorted(source.rglob("__init__.py")):
        yield init.parent


@pytest.mark.parametrize("source", MIRRORED)
def test_every_module_has_a_test_of_its_name(source: str) -> None:
    missing = []
    for folder in folders(ROOT / source):
        mirror = ROOT / MIRRORED[source] / folder.relative_to(ROOT / source)
        tests = {path.stem for path in mirror.glob("test_*.py")}
        missing += [str((folder / f"{name}.py").relative_to(ROOT)) for name in untested(modules(folder), tests)]
    assert sorted(missing) == []


def test_every_module_of_the_kernels_has_a_test_of_its_name() -> None:
    """Anywhere below tests/kernels; that of `bench/speed.py` may also be called `test_bench_speed.py`."""
    tests = {path.stem for path in (ROOT / "tests" / "kernels").rglob("test_*.py")}
    missing = []
    for folder in folders(ROOT / KERNELS):
        names = modules(folder)
        prefix = f"test_{folder.name}_"
        here = tests | {f"test_{test.removeprefix(prefix)}" for test in tests if test.startswith(prefix)}
        missing += [str((folder / f"{name}.py").relative_to(ROOT)) for name in untested(names, here)]
    assert sorted(missing) == []


@pytest.mark.parametrize(
    "package",
    [
        *(f"kvmanager/pagekv/kvmanager/{name}" for name in ("engine", "kvcache", "scheduling")),
        *(f"executor/pagekv/executor/{name}" for name in ("session", "cuda", "cpu", "cpu/native", "ranks")),
        KERNELS,
    ],
)
def test_the_order_to_read_a_large_package_in_has_each_of_its_modules_once(package: str) -> None:
    folder = ROOT / package
    order = (folder / "__init__.py").read_text().split("in this order")[1].split('"""')[0]
    named = [name for line in order.splitlines() for name in line[32:].split(", ") if name]
    assert sorted(named) == sorted(modules(folder))
