"""Steps for an executor's live epoch, made at random: lawful ones, and such as break a rule, with the answer that an
epoch in this process gives to each.

The epoch here has the session's code and not its wire: what is compared is how the port reads, orders and answers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode
from support.executor.executor_steps import EPOCH
from support.executor.random_steps import (
    BLOCK_SIZE,
    DEVICE_BLOCKS,
    HOST_BLOCKS,
    MODEL_LEN,
    NUMBERS,
    SEQUENCES,
    base_step,
    small_world,
)
from support.fuzz.calls import ENDED_BEFORE_ALL_WAS_SENT
from support.fuzz.mutations import damaged, mutate

from pagekv.common.errors import InvalidRequest, StaleEpoch
from pagekv.common.server import EPOCH_KEY
from pagekv.executor.backend.interface import LAYOUT, BackendFeature
from pagekv.executor.oracle.backend import SlotError
from pagekv.executor.rpc import wire
from pagekv.executor.session.attach_check import CONTRACT_REVISION
from pagekv.steps.v1 import executor_service_pb2 as pb

SERVICE = "/pagekv.steps.v1.ExecutorService"
# Of an executor whose steps are made here.
EXECUTOR_ARGS = (
    *("--backend", "oracle", "--max-model-len", str(MODEL_LEN), "--max-sequences", str(SEQUENCES)),
    *("--kv-memory", "1MiB"),
)
FEATURES = {
    BackendFeature.HOST_POOL: pb.EXECUTOR_FEATURE_HOST_POOL,
    BackendFeature.LOGPROBS: pb.EXECUTOR_FEATURE_LOGPROBS,
    BackendFeature.MIN_TOKENS: pb.EXECUTOR_FEATURE_MIN_TOKENS,
}
# Answers of an epoch that are a step's own fault.
REFUSALS = {InvalidRequest: StatusCode.INVALID_ARGUMENT, StaleEpoch: StatusCode.ABORTED}
# Values of `pagekv-epoch` in the metadata of Run, "" for the epoch that was attached, by the refusal of the call; None:
# the call is taken. Of two values the first one counts.
NAMED: dict[tuple[str, ...], StatusCode | None] = {
    (): None,
    ("",): None,
    ("", ""): None,
    ("", "1"): None,
    ("1",): StatusCode.ABORTED,
    ("1", ""): StatusCode.ABORTED,
    ("0",): StatusCode.ABORTED,
    (str(2**64),): StatusCode.ABORTED,
    ("x",): StatusCode.INVALID_ARGUMENT,
    ("-1", ""): StatusCode.INVALID_ARGUMENT,
    ("9" * 21,): StatusCode.INVALID_ARGUMENT,
}
HANG_S = 240.0


@dataclass(frozen=True)
class Judged:
    """A step, as bytes that name the epoch of this process, and its answer: a result, or the status that ends all."""

    data: bytes
    result: pb.StepResult | None
    refusal: StatusCode = StatusCode.OK

    def sent(self, epoch: int) -> bytes:
        """The bytes that name another epoch instead. Bytes that are no message stay as they are."""
        try:
            message = pb.StepRequest.FromString(self.data)
        except DecodeError:
            return self.data
        if message.epoch == EPOCH:
            message.epoch = epoch
        return message.SerializeToString()


def epoch_of_steps(rng: random.Random) -> Iterator[Judged]:
    """The steps of one epoch. The last one may be refused; steps are left out in which a sequence would read what is
    not there, a lawful mistake that the oracle answers with INTERNAL, as it should.
    """
    world = small_world(frozenset(FEATURES))
    before = b""
    for _ in range(rng.choice([1, 5, 30, 100])):
        request = base_step(rng, world)
        if rng.random() < 0.1:
            mutate(rng, request, NUMBERS)
        data, fate = request.SerializeToString(), rng.random()
        if fate < 0.01:
            data = before
        elif fate < 0.03:
            data = damaged(rng, data)
        before = data
        try:
            result = wire.step_result(world.epoch.launch(wire.step(data)).collect())
        except SlotError:
            return
        except DecodeError:
            yield Judged(data, None, StatusCode.INVALID_ARGUMENT)
            return
        except (InvalidRequest, StaleEpoch) as error:
            yield Judged(data, None, REFUSALS[type(error)])
            return
        yield Judged(data, result)


def attach_request() -> bytes:
    """Opens an epoch for the steps above."""
    return pb.AttachRequest(
        manager_id="steps",
        block_size=BLOCK_SIZE,
        num_device_blocks=DEVICE_BLOCKS,
        num_host_blocks=HOST_BLOCKS,
        layout=LAYOUT,
        take_over=True,
        required_features=list(FEATURES.values()),
        contract_revision=CONTRACT_REVISION,
    ).SerializeToString()


@dataclass(frozen=True)
class StepsCase:
    """An epoch: its steps, how many may be unanswered, and how it ends when no step is refused."""

    steps: tuple[Judged, ...]
    ahead: int
    cancels: bool
    # Values of `pagekv-epoch` in the call's metadata; "" stands for the epoch that was attached.
    named: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes that are sent and not answered at most."""
        return max((len(step.data) for step in self.steps), default=0) * self.ahead

    @property
    def count(self) -> int:
        """Messages, with that to Attach."""
        return 1 + len(self.steps)


def make_steps(rng: random.Random) -> StepsCase:
    """The epoch that these random numbers mean."""
    steps, ahead, cancels = tuple(epoch_of_steps(rng)), rng.choice([1, 2, 4]), rng.random() < 0.2
    return StepsCase(steps, ahead, cancels, rng.choice(list(NAMED)))


async def perform(channel: Any, case: StepsCase) -> str:
    """Runs the epoch. "" when every answer was the expected one, else what is wrong."""
    attached = await channel.unary_unary(f"{SERVICE}/Attach")(attach_request(), timeout=HANG_S)
    epoch = pb.AttachResponse.FromString(attached).epoch
    metadata = tuple((EPOCH_KEY, value or str(epoch)) for value in case.named)
    call = channel.stream_stream(f"{SERVICE}/Run")(timeout=HANG_S, metadata=metadata)
    if refusal := NAMED[case.named]:
        code = await call.code()
        return "" if code is refusal else f"{code.name}, not {refusal.name}, for metadata {metadata}"
    answered = 0
    try:
        for number, step in enumerate(case.steps):
            await call.write(step.sent(epoch))
            while answered <= number - case.ahead:
                if wrong := _difference(case.steps[answered], await call.read(), epoch):
                    return wrong
                answered += 1
        if case.cancels:
            call.cancel()
            return ""
        await call.done_writing()
        for step in case.steps[answered:]:
            if step.result is not None and (wrong := _difference(step, await call.read(), epoch)):
                return wrong
        if await call.read() is not grpc.aio.EOF:
            return "a result too many"
    except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        # The call is over: its status says why.
        pass
    code = await call.code()
    wanted = case.steps[-1].refusal if case.steps else StatusCode.OK
    details = await call.details()
    # Another manager may have attached before the first step came, or once a step was refused: then the epoch is over.
    lost = code is StatusCode.ABORTED and (answered == 0 or wanted is not StatusCode.OK)
    lost_at_once = answered == 0 and details == ENDED_BEFORE_ALL_WAS_SENT
    return "" if code is wanted or lost or lost_at_once else f"{code.name}, not {wanted.name}: {details}"


def _difference(step: Judged, answer: Any, epoch: int) -> str:
    """Between a result and the expected one, the times left out."""
    if step.result is None or answer is grpc.aio.EOF:
        return ""
    got, wanted = pb.StepResult.FromString(answer), pb.StepResult()
    wanted.CopyFrom(step.result)
    for result in (got, wanted):
        result.execute_us = result.idle_us = 0
        result.epoch = epoch
    return "" if got == wanted else f"result {got}, not {wanted}"


def shown(case: StepsCase) -> str:
    """All of an epoch, for a failure's report; steps name epoch 77."""
    named = f" with {EPOCH_KEY} {case.named}" if case.named else ""
    return f"Attach, then Run{named}, {case.ahead} ahead: {[step.data.hex() for step in case.steps]}"
