"""Packages that the bare installation lacks are named, with the command that brings them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.clients.stack import environment

from pagekv.client.cli.main import main
from pagekv.common.extras import MODULES, missing_modules
from pagekv.common.version import pagekv_version

EXTRAS = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
# A distribution whose module has another name, and those that are used where they are installed.
OTHER_NAMES = {"grpcio_reflection": "grpc_reflection", "PyJWT": "jwt"}
OPTIONAL = {"uvloop", "numba"}


@pytest.mark.parametrize("extra", sorted(MODULES))
def test_modules_are_those_of_the_extra(extra: str) -> None:
    names = [requirement.partition(">=")[0].replace("-", "_") for requirement in EXTRAS[extra]]
    assert sorted(MODULES[extra]) == sorted({OTHER_NAMES.get(name, name) for name in names} - OPTIONAL)


def test_serve_is_all_of_it() -> None:
    assert EXTRAS["serve"] == ["pagekv[manager,executor,observe,top]"]


def test_nothing_is_missing_where_all_is_installed_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_modules("manager", "executor") == []
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert missing_modules("manager", "executor") == ["numpy"]


def run_without(modules: list[str], program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """`python -m program` where these modules are not installed."""
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({modules!r})); sys.argv = {['it', *argv]!r}\n"
        f"runpy.run_module({program!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


def test_the_version_needs_no_extra() -> None:
    done = run_without([*MODULES["manager"]], "pagekv.kvmanager", "--version")
    assert (done.returncode, done.stdout) == (0, f"pagekv-manager {pagekv_version()}\n")


def test_an_executor_without_its_extra_names_all_that_is_missing() -> None:
    done = run_without(["torch", "safetensors"], "pagekv.executor.server", "--listen", "127.0.0.1:0", "--backend=cpu")
    assert done.returncode == 1
    words = "not installed: torch, safetensors; pip install 'pagekv[executor]' brings all it needs"
    assert f'cannot start reason="{words}"' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_manager_without_its_extra_says_so_in_one_line() -> None:
    done = run_without(["numpy", "tokenizers"], "pagekv.kvmanager")
    assert done.returncode == 1
    assert done.stderr == (
        "pagekv-manager: not installed: tokenizers, numpy; pip install 'pagekv[manager]' brings all it needs\n"
    )


def test_up_says_what_is_missing_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("pagekv.client.cli.commands.up.Stack", lambda _: pytest.fail("started"))
    for command in ("up", "demo"):
        assert main([command]) == 2
        assert capsys.readouterr().err == (
            "pagekv: not installed: torch; pip install 'pagekv[serve]' brings all it needs\n"
        )
