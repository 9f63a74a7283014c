"""Calls, their refusals, and waits that end."""

from __future__ import annotations

from typing import Any
from unittest import mock

import grpc
import pytest
from support.executor.judged import kit_of, toy

from pagekv.conformance import link
from pagekv.conformance.link import Link, Refusal
from pagekv.conformance.verdict import BrokenRule
from pagekv.kvmanager.engine.executor_client import ExecutorLink
from pagekv.steps.v1 import executor_service_pb2 as pb


def test_a_refusal_names_its_field_and_rule() -> None:
    with toy() as address, kit_of(address) as kit:
        with pytest.raises(Refusal) as caught:
            kit.target.link.describe(pb.DescribeRequest(block_size=3, token_budget=1))
        refusal = caught.value
        assert (refusal.code, refusal.field, refusal.rule) == (grpc.StatusCode.INVALID_ARGUMENT, "block_size", "P11")
        assert str(refusal) == "INVALID_ARGUMENT, field block_size (block_size: breaks P11)"


def test_a_stream_that_ends_otherwise_than_expected() -> None:
    with toy() as address, kit_of(address) as kit:
        call = kit.target.run()
        call.send(pb.StepRequest(epoch=5, step=1))
        with pytest.raises(BrokenRule, match=r"ended with ABORTED .* instead of a result"):
            call.result()
        call = kit.target.run()
        call.half_close()
        with pytest.raises(BrokenRule, match="ended with OK instead of an error"):
            call.refusal()
        with kit.epoch() as epoch:
            epoch.call.send(pb.StepRequest(epoch=epoch.epoch, step=1))
            with pytest.raises(BrokenRule, match="step 1 was accepted"):
                epoch.call.refusal()
            with mock.patch.object(link, "RESULT_S", 0.1), pytest.raises(BrokenRule, match="no answer within"):
                epoch.call.outcome()


def test_details_that_are_none_name_nothing() -> None:
    class Odd(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.INTERNAL

        def details(self) -> None:
            return None

        def trailing_metadata(self) -> Any:
            return [("grpc-status-details-bin", b"\xff\xff")]

    refusal = Refusal(Odd())
    assert (refusal.code, refusal.field, refusal.rule, refusal.words) == (grpc.StatusCode.INTERNAL, "", "", "")


def test_the_channel_pings_as_a_managers_does() -> None:
    with mock.patch.object(grpc, "insecure_channel") as kit:
        Link("127.0.0.1:1")
    with mock.patch.object(grpc.aio, "insecure_channel") as manager:
        ExecutorLink("127.0.0.1:1", lambda: None)
    options, managers = dict(kit.call_args.kwargs["options"]), dict(manager.call_args.kwargs["options"])
    own = options.pop("grpc.use_local_subchannel_pool")
    assert (own, options) == (1, managers)
    # For an executor that hangs; gRPC itself would wait a minute.
    assert managers["grpc.http2.ping_timeout_ms"] == 20_000


def test_nobody_there() -> None:
    nobody = Link("127.0.0.1:1")
    with mock.patch.object(link, "CONNECT_S", 0.2):
        assert not nobody.is_there()
    nobody.close()
