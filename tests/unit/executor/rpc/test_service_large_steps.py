"""Steps of more than a few kilobytes over a real server: epoch and sizes are looked at before the rest is parsed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.event_loop import run_by
from support.executor.served_oracle import (
    Code,
    Served,
    end_of,
    entering,
    field_of,
    read,
    refusal,
    rule_of,
    served,
)

from pagekv.common.large_messages import SLICE_BYTES, parse_slices
from pagekv.executor.rpc import wire
from pagekv.steps.v1 import executor_service_pb2 as pb

# Tokens of a prompt of three megabytes; the model takes 256.
LONG = [300] * 1_500_000


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the message at each slice that was parsed."""
    seen: list[int] = []

    def watched(message: pb.StepRequest, *more: Any) -> Iterator[None]:
        for _ in parse_slices(message, *more):
            seen.append(message.ByteSize())
            yield

    monkeypatch.setattr(wire, "parse_slices", watched)
    return seen


def long_step(epoch: int, step: int = 1) -> pb.StepRequest:
    request = entering(epoch, step)
    request.new_seqs[0].token_ids[:] = LONG
    return request


def test_of_a_step_of_no_epoch_no_more_is_parsed_than_that(slices: list[int]) -> None:
    async def test(it: Served) -> None:
        epoch = await it.attach()
        for number in (1, epoch - 1):
            call = it.run()
            await call.write(long_step(number))
            code, details = await end_of(call)
            assert (code, f"{number} is over" in details) == (Code.ABORTED, True)
        call = it.run()
        await call.write(entering(epoch))  # the present epoch was not touched
        assert (await read(call)).step == 1

    served(test)
    assert max(slices, default=0) < SLICE_BYTES


def test_a_step_of_another_epoch_in_a_live_stream_ends_it_behind_the_results_before(slices: list[int]) -> None:
    async def test(it: Served) -> None:
        epoch = await it.attach()
        call = it.run()
        it.backend.gate.clear()
        await call.write(entering(epoch))
        await call.write(long_step(epoch - 1, 2))
        it.backend.gate.set()
        assert (await read(call)).step == 1
        assert (await end_of(call))[0] is Code.ABORTED

    served(test)
    assert max(slices, default=0) < SLICE_BYTES


def test_a_list_longer_than_the_epoch_allows_is_refused_before_it_is_parsed(slices: list[int]) -> None:
    async def test(it: Served) -> None:
        epoch = await it.attach()
        call = it.run()
        await call.write(long_step(epoch))
        error = await refusal(call.read())
        assert error.code() is Code.INVALID_ARGUMENT
        assert (field_of(error), rule_of(error)) == ("new_seqs[0].token_ids", "R11")
        assert f"at most 256 entries, has {len(LONG)}" in (error.details() or "")

    served(test)
    assert max(slices, default=0) < SLICE_BYTES


@run_by(served)
async def test_more_messages_than_sequences_could_need_are_refused(it: Served) -> None:
    epoch = await it.attach()
    call = it.run()
    await call.write(pb.StepRequest(epoch=epoch, step=1, new_seqs=[pb.NewSequence()] * 200_000))
    error = await refusal(call.read())
    assert (error.code(), field_of(error)) == (Code.INVALID_ARGUMENT, "new_seqs")


def test_a_large_step_is_run_like_any_other(slices: list[int]) -> None:
    async def test(it: Served) -> None:
        epoch = await it.attach()
        call = it.run()
        await call.write(entering(epoch))
        assert (await read(call)).step == 1
        copies = pb.MemoryOp(kind=pb.MEMORY_OP_KIND_COPY, sources=[0, 1, 2] * 3, destinations=range(20, 29))
        await call.write(pb.StepRequest(epoch=epoch, step=2, memory_ops=[copies] * 1000))
        assert (await read(call)).step == 2
        await call.write(pb.StepRequest(epoch=epoch, step=3))
        assert (await read(call)).step == 3

    served(test)
    assert max(slices) > SLICE_BYTES
