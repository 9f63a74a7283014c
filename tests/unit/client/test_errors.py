"""Statuses of the server as exceptions."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from support.clients.scripted_server import Fails, ScriptedServer, free_port

from pagekv.client import (
    AlreadyExists,
    ComputationFailed,
    FailedPrecondition,
    FellBehind,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    NotImplementedYet,
    Overloaded,
    PageKVClient,
    PageKVError,
    ServerError,
    Unavailable,
    Unreachable,
)
from pagekv.common import errors


@pytest.mark.parametrize(
    ("sent", "raised", "attributes"),
    [
        (
            errors.InvalidRequest("sampling_params.top_p", "must be above 0, got 0"),
            InvalidRequest,
            {"field": "sampling_params.top_p", "description": "must be above 0, got 0"},
        ),
        (errors.AlreadyExists("request_id", "r is running"), AlreadyExists, {"field": "request_id"}),
        (errors.NotFound("no request r"), NotFound, {}),
        (errors.Overloaded("1024 wait", 2.5), Overloaded, {"retry_delay_s": 2.5}),
        (errors.OutOfMemory("pools"), errors.OutOfMemory, {}),
        (errors.LimitExceeded("pins"), LimitExceeded, {}),
        (errors.Unavailable("draining", 3.0), Unavailable, {"retry_delay_s": 3.0}),
        (errors.FailedPrecondition("blocks are held"), FailedPrecondition, {}),
        (errors.StaleEpoch("old"), errors.StaleEpoch, {}),
        (errors.FellBehind("start again"), FellBehind, {}),
        (errors.ComputationFailed("no"), ComputationFailed, {}),
        (errors.NotImplementedYet("later"), NotImplementedYet, {}),
        (grpc.StatusCode.INTERNAL, ServerError, {"code": "INTERNAL"}),
        (grpc.StatusCode.UNIMPLEMENTED, ServerError, {"code": "UNIMPLEMENTED"}),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ServerError, {"code": "RESOURCE_EXHAUSTED"}),
    ],
)
def test_statuses_become_domain_exceptions(
    server: ScriptedServer, client: PageKVClient, sent: Any, raised: type[PageKVError], attributes: dict[str, Any]
) -> None:
    server.expect("ResetPrefixCache", Fails(sent))
    server.expect("Generate", Fails(sent))
    for call in (client.reset_prefix_cache, lambda: client.generate("x")):
        with pytest.raises(PageKVError) as caught:
            call()
        assert type(caught.value) is raised
        assert {name: getattr(caught.value, name) for name in attributes} == attributes
        if isinstance(sent, PageKVError):
            assert str(sent) in str(caught.value)


def test_nobody_listens(make_client: Any) -> None:
    target = f"127.0.0.1:{free_port()}"
    client = make_client(target)
    for call in (client.stats, lambda: client.generate("x"), lambda: next(client.stream("x"))):
        with pytest.raises(Unreachable, match=rf"cannot reach PageKV at {target}.*pagekv up"):
            call()
