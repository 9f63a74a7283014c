"""The lists in locks/: complete, with the versions of constraints.txt and a hash for everything; images are built from
nothing else.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The extras that each list installs; None: what builds the package.
LISTS: dict[str, tuple[str, ...] | None] = {
    "build": None,
    "manager": ("manager", "observe", "gateway-api"),
    "gateway": ("manager", "observe", "gateway-api", "gateway"),
    "executor": ("executor", "ranks"),
    "gpu": ("executor", "ranks", "cuda12"),
    "dev": ("dev",),
}
# Lists beside which torch is installed, as a CPU build that stands in an index of its own.
WITHOUT_TORCH = ("executor", "dev")
LINUX = {
    "python_version": "3.11",
    "python_full_version": "3.11.9",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
    "extra": "",
}


@cache
def locked(name: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Version and hashes of every distribution of a list. Fails on a line that is neither."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for entry in (ROOT / "locks" / f"{name}.txt").read_text().replace("\\\n", " ").splitlines():
        requirement, *hashes = entry.split()
        distribution_name, _, version = requirement.partition("==")
        found[canonicalize_name(distribution_name)] = (version, tuple(hashes))
    return found


def direct(extras: tuple[str, ...] | None) -> list[Requirement]:
    """Requirements of the extras themselves, and of the project's extras that they name."""
    if extras is None:
        return [Requirement(text) for text in PROJECT["build-system"]["requires"]]
    asked = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    for extra in extras:
        for each in (Requirement(text) for text in PROJECT["project"]["optional-dependencies"][extra]):
            asked += direct(tuple(each.extras)) if each.name == "pagekv" else [each]
    return asked


def applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**LINUX, "extra": extra})


@pytest.mark.parametrize("name", LISTS)
def test_everything_has_one_version_and_a_hash(name: str) -> None:
    entries = locked(name)
    assert entries
    assert [each for each, (version, _) in entries.items() if not re.fullmatch(r"[\w.+]+", version)] == []
    wrong = {
        each
        for each, (_, hashes) in entries.items()
        if not hashes or not all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", text) for text in hashes)
    }
    assert wrong == set()


@pytest.mark.parametrize("name", LISTS)
def test_versions_are_those_of_constraints(name: str) -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([\w.+]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {each: locked(name)[each][0] for each in pins if each in locked(name)} == {
        each: version for each, version in pins.items() if each in locked(name)
    }


def test_everything_in_constraints_has_a_hash() -> None:
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pins) > 30
    assert [name for name in pins if name not in locked("dev")] == []


@pytest.mark.parametrize("name", LISTS)
def test_what_the_extras_ask_for_is_there(name: str) -> None:
    entries, left_out = locked(name), {"torch"} if name in WITHOUT_TORCH else set()
    asked = [each for each in direct(LISTS[name]) if applies(each) and each.name not in left_out]
    assert [
        str(each)
        for each in asked
        if canonicalize_name(each.name) not in entries or entries[canonicalize_name(each.name)][0] not in each.specifier
    ] == []
    assert not left_out & entries.keys()


@pytest.mark.parametrize("name", LISTS)
def test_what_its_distributions_need_is_there(name: str) -> None:
    """As their own metadata say, of those that are installed here; pip takes the lists without looking at needs."""
    entries = locked(name)
    missing, looked_at = [], 0
    for each, (version, _) in entries.items():
        try:
            installed = distribution(each)
        except PackageNotFoundError:
            continue
        if installed.version != version:
            continue
        looked_at += 1
        for need in (Requirement(text) for text in installed.requires or ()):
            other = canonicalize_name(need.name)
            if (
                applies(need)
                and other != "torch"
                and (other not in entries or not need.specifier.contains(entries[other][0], prereleases=True))
            ):
                missing.append(f"{each} needs {need}")
    assert missing == []
    assert looked_at > 0 or name == "build"


def test_the_manager_has_no_torch_and_the_gpu_image_the_one_that_tests_ran_with() -> None:
    assert not {"torch", "transformers", "smg"} & locked("manager").keys()
    assert "smg" in locked("gateway")
    pin = re.search(r"torch==([0-9.]+)", (ROOT / "scripts" / "install.sh").read_text())
    assert pin is not None
    assert locked("gpu")["torch"][0] == pin[1]
    assert not any(name.startswith(("nvidia-", "cuda-", "triton", "cupy")) for name in locked("executor"))


@pytest.mark.parametrize("process", ["kvmanager", "executor"])
def test_images_take_nothing_from_an_index_without_its_hash(process: str) -> None:
    """Except torch's CPU build, which SECURITY.md says."""
    text = (ROOT / process / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip (?:install|wheel|download)[^&;]*", text)
    assert len(installs) > 3
    free = [each for each in installs if "--require-hashes" not in each and "--no-index" not in each]
    assert [each for each in free if '"${TORCH}"' not in each] == []
    assert len(free) == (1 if process == "executor" else 0)
    # Nor does torch bring anything along from an index of its own.
    assert all("--no-deps" in each for each in installs)
    chosen = re.findall(r"^ *(?:ARG LOCK=|LOCK: )(\w+)$", text + compose_files(), re.MULTILINE)
    assert len(chosen) == 3
    assert set(chosen) <= LISTS.keys()


@pytest.mark.parametrize("hashes", ["1", ""])
def test_with_hashes_required_torch_comes_last(hashes: str, tmp_path: Path) -> None:
    """pip looks at no hash of what is installed already, so what torch brought along would never be looked at."""
    calls = tmp_path / "calls"
    (tmp_path / "bin").mkdir()
    for name, status in (("pip", 0), ("python", 1)):  # torch is not there
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\nexit {status}\n')
        script.chmod(0o755)
    env = os.environ | {"REQUIRE_HASHES": hashes, "TORCH_INDEX": "https://index.example/cpu"}
    subprocess.run([ROOT / "scripts" / "install.sh", tmp_path, "dev"], env=env, capture_output=True, check=True)
    installs = [line for line in calls.read_text().splitlines() if line.startswith("pip install")]
    (at,) = (at for at, line in enumerate(installs) if "https://index.example/cpu" in line)
    assert at == (len(installs) - 1 if hashes else 0)
    assert any("--require-hashes" in line for line in installs[:at]) is bool(hashes)


def compose_files() -> str:
    return "".join((ROOT / name).read_text() for name in ("compose.yaml", "compose.gpu.yaml"))


@pytest.mark.parametrize(("name", "fixed"), [("grpcio", "1.83.1"), ("protobuf", "5.29.6")])
def test_releases_with_known_holes_are_never_installed(name: str, fixed: str) -> None:
    """gRPC's up to GHSA-hf3w-6hpw-qp67, protobuf's up to CVE-2026-0994 (docs/security.md)."""
    (floor,) = (
        bound.version
        for requirement in map(Requirement, PROJECT["project"]["dependencies"])
        if requirement.name == name
        for bound in requirement.specifier
        if bound.operator == ">="
    )
    installed = [version for each in LISTS if each != "build" for version, _ in [locked(each)[name]]]
    assert min(map(Version, [floor, *installed])) >= Version(fixed)
