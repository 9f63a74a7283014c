"""CacheService over a real gRPC server, with an engine that gives known answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from support.engine.cache_harness import TOKENIZER, run
from support.engine.fake_engine import MODEL, FakeEngine
from support.event_loop import in_event_loop, run_by
from support.prompts import as_chat, as_prompt

from pagekv.client.errors import from_rpc_error
from pagekv.common.errors import LimitExceeded, NotFound
from pagekv.kvmanager.access.caller import caller
from pagekv.kvmanager.access.identity import Identity, Role
from pagekv.kvmanager.access.tenancy import acting
from pagekv.kvmanager.api.cache_service import CacheService
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.tenants.limits import TenantLimits
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import types_pb2

if TYPE_CHECKING:
    from pagekv.v1.cache_service_pb2_grpc import CacheServiceAsyncStub as CacheStub

IDS = as_prompt([5, 6, 7])
MEDIA = types_pb2.CacheControls(media_hashes=[types_pb2.MediaHash(position=1, length=1, hash="h")])
NO_WRITE = types_pb2.CacheControls(write=False)


@run_by(run)
async def test_lookup_prefix(engine: FakeEngine, stub: CacheStub) -> None:
    controls = types_pb2.CacheControls(namespace="n")
    answer = await stub.LookupPrefix(pb.LookupPrefixRequest(prompt=IDS, cache=controls))
    assert (answer.prompt_tokens, answer.device_tokens, answer.host_tokens) == (3, 8, 4)
    assert answer.partial_tokens == 2
    assert list(answer.block_ids) == [7, 3]
    assert engine.lookups == [([5, 6, 7], CacheIdentity("n"))]
    await stub.LookupPrefix(pb.LookupPrefixRequest(prompt=as_prompt("void")))
    assert engine.lookups[1][0] == [0, *TOKENIZER.encode("void", special_tokens=False, limit=9)]


@pytest.mark.parametrize(
    ("method", "message", "field"),
    [
        ("LookupPrefix", pb.LookupPrefixRequest(), "prompt: exactly one of text, token_ids and chat"),
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=as_prompt("")), "prompt.text"),
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=as_prompt([5] * 65)), "prompt.token_ids.ids"),
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=as_chat()), "prompt.chat"),
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=IDS, adapter="a" * 257), "adapter"),
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=IDS, cache=types_pb2.CacheControls(read=True)), "cache.read"),
        ("PinPrefix", pb.PinPrefixRequest(prompt=IDS, lease_seconds=1, cache=NO_WRITE), "cache.write"),
        (
            "LookupPrefix",
            pb.LookupPrefixRequest(prompt=IDS, cache=types_pb2.CacheControls(namespace="n" * 257)),
            "cache.namespace",
        ),
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=IDS, cache=MEDIA), "cache.media_hashes: must be empty"),
        ("ExplainPrefix", pb.ExplainPrefixRequest(prompt=IDS, cache=MEDIA), "cache.media_hashes: must be empty"),
        ("PinPrefix", pb.PinPrefixRequest(prompt=IDS, lease_seconds=1, cache=MEDIA), "cache.media_hashes: must be"),
        ("ExplainPrefix", pb.ExplainPrefixRequest(), "prompt"),
        ("ExplainPrefix", pb.ExplainPrefixRequest(prompt=IDS, page_token="3"), "page_token"),
        ("ExplainPrefix", pb.ExplainPrefixRequest(prompt=IDS, page_size=10001), "page_size"),
        ("PinPrefix", pb.PinPrefixRequest(lease_seconds=1), "prompt"),
        ("PinPrefix", pb.PinPrefixRequest(prompt=IDS), "lease_seconds"),
        ("PinPrefix", pb.PinPrefixRequest(prompt=IDS, lease_seconds=86401), "lease_seconds"),
        ("UnpinPrefix", pb.UnpinPrefixRequest(), "pin_id"),
        ("UnpinPrefix", pb.UnpinPrefixRequest(pin_id="p" * 129), "pin_id"),
        ("PinPrefix", pb.PinPrefixRequest(prompt=IDS, lease_seconds=1, pin_id="p" * 129), "pin_id"),
        ("PinPrefix", pb.PinPrefixRequest(prompt=IDS, lease_seconds=1, pin_id="a b"), "pin_id"),
    ],
)
@run_by(run)
async def test_bad_fields(engine: FakeEngine, stub: CacheStub, *, method: str, message: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, method)(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(field)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("LookupPrefix", pb.LookupPrefixRequest(prompt=IDS, adapter="lora")),
        ("ExplainPrefix", pb.ExplainPrefixRequest(prompt=IDS, adapter="lora")),
        ("PinPrefix", pb.PinPrefixRequest(prompt=IDS, lease_seconds=1, adapter="lora")),
    ],
)
@run_by(run)
async def test_an_adapter_is_not_found(engine: FakeEngine, stub: CacheStub, *, method: str, message: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="adapter: there is no 'lora', the model has no adapters") as caught:
        await getattr(stub, method)(message)
    error = from_rpc_error(caught.value, "")
    assert isinstance(error, NotFound)
    assert (error.kind, error.name, engine.lookups) == ("adapter", "lora", [])


@run_by(run)
async def test_explain_prefix_in_pages(engine: FakeEngine, stub: CacheStub) -> None:
    prompt = as_prompt([5] * 9)
    controls = types_pb2.CacheControls(namespace="n")
    answer = await stub.ExplainPrefix(pb.ExplainPrefixRequest(prompt=prompt, cache=controls))
    assert engine.lookups == [([5] * 9, CacheIdentity("n"))]
    hit, old, tail = answer.blocks
    assert hit == pb.BlockExplanation(
        end=4, outcome=pb.BLOCK_OUTCOME_HIT, block_hash="aa", block_id=7, reason="cached", shared_tokens=4
    )
    assert (old.outcome, old.steps_ago, old.seconds_ago) == (pb.BLOCK_OUTCOME_EVICTED, 0, 0.5)
    assert old.HasField("steps_ago")
    assert not old.HasField("block_id")
    assert tail == pb.BlockExplanation(start=8, end=9, outcome=pb.BLOCK_OUTCOME_PARTIAL_TAIL, reason="tail")
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4)
    assert not answer.next_page_token
    starts, token = [], None
    while token != "":
        request = pb.ExplainPrefixRequest(prompt=prompt, page_size=2, page_token=token or "")
        answer = await stub.ExplainPrefix(request)
        starts.append([block.start for block in answer.blocks])
        token = answer.next_page_token
    assert starts == [[0, 4], [8]]


@run_by(run)
async def test_pin_and_unpin(engine: FakeEngine, stub: CacheStub) -> None:
    answer = await stub.PinPrefix(pb.PinPrefixRequest(prompt=IDS, lease_seconds=60))
    assert answer == pb.PinPrefixResponse(pin_id="pin-60", pinned_tokens=8)
    assert engine.lookups == [([5, 6, 7], CacheIdentity())]
    answer = await stub.PinPrefix(pb.PinPrefixRequest(prompt=IDS, lease_seconds=60, pin_id="A1._:-"))
    assert answer.pin_id == "A1._:-"
    assert await stub.ListPins(pb.ListPinsRequest()) == engine.queries.cache.list_pins()
    assert (await stub.UnpinPrefix(pb.UnpinPrefixRequest(pin_id="pin-60"))).unpinned_tokens == 8
    assert (await stub.UnpinPrefix(pb.UnpinPrefixRequest(pin_id="pin-61"))).unpinned_tokens == 0
    engine.refusal = LimitExceeded("12 blocks would be pinned; at most 5 of 10")
    with pytest.raises(grpc.aio.AioRpcError, match="12 blocks would be pinned; at most 5 of 10") as caught:
        await stub.PinPrefix(pb.PinPrefixRequest(prompt=IDS, lease_seconds=60))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@run_by(run)
async def test_the_text_of_a_question_is_counted_for_its_tenant(engine: FakeEngine, stub: CacheStub) -> None:
    engine.accounts.of("").set_limits(TenantLimits(tokenized_bytes_per_second=1))
    await stub.LookupPrefix(pb.LookupPrefixRequest(prompt=as_prompt("void")))
    with pytest.raises(grpc.aio.AioRpcError, match="tokenized_bytes_per_second: your tenant may use 1"):
        await stub.LookupPrefix(pb.LookupPrefixRequest(prompt=as_prompt("void")))
    await stub.LookupPrefix(pb.LookupPrefixRequest(prompt=IDS))
    assert len(engine.lookups) == 2


@in_event_loop
async def test_a_call_for_a_tenant_is_about_this_tenants_pins() -> None:
    """Operators that act for nobody list and end those of all; what they pin is their own tenant's."""
    operator = Identity("olga", frozenset({Role.OPERATE, Role.ACT_FOR}), act_for=frozenset({"*"}))

    async def asked(known: Identity | None) -> list[str | None]:
        caller.set(known)
        engine = FakeEngine()
        state = ServedModel(engine)
        state.open(MODEL.model_fingerprint, TOKENIZER)
        service = CacheService(engine, state)
        await service.PinPrefix(pb.PinPrefixRequest(prompt=IDS, lease_seconds=60, pin_id="p"), None)
        await service.ListPins(pb.ListPinsRequest(), None)
        await service.UnpinPrefix(pb.UnpinPrefixRequest(pin_id="p"), None)
        return engine.pins_of

    assert await asked(None) == ["", None, None]
    assert await asked(operator) == ["olga", None, None]
    assert await asked(acting(operator, ["alice"])) == ["alice", "alice", "alice"]
