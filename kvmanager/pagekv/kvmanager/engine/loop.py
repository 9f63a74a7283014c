"""The engine loop: schedule → send → commit, pipelined, and everything again on a new epoch when the executor is lost.

One asyncio task owns scheduler, pool and queues, so there are no locks. Service handlers run on the same event loop:
their calls (`submit`, `abort`, ...) take effect between two awaits of this task, which is when every structure is
consistent, and wake it. Nothing in here waits for a client.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable

from pagekv.common.errors import AlreadyExists, InvalidRequest, Overloaded, Unavailable
from pagekv.common.logs import Log
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.capacity import blocks_needed, check_fits, fits, total_tokens
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.executor_client import AttachRefused, ExecutorLink, ExecutorLost
from pagekv.kvmanager.engine.interface import EngineInfo
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.engine.observer import Observer, Observers, RequestEnd
from pagekv.kvmanager.engine.outputs import deliver, deliver_abort, unfinished_outputs
from pagekv.kvmanager.engine.queries import RETRY_DELAY_S, EngineQueries
from pagekv.kvmanager.engine.recovery import FailedSteps, Fault, Reconnect
from pagekv.kvmanager.engine.sizing import plan_deployment, plan_limits
from pagekv.kvmanager.engine.snapshots import EngineTotals
from pagekv.kvmanager.engine.steps_in_flight import StepsInFlight
from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import root_digest
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.eviction_policy import make_order
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import LiveRequest

log = Log(__name__)


class EngineLoop(EngineQueries):
    """Implements `engine.Engine`. States: detached → attached ⇄ detached → stopped."""

    def __init__(
        self,
        config: EngineConfig,
        on_attached: Callable[[bool], None] = lambda attached: None,
        observers: Iterable[Observer] = (),
    ) -> None:
        """`on_attached` is called with every change between attached and detached."""
        self._config = config
        self.observers = Observers(observers)
        self._on_attached = on_attached
        self._manager_id = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        self._scheduler: Scheduler | None = None
        self._model: EngineInfo | None = None
        self._attached = False
        self._draining = False
        self._stopping = False
        self._live = LiveRequests(config.priority_aging)
        self._in_flight = StepsInFlight()
        self._failed = FailedSteps(config.step_attempts)
        self._totals = EngineTotals()
        self._cache = CacheAdmin(config.limits.prefix_cache, config.max_pinned_share, self._wake.set)
        # The latest step committed left work to do.
        self._work_left = False

    # -- the task

    async def run(self) -> None:
        """Serves until `stop`; comes back from every loss of the executor.

        Raises AttachRefused when the very first executor does not go with the flags; later ones are waited out.
        """
        reconnect = Reconnect()
        while not self._stopping:
            link = ExecutorLink(self._config.executor, self._wake.set)
            steps, epochs = self._totals.steps, self._totals.epochs
            try:
                await self._attach(link)
                await self._drive(link)
            except (ExecutorLost, AttachRefused) as error:
                if isinstance(error, AttachRefused) and self._model is None:
                    raise
                log.warning("no executor", executor=self._config.executor, reason=error)
                self._give_up(error.fault if isinstance(error, ExecutorLost) else Fault.NONE)
            except InvariantError as error:
                log.exception("broken invariant; opening a new epoch", reason=error)
                self._give_up(Fault.STEP)
            finally:
                self._detach()
                await link.close()
            if not self._stopping:
                attached = self._totals.epochs > epochs
                await self._pause(reconnect.pause_s(attached=attached, steps=self._totals.steps - steps))

    async def _attach(self, link: ExecutorLink) -> None:
        config = self._config
        description = await link.describe(config.block_size, config.limits.max_batch_tokens)
        model = plan_deployment(description, config)
        await link.attach(self._manager_id, model, description.layout, config.take_over)
        limits = plan_limits(description, config)
        self._end_what_does_not_fit(model, limits.max_running)
        order = make_order(config.eviction_policy, model.num_device_blocks, config.protected_share)
        clock = time.monotonic if config.block_ages else None
        pool = BlockPool(model.num_device_blocks, config.block_size, order, self._cache.log, clock)
        host = HostPool(model.num_host_blocks, config.block_size, self._cache.log)
        if self._scheduler is None:
            self._scheduler = Scheduler(pool, limits, model.eos_token_ids, host, self.observers)
        else:
            self._in_flight.end_epoch()
            self._scheduler.lose_executor(pool, limits, model.eos_token_ids, host)
        self._cache.adopt(pool, host, model.model_fingerprint, self.observers)
        self._model = model
        self._totals.epochs += 1
        self._attached = True
        self._ready.set()
        self._on_attached(True)
        self.observers.attached(model, self._totals.epochs)
        log.info(
            "attached",
            executor=config.executor,
            epoch=link.epoch,
            model=model.model_id,
            backend=model.backend,
            blocks=model.num_device_blocks,
            host_blocks=model.num_host_blocks,
            block_size=model.block_size,
        )

    def _end_what_does_not_fit(self, model: EngineInfo, max_running: int) -> None:
        """The executor may have come back as another one. Requests that it cannot continue exactly end."""
        old = self._model or model
        same = (old.model_fingerprint, old.vocab_size, old.eos_token_ids) == (
            model.model_fingerprint,
            model.vocab_size,
            model.eos_token_ids,
        )
        if old != model:
            log.warning("the executor changed", same_model=same, blocks=model.num_device_blocks, model=model.model_id)
        for request in self._live.all():
            width = request.command.sampling.beam_width
            if not (same and fits(request.command, model) and width <= max_running):
                self._close(request)
                what = "another model, a smaller pool, or room for fewer sequences"
                request.stream.fail(Unavailable(f"the executor restarted with {what}"))

    async def _drive(self, link: ExecutorLink) -> None:
        """Plans, sends and commits until the link is lost or the loop is stopped."""
        scheduler = self._scheduler
        assert scheduler is not None
        watchdog = asyncio.create_task(self._watch(), name="step watchdog")
        try:
            while not self._stopping:
                self._wake.clear()
                while (outcome := link.take_outcome()) is not None:
                    # Until it is committed a step counts as lost, should the answer turn out not to fit.
                    plan = self._in_flight.answered(outcome)
                    committed = scheduler.commit(plan, outcome)
                    self._in_flight.pop()
                    self._totals.count(outcome, self._work_left)
                    self._failed.clear(plan, committed.sequences)
                    ended = deliver(committed, outcome)
                    self.observers.committed(plan, outcome, committed)
                    for sequence in ended:
                        self._forget_if_done(sequence.request, RequestEnd.FINISHED)
                    self._work_left = len(self._live) > 0
                ahead = scheduler.schedule() if len(self._in_flight) < self._config.pipeline_depth else None
                self._cache.border(self._totals.steps)
                if ahead is not None:
                    self._cache.count_admissions(ahead.admitted)
                    self.observers.planned(ahead)
                    self._in_flight.add(ahead)
                    await link.send(ahead, self._config.step_timeout_s)
                    continue
                if watchdog.done():
                    watchdog.result()
                await self._wake.wait()
        finally:
            watchdog.cancel()

    async def _watch(self) -> None:
        """Ends with ExecutorLost when the oldest step in flight is overdue; wakes the loop to see it."""
        timeout = self._config.step_timeout_s
        try:
            while True:
                await asyncio.sleep(min(1.0, timeout / 4))
                if self._in_flight.waited_s() > timeout:
                    raise ExecutorLost(f"no answer to a step for {timeout:g} s (--step-timeout-s)", Fault.STEP)
        finally:
            self._wake.set()

    def _give_up(self, fault: Fault) -> None:
        """An epoch is lost: ends the requests whose step was lost too often."""
        plan = self._in_flight.oldest
        if plan is None or self._scheduler is None or fault is Fault.NONE:
            return
        for request in self._failed.count(plan, self._scheduler.running, fault):
            error = self._failed.error(request)
            log.error("gave up a request", reason=error)
            self._close(request)
            request.stream.fail(error)

    def _detach(self) -> None:
        if self._attached:
            self._attached = False
            self._on_attached(False)
            self.observers.detached()

    async def _pause(self, seconds: float) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                while not self._stopping:
                    await self._wake.wait()
                    self._wake.clear()
        except TimeoutError:
            pass

    async def wait_ready(self) -> EngineInfo:
        """Waits for the first attachment."""
        await self._ready.wait()
        assert self._model is not None
        return self._model

    async def stop(self, grace_s: float) -> None:
        """Refuses new requests, lets live ones finish for up to `grace_s` seconds, aborts the rest, ends `run`."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._live.idle.wait()
        except TimeoutError:
            log.warning("grace time over, aborting", requests=len(self._live))
        for request in self._live.all():
            self._abort(request)
        self._stopping = True
        self._cache.end(Unavailable("the manager is shutting down", RETRY_DELAY_S))
        self._wake.set()

    # -- requests

    @property
    def model(self) -> EngineInfo | None:
        """None until an executor is attached for the first time."""
        return self._model

    def submit(self, command: GenerateCommand) -> RequestStream:
        """Queues a request. Raises AlreadyExists, Overloaded, Unavailable, InvalidRequest when it can never fit, or
        LimitExceeded when it cannot beside what is pinned.
        """
        if self._draining:
            raise Unavailable("the manager is shutting down", RETRY_DELAY_S)
        if self._model is None or self._scheduler is None:
            raise Unavailable("no executor is attached yet", RETRY_DELAY_S)
        if command.request_id in self._live:
            raise AlreadyExists("request_id", f"{command.request_id!r} is in use by a running request")
        sampling = command.sampling
        check_fits(command, self._model)
        self._check_limits(command)
        self._cache.check_room(blocks_needed(total_tokens(command), self._model.block_size, sampling.beam_width))
        waiting = self._scheduler.num_waiting
        if waiting + command.n > self._config.max_queue:
            raise self._rejected(f"the queue is full: {waiting} sequences wait, at most {self._config.max_queue}")
        unread = self._live.num_unread
        if unread >= self._config.max_unread:
            raise self._rejected(
                f"{unread} sequences have ended whose readers have not taken them, at most {self._config.max_unread}"
            )
        return self._enqueue(command)

    def _rejected(self, why: str) -> Overloaded:
        self._totals.rejected += 1
        self.observers.rejected()
        return Overloaded(why, RETRY_DELAY_S)

    def _check_limits(self, command: GenerateCommand) -> None:
        """Refuses what no retry could help."""
        width, most = command.sampling.beam_width, self._serving().limits.max_running
        if command.n > self._config.max_queue:
            raise InvalidRequest(
                "sampling_params.n", f"must be from 1 to {self._config.max_queue} (--max-queue), got {command.n}"
            )
        if width > most:
            raise InvalidRequest(
                "sampling_params.beam_width",
                f"must be from 0 to {most} (--max-running and what the executor takes), got {width}",
            )

    def _enqueue(self, command: GenerateCommand) -> RequestStream:
        model, scheduler = self._model, self._serving()
        assert model is not None
        identity = command.identity
        root = root_digest(model.model_fingerprint, identity.namespace, identity.adapter_id)
        request = self._live.enter(command, root)
        self._totals.requests += 1
        self._cache.note_request(identity)
        scheduler.add(request)
        self.observers.submitted(request)
        self._wake.set()
        return request.stream

    def abort(self, request_id: str) -> bool:
        """Ends a request; its stream gets finish ABORT. False when it is not live. Its blocks are back at once."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._abort(request)
        return True

    def leave(self, stream: RequestStream) -> None:
        """The reader has left: what still runs of its request ends as by `abort`. Never of another that has its id."""
        request = self._live.leave(stream)
        if request is not None:
            self._abort(request)

    def _abort(self, request: LiveRequest) -> None:
        self._totals.aborted += 1
        unfinished = unfinished_outputs(request)
        self._close(request, RequestEnd.ABORTED)
        deliver_abort(request, unfinished)

    def stop_sequence(self, stream: RequestStream, index: int) -> None:
        """The reader found a stop string: ends one sequence quietly; nothing more is pushed for it."""
        request = self._live.of(stream)
        if request is not None and self._scheduler is not None:
            self._scheduler.finish(request.sequences[index])
            self._forget_if_done(request, RequestEnd.FINISHED)
            self._wake.set()

    def _close(self, request: LiveRequest, end: RequestEnd = RequestEnd.FAILED) -> None:
        """The one way out for a whole request."""
        if self._scheduler is not None:
            for sequence in request.sequences:
                self._scheduler.finish(sequence)
        self._forget_if_done(request, end)
        self._wake.set()

    def _forget_if_done(self, request: LiveRequest, end: RequestEnd) -> None:
        if self._live.forget_if_done(request):
            self.observers.ended(request, end)
            if self._scheduler is not None:
                self._scheduler.remove(request)
