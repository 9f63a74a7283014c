"""The folder of wheels for a GPU machine without network: what is collected, and what is installed there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
# Stands in for `python -m pip download`: a wheel of PIP_SIZE bytes for each requirement, or an error.
PIP = """\
import os, sys
from pathlib import Path

assert sys.argv[1:4] == ["-m", "pip", "download"], sys.argv
folder = Path(sys.argv[sys.argv.index("--dest") + 1])
if os.environ["PIP_SIZE"] == "none":
    sys.exit("no such package")
for requirement in sys.argv:
    name, there, version = requirement.partition("==")
    if there:
        with (folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl").open("wb") as wheel:
            wheel.truncate(int(os.environ["PIP_SIZE"]))
"""


def run(script: str, *args: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts" / script, *args]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


# --- collecting


@pytest.fixture
def pip(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{PIP}")
    path.chmod(0o755)
    return str(path)


def test_one_version_of_each_is_collected_and_told(tmp_path: Path, pip: str) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "grpcio-0.1-py3-none-any.whl").touch()  # of an earlier time
    done = run("gpu_wheels.sh", wheels, PYTHON=pip, PIP_SIZE=str(MIB))
    assert done.returncode == 0, done.stderr
    there = {tuple(path.name.split("-")[:2]) for path in wheels.iterdir()}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    grpc = {(name.replace("-", "_"), pinned[name]) for name in pinned if name.startswith("grpcio")}
    assert grpc | {("protobuf", pinned["protobuf"]), ("flashinfer_python", "0.6.6")} <= there
    assert len({version for _, version in grpc}) == 1
    assert len({name for name, _ in there}) == len(there)
    assert f"{len(there) * MIB}  of {64 * MIB} allowed (64 MiB)" in done.stdout
    assert all(f"{name.replace('_', '-')} {version}" in done.stdout for name, version in there)
    assert "nvidia-cutlass-dsl" in done.stdout.partition("left out")[2]


def test_more_than_the_limit_is_an_error_that_tells_the_sizes(tmp_path: Path, pip: str) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "kept").touch()
    done = run("gpu_wheels.sh", wheels, PYTHON=pip, PIP_SIZE=str(10 * MIB))
    assert done.returncode == 1
    assert f"{10 * MIB}  flashinfer-python 0.6.6" in done.stdout
    assert f"{110 * MIB} bytes of wheels are more than the {64 * MIB} (64 MiB)" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["wheels"]
    assert [path.name for path in wheels.iterdir()] == ["kept"]


def test_what_pip_cannot_find_is_named(tmp_path: Path, pip: str) -> None:
    done = run("gpu_wheels.sh", tmp_path / "wheels", PYTHON=pip, PIP_SIZE="none")
    assert done.returncode == 1
    assert "pip could not download all of: grpcio==" in done.stderr
    assert not (tmp_path / "wheels").exists()


# --- installing


def make_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel of one module, whose VERSION is that version."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def install(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    done = run("gpu_site.sh", tmp_path / "wheels", tmp_path / "site", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    return done


def version_in(site: str, name: str) -> str:
    code = f"import {name}; print({name}.VERSION)"
    env = {**os.environ, "PYTHONPATH": site}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip()


def test_without_wheels_it_says_what_will_be_missing(tmp_path: Path) -> None:
    done = install(tmp_path)
    assert done.stdout == "\n"
    assert len(done.stderr.splitlines()) == 1
    assert f"no wheels in {tmp_path}/wheels" in done.stderr
    assert "google.rpc" in done.stderr


@pytest.mark.long
def test_installs_once_and_again_when_the_wheels_change(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "pagekv_carried", "1.0")
    site = install(tmp_path).stdout.strip()
    assert site == str(tmp_path / "site")
    assert version_in(site, "pagekv_carried") == "1.0"
    (tmp_path / "site" / "mark").touch()
    assert install(tmp_path).stdout.strip() == site
    assert (tmp_path / "site" / "mark").exists()

    (tmp_path / "wheels" / "pagekv_carried-1.0-py3-none-any.whl").unlink()
    make_wheel(tmp_path / "wheels", "pagekv_carried", "2.0")
    assert install(tmp_path).stdout.strip() == site
    assert not (tmp_path / "site" / "mark").exists()
    assert version_in(site, "pagekv_carried") == "2.0"


def test_no_package_hides_one_that_is_there_and_newer(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "pytest", "0.1")
    assert (install(tmp_path).stdout, (tmp_path / "site").exists()) == ("\n", False)
    make_wheel(tmp_path / "wheels", "numpy", "9999.0")
    make_wheel(tmp_path / "wheels", "pagekv_carried", "1.0")
    install(tmp_path)
    assert {path.name for path in (tmp_path / "site").glob("*.py")} == {"numpy.py", "pagekv_carried.py"}


def test_a_wheel_that_is_broken_costs_the_folder_and_no_more(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "pagekv_carried", "1.0")
    (tmp_path / "wheels" / "pagekv_broken-1.0-py3-none-any.whl").write_bytes(b"cut off")
    done = install(tmp_path)
    assert done.stdout == "\n"
    assert "pip could not install the wheels" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["wheels"]


# --- what is imported there

# Of the machine's image, as scripts/gpu_wheels.sh has it; what these require is there with them.
IMAGE = {"torch", "transformers", "accelerate", "numpy", "grpcio", "protobuf", "tokenizers", "safetensors", "jinja2"}
IMAGE |= {"msgpack", "uvloop", "aiohttp", "prometheus-client", "requests", "pytest", "hypothesis"}
# Imports modules where only the packages named first are installed.
WITH = """\
import importlib, re, sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions

packages, real = set(sys.argv[1].split()), PathFinder.find_spec
plain = lambda name: re.sub(r"[-_.]+", "-", name).lower()
hidden = {name for name, by in packages_distributions().items() if not {plain(each) for each in by} & packages}
PathFinder.find_spec = lambda name, *rest: None if name in hidden else real(name, *rest)
from pagekv.common.extras import missing_modules

assert not missing_modules("manager", "executor"), missing_modules("manager", "executor")
for module in sys.argv[2:]:
    importlib.import_module(module)
"""
STACK = ("support.clients.stack", "support.clients.calls", "pagekv.client.aio", "pagekv.client.planning.load_test")
STEPS = (
    *("gpu_first.kernel_steps", "gpu_first.watched_steps", "gpu_first.serving_steps", "gpu_first.rank_steps"),
    "gpu_first.failures",
)
PROCESSES = ("pagekv.kvmanager.server", "pagekv.executor.server", "pagekv.executor.cuda.backend")


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_requirements(names: Iterable[str]) -> set[str]:
    """The packages, and all that they require without extras."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        if (name := plain(todo.pop())) in found:
            continue
        found.add(name)
        with suppress(PackageNotFoundError):
            todo += [re.split(r"[^\w.-]", line)[0] for line in requires(name) or () if "extra ==" not in line]
    return found


@pytest.mark.parametrize("modules", [STACK, pytest.param((*STEPS, *PROCESSES), marks=pytest.mark.long)])
def test_what_is_there_and_what_is_carried_suffice_for_steps_and_processes(modules: tuple[str, ...]) -> None:
    text = (ROOT / "scripts" / "gpu_wheels.sh").read_text()
    carried = set(re.findall(r"^([\w-]+)\|[^|]*\|", text.partition("left_out=")[0], re.MULTILINE))
    assert "grpcio-health-checking" in carried
    there = with_requirements(IMAGE) | carried | {"pagekv"}
    sources = ("proto", "kvmanager", "executor", "kernels", "client", "tests", "tests/kernels", "tests/bench")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / source) for source in sources)}
    command = [sys.executable, "-c", WITH, " ".join(there), *modules]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
