"""`pagekv up --certs`: TLS on every port, and text for callers who are known alone."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc
import pytest
from support.clients.stack import ORACLE, environment
from support.waiting import wait_until

from pagekv.client.launcher.certificates import StackCertificates
from pagekv.common.loopback import authority_options
from pagekv.steps.v1 import executor_service_pb2, executor_service_pb2_grpc

pytestmark = pytest.mark.e2e

PAGEKV = [sys.executable, "-m", "pagekv.client.cli"]


def pagekv(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PAGEKV, *words], env=environment(), capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    assert pagekv("certs", str(directory)).returncode == 0
    return directory


@dataclass(frozen=True)
class Keyed:
    """A stack with keys: its answer, the file of keys, two keys, and the file with what the command says."""

    up: dict[str, Any]
    keys: Path
    alice: str
    olga: str
    said: Path


@pytest.fixture(scope="module")
def keyed(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    directory = tmp_path_factory.mktemp("keyed")
    keys, path = directory / "keys.toml", directory / "said"
    alice, olga = (
        json.loads(pagekv("keys", "add", name, "--role", role, "--file", str(keys), "--json").stdout)["key"]
        for name, role in (("alice", "generate"), ("olga", "operate"))
    )
    flags = ("--certs", str(certificates), "--identities", str(keys))
    with path.open("w") as said, running_up(*flags, stderr=said) as up:
        yield Keyed(up, keys, alice, olga, path)


@contextmanager
def running_up(*flags: str, stderr: IO[str] | None = None) -> Iterator[dict[str, Any]]:
    """The stack that runs, as `up --json` says it."""
    command = [*PAGEKV, "up", "--json", *ORACLE, "--port", "0", "--http-port", "0", *flags]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=stderr, text=True) as up:
        assert up.stdout is not None
        try:
            yield json.loads(up.stdout.readline())
        finally:
            up.terminate()
    assert up.returncode == 0


def generate(target: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return pagekv(
        "generate", "--target", target, "--token-ids", "1,2,3", "--max-tokens", "4", "--ignore-eos", "--json", *flags
    )


def error_code(refused: subprocess.CompletedProcess[str]) -> str:
    return str(json.loads(refused.stderr.splitlines()[-1])["error"]["code"])


def page_status(url: str, ca: str, *headers: tuple[str, str]) -> int:
    context = ssl.create_default_context(cafile=ca)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(urllib.request.Request(url, headers=dict(headers)), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_text_for_a_key_and_none_without(certificates: Path, keyed: Keyed) -> None:
    up, alice, olga = keyed.up, keyed.alice, keyed.olga
    ca = ["--ca", up["ca"]]
    assert "client_cert" not in up
    answered = generate(up["target"], *ca, "--api-key", alice)
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["completions"][0]["completion_tokens"] == 4
    for flags, code in (
        (ca, "UNAUTHENTICATED"),
        ([*ca, "--api-key", "wrong"], "UNAUTHENTICATED"),
        ([*ca, "--api-key", olga], "PERMISSION_DENIED"),
        ([], "UNAVAILABLE"),
    ):
        refused = generate(up["target"], *flags)
        assert error_code(refused) == code, (flags, refused.stderr)
    assert page_status(up["page"], up["ca"]) == 401
    assert page_status(up["page"], up["ca"], ("Authorization", f"Bearer {olga}")) == 200
    # The executor is its manager's: a certificate of the same authority is not enough.
    credentials = StackCertificates(certificates).credentials("client")
    with grpc.secure_channel(up["executor"], credentials, authority_options(up["executor"])) as channel:
        stub = executor_service_pb2_grpc.ExecutorServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="serves only its manager"):
            stub.Attach(executor_service_pb2.AttachRequest(manager_id="rival", take_over=True), timeout=60)


def test_a_file_that_cannot_be_used_any_more_is_told_and_changes_nothing(keyed: Keyed) -> None:
    """By the command that the processes belong to, which shows nothing else of their logs."""
    keys, up = keyed.keys, keyed.up
    keys.chmod(0o644)
    wait_until(lambda: f"{keys}: must be writable only by its owner" in keyed.said.read_text())
    answered = generate(up["target"], "--ca", up["ca"], "--api-key", keyed.alice)
    assert answered.returncode == 0, answered.stderr
    first, *_ = keyed.said.read_text().splitlines()
    assert first.startswith("manager  | ")
    assert "the earlier content stays in force" in first


def test_text_for_a_certificate_and_none_without(certificates: Path) -> None:
    with running_up("--certs", str(certificates)) as up:
        files = ["--ca", up["ca"], "--client-cert", up["client_cert"], "--client-key", up["client_key"]]
        answered = generate(up["target"], *files)
        assert answered.returncode == 0, answered.stderr
        refused = generate(up["target"], "--ca", up["ca"])
        assert error_code(refused) == "UNAVAILABLE", refused.stderr
        probe = [f"--client-cert={certificates}/probe.pem", f"--client-key={certificates}/probe.key"]
        refused = generate(up["target"], "--ca", up["ca"], *probe)
        assert error_code(refused) == "UNAUTHENTICATED", refused.stderr
