"""A directory of certificates as flags of processes and credentials of clients."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
import pytest

from pagekv.client.errors import InvalidRequest
from pagekv.client.launcher.certificates import CLIENT, EXECUTOR, MANAGER, PROBE, StackCertificates, server_name


def test_a_caller_needs_a_certificate_where_all_have_to_show_one(certificates: Path) -> None:
    mutual, one_sided = (StackCertificates(certificates, mutual) for mutual in (True, False))
    assert mutual.client_files() == {
        "ca": certificates / "ca.pem",
        "client_cert": certificates / "client.pem",
        "client_key": certificates / "client.key",
    }
    assert one_sided.client_files() == {"ca": certificates / "ca.pem"}
    client_ca = f"--tls-client-ca={certificates}/ca.pem"
    assert client_ca in mutual.manager_args()
    assert client_ca not in one_sided.manager_args()
    # The executor serves its manager alone, whatever callers show.
    assert client_ca in one_sided.executor_args()


def test_every_role_has_credentials(certificates: Path) -> None:
    found = StackCertificates(certificates)
    found.check()
    for role in (MANAGER, EXECUTOR, PROBE, CLIENT):
        assert isinstance(found.credentials(role), grpc.ChannelCredentials)
    assert server_name(MANAGER) == "pagekv-manager"


@pytest.mark.parametrize("role", [MANAGER, EXECUTOR, PROBE, CLIENT])
def test_a_file_that_is_missing_is_named(certificates: Path, tmp_path: Path, role: str) -> None:
    copied = Path(shutil.copytree(certificates, tmp_path / "copied"))
    (copied / f"{role}.key").unlink()
    with pytest.raises(InvalidRequest, match=rf"copied/{role}\.key: cannot be read"):
        StackCertificates(copied).check()
    # No caller has to show the client's.
    if role == CLIENT:
        StackCertificates(copied, mutual=False).check()
