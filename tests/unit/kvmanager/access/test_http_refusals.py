"""Refusals of the HTTP port to callers that the gate has let in are in the audit log."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from support.clients.protected_stack import KEYS, write_identities
from support.engine.running_manager import Running, config, run
from support.json_lines import json_lines

from pagekv.common.port_file import read_port_file
from pagekv.kvmanager.page.hub import MAX_VIEWERS


def test_a_tenant_that_is_not_known_and_a_page_too_many_are_written_down(tmp_path: Path) -> None:
    identities, tenants, audit = (tmp_path / name for name in ("identities.toml", "tenants.toml", "audit.jsonl"))
    write_identities(identities)
    # Without a table for olga, and without one for the tenants that are not named.
    tenants.write_text("[tenants.alice]\n")
    statuses = []

    async def body(running: Running) -> None:
        url = f"http://{read_port_file(tmp_path / 'port')['http']}/api"
        async with AsyncExitStack() as pages:
            headers = {"Authorization": f"Bearer {KEYS['olga']}"}
            session = await pages.enter_async_context(aiohttp.ClientSession(headers=headers))
            async with session.post(f"{url}/explain", json={"token_ids": [1]}) as response:
                statuses.append(response.status)
            for _ in range(MAX_VIEWERS + 1):
                response = await pages.enter_async_context(session.get(f"{url}/stream"))
            statuses.append(response.status)

    files = (f"--identities={identities}", f"--tenants={tenants}", f"--audit-log={audit}")
    assert run(config(tmp_path, "--http-listen=127.0.0.1:0", *files), body) == 0
    assert statuses == [403, 429]
    refusals = [line for line in json_lines(audit) if line["event"] == "refused"]
    assert [(line["identity"], line["call"], line["reason"]) for line in refusals] == [
        ("olga", "POST /api/explain", "the tenant olga is not known"),
        ("olga", "GET /api/stream", "16 pages are open, the most possible; close one"),
    ]
    assert {line["peer"] for line in refusals} == {"127.0.0.1"}
