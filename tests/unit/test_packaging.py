"""The package map: namespace, console scripts, packages and data agree with the folders on disk."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("proto", "kvmanager", "executor", "kernels", "client")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: dict[str, Any] = PYPROJECT["tool"]["setuptools"]
SCRIPTS: dict[str, str] = PYPROJECT["project"]["scripts"]


def packages_on_disk() -> dict[str, str]:
    """Import name -> folder of every package below a source root."""
    found = {}
    for source_root in SOURCE_ROOTS:
        for init in (ROOT / source_root).rglob("__init__.py"):
            folder = init.parent
            found[".".join(folder.relative_to(ROOT / source_root).parts)] = str(folder.relative_to(ROOT))
    return found


def test_pagekv_is_a_namespace() -> None:
    # One __init__.py would hide the portions of the other source roots.
    assert [str(path) for root in SOURCE_ROOTS for path in (ROOT / root).glob("pagekv/__init__.py")] == []


def test_every_package_is_listed() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_on_disk())


def test_every_module_belongs_to_a_package() -> None:
    # A folder of modules without __init__.py would be left out of the wheel.
    packaged = set(packages_on_disk().values())
    modules = [path.relative_to(ROOT) for root in SOURCE_ROOTS for path in (ROOT / root / "pagekv").rglob("*.py")]
    assert [str(path) for path in modules if str(path.parent) not in packaged] == []


def test_package_dir_maps_to_the_folders() -> None:
    on_disk = packages_on_disk()
    for name, folder in SETUPTOOLS["package-dir"].items():
        assert on_disk[name] == folder


def test_every_top_package_is_typed() -> None:
    for folder in SETUPTOOLS["package-dir"].values():
        assert (ROOT / folder / "py.typed").is_file()


def test_tools_know_every_source_root() -> None:
    assert set(SOURCE_ROOTS) <= set(PYPROJECT["tool"]["pytest"]["ini_options"]["pythonpath"])
    assert set(SOURCE_ROOTS) <= set(PYPROJECT["tool"]["mypy"]["mypy_path"].split(":"))


@pytest.mark.parametrize("command", sorted(SCRIPTS))
def test_console_script_resolves(command: str) -> None:
    module, _, function = SCRIPTS[command].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def run_python(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter with every source root importable and no PAGEKV_* variable but those given."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PAGEKV_")}
    env |= {"PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in SOURCE_ROOTS), **variables}
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("module", ["pagekv.kvmanager.server", "pagekv.client", "pagekv.client.cli.main"])
def test_cpu_side_imports_no_torch(module: str) -> None:
    # With `*`, since the client's names are imported when they are asked for.
    everything = f"import sys, {module}; from {module} import *"
    code = f"{everything}; print(sorted({{'torch', 'cupy', 'transformers'}} & sys.modules.keys()))"
    result = run_python("-c", code)
    assert (result.stdout, result.returncode) == ("[]\n", 0), result.stderr


@pytest.mark.long
def test_device_side_imports_no_grpc() -> None:
    # In one process, because torch and transformers take seconds; and every module, because a benchmark imports most of
    # its own only when it has found a GPU. Torch and transformers first, as an executor imports them.
    code = (
        "import importlib, pkgutil, sys\n"
        "from pagekv.executor.model.torch_import import import_torch\n"
        "import_torch()\n"
        "from pagekv.executor.model.transformers_import import import_transformers\n"
        "import_transformers()\n"
        "for name in ('executor.model', 'executor.cpu', 'executor.cuda', 'kernels.bench'):\n"
        "    package = importlib.import_module(f'pagekv.{name}')\n"
        "    for module in pkgutil.iter_modules(package.__path__, f'pagekv.{name}.'):\n"
        "        importlib.import_module(module.name)\n"
        "assert 'pagekv.executor.cuda.backend' in sys.modules\n"
        "print(sorted({'grpc', 'google.rpc'} & sys.modules.keys()))\n"
    )
    result = run_python("-c", code)
    assert (result.stdout, result.returncode) == ("[]\n", 0), result.stderr


@pytest.mark.parametrize("command", ["pagekv-manager", "pagekv-executor"])
def test_every_flag_is_documented(command: str) -> None:
    module = SCRIPTS[command].partition(":")[0]
    result = run_python("-m", module, "--help", COLUMNS="200")
    assert result.returncode == 0, result.stderr
    # As wide as it is read, however wide the terminal.
    assert max(map(len, result.stdout.splitlines())) <= 100
    # One option a row: its flags, then at least two spaces (or a new line), then its help.
    rows = re.split(r"\n  (?=-)", result.stdout.partition("options:")[2])[1:]
    flags = [flag for row in rows for flag in re.findall(r"^--?[a-z-]+|(?<=, )--[a-z-]+", row)]
    assert {"--listen", "--log-level", "--port-file"} <= set(flags)
    undocumented = [row for row in rows if len(re.split(r"\s{2,}", row.strip(), maxsplit=1)) < 2]
    assert undocumented == []
    known = set(re.findall(r"^\| `(--[a-z-]+)", (ROOT / "docs/flags.md").read_text(), re.M))
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    assert {flag for flag in flags if flag.startswith("--")} - known == {"--help", "--version"}


@pytest.mark.parametrize("script", ["install.sh", "install_peer.sh"])
@pytest.mark.parametrize("state", ["works", "interpreter gone", "no pip", "no environment"])
def test_an_environment_without_its_interpreter_is_made_anew(tmp_path: Path, script: str, state: str) -> None:
    """As after an upgrade of the system's Python. Its pip is still there, and executable. One that lacks only pip, as
    uv makes them, keeps its packages.
    """
    calls, venv, stub, python = (tmp_path / name for name in ("calls", "venv", "stub", "python"))
    write_executable(stub, f'#!/bin/sh\necho "$0" "$@" >> {calls}\n')
    # Does nothing but make environments, of which every program is the stub.
    write_executable(
        python,
        f'#!/bin/sh\necho "$0" "$@" >> {calls}\n'
        f'case "$*" in "-m venv"*) mkdir -p {venv}/bin; cd {venv}/bin; rm -f pip python\n'
        f"cp {stub} pip; cp {stub} python;; esac\n",
    )
    if state != "no environment":
        (venv / "bin").mkdir(parents=True)
        (venv / "pyvenv.cfg").write_text("")
        for name in ("pip", "python"):
            write_executable(venv / "bin" / name, stub.read_text())
    if state == "interpreter gone":
        write_executable(venv / "bin" / "pip", f"#!{venv}/bin/gone\n")
        (venv / "bin" / "python").unlink()
        (venv / "bin" / "python").symlink_to(venv / "bin" / "gone")
    if state == "no pip":
        (venv / "bin" / "pip").unlink()
    env = os.environ | {"PYTHON": str(python), "TORCH_INDEX": "https://index.example/cpu"}
    subprocess.run([ROOT / "scripts" / script, venv, "dev"], env=env, capture_output=True, check=True)
    made = [line for line in calls.read_text().splitlines() if line.startswith(f"{python} -m venv")]
    clear = "--clear " * (state == "interpreter gone")
    assert made == [f"{python} -m venv {clear}{venv}"] * (state != "works")


@pytest.mark.parametrize("target", ["lint", "demo", "gateway", "test-compat", "bench-peers"])
def test_make_installs_again_where_the_interpreter_is_gone(tmp_path: Path, target: str) -> None:
    """However new the record of what was installed is."""
    (tmp_path / "bin").mkdir()
    for name in ("", "-run", "-gateway", "-dev"):
        (tmp_path / f".installed{name}").touch()
    command = ["make", "--dry-run", target, *(f"{name}={tmp_path}" for name in ("VENV", "COMPAT", "PEER"))]

    def installs(interpreter: Path) -> bool:
        (tmp_path / "bin" / "python").unlink(missing_ok=True)
        (tmp_path / "bin" / "python").symlink_to(interpreter)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return "scripts/install" in done.stdout

    assert [installs(each) for each in (Path(sys.executable), tmp_path / "gone")] == [False, True]


def write_executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_images_and_make_agree_on_torch() -> None:
    # Two places say which torch a user gets; they must say the same.
    pins = {
        re.search(r"torch==[0-9.]+", (ROOT / name).read_text())
        for name in ("scripts/install.sh", "executor/Dockerfile")
    }
    assert len({pin and pin.group() for pin in pins}) == 1
    assert None not in pins


def test_the_clients_names_and_modules_are_there_when_they_are_asked_for() -> None:
    code = (
        "import sys, pagekv.client as client\n"
        "assert 'grpc' not in sys.modules\n"
        "assert {'PageKVClient', 'errors', '__all__'} <= set(dir(client))\n"
        "assert issubclass(client.errors.NotFound, client.PageKVError)\n"
        "assert all(hasattr(client, name) for name in client.__all__)\n"
        "assert not hasattr(client, 'nonsense')\n"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
