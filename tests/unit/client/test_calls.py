"""Calls with one answer, of both clients: requests as sent, results as typed."""

from __future__ import annotations

import inspect
import re
from dataclasses import astuple
from datetime import UTC, datetime
from typing import Any

import grpc
from support.clients.scripted_server import Fails, ScriptedServer
from support.prompts import as_prompt

from pagekv.client import (
    AsyncPageKVClient,
    CacheControls,
    PageKVClient,
)
from pagekv.v1 import cache_service_pb2 as cache_pb
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2


def test_the_other_calls(server: ScriptedServer, client: PageKVClient) -> None:
    def is_equal(wanted: Any) -> Any:
        def check(request: Any) -> None:
            assert request == wanted

        return check

    server.expect(
        "Abort", pb.AbortResponse(aborted_request_ids=["a"]), check=is_equal(pb.AbortRequest(request_ids=["a", "b"]))
    )
    assert client.abort("a", "b") == ("a",)
    server.expect(
        "Tokenize", pb.TokenizeResponse(token_ids=[1, 2]), check=is_equal(pb.TokenizeRequest(prompt=as_prompt("hi")))
    )
    assert client.tokenize("hi") == (1, 2)
    detokenize = pb.DetokenizeRequest(token_ids=[1, 2])
    server.expect("Detokenize", pb.DetokenizeResponse(text="hi"), check=is_equal(detokenize))
    assert client.detokenize([1, 2]) == "hi"
    server.expect("GetModelInfo", pb.GetModelInfoResponse(model_id="m", eos_token_ids=[0], has_tokenizer=True))
    info = client.model_info()
    assert (info.model_id, info.eos_token_ids, info.has_tokenizer, info.block_size) == ("m", (0,), True, 0)
    server.expect("GetStats", operator_pb.GetStatsResponse(num_device_blocks=9, kv_usage=0.5, executor_attached=True))
    stats = client.stats()
    assert (stats.num_device_blocks, stats.kv_usage, stats.executor_attached) == (9, 0.5, True)
    lookup = cache_pb.LookupPrefixRequest(prompt=as_prompt([1, 2]))
    lookup.cache.namespace = "n"
    server.expect("LookupPrefix", cache_pb.LookupPrefixResponse(prompt_tokens=2, block_ids=[4]), check=is_equal(lookup))
    assert astuple(client.lookup_prefix([1, 2], cache=CacheControls("n"))) == (2, 0, 0, (4,), 0)
    sequence = operator_pb.SequenceBlocks(
        state=types_pb2.SEQUENCE_STATE_RUNNING, num_tokens=4, block_ids=[1], block_hashes=["ff"]
    )
    table = operator_pb.GetBlockTableRequest(request_id="r")
    server.expect("GetBlockTable", operator_pb.GetBlockTableResponse(sequences=[sequence]), check=is_equal(table))
    assert list(map(astuple, client.block_table("r"))) == [(0, "running", 4, 0, (1,), ("ff",))]
    waiting = types_pb2.SEQUENCE_STATE_WAITING
    live = operator_pb.RequestInfo(request_id="r", state=waiting, priority=-1, prompt_tokens=7, namespace="n")
    live.create_time.FromMilliseconds(1500)
    some = operator_pb.ListRequestsRequest(page_size=5, page_token="t")
    server.expect(
        "ListRequests",
        operator_pb.ListRequestsResponse(requests=[live], total=9, next_page_token="u"),
        check=is_equal(some),
    )
    assert astuple(client.list_requests(5, "t")) == (
        (("r", "waiting", -1, 0, 7, 0, 0, 0, 0, 0, 0, "n", "", datetime.fromtimestamp(1.5, UTC)),),
        9,
        "u",
    )
    block = operator_pb.BlockInfo(block_id=3, ref_count=1, state=operator_pb.BLOCK_STATE_ACTIVE)
    listing = operator_pb.ListBlocksRequest(page_token="t", page_size=1, state=operator_pb.BLOCK_STATE_ACTIVE)
    server.expect(
        "ListBlocks", operator_pb.ListBlocksResponse(blocks=[block], next_page_token="u"), check=is_equal(listing)
    )
    blocks = client.list_blocks("active", page_size=1, page_token="t")
    assert (blocks.blocks[0].state, blocks.blocks[0].ref_count, blocks.next_page_token) == ("active", 1, "u")
    server.expect("ListBlocks", operator_pb.ListBlocksResponse())
    assert client.list_blocks().next_page_token == ""
    reset = operator_pb.ResetPrefixCacheRequest(force=True)
    server.expect("ResetPrefixCache", operator_pb.ResetPrefixCacheResponse(removed_blocks=5), check=is_equal(reset))
    assert astuple(client.reset_prefix_cache(force=True)) == (5, 0, 0)
    explain = cache_pb.ExplainPrefixRequest(prompt=as_prompt("hi"), page_token="t", page_size=3)
    explain.adapter = "a"
    reply = cache_pb.ExplainPrefixResponse(
        blocks=[
            cache_pb.BlockExplanation(end=4, outcome=cache_pb.BLOCK_OUTCOME_HIT, block_id=0, block_hash="ff"),
            cache_pb.BlockExplanation(start=4, end=8, outcome=cache_pb.BLOCK_OUTCOME_EVICTED, steps_ago=0),
        ],
        next_page_token="u",
        prompt_tokens=90,
    )
    server.expect("ExplainPrefix", reply, check=is_equal(explain))
    found = client.explain_prefix("hi", adapter="a", page_token="t", page_size=3)
    assert (found.next_page_token, found.prompt_tokens, found.cached_tokens) == ("u", 90, 0)
    assert list(map(astuple, found.blocks)) == [
        (0, 4, "hit", "ff", 0, "", 0, None, None),
        (4, 8, "evicted", "", None, "", 0, 0, None),
    ]
    pin = cache_pb.PinPrefixRequest(prompt=as_prompt([1, 2]), lease_seconds=60, pin_id="p")
    made = cache_pb.PinPrefixResponse(pin_id="p", pinned_tokens=16)
    made.expire_time.FromMilliseconds(1500)
    server.expect("PinPrefix", made, check=is_equal(pin))
    when = datetime.fromtimestamp(1.5, UTC)
    assert astuple(client.pin_prefix([1, 2], 60, pin_id="p")) == ("p", 16, when)
    listed_pin = cache_pb.PinInfo(
        pin_id="p", pinned_tokens=16, namespace="n", adapter="a", expire_time=made.expire_time
    )
    server.expect("ListPins", cache_pb.ListPinsResponse(pins=[listed_pin]))
    assert list(map(astuple, client.list_pins())) == [("p", 16, "n", "a", when)]
    unpin = cache_pb.UnpinPrefixRequest(pin_id="p")
    server.expect("UnpinPrefix", cache_pb.UnpinPrefixResponse(unpinned_tokens=16), check=is_equal(unpin))
    assert client.unpin_prefix("p") == 16


def test_tenants(server: ScriptedServer, client: PageKVClient) -> None:
    tenant = operator_pb.TenantInfo(
        name="a", weight=2, max_waiting=0, min_priority=-1, adapters=["x"], blocks=5, refusals_total={"max_running": 3}
    )
    server.expect("ListTenants", operator_pb.ListTenantsResponse(tenants=[tenant]))
    (found,) = client.list_tenants()
    assert (found.name, found.weight, found.blocks, found.adapters) == ("a", 2.0, 5, ("x",))
    # A limit of 0 is one, and no limit none.
    assert (found.max_waiting, found.max_running, found.min_priority, found.max_priority) == (0, None, -1, None)
    assert type(found.refusals_total) is dict
    assert found.refusals_total == {"max_running": 3}
    server.expect("ListTenants", operator_pb.ListTenantsResponse())
    assert client.list_tenants() == ()


def test_all_pages_of_a_list(server: ScriptedServer, client: PageKVClient) -> None:
    tokens: list[str] = []

    def note(request: Any) -> None:
        assert request.page_size == 4096
        tokens.append(request.page_token)

    live = [operator_pb.RequestInfo(request_id=name) for name in "abc"]
    for page, token in ((live[:2], "u"), ([], "v"), (live[2:], "")):
        answer = operator_pb.ListRequestsResponse(requests=page, total=3, next_page_token=token)
        server.expect("ListRequests", answer, check=note)
    assert [request.request_id for request in client.iter_requests()] == ["a", "b", "c"]
    assert tokens == ["", "u", "v"]

    def cached(request: operator_pb.ListBlocksRequest) -> None:
        note(request)
        assert request.state == operator_pb.BLOCK_STATE_CACHED

    for number, token in ((3, "u"), (7, "")):
        block = operator_pb.BlockInfo(block_id=number, state=operator_pb.BLOCK_STATE_CACHED)
        answers = operator_pb.ListBlocksResponse(blocks=[block], next_page_token=token)
        server.expect("ListBlocks", answers, check=cached)
    assert [block.block_id for block in client.iter_blocks("cached")] == [3, 7]
    # Only what is taken is asked for.
    server.expect("ListBlocks", operator_pb.ListBlocksResponse(blocks=[operator_pb.BlockInfo()], next_page_token="u"))
    blocks = client.iter_blocks()
    assert next(blocks).block_id == 0
    blocks.close()


def test_a_whole_prompt_is_explained(server: ScriptedServer, client: PageKVClient) -> None:
    tokens: list[tuple[int, str]] = []
    for start, token in ((0, "u"), (4, "")):
        reply = cache_pb.ExplainPrefixResponse(
            blocks=[cache_pb.BlockExplanation(start=start, end=start + 4)], next_page_token=token, prompt_tokens=8
        )
        server.expect("ExplainPrefix", reply, check=lambda r: tokens.append((r.page_size, r.page_token)))
    found = client.explain_prefix("hi")
    assert ([block.start for block in found.blocks], found.next_page_token) == ([0, 4], "")
    assert tokens == [(4096, ""), (4096, "u")]


def test_a_pin_without_a_name_gets_one_that_a_repeated_call_keeps(server: ScriptedServer, client: PageKVClient) -> None:
    names: list[str] = []

    def note(request: cache_pb.PinPrefixRequest) -> None:
        names.append(request.pin_id)

    # gRPC itself repeats the first call.
    server.expect("PinPrefix", Fails(grpc.StatusCode.UNAVAILABLE), check=note)
    server.expect("PinPrefix", cache_pb.PinPrefixResponse(pin_id="p"), check=note)
    server.expect("PinPrefix", cache_pb.PinPrefixResponse(pin_id="q"), check=note)
    assert [client.pin_prefix("hi", 60).pin_id for _ in range(2)] == ["p", "q"]
    assert names[0] == names[1] != names[2]
    assert re.fullmatch("pin-[0-9a-f]{16}", names[0])


def test_health(server: ScriptedServer, client: PageKVClient) -> None:
    from grpc_health.v1 import health_pb2

    server.expect("Check", health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING))
    assert client.health() == "serving"
    server.expect("Check", health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING))
    assert client.health() == "not_serving"
    server.expect("Check", Fails(grpc.StatusCode.NOT_FOUND))
    assert client.health("no.such.Service") == "service_unknown"


def test_both_clients_have_the_same_methods() -> None:
    def public(cls: type) -> set[str]:
        return {name for name in dir(cls) if not name.startswith("_")}

    assert public(PageKVClient) == public(AsyncPageKVClient)


def test_help_shows_what_a_call_takes_and_returns() -> None:
    for cls in (PageKVClient, AsyncPageKVClient):
        shown = inspect.signature(getattr(cls, "pin_prefix"))  # noqa: B009  # the stub of a descriptor is no function
        assert [*shown.parameters] == ["self", "prompt", "lease_seconds", "pin_id", "cache", "adapter"]
        assert shown.return_annotation == "Pin"
        assert (getattr(cls, "pin_prefix").__doc__ or "").startswith("Keeps what is cached")  # noqa: B009  # as above
