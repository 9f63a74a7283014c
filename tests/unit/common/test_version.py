"""The version, of an installation and of a checkout that is run as it is."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pagekv.client
from pagekv.common.version import UNINSTALLED, pagekv_version

ROOT = Path(__file__).resolve().parents[3]


def test_it_is_that_of_the_project() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert pagekv_version() in (wanted, UNINSTALLED)


def test_a_checkout_runs_with_nothing_installed(tmp_path: Path) -> None:
    """As on a machine where nothing can be installed: processes start there, too."""
    program = (
        "import importlib.metadata as metadata\n"
        "def missing(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = missing\n"
        "from pagekv.kvmanager.config import parse_config\n"
        "print(parse_config(['--executor', '127.0.0.1:1']).engine.executor)\n"
        "from pagekv.common.version import pagekv_version\n"
        "print(pagekv_version())\n"
    )
    path = ":".join(str(ROOT / root) for root in ("proto", "kvmanager"))
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == ["127.0.0.1:1", UNINSTALLED], done.stderr


def test_programs_read_it_from_the_client() -> None:
    """`pagekv` itself is a namespace of several folders, so it has no file that could hold it."""
    assert pagekv.client.__version__ == pagekv_version()
    assert "__version__" in dir(pagekv.client)
