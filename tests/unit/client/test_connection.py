"""Where the calls of both clients go, and what goes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from support.clients.scripted_server import Hangs, ScriptedServer, answer, chunk
from support.event_loop import in_event_loop

from pagekv.client import AsyncPageKVClient, FailedPrecondition, InvalidRequest, PageKVClient, Unreachable
from pagekv.client.channel import channel_options
from pagekv.v1 import operator_service_pb2 as operator_pb

STATS = operator_pb.GetStatsResponse()


def test_metadata_goes_with_every_call(server: ScriptedServer, make_client: Any) -> None:
    client = make_client(server.target, metadata=[("authorization", "Bearer a"), ("trace-bin", b"\x00\xff")])
    server.expect("GetStats", STATS)
    client.stats()
    server.expect("Generate", *answer(4))
    client.generate("x")
    server.expect("WatchEvents", operator_pb.WatchEventsResponse(sequence=1, snapshot=True))
    list(client.watch_events(snapshot_only=True))
    assert server.metadata == [{"authorization": "Bearer a", "trace-bin": b"\x00\xff"}] * 3


def test_options_are_for_the_copy_alone(server: ScriptedServer, make_client: Any) -> None:
    client = make_client(server.target, timeout=1000, metadata=[("authorization", "Bearer a")])
    one = client.with_options(timeout=3000, metadata=[("traceparent", "00-1")])
    for each in (one, client, one.with_options(timeout=None)):
        server.expect("GetStats", STATS)
        each.stats()
    both = {"authorization": "Bearer a", "traceparent": "00-1"}
    assert server.metadata == [both, {"authorization": "Bearer a"}, both]
    first, second, unlimited = server.deadlines
    assert first is not None
    assert second is not None
    assert second < 1100 < 2000 < first < 3300
    assert unlimited is None or unlimited > 1e6


def test_closing_a_copy_leaves_the_connection(server: ScriptedServer) -> None:
    with PageKVClient(server.target) as client:
        with client.with_options(timeout=9) as copy:
            assert type(copy) is PageKVClient
        server.expect("GetStats", STATS)
        client.stats()


def test_a_channel_given_is_used_and_left_open(server: ScriptedServer) -> None:
    with grpc.insecure_channel(server.target) as channel:
        with PageKVClient(channel=channel) as client:
            server.expect("GetStats", STATS)
            client.stats()
        server.expect("GetStats", STATS)
        PageKVClient(channel=channel).stats()


@in_event_loop
async def test_an_asyncio_channel_given_is_used_and_left_open(server: ScriptedServer) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        for _ in range(2):
            server.expect("GetStats", STATS)
            async with AsyncPageKVClient(channel=channel) as client:
                await client.stats()


def assert_closed(call: Callable[[], object], target: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"{target} was closed here: make another client") as caught:
        call()
    assert (caught.value.kind, caught.value.subject) == ("CLIENT_CLOSED", target)


def test_calls_of_a_closed_client_are_refused_by_an_error_of_ours(make_client: Any) -> None:
    client = make_client("127.0.0.1:1")
    copy, begun = client.with_options(timeout=9), client.stream("x")
    client.close()
    client.close()
    for call in (
        client.stats,
        client.health,
        copy.stats,
        lambda: client.generate("x"),
        lambda: next(begun),
        lambda: next(client.watch_events()),
        lambda: next(client.iter_blocks()),
    ):
        assert_closed(call, "127.0.0.1:1")


def test_a_channel_given_may_be_closed_by_its_owner() -> None:
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        client = PageKVClient("there:1", channel=channel)
    for call in (client.stats, client.health, lambda: client.generate("x")):
        assert_closed(call, "there:1")


def test_another_value_error_of_a_channel_is_passed_on() -> None:
    """As one of an interceptor of the caller's own."""

    class Refuses(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, *_: Any) -> Any:
            raise ValueError("no token")

    with grpc.insecure_channel("127.0.0.1:1") as bare:
        client = PageKVClient(channel=grpc.intercept_channel(bare, Refuses()))
        with pytest.raises(ValueError, match=r"^no token$"):
            client.stats()


def test_credentials_encrypt_the_connection(make_client: Any) -> None:
    server = ScriptedServer(credentials=grpc.local_server_credentials())
    server.start()
    try:
        client = make_client(server.target, credentials=grpc.local_channel_credentials())
        server.expect("GetStats", STATS)
        client.stats()
        server.expect("Generate", chunk(4), Hangs())
        with client.stream("x") as stream:
            assert next(stream).token_ids == (4,)
        server.finish()
    finally:
        server.stop()


def test_the_environment_names_the_target(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEKV_TARGET", raising=False)
    assert PageKVClient().target == "127.0.0.1:50051"
    monkeypatch.setenv("PAGEKV_TARGET", server.target)
    with PageKVClient() as client:
        server.expect("GetStats", STATS)
        client.stats()
    assert PageKVClient("there:1").target == "there:1"


@pytest.mark.parametrize("url", ["http://127.0.0.1:50051", "HTTPS://gpu-7:50051/", "grpc://gpu-7:50051"])
def test_the_address_of_another_program_is_refused_with_the_form_wanted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said to be a name for which no address is known."""
    words = f"^target: must be host:port or unix:/path, without {url.partition('//')[0]}//, is '{url}'"
    with pytest.raises(InvalidRequest, match=f"{words}$"):
        PageKVClient(url)
    monkeypatch.setenv("PAGEKV_TARGET", url)
    with pytest.raises(InvalidRequest, match=rf"{words} \(from PAGEKV_TARGET\)$"):
        PageKVClient()
    # Ways to find addresses that gRPC knows.
    assert PageKVClient("dns:///gpu-7:50051").target == "dns:///gpu-7:50051"


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1", "gpu-7", "gpu-7:", "[::1]", "gpu-7:0", "127.0.0.1:65536", "[::1]:99999", f"gpu-7:{'1' * 5000}"],
)
def test_a_target_without_a_port_that_there_is_is_refused(target: str) -> None:
    """gRPC would ask port 443, or a port that nobody named."""
    words = "^target: must be host:port with a port from 1 to 65535, or unix:/path, is "
    with pytest.raises(InvalidRequest, match=words):
        PageKVClient(target)


@pytest.mark.parametrize("target", ["/run/pagekv.sock", "gpu-7\0:50051", "gpu-7:50051\n"])
def test_a_path_and_what_is_no_text_to_read_are_no_targets(target: str) -> None:
    """Such a target was said to be a name for which no address is known."""
    with pytest.raises(InvalidRequest, match=r"^target: must be host:port or unix:/path, is "):
        PageKVClient(target)


@pytest.mark.parametrize(
    "target", ["gpu-7:65535", "[::1]:1", "unix:relative", "unix:70000", "unix:///tmp/x", "ipv4:127.0.0.1:1"]
)
def test_other_targets_are_grpcs_own_affair(target: str) -> None:
    assert PageKVClient(target).target == target


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"target": ""}, "target"),
        ({"target": 50051}, "target"),
        ({"timeout": -1}, "timeout"),
        ({"metadata": [("A", "x")]}, "metadata[0]"),
        ({"credentials": "secret"}, "credentials"),
        ({"channel": "127.0.0.1:50051"}, "channel"),
    ],
)
def test_arguments_out_of_bounds_are_refused_by_name(given: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PageKVClient(**given)
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


class _Subclass(PageKVClient):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)


@pytest.mark.parametrize("kind", [PageKVClient, AsyncPageKVClient, _Subclass])
def test_an_unknown_argument_is_refused_beside_all_that_there_are(kind: Any) -> None:
    known = "act_for, api_key, ca, channel, client_cert, client_key, credentials, max_retries, metadata, resume_timeout"
    words = f"^{kind.__name__}: unknown option 'host'; known are {known}, target, timeout$"
    with pytest.raises(TypeError, match=words):
        kind(host="127.0.0.1")


def test_a_channel_has_credentials_of_its_own_and_is_of_the_clients_kind() -> None:
    with grpc.insecure_channel("127.0.0.1:1", options=channel_options("127.0.0.1:1")) as channel:
        with pytest.raises(InvalidRequest, match="credentials: must be left out"):
            PageKVClient(channel=channel, credentials=grpc.local_channel_credentials())
        with pytest.raises(InvalidRequest, match=r"channel: must be a grpc\.aio\.Channel"):
            AsyncPageKVClient(channel=channel)


def test_a_server_without_encryption_is_unreachable_with_credentials(server: ScriptedServer, make_client: Any) -> None:
    client = make_client(server.target, credentials=grpc.ssl_channel_credentials(), timeout=300)
    with pytest.raises(Unreachable):
        client.stats()
