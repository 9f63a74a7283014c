"""Metrics of TLS and of the gate."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from prometheus_client import CollectorRegistry, generate_latest
from support.access.calls import Call, bearer
from support.access.issuer import AUDIENCE, ISSUER, token
from support.clients.certificates import Authority
from support.clients.protected_stack import write_identities
from support.event_loop import until

from pagekv.common.errors import PageKVError
from pagekv.common.tls_flags import TlsConfig
from pagekv.kvmanager.access.flags import AccessConfig
from pagekv.kvmanager.access.opening import Access, open_access
from pagekv.kvmanager.observe.metrics.access_metrics import AccessCollector

GENERATE = "/pagekv.v1.InferenceService/Generate"
# Where nobody listens.
JWT = f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks = "http://127.0.0.1:1/keys"\n'


def shown(access: Access) -> dict[str, float]:
    """Values by name and labels."""
    registry = CollectorRegistry()
    registry.register(AccessCollector(access))
    lines = generate_latest(registry).decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values}


def test_nothing_for_what_no_flag_turns_on(tmp_path: Path) -> None:
    assert shown(Access()) == {}
    write_identities(tmp_path / "identities.toml")
    found = shown(open_access(AccessConfig(identities=str(tmp_path / "identities.toml"))))
    assert not [name for name in found if "certificate_end" in name or "audit" in name]


def test_the_validity_of_the_certificate(tmp_path: Path) -> None:
    pair = Authority(tmp_path).pair("pagekv-manager")
    access = open_access(AccessConfig(TlsConfig(str(pair.cert), str(pair.key))))
    (leaf,) = x509.load_pem_x509_certificates(pair.pem)
    assert shown(access) == {
        "pagekv_certificate_begin_seconds": leaf.not_valid_before_utc.timestamp(),
        "pagekv_certificate_end_seconds": leaf.not_valid_after_utc.timestamp(),
        'pagekv_files_refused{files="TLS"}': 0,
    }


def test_what_was_refused_and_what_failed_is_counted(tmp_path: Path) -> None:
    identities, audit = tmp_path / "identities.toml", tmp_path / "audit.jsonl"
    write_identities(identities, JWT)
    access = open_access(AccessConfig(identities=str(identities), audit_log=str(audit)))
    assert access.gate is not None
    calls = [Call(), Call(bearer("wrong")), Call(bearer("wrong")), Call(bearer("meter-key")), Call(bearer(token()))]

    async def ask() -> None:
        assert access.gate is not None
        for call in calls:
            with suppress(PageKVError):
                await access.gate.admit_call(GENERATE, call)
        watching = asyncio.create_task(access.gate.files.watch(0.02))
        identities.write_text("no TOML")
        await until(lambda: access.files[0].are_refused)
        watching.cancel()

    asyncio.run(ask())
    access.close()
    with suppress(PageKVError):
        asyncio.run(access.gate.admit_call(GENERATE, Call()))
    found = {name: value for name, value in shown(access).items() if value}
    assert found == {
        'pagekv_refused_calls_total{reason="no_identity"}': 2,
        'pagekv_refused_calls_total{reason="unknown_key"}': 2,
        'pagekv_refused_calls_total{reason="no_role"}': 1,
        'pagekv_refused_calls_total{reason="invalid_token"}': 1,
        'pagekv_files_refused{files="identities"}': 1,
        "pagekv_key_set_failures_total": 1,
        "pagekv_lost_audit_lines_total": 1,
    }
    assert set(shown(access)) > {
        f'pagekv_refused_calls_total{{reason="{reason}"}}' for reason in ("sent_twice", "wrong_tenant", "expired_token")
    }
