"""The manager's end of the connection to one executor: describe, attach, and the ordered stream of steps."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import grpc

from pagekv.common.keepalive import keepalive_options
from pagekv.common.logs import Log
from pagekv.common.loopback import authority_options
from pagekv.common.message_sizes import MAX_RESULT_BYTES
from pagekv.common.server import EPOCH_KEY
from pagekv.common.statuses import STATUS_DETAILS_KEY
from pagekv.common.turns import let_others_run
from pagekv.kvmanager.engine.executor_wire import step_bytes, step_result
from pagekv.kvmanager.engine.features import feature_numbers
from pagekv.kvmanager.engine.recovery import Fault, WrongAnswer
from pagekv.kvmanager.engine.stream_status import StreamStatus
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult
from pagekv.steps.v1 import executor_service_pb2 as pb
from pagekv.steps.v1 import executor_service_pb2_grpc as pb_grpc

log = Log(__name__)

# The latest revision of executor_service.proto that this manager supports.
CONTRACT_REVISION = 1
_RUN = f"/{pb.DESCRIPTOR.services_by_name['ExecutorService'].full_name}/Run"
# Seconds. Describe is answered only after the model was loaded, but its profiling pass may be slow on a busy machine.
DESCRIBE_TIMEOUT_S = 300.0
ATTACH_TIMEOUT_S = 300.0


class ExecutorLost(Exception):
    """The executor cannot be reached, refused a step, or did not answer in time: its epoch is over."""

    def __init__(self, message: str, fault: Fault = Fault.NONE) -> None:
        super().__init__(message)
        self.fault = fault


class UnfitExecutor(ExecutorLost):
    """This manager cannot work with the executor's description of itself. Another executor may take its place."""


class NoExecutor(ExecutorLost):
    """No executor answers at its address. The message names the address; FOR_CALLERS, for clients, does not."""

    FOR_CALLERS = "no executor answers at --executor; the manager's log says which address that is, and what to do"


class NoRoom(ExecutorLost):
    """The executor has no memory for the `asked` device and host blocks; None: for a step. It may have more later."""

    def __init__(self, message: str, asked: tuple[int, int] | None) -> None:
        super().__init__(message)
        self.asked = asked


class AttachRefused(Exception):
    """The flags and this executor do not go together; trying again would not help."""


class ExecutorLink:
    """One channel and, after `attach`, one epoch. After an error, close the link and make another."""

    def __init__(
        self, target: str, wake: Callable[[], None], credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        """`wake` is called when `take_result` has news; without `credentials` nothing is encrypted."""
        self._target = target
        self._wake = wake
        options = [
            # A proxy configured for the internet does not lead to an executor.
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", MAX_RESULT_BYTES),
            # Also while no call is open: a lost executor is noticed before the next one (P10).
            *keepalive_options(10_000, idle=True),
            *authority_options(target),
        ]
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=options)
        self._stub = cast("pb_grpc.ExecutorServiceAsyncStub", pb_grpc.ExecutorServiceStub(self._channel))
        self._call: grpc.aio.StreamStreamCall[bytes, pb.StepResult] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._results: deque[StepResult] = deque()
        self._error: ExecutorLost | WrongAnswer | None = None
        self._eos: tuple[int, ...] = ()
        self._revision = CONTRACT_REVISION
        self._step = 0
        self.epoch = 0

    async def describe(self, block_size: int, token_budget: int) -> pb.DescribeResponse:
        """Asks what is loaded. Raises ExecutorLost, or AttachRefused if the executor refuses these numbers."""
        request = pb.DescribeRequest(
            block_size=block_size, token_budget=token_budget, contract_revision=CONTRACT_REVISION
        )
        with _refusals("Describe", self._target):
            answer = await self._stub.Describe(request, timeout=DESCRIBE_TIMEOUT_S)
        self._revision = min(CONTRACT_REVISION, answer.contract_revision)
        return answer

    async def attach(self, manager_id: str, model: EngineInfo, layout: str, take_over: bool) -> pb.AttachResponse:
        """Opens an epoch with empty pools, and its stream of steps. Raises ExecutorLost or AttachRefused."""
        request = pb.AttachRequest(
            manager_id=manager_id,
            block_size=model.block_size,
            num_device_blocks=model.num_device_blocks,
            num_host_blocks=model.num_host_blocks,
            layout=layout,
            take_over=take_over,
            required_features=feature_numbers(model.features),
            contract_revision=self._revision,
        )
        with _refusals("Attach", self._target, (model.num_device_blocks, model.num_host_blocks)):
            answer = await self._stub.Attach(request, timeout=ATTACH_TIMEOUT_S)
        if not answer.epoch:
            raise ExecutorLost("AttachResponse.epoch: must not be 0, which stands for no epoch")
        self.epoch, self._eos = answer.epoch, model.eos_token_ids
        # Not through the stub: steps are bytes already.
        self._call = self._channel.stream_stream(_RUN, response_deserializer=pb.StepResult.FromString)(
            # Holds the executor from now on, though the first step may be hours away.
            metadata=((EPOCH_KEY, str(self.epoch)),)
        )
        self._reader = asyncio.create_task(self._read(self._call), name="executor results")
        return answer

    async def _read(self, call: grpc.aio.StreamStreamCall[bytes, pb.StepResult]) -> None:
        status = StreamStatus(call)
        try:
            async for message in call:
                if message.epoch != self.epoch:
                    raise WrongAnswer("epoch", f"must be {self.epoch}, got {message.epoch}")
                self._results.append(step_result(message))
                self._wake()
            # An executor ends the stream with OK only if the manager half-closes it (P8); this manager never does.
            self._error = ExecutorLost("Run: the executor ended the stream of steps with OK", Fault.STEP)
        except WrongAnswer as error:
            self._error = error
        except grpc.aio.AioRpcError as error:
            sent = await status.sent(error)
            self._error = ExecutorLost(_words(sent, "Run"), _fault(sent))
        except Exception as error:
            # A defect of this manager, which would otherwise look like a step without an answer.
            log.exception("reading a result failed; opening a new epoch", reason=error)
            self._error = ExecutorLost(f"Run: {type(error).__name__} while a result was read", Fault.STEP)
        self._wake()

    async def send(self, plan: StepPlan, timeout_s: float) -> None:
        """Sends the next step. Raises WrongAnswer, and ExecutorLost, also if it takes more than `timeout_s` seconds."""
        if self._call is None:
            raise ExecutorLost("not attached")
        self._step += 1
        long = any(new.sequence.request.packed_prompt for new in plan.new)
        if long:
            await let_others_run()  # planning so long a prompt has used up this turn
        message = step_bytes(plan, self.epoch, self._step, self._eos)
        if long:
            await let_others_run()  # gRPC copies the message
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.write(message)
        except TimeoutError as error:
            what = f"the executor read no step for {timeout_s:g} s (--step-timeout-s)"
            raise ExecutorLost(what, Fault.STEP) from error
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The stream is over; the reader task has the reason, or gets it in a moment.
            if self._reader is not None:
                await asyncio.wait([self._reader], timeout=1.0)
            raise self._error or ExecutorLost("the stream of steps broke") from error

    def take_result(self) -> StepResult | None:
        """The next result, None if there is none yet. Raises ExecutorLost or WrongAnswer after the last."""
        if self._results:
            return self._results.popleft()
        if self._error is not None:
            raise self._error
        return None

    async def close(self) -> None:
        """Ends stream and channel. Idempotent."""
        if self._call is not None:
            self._call.cancel()
        if self._reader is not None:
            await asyncio.wait([self._reader])
        await self._channel.close()


@contextmanager
def _refusals(method: str, target: str, asked: tuple[int, int] | None = None) -> Iterator[None]:
    """Turns the status of a call into AttachRefused, NoExecutor, NoRoom or another ExecutorLost."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        words = error.details() or ""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            for said, meaning in _MEANINGS.items():
                if re.search(said, words):
                    raise NoExecutor(meaning.format(target)) from error
        if error.code() is grpc.StatusCode.UNIMPLEMENTED and not _has_details(error):
            raise NoExecutor(
                f"the server at {target} is no executor, or of another version ({_words(error, method)}): {_NAME_IT}"
            ) from error
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise NoRoom(_words(error, method), asked) from error
        refused = error.code() == grpc.StatusCode.INVALID_ARGUMENT
        raise (AttachRefused if refused else ExecutorLost)(_words(error, method)) from error


# gRPC's words (regular expressions) for an address where no executor answers, and the explanation for the operator. A
# server that wants TLS, or another certificate, closes the connection without a reason.
_NAME_IT = "name the executor's address with --executor"
_START_ONE = "start a pagekv-executor with --listen {0}, or name another address with --executor"
_MEANINGS = {
    "Connection refused": f"nothing listens at {{0}}, or its model is still being loaded: {_START_ONE}",
    "No such file or directory": f"nothing listens at {{0}}, or its model is still being loaded: {_START_ONE}",
    "Domain name not found": "no address is known for the name in {0}: check its spelling, or name another address "
    "with --executor",
    "Trying to connect an http1.x server": f"the server at {{0}} does not speak gRPC: {_NAME_IT}",
    "WRONG_VERSION_NUMBER": "the executor at {0} answers without TLS: give it --tls-cert, or leave --executor-ca out",
    "certificate has expired|certificate is not yet valid": "the certificate of the executor at {0}, or that of its "
    "authority, has expired or is not valid yet by this machine's clock: renew it, or set the clock",
    "local issuer certificate|certificate signature failure": "the certificate of the executor at {0} is not signed by "
    "an authority in --executor-ca",
    "Hostname Verification Check failed": "the certificate of the executor at {0} is not for this name: name it with "
    "--executor as its certificate does",
    "failed to connect .*Socket closed": "the executor at {0} closes every connection at once: it wants TLS "
    "(--executor-ca), or a certificate that has not expired and is signed by an authority in its --tls-client-ca "
    "(--executor-cert, else --tls-cert), or it is a tunnel or a published port behind which no executor listens yet",
}

# Statuses that blame no step: the epoch is another manager's, or older than a new one.
_BLAMELESS = (grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION)


def _fault(error: grpc.aio.AioRpcError) -> Fault:
    """How far the end of the stream counts against the step that was due, by the rules of Run in
    executor_service.proto. An uncertain status blames the step, because a step that fails each time must not be sent
    for ever.
    """
    code = error.code()
    if code in _BLAMELESS:
        return Fault.NONE
    if code is grpc.StatusCode.CANCELLED:
        return Fault.GONE
    if code is grpc.StatusCode.UNAVAILABLE:
        return Fault.NONE if _has_details(error) else Fault.GONE
    return Fault.STEP


def _has_details(error: grpc.aio.AioRpcError) -> bool:
    """Whether an executor gave the status, and not gRPC."""
    return any(key == STATUS_DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def _words(error: grpc.aio.AioRpcError, method: str) -> str:
    return f"{method}: {error.code().name}: {error.details()}"
