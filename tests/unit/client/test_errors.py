"""Statuses of the server as exceptions."""

from __future__ import annotations

import pickle
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clients.held_port import held_port
from support.clients.scripted_server import Fails, ScriptedServer

from pagekv.client import (
    AlreadyExists,
    ConnectionLost,
    DeadlineExceeded,
    FailedPrecondition,
    FellBehind,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    Overloaded,
    PageKVClient,
    PageKVError,
    ServerError,
    Unavailable,
    Unreachable,
)
from pagekv.client import errors as client_errors
from pagekv.common import errors
from pagekv.kvmanager.access.refusals import WORDS, RefusalReason


@pytest.mark.parametrize(
    ("sent", "raised", "attributes"),
    [
        (
            errors.InvalidRequest("sampling_params.top_p", "must be above 0, got 0"),
            InvalidRequest,
            {"field": "sampling_params.top_p", "description": "must be above 0, got 0"},
        ),
        (
            errors.AlreadyExists("request_id", "r is running", "request", "r"),
            AlreadyExists,
            {"field": "request_id", "description": "r is running", "kind": "request", "name": "r"},
        ),
        (errors.NotFound("no request r", "request", "r"), NotFound, {"kind": "request", "name": "r"}),
        (
            errors.Overloaded("1024 wait", 2.5, limit=1024, flag="--max-queue"),
            Overloaded,
            {"retry_delay_s": 2.5, "limit": 1024, "flag": "--max-queue"},
        ),
        (
            errors.LimitExceeded("pins", needed_blocks=4, available_blocks=0, pinned_blocks=5, limit=5, flag="--share"),
            LimitExceeded,
            {"needed_blocks": 4, "available_blocks": 0, "pinned_blocks": 5, "limit": 5, "flag": "--share"},
        ),
        (errors.LimitExceeded("pins", limit=16), LimitExceeded, {"needed_blocks": None, "limit": 16, "flag": ""}),
        (errors.Unavailable("no executor", 3.0), Unavailable, {"retry_delay_s": 3.0, "server_version": ""}),
        (errors.Unavailable("no executor", server_version="1"), Unavailable, {"server_version": "1"}),
        (
            errors.FailedPrecondition("blocks are held", "BLOCKS_HELD", "prefix cache"),
            FailedPrecondition,
            {"kind": "BLOCKS_HELD", "subject": "prefix cache"},
        ),
        # Of executors, which talk to no client.
        (errors.OutOfMemory("pools"), LimitExceeded, {}),
        (errors.StaleEpoch("old"), ServerError, {"code": "ABORTED", "reason": "STALE_EPOCH"}),
        (errors.FellBehind("start again"), FellBehind, {}),
        (errors.ComputationFailed("no"), ServerError, {"code": "INTERNAL", "reason": "COMPUTATION_FAILED"}),
        (errors.SequenceFailed("not a number"), errors.SequenceFailed, {}),
        (errors.RevisionGone("too old"), errors.RevisionGone, {}),
        (errors.NotImplementedYet("later"), ServerError, {"code": "UNIMPLEMENTED", "reason": "NOT_IMPLEMENTED"}),
        (grpc.StatusCode.INTERNAL, ServerError, {"code": "INTERNAL", "reason": ""}),
        (grpc.StatusCode.UNIMPLEMENTED, ServerError, {"code": "UNIMPLEMENTED"}),
    ],
)
def test_statuses_become_domain_exceptions(
    server: ScriptedServer, client: PageKVClient, sent: Any, raised: type[PageKVError], attributes: dict[str, Any]
) -> None:
    server.expect("ResetPrefixCache", Fails(sent))
    server.expect("Generate", Fails(sent))
    once = client.with_options(max_retries=0)
    for call in (once.reset_prefix_cache, lambda: once.generate("x")):
        with pytest.raises(PageKVError) as caught:
            call()
        assert type(caught.value) is raised
        assert {name: getattr(caught.value, name) for name in attributes} == attributes
        if isinstance(sent, PageKVError):
            assert str(sent) in str(caught.value)


def test_how_to_come_back_is_in_the_words(server: ScriptedServer, client: PageKVClient) -> None:
    """For those who read the message alone."""
    for sent, words in (
        (errors.Overloaded("1024 wait", 2.5), "1024 wait; try again in 3 s"),
        (
            errors.Unauthenticated(WORDS[RefusalReason.NO_IDENTITY]),
            f"{server.target} refuses the call: {WORDS[RefusalReason.NO_IDENTITY]} "
            "(--api-key or PAGEKV_API_KEY, --client-cert; api_key= and client_cert= in Python)",
        ),
        (errors.Unauthenticated("unknown key"), f"{server.target} refuses the call: unknown key"),
    ):
        server.expect("ResetPrefixCache", Fails(sent))
        with pytest.raises(PageKVError) as caught:
            client.reset_prefix_cache()
        assert str(caught.value) == words


def test_nobody_listens(make_client: Any) -> None:
    with held_port() as port:
        target = f"127.0.0.1:{port}"
        client = make_client(target, max_retries=0)
        for call in (client.stats, lambda: client.generate("x"), lambda: next(client.stream("x"))):
            with pytest.raises(Unreachable, match=rf"cannot reach PageKV at {target}.*pagekv up"):
                call()


class _Page(BaseHTTPRequestHandler):
    """Speaks HTTP 1, as the live page does."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_a_port_that_speaks_http_is_none_of_a_manager(make_client: Any) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        target = f"127.0.0.1:{page.server_port}"
        with pytest.raises(Unreachable, match=rf"PageKV at {target}: it does not speak gRPC.*live page"):
            make_client(target, max_retries=0).stats()
        page.shutdown()


def test_a_message_beyond_the_servers_bound_is_the_callers_mistake(client: PageKVClient) -> None:
    """Worded by gRPC's own server, whose bound is that of a manager."""
    for call in (client.tokenize, client.generate, lambda text: next(client.stream(text))):
        with pytest.raises(InvalidRequest, match=r"^request: must be at most 4194304 bytes as a message, has 50000"):
            call("x" * 5_000_000)


def test_errors_are_caught_by_their_builtin_bases() -> None:
    caught: list[Exception] = []
    for error, base in (
        (Unreachable("nobody", retry_delay_s=2.0), ConnectionError),
        (ConnectionLost("broken"), ConnectionError),
        (DeadlineExceeded("late"), TimeoutError),
    ):
        try:
            raise error
        except base as found:
            caught.append(found)
    assert [str(error) for error in caught] == ["nobody", "broken", "late"]
    assert [getattr(error, "retry_delay_s", None) for error in caught] == [2.0, 1.0, None]


def test_every_error_that_is_exported_can_be_raised() -> None:
    """By a status of a manager or a proxy, by gRPC or by the client itself, as docs/python.md tells."""
    told = (Path(__file__).resolve().parents[3] / "docs/python.md").read_text().partition("\n## Errors\n")[2]
    exported = {name for name in client_errors.__all__ if issubclass(getattr(client_errors, name), Exception)}
    assert {*re.findall(r"`([A-Z][a-z]\w+)`", told)} & {*vars(client_errors)} == exported


@pytest.mark.parametrize(
    "error",
    [
        client_errors.ServerError("INTERNAL", "it broke", "COMPUTATION_FAILED"),
        client_errors.DataLoss("a gap"),
        client_errors.DeadlineExceeded("too late"),
        client_errors.Unreachable("nobody is there", 3.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_goes_to_another_process_whole(error: errors.PageKVError) -> None:
    other = pickle.loads(pickle.dumps(error))  # noqa: S301  # its own
    assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
