"""Mutual TLS and identities for every stack: PAGEKV_TEST_TLS=1 does so for every process that tests start without flags
of their own for it (`make test-tls`), and for every channel of gRPC that the tests open to one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from support.clients.certificates import Authority, Pair, client_credentials

ASKED_FOR = bool(os.environ.get("PAGEKV_TEST_TLS"))
_KEY = "tester-key"
# Flags of a process that says itself how it is reached.
_OWN = ("--tls-cert", "--insecure", "--identities")
# Credentials by the address of a process that serves with the files below.
_TARGETS: dict[str, grpc.ChannelCredentials] = {}


@dataclass(frozen=True)
class _Files:
    """Certificates and the key of the one caller, for all processes of this run."""

    folder: tempfile.TemporaryDirectory[str]
    ca: Path
    identities: Path
    executor: Pair
    manager: Pair
    client: Pair


@cache
def _files() -> _Files:
    folder = tempfile.TemporaryDirectory()
    authority, identities = Authority(Path(folder.name)), Path(folder.name) / "identities.toml"
    identities.touch(0o600)
    digest = hashlib.sha256(_KEY.encode()).hexdigest()
    identities.write_text(f'[keys.tester]\nsha256 = "{digest}"\nroles = ["generate", "observe", "operate"]\n')
    executor, manager, client = (authority.pair(name) for name in ("pagekv-executor", "pagekv-manager", "nobody"))
    return _Files(folder, authority.ca, identities, executor, manager, client)


def flags(args: Sequence[str], *, manager: bool) -> list[str]:
    """Flags behind those of a process, of a manager or of an executor; none where it has some of its own."""
    if not ASKED_FOR or any(arg.startswith(_OWN) for arg in args):
        return []
    files = _files()
    pair = files.manager if manager else files.executor
    found = [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", f"--tls-client-ca={files.ca}"]
    if manager:
        found += [f"--identities={files.identities}"]
        # An executor that the test serves itself has no certificate.
        found += [f"--executor-ca={files.ca}"] if _TARGETS.keys() & args else []
    return found


def serves(target: str, *, manager: bool) -> grpc.ChannelCredentials:
    """A process serves at this address with these flags; the credentials for it."""
    files = _files()
    if manager:
        shown = client_credentials(files.ca, files.client)
        found = grpc.composite_channel_credentials(shown, grpc.access_token_call_credentials(_KEY))
    else:
        found = client_credentials(files.ca, files.manager)
    _TARGETS[target] = found
    return found


def ended(target: str) -> None:
    """Nothing serves at this address with these flags any more; whoever has the port next may speak plain text."""
    _TARGETS.pop(target, None)


def secured(insecure: Callable[..., Any], secure: Callable[..., Any]) -> Callable[..., Any]:
    """In place of gRPC's `insecure_channel`: with credentials where the address is of such a process."""

    def channel(target: str, *args: Any, **options: Any) -> Any:
        credentials = _TARGETS.get(target)
        if credentials is None:
            return insecure(target, *args, **options)
        return secure(target, credentials, *args, **options)

    return channel
