"""The gateway's process: the key of its own is on no command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.clients.stack import environment

from pagekv.client.launcher.gateway import COMMAND

# In place of the gateway: its arguments, and its command line as every user of the machine can read it.
MODULE = """
import json, sys
print(json.dumps([sys.argv[1:], open("/proc/self/cmdline").read().split("\\0")]))
"""


def started(tmp_path: Path, *args: str) -> tuple[list[str], list[str]]:
    """Both of a gateway with these arguments."""
    (tmp_path / "smg.py").write_text(MODULE)
    env = environment()
    env["PYTHONPATH"] += f":{tmp_path}"
    with subprocess.Popen([*COMMAND, *args], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        given, shown = json.loads(process.stdout.readline())
    return given, shown


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_managers_are_added_by_nobody_and_no_command_line_has_the_key(tmp_path: Path) -> None:
    (command, first, *rest), shown = started(tmp_path, "--policy=random", "--worker-urls", "grpc://127.0.0.1:3")
    assert (command, rest) == ("launch", ["--policy=random", "--worker-urls", "grpc://127.0.0.1:3"])
    assert first.startswith("--control-plane-api-keys=pagekv:pagekv:admin:")
    assert len(first) > 80
    assert "--policy=random" in shown
    assert [word for word in shown if "key" in word] == []
    assert started(tmp_path)[0][1] != first


@pytest.mark.parametrize(
    "given",
    [
        *(["--api-key", "x"], ["--api-key=x"], ["--tenant-api-key=a:x"], ["--jwt-audience=x"]),
        *(["--control-plane-api-keys"], ["--control-plane-api-keys", "a:a:admin:x"], ["--jwt-issuer="]),
    ],
)
def test_a_key_is_drawn_beside_others(given: list[str], tmp_path: Path) -> None:
    """Without keys of their own, the calls that add managers are open to --api-key; with an audience but no issuer, and
    with an empty list of keys, to everybody.
    """
    (_, first, *rest), _ = started(tmp_path, *given)
    assert first.startswith("--control-plane-api-keys=pagekv:pagekv:admin:")
    assert rest == given


def test_an_issuer_of_tokens_stays_the_only_one(tmp_path: Path) -> None:
    assert started(tmp_path, "--jwt-issuer=x")[0] == ["launch", "--jwt-issuer=x"]
