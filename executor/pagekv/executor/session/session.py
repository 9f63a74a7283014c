"""The session of the manager that drives the executor: one manager at a time, by epoch.

At most one epoch is current. `attach` first fences the previous epoch (its stream ends with ABORTED, its queued steps
are dropped, a step under way is finished) and then replaces the pools. An epoch accepts one Run stream; the end of the
stream, for any reason, ends the epoch.

The session lives on the event loop and uses two threads, so that a step is prepared while the one before runs:

    event loop:      submit 1 | submit 2                      | report 1 | submit 3          | report 2
    worker thread:            | launch 1  launch 2            |          | launch 3          |
    collect thread:           |           collect 1 (waits)   | collect 2 (waits)            | collect 3 (waits)

The worker thread makes every call of the backend, in the order of the steps. A launched step that is not ready goes to
the collect thread. A step that is ready (a refusal, an error, or a backend that computes in `launch`) is collected on
the worker thread, unless the collect thread still has earlier steps: then it queues behind them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from pagekv.common.errors import (
    ComputationFailed,
    Draining,
    FailedPrecondition,
    OutOfMemory,
    PageKVError,
    StaleEpoch,
    Unavailable,
)
from pagekv.common.logs import Log
from pagekv.common.phases import phase
from pagekv.executor.backend.interface import Backend, BackendDescription, GraphCounts
from pagekv.executor.session.attach_check import AttachOrder, check_describe, check_fit, check_order
from pagekv.executor.session.collector import Collector
from pagekv.executor.session.epoch import Epoch, OtherRanks, is_lost
from pagekv.executor.session.state_digest import StateDigest
from pagekv.executor.session.step import ExecutedStep, Step
from pagekv.executor.session.step_check import EpochLimits
from pagekv.executor.session.step_run import StepFailure, run_step
from pagekv.executor.session.step_stream import StepStream
from pagekv.executor.session.worker_thread import WorkerThread

log = Log(__name__)

T = TypeVar("T")

# The token budget to profile if `Attach` comes without a `Describe`.
DEFAULT_TOKEN_BUDGET = 2048
LOST = "the executor's device failed, and the executor restarts"


class StepFailed(ComputationFailed):
    """The backend failed in the middle of a step, or steps cannot be read; the message names the step and the
    reason.
    """


class Session:
    """States: loading until `serve`, then serving, then closed by `shut_down`."""

    def __init__(self, compute: WorkerThread, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._compute = compute
        # The worker thread submits its jobs.
        self._collector = Collector()
        self._clock_ns = clock_ns
        self._loop = asyncio.get_running_loop()
        self._backend: Backend | None = None
        self._ranks: OtherRanks | None = None
        self._closed = False
        # The latest description by block size, so that `attach` can fence an epoch without waiting for the worker
        # thread.
        self._descriptions: dict[int, BackendDescription] = {}
        self._current: Epoch | None = None
        self._last_epoch = 0
        # The streams that have not ended.
        self._streams: set[StepStream] = set()
        self._attaching = asyncio.Lock()
        # CUDA graphs of the latest epoch.
        self.graphs = GraphCounts()
        # Set when the device is lost to this process: from then on calls are refused. And the reason.
        self.lost = asyncio.Event()
        self.lost_reason = ""

    def serve(self, backend: Backend, ranks: OtherRanks | None = None) -> None:
        """From now on answers calls with this loaded backend. `ranks`: the other ranks, if this process is rank 0 of a
        group.
        """
        self._backend, self._ranks = backend, ranks

    async def describe(self, block_size: int, token_budget: int, contract_revision: int = 0) -> BackendDescription:
        """The loaded model and measured memory, for any revision of the manager. Raises InvalidRequest; OutOfMemory if
        memory is too short to profile a step; Unavailable while loading.
        """
        backend = self._serving()
        check_describe(block_size, token_budget, contract_revision)
        try:
            description = await self._ask(backend, lambda: backend.describe(block_size, token_budget))
        except MemoryError as error:
            raise OutOfMemory(str(error)) from error
        self._descriptions[block_size] = description
        return description

    # -- epochs

    async def attach(self, order: AttachOrder) -> int:
        """Allocates the pools and returns the new epoch. Ends the previous epoch only after the order has passed all
        checks: its pools are freed before the new ones are allocated, which may fail. Raises InvalidRequest,
        FailedPrecondition, OutOfMemory or Unavailable.
        """
        backend = self._serving()
        check_order(order)
        # Before any wait and any call of the backend, whose thread runs the steps of the manager that is attached.
        self._refuse_if_held(order)
        async with self._attaching:
            description = self._descriptions.get(order.block_size)
            if description is None:
                description = await self.describe(order.block_size, DEFAULT_TOKEN_BUDGET)
            check_fit(order, description)
            self._refuse_if_held(order)
            if self._current is not None:
                which = "this" if order.manager_id == self._current.manager_id else "another"
                self._end_epoch(self._current, StaleEpoch(f"{which} manager attached: the epoch is over"))
            self.graphs = await self._allocate(backend, order)
            return self._open_epoch(backend, order, description)

    def _refuse_if_held(self, order: AttachOrder) -> None:
        current = self._current
        if current is None or current.over or order.take_over or current.manager_id == order.manager_id:
            return
        if any(stream.epoch is current for stream in self._streams):
            # The message does not name the attached manager's id: a caller that used it would need no take_over. The
            # log has the id.
            raise FailedPrecondition(
                "another manager drives this executor: stop it, or attach with take_over (P3), as a manager does with "
                "--take-over",
                "EXECUTOR_HELD",
                "manager_id",
            )

    async def _allocate(self, backend: Backend, order: AttachOrder) -> GraphCounts:
        """Allocates after the step under way, if any: the worker thread runs one job at a time."""
        try:
            with phase(f"allocating {order.num_device_blocks + order.num_host_blocks} blocks"):
                graphs = await self._ask(
                    backend, lambda: backend.allocate(order.block_size, order.num_device_blocks, order.num_host_blocks)
                )
        except MemoryError as error:
            raise OutOfMemory(
                f"num_device_blocks {order.num_device_blocks}, num_host_blocks {order.num_host_blocks}: {error}"
            ) from error
        return graphs or GraphCounts()

    def _open_epoch(self, backend: Backend, order: AttachOrder, description: BackendDescription) -> int:
        if self._closed:
            raise Draining("the executor is shutting down")
        # Increases within the process even if the clock goes back, and across restarts because the clock advances.
        self._last_epoch = max(self._clock_ns(), self._last_epoch + 1)
        limits = EpochLimits(
            block_size=order.block_size,
            num_device_blocks=order.num_device_blocks,
            num_host_blocks=order.num_host_blocks,
            vocab_size=description.vocab_size,
            max_model_len=description.max_model_len,
            max_sequences=description.max_sequences,
            max_logprobs=description.max_logprobs,
            features=order.features,
        )
        self._current = Epoch(
            self._last_epoch,
            order.manager_id,
            limits,
            backend,
            ranks=self._ranks,
            digest=None if self._ranks is None else StateDigest(),
        )
        log.info(
            "attached",
            manager=order.manager_id,
            epoch=self._last_epoch,
            device_blocks=order.num_device_blocks,
            host_blocks=order.num_host_blocks,
            block_size=order.block_size,
        )
        return self._last_epoch

    def _end_epoch(self, epoch: Epoch, reason: PageKVError) -> None:
        """Fences an epoch: its queued steps will not run, its streams end with `reason`. Idempotent."""
        epoch.over = True
        if self._current is epoch:
            self._current = None
        for stream in [stream for stream in self._streams if stream.epoch is epoch]:
            stream.deliver(reason)
            self._streams.discard(stream)

    # -- streams

    def open_stream(self, number: int | None = None) -> StepStream:
        """Begins a Run call for the epoch with this number. None: the first step of the stream names the epoch, and
        until then the stream holds none. Raises Unavailable, StaleEpoch or FailedPrecondition.
        """
        self._serving()
        stream = StepStream()
        if number is not None:
            self._bind(stream, number)
        self._streams.add(stream)
        return stream

    @property
    def limits(self) -> EpochLimits | None:
        """The limits of the current epoch; None if there is none."""
        return None if self._current is None else self._current.limits

    def check_epoch(self, stream: StepStream, number: int) -> None:
        """Raises StaleEpoch or FailedPrecondition unless the stream may bring a step of the epoch with this number."""
        epoch = stream.epoch or self._bind(stream, number)
        if epoch.epoch != number:
            raise StaleEpoch(f"epoch: {number} is over: attach again (P6)")

    async def submit(self, stream: StepStream, step: Step) -> None:
        """Queues a step; waits while too many are in flight. Raises StaleEpoch or FailedPrecondition."""
        epoch = stream.epoch or self._bind(stream, step.epoch)
        await stream.wait_for_room()
        launch, ended = partial(epoch.launch, step), partial(self._ended, stream)
        self._compute.post(lambda: run_step(self._collector, epoch, step.step, launch, ended))

    def finish_input(self, stream: StepStream, refusal: PageKVError | None = None) -> None:
        """Ends the stream after the result of its last step, because no more steps come, or because of `refusal` if the
        next step was refused before it was decoded.
        """
        epoch = stream.epoch

        def end() -> None:
            # A fenced epoch has dropped steps, so this is not a clean end: the stream gets the reason from
            # `_end_epoch`.
            if epoch is not None and epoch.over:
                return
            if refusal is not None:
                log.warning("refused a step", epoch=epoch.epoch if epoch else 0, reason=refusal)
            self._report(stream, refusal)

        self._compute.post(lambda: self._collector.run(end, True))

    def close_stream(self, stream: StepStream) -> None:
        """Ends a Run call and the epoch that it is bound to. Idempotent."""
        if stream.closed:
            return
        stream.closed = True
        self._streams.discard(stream)
        epoch = stream.epoch
        if epoch is not None and self._current is epoch:
            log.info("the manager's stream ended", manager=epoch.manager_id, epoch=epoch.epoch)
            self._end_epoch(epoch, StaleEpoch(f"the stream of epoch {epoch.epoch} ended: attach again"))

    def _bind(self, stream: StepStream, number: int) -> Epoch:
        """Binds the stream to the epoch with this number. Errors do not name the current epoch's number, which only its
        manager may know.
        """
        current = self._current
        if current is None or current.epoch != number:
            raise StaleEpoch(f"epoch: {number} is over: attach again (P6)")
        if any(other.epoch is current for other in self._streams):
            raise FailedPrecondition(f"epoch {number} has a stream already (P4)", "STREAM_OPEN", str(number))
        stream.epoch = current
        return current

    def _ended(self, stream: StepStream, outcome: ExecutedStep | StepFailure) -> None:
        """Reports the end of a step. Runs on the thread that collected it."""
        if isinstance(outcome, ExecutedStep):
            self._report(stream, outcome)
            return
        told = outcome.refusal or StepFailed(f"step {outcome.step}: {outcome.reason}")
        self._report(stream, told)
        if outcome.lost:
            self._lose(told)

    async def _ask(self, backend: Backend, function: Callable[[], T]) -> T:
        """Calls `function`, a call of the backend, on the worker thread after the steps posted before. Returns its
        result, or raises its error; raises Unavailable if the device is lost.
        """

        def ask() -> T:
            try:
                return function()
            except Exception as error:
                if is_lost(backend, error):
                    self._lose(error)
                    raise Unavailable(LOST) from error
                raise

        return await self._compute.call(ask)

    def _lose(self, error: object) -> None:
        """Sets `lost` after everything reported before is delivered. Callable from any thread."""

        def lose() -> None:
            if not self.lost.is_set():
                self.lost_reason = f"the device failed and is lost to this process: {str(error).partition(chr(10))[0]}"
                self.lost.set()

        with suppress(RuntimeError):  # the loop is closed: the process is exiting
            self._loop.call_soon_threadsafe(lose)

    def _report(self, stream: StepStream, outcome: ExecutedStep | Exception | None) -> None:
        """Hands an outcome to the event loop. Callable from any thread."""
        try:
            self._loop.call_soon_threadsafe(stream.deliver, outcome)
        except RuntimeError:
            # The loop is closed: the process is exiting.
            log.debug("a result came after the end", outcome=type(outcome).__name__)

    # -- the end

    async def shut_down(self) -> None:
        """Finishes the step under way, delivers its result and ends every stream with Unavailable."""
        self._closed = True
        current = self._current
        if current is not None:
            current.over = True
        await self._compute.call(lambda: None)
        await self._collector.wait()
        reason = Draining("the executor is shutting down")
        if current is not None:
            self._end_epoch(current, reason)
        for stream in list(self._streams):
            stream.deliver(reason)
        self._streams.clear()

    def _serving(self) -> Backend:
        if self._closed:
            raise Draining("the executor is shutting down")
        if self._backend is None:
            raise Unavailable("the executor is still loading its model")
        if self.lost.is_set():
            raise Unavailable(LOST)
        return self._backend
