"""`pagekv up` that is killed: nothing of its stack stays behind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.clients.processes import runs
from support.clients.stack import ORACLE, environment
from support.waiting import wait_until

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("gateway", [[], ["--gateway", "--gateway-port", "0"]], ids=["plain", "gateway"])
def test_no_process_outlives_a_launcher_that_was_killed(gateway: list[str]) -> None:
    if gateway:
        pytest.importorskip("smg", reason="pip install 'pagekv[gateway]'")
    command = [sys.executable, "-m", "pagekv.client.cli", "up", "--json", *ORACLE, *gateway]
    command += ["--port", "0", "--http-port", "0"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        try:
            pids = json.loads(up.stdout.readline())["pids"]
            assert pids.keys() == {"executor", "manager", *(["gateway"] if gateway else [])}
            assert all(runs(pid) for pid in pids.values())
        finally:
            up.kill()
    wait_until(lambda: not any(map(runs, pids.values())), why=lambda: [name for name, pid in pids.items() if runs(pid)])
