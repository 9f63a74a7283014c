"""The explain box: answers as the engine explains, and refusals by name."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.engine import engine_harness
from support.engine.engine_harness import command, read
from support.engine.fake_engine import MODEL, FakeEngine
from support.engine.inference_harness import TOKENIZER
from support.event_loop import run_by

from pagekv.common.errors import InvalidRequest, NotFound, Overloaded, PermissionDenied
from pagekv.kvmanager.api.served_model import Served
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.page.explain import explain
from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.tenants.accounts import Account
from pagekv.kvmanager.tenants.asking import Asking
from pagekv.kvmanager.tenants.limits import TenantLimits
from pagekv.v1 import cache_service_pb2 as pb


def name_of(block: pb.BlockExplanation) -> str:
    return pb.BlockOutcome.Name(block.outcome).removeprefix("BLOCK_OUTCOME_").lower()


@run_by(engine_harness.run, num_device_blocks=40)
async def test_explaining_agrees_with_the_engine(engine: EngineLoop) -> None:
    await read(engine.submit(command("first", list(range(20)))))
    assert engine.model is not None
    served = Served(engine.model, None)
    prompt = [*range(10), 49, 48, 47]
    answer = await explain(engine, served, {"token_ids": prompt})
    expected = await engine.queries.explain_prefix(prompt, CacheIdentity(), 100)
    assert (answer["prompt_tokens"], answer["cached_tokens"]) == (13, expected.cached_tokens)
    assert answer["num_blocks"] == 4
    assert [(block["outcome"], block["reason"], block["block_id"]) for block in answer["blocks"]] == [
        (name_of(block), block.reason, block.block_id if block.HasField("block_id") else None)
        for block in expected.blocks
    ]
    assert [block["outcome"] for block in answer["blocks"]] == ["hit", "hit", "diverged", "partial_tail"]
    other = await explain(engine, served, {"token_ids": prompt, "namespace": "elsewhere"})
    assert other["cached_tokens"] == 0


def test_text_is_read_and_shown_in_blocks() -> None:
    answer = asyncio.run(explain(FakeEngine(), Served(MODEL, TOKENIZER), {"text": "the earth"}))
    assert "".join(block["text"] for block in answer["blocks"]).startswith("the")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([], "body: must be a JSON object with fields among adapter, namespace, text, token_ids"),
        ({"tokens": [1]}, "body: must be a JSON object"),
        ({}, "body: exactly one of text and token_ids"),
        ({"text": "a", "token_ids": [1]}, "body: exactly one of text and token_ids"),
        ({"text": 5}, "text: must be text"),
        ({"text": "\ud800"}, "text: must be text"),
        ({"token_ids": [1], "namespace": "\ud800"}, "namespace: must be text of at most 256 bytes"),
        ({"text": "a"}, "text: this deployment has no tokenizer; give token ids"),
        ({"token_ids": "1"}, "token_ids: must be a list of whole numbers"),
        ({"token_ids": [True]}, "token_ids: must be a list of whole numbers"),
        ({"token_ids": [-1]}, "token_ids: must be a list of whole numbers"),
        ({"token_ids": []}, "token_ids: has 0 tokens, must have from 1 to 200"),
        ({"token_ids": [1] * 201}, "token_ids: has 201 tokens, must have from 1 to 200"),
        ({"token_ids": [1, 50]}, "token_ids[1]: must be from 0 to 49 (the vocabulary), got 50"),
        ({"token_ids": [1], "namespace": 3}, "namespace: must be text of at most 256 bytes"),
        ({"token_ids": [1], "adapter": "x" * 257}, "adapter: must be text of at most 256 bytes"),
    ],
)
def test_bad_fields_are_refused_by_name(asked: object, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(explain(FakeEngine(), Served(replace(MODEL, max_model_len=200, vocab_size=50), None), asked))
    assert words in str(caught.value)


def test_an_adapter_is_not_found() -> None:
    with pytest.raises(NotFound, match="adapter: there is no 'lora'"):
        asyncio.run(explain(FakeEngine(), Served(MODEL, None), {"token_ids": [1], "adapter": "lora"}))


def asked_for(limits: TenantLimits) -> Served:
    """A model and its tokenizer, and a tenant with these limits that asks for it."""
    tenant = Tenant("alice", 1)
    account = Account(tenant)
    account.set_limits(limits)
    return Served(MODEL, TOKENIZER, Asking(tenant, account))


def test_a_text_is_counted_for_its_tenant() -> None:
    """As the text of ExplainPrefix is."""
    served = asked_for(TenantLimits(tokenized_bytes_per_second=1))
    asyncio.run(explain(FakeEngine(), served, {"text": "void"}))
    with pytest.raises(Overloaded, match="tokenized_bytes_per_second: your tenant may use 1"):
        asyncio.run(explain(FakeEngine(), served, {"text": "void"}))
    asyncio.run(explain(FakeEngine(), served, {"token_ids": [1]}))


def test_an_adapter_that_the_tenant_may_not_use_is_refused() -> None:
    """Whether there is such an adapter or not."""
    served = asked_for(TenantLimits(adapters=frozenset()))
    with pytest.raises(PermissionDenied, match="adapter: your tenant may not use 'lora'"):
        asyncio.run(explain(FakeEngine(), served, {"token_ids": [1], "adapter": "lora"}))
