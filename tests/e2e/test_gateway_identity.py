"""The gateway in front of a manager that asks everybody who they are: `pagekv up --gateway --identities`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clients.gateway_stack import MODEL, client_of
from support.clients.protected_stack import write_identities
from support.clients.stack import CPU

from pagekv.client import PageKVClient
from pagekv.client.cli.commands import up
from pagekv.client.cli.main import make_parser
from pagekv.client.cli.terminal import Terminal
from pagekv.client.errors import ServerError, Unauthenticated
from pagekv.client.launcher.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.long]
PROMPT = "And the earth was without form, and void; and darkness was upon the face of the deep; and the spirit moved."
OF_GATEWAY = '[gateway]\nroles = ["generate"]\ntenant = "web"\n'


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path: Path = tmp_path_factory.mktemp("identities") / "identities.toml"
    write_identities(path, OF_GATEWAY)
    ports = ["--port=0", "--gateway-port=0", "--no-http"]
    flags = [f"--identities={path}", "--gateway", *ports, f"--executor-args={' '.join(CPU)}"]
    config = up.stack_config(make_parser().parse(["up", *flags]), Terminal())
    with Stack(config) as stack:
        stack.start()
        assert stack.wait_ready(600)
        yield stack


def cached(completion: Any) -> int:
    return int(completion.usage.prompt_tokens_details.cached_tokens or 0)


def test_callers_behind_the_gateway_are_its_identity(stack: Stack) -> None:
    """Text for who comes through it, counted for its tenant, which finds no blocks of others."""
    with (
        PageKVClient(stack.target, api_key="alice-key") as alice,
        PageKVClient(stack.target, api_key="olga-key") as olga,
        client_of(stack) as api,
    ):
        own = [alice.generate(PROMPT, max_tokens=8, temperature=0) for _ in range(2)]
        assert own[1].cached_tokens
        through = [api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0) for _ in range(2)]
        assert {run.choices[0].text for run in through} == {own[0].text}
        assert cached(through[0]) == 0
        assert cached(through[1]) == own[1].cached_tokens
        tenants = {each.name: each for each in olga.list_tenants()}
        assert tenants["web"].output_tokens_total == tenants["alice"].output_tokens_total == 16


def test_without_a_name_nobody_else_is_the_gateway(stack: Stack) -> None:
    with PageKVClient(stack.target) as nobody, pytest.raises(Unauthenticated):
        nobody.generate("x", max_tokens=1)
    (listen,) = stack.listening("gateway")
    assert listen.startswith("127.0.0.1:")
    # There nothing is served but the gateway's protocol.
    with PageKVClient(listen) as nobody, pytest.raises(ServerError):
        nobody.generate("x", max_tokens=1)
