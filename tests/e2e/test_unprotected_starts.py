"""Managers that could not protect what they serve end at once, each with one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.clients.certificates import Authority
from support.clients.protected_stack import write_identities
from support.clients.stack import environment

pytestmark = pytest.mark.e2e

# A manager for each list of flags, one after the other; they are forked, because most of a start is imports.
MANAGERS = """
import json, os, signal, sys
from pagekv.kvmanager.server import main

for flags in json.loads(sys.argv[1]):
    if not (pid := os.fork()):
        signal.alarm(100)  # ends one that serves
        sys.exit(main(["--listen=127.0.0.1:0", *flags]))
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=sys.stderr, flush=True)
"""


def refusals(tmp_path: Path, *flags: list[str]) -> Iterator[str]:
    """The one line with which each of so many managers ends."""
    command = [sys.executable, "-c", MANAGERS, json.dumps(flags)]
    ended = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("Try ")]
    assert len(lines) == 2 * len(flags), ended.stderr
    assert set(lines[1::2]) <= {"ended with 1", "ended with 2"}, ended.stderr
    return iter(lines[::2])


def test_a_start_that_cannot_protect_ends_with_one_line(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, late = authority.pair("m"), authority.pair("late", since=timedelta(days=-2), until=timedelta(days=-1))
    files = [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"]
    gone, readable, identities = (tmp_path / f"{name}.toml" for name in ("gone", "readable", "identities"))
    write_identities(readable)
    readable.chmod(0o644)
    write_identities(identities)
    everywhere = "--listen=0.0.0.0:0"
    lines = refusals(
        tmp_path,
        [f"--identities={gone}"],
        [f"--identities={readable}"],
        [f"--tls-cert={late.cert}", f"--tls-key={late.key}"],
        [f"--tls-cert={pair.cert}"],
        [f"--executor-ca={authority.ca}", f"--executor-cert={pair.cert}"],
        [*files, f"--tls-client-ca={authority.ca}"],
        [f"--identities={identities}", "--kv-events"],
        # Neither of the two alone protects a port that other machines reach.
        [*files, everywhere],
        [f"--identities={identities}", everywhere],
    )
    assert str(gone) in next(lines)
    assert str(readable) in (line := next(lines))
    assert "chmod 640 or 600" in line
    assert f"--tls-cert {late.cert}: the certificate expired" in next(lines)
    assert "needs --tls-key" in next(lines)
    assert "--executor-cert: needs --executor-key, too" in next(lines)
    assert "needs --identities" in next(lines)
    assert "would show all prompts" in next(lines)
    assert ["other machines could connect" in line for line in lines] == [True, True]
