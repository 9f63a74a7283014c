"""The engine loop: schedule → send → commit, pipelined; when the executor is lost, everything goes on in a new epoch.

One asyncio task owns scheduler, pool and queues, so there are no locks. Service handlers run on the same event loop:
their calls (`submit`, `abort`, ...) take effect between two awaits of this task, when every structure is consistent,
and wake it. The task never waits for a client.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagekv.common.errors import Overloaded, Unavailable
from pagekv.common.logs import Log
from pagekv.kvmanager.engine.admission_control import check_admissible
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.config import EngineConfig
from pagekv.kvmanager.engine.description import check_description
from pagekv.kvmanager.engine.executor_client import (
    AttachRefused,
    ExecutorLink,
    ExecutorLost,
    NoExecutor,
    NoRoom,
    UnfitExecutor,
)
from pagekv.kvmanager.engine.executor_wire import pack_token_ids
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.engine.long_prompts import LongPrompts
from pagekv.kvmanager.engine.observer import Observers, RequestEnd
from pagekv.kvmanager.engine.outputs import deliver
from pagekv.kvmanager.engine.queries import EngineQueries
from pagekv.kvmanager.engine.recovery import FailedSteps, Fault, Reconnect, RoomRefusals, WrongAnswer
from pagekv.kvmanager.engine.request_ends import RequestEnds
from pagekv.kvmanager.engine.sizing import make_pools, size_limits, size_model, wanted_model_len
from pagekv.kvmanager.engine.snapshots import EngineSnapshots
from pagekv.kvmanager.engine.state import EngineState, draining
from pagekv.kvmanager.engine.statistics import EngineStatistics
from pagekv.kvmanager.engine.step_pace import StepPace
from pagekv.kvmanager.engine.steps_in_flight import StepsInFlight
from pagekv.kvmanager.engine.tenant_books import TenantBooks
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.step_plan import StepResult
from pagekv.kvmanager.tenants.accounts import Accounts

if TYPE_CHECKING:
    import grpc

log = Log(__name__)

# Reasons why an executor cannot be used are compared without their figures.
_FIGURES = re.compile(r"\d+")


class EngineLoop:
    """States: detached → attached ⇄ detached → stopped. Every method is called on the event loop that runs `run`.

    Requests end (`RequestEnds`) in `_drive`, `finish_sequence`, `release`, `abort` and `stop`. Requests that fail end
    in `_drive`, `_attach` and `_fail_after_attempts`.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_attached: Callable[[bool], None] = lambda attached: None,
        executor_credentials: Callable[[], grpc.ChannelCredentials | None] = lambda: None,
        accounts: Accounts | None = None,
        secret: bytes = b"",
    ) -> None:
        """`on_attached` is called with True after each attachment and with False after its end, `executor_credentials`
        for every connection to an executor. `accounts`: the tenants' accounts; `secret` as in `CacheAdmin`.
        """
        self.accounts = Accounts() if accounts is None else accounts
        self.observers = Observers()
        self._config = config
        self._on_attached = on_attached
        self._executor_credentials = executor_credentials
        self._manager_id = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._wake = asyncio.Event()
        self._ready = asyncio.Event()
        self._live = LiveRequests(config.priority_aging)
        self._long_prompts = LongPrompts(pack_token_ids)
        cache = CacheAdmin(config.limits.prefix_cache, config.max_pinned_share, self._wake.set, secret=secret)
        self._state = EngineState(config, cache, self._live, self.accounts)
        self._tenants = TenantBooks(self._state)
        self._ends = RequestEnds(self._state, self._tenants, self.observers, self._wake.set)
        self._totals = self._state.totals
        self.queries = EngineQueries(self._state)
        self.snapshots = EngineSnapshots(self._state)
        self.statistics = EngineStatistics(self._state)
        self._in_flight = StepsInFlight()
        depth, most = config.pipeline_depth, config.limits.max_batch_tokens
        self._pace = StepPace(depth, most, self._in_flight)
        self._failed = FailedSteps(config.step_attempts)
        # Whether requests were live when the latest step was committed.
        self._work_left = False

    # -- the task

    async def run(self) -> None:
        """Serves until `stop`; recovers from every loss of the executor.

        Raises AttachRefused if the first executor does not fit the flags, or repeatedly has no memory for what they
        ask, and TomlFileError if its pool is too small for the tenants' floors. After the first attachment it tries
        again instead.
        """
        reconnect, room, told = Reconnect(), RoomRefusals(), ""
        state = self._state
        while not state.stopping:
            link = ExecutorLink(self._config.executor, self._wake.set, self._executor_credentials())
            steps, epochs = self._totals.steps_total, state.epochs
            try:
                await self._attach(link)
                told = ""
                await self._drive(link)
            except (ExecutorLost, AttachRefused, WrongAnswer) as error:
                if isinstance(error, NoRoom) and state.model is None and room.are_final(error.asked):
                    raise AttachRefused(str(error)) from error
                if isinstance(error, AttachRefused) and state.model is None:
                    raise
                if isinstance(error, NoExecutor):
                    state.no_executor = error.FOR_CALLERS
                else:
                    state.no_executor = str(error) if isinstance(error, UnfitExecutor) else ""
                # An executor that loads is asked four times a second. Reasons that differ only in figures count as one.
                if (reason := _FIGURES.sub("", str(error))) != told:
                    log.warning("no executor", executor=self._config.executor, reason=error)
                told = reason
                self._fail_after_attempts(Fault.NONE if isinstance(error, AttachRefused) else error.fault)
            except InvariantError as error:
                log.exception("broken invariant; opening a new epoch", reason=error)
                self._fail_after_attempts(Fault.STEP)
            finally:
                self._detach()
                await link.close()
            if not state.stopping:
                answered = self._totals.steps_total - steps
                await self._pause(reconnect.pause_s(attached=state.epochs > epochs, steps=answered))

    async def _attach(self, link: ExecutorLink) -> None:
        config, state = self._config, self._state
        description = await link.describe(config.block_size, config.limits.max_batch_tokens)
        check_description(description)
        self._totals.executor_rank_differences_total = description.rank_differences
        model = size_model(description, config)
        attached = await link.attach(self._manager_id, model, description.layout, config.take_over)
        self._totals.executor_graphs = attached.graphs
        self._totals.executor_failed_graphs = attached.failed_graphs
        if attached.failed_graphs:
            log.error(
                "the executor runs steps without CUDA graphs, slower: its log says why it could not record them",
                recorded=attached.graphs,
                failed=attached.failed_graphs,
            )
        limits = size_limits(description, config, model)
        pool, host = make_pools(model, config, self._state.cache.log)
        self._ends.fail_misfits(model, limits.max_running)
        self._in_flight.begin_epoch(model.vocab_size)
        self._pace.begin_epoch(limits.max_batch_tokens)
        if state.scheduler is None:
            state.scheduler = Scheduler(pool, limits, model.eos_token_ids, host, self.observers)
        else:
            state.scheduler.lose_executor(pool, limits, model.eos_token_ids, host)
        if state.model is None:
            self._tenants.configure(self._wake.set)
        self._state.cache.adopt(pool, host, model.model_fingerprint, self.observers)
        told, wanted = state.model, wanted_model_len(description, config)
        # Logged once, and not again with every executor that comes back.
        if model.max_model_len < wanted and (told is None or told.max_model_len != model.max_model_len):
            log.warning("longer sequences do not fit into a step", tokens=model.max_model_len, wanted=wanted)
        asked = limits.write_back or limits.swap.mode == "swap"
        if asked and not model.num_host_blocks and (told is None or told.num_host_blocks):
            log.warning("the executor offers no host pool: --preemption swap and --write-back have no effect")
        state.model = model
        state.epochs += 1
        state.attached = True
        self._ready.set()
        self._on_attached(True)
        self.observers.attached(model, state.epochs)
        log.info(
            "attached",
            executor=config.executor,
            epoch=link.epoch,
            model=model.model_id,
            backend=model.backend,
            blocks=model.num_device_blocks,
            host_blocks=model.num_host_blocks,
            block_size=model.block_size,
            max_model_len=model.max_model_len,
            max_running=limits.max_running,
            features=",".join(model.features),
            sampler=model.sampler,
        )

    async def _drive(self, link: ExecutorLink) -> None:
        """Plans, sends and commits until the link is lost or the loop is stopped."""
        scheduler = self._state.serving()
        watchdog = asyncio.create_task(self._watch(), name="step watchdog")
        try:
            while not self._state.stopping:
                self._wake.clear()
                while (result := link.take_result()) is not None:
                    # A step stays in flight until it is committed: an answer that does not fit counts as a lost step.
                    plan, result = self._in_flight.answered(result)
                    committed = scheduler.commit(plan, result)
                    self._in_flight.pop()
                    self._count(result)
                    self._pace.learn(scheduler, plan, result)
                    self._tenants.count_outputs()
                    self._failed.clear(plan, committed.sequences)
                    ended = deliver(committed, result)
                    self.observers.committed(plan, result, committed)
                    for sequence in ended:
                        self._ends.remove_if_finished(sequence.request, RequestEnd.FINISHED)
                    for request, reason in committed.failed:
                        self._ends.give_up(request, reason)
                    self._work_left = len(self._live) > 0
                wait_s = self._pace.wait_s(scheduler)
                ahead = scheduler.schedule() if not wait_s else None
                self._state.cache.log.step_boundary(self._totals.steps_total)
                if ahead is not None:
                    self._state.cache.count_admissions(ahead.admitted)
                    self._tenants.count_admissions(ahead.admitted)
                    self.observers.planned(ahead)
                    self._in_flight.add(ahead)
                    await link.send(ahead, self._config.step_timeout_s)
                    continue
                if watchdog.done():
                    watchdog.result()
                due = asyncio.get_running_loop().call_later(wait_s, self._wake.set) if 0 < wait_s < math.inf else None
                try:
                    await self._wake.wait()
                finally:
                    if due is not None:
                        due.cancel()
        finally:
            watchdog.cancel()

    def _count(self, result: StepResult) -> None:
        totals = self._totals
        totals.steps_total += 1
        totals.computed_tokens_total += result.computed_tokens
        totals.executor_busy_us_total += result.execute_us
        totals.executor_threads = result.threads
        totals.executor_rank_us[:] = result.rank_us
        # Idle time of the executor counts only if there was something to plan.
        totals.executor_idle_us_total += result.idle_us if self._work_left else 0

    async def _watch(self) -> None:
        """Ends with ExecutorLost when the oldest step in flight is overdue; wakes the loop to see it."""
        timeout = self._config.step_timeout_s
        interval = min(1.0, timeout / 4)
        try:
            while True:
                await asyncio.sleep(interval)
                if self._in_flight.count_wait(interval) >= timeout:
                    raise ExecutorLost(f"no answer to a step for {timeout:g} s (--step-timeout-s)", Fault.STEP)
        finally:
            self._wake.set()

    def _fail_after_attempts(self, fault: Fault) -> None:
        """Fails the requests whose step was lost too often; called when an epoch is lost."""
        plan = self._in_flight.oldest
        if plan is None or fault is Fault.NONE:
            return
        later = self._in_flight.entering_later()
        running = [sequence for sequence in self._state.serving().running if sequence not in later]
        for request in self._failed.count(plan, running, fault):
            error = self._failed.error(request)
            log.error("gave up a request", reason=error)
            self._ends.fail(request, error)

    def _detach(self) -> None:
        if self._state.attached:
            self._state.attached = False
            self._on_attached(False)
            self.observers.detached()

    async def _pause(self, seconds: float) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                while not self._state.stopping:
                    await self._wake.wait()
                    self._wake.clear()
        except TimeoutError:
            pass

    async def wait_ready(self) -> None:
        """Waits for the first attachment."""
        await self._ready.wait()

    async def stop(self, grace_s: float) -> None:
        """Refuses new requests, lets live ones finish for up to `grace_s` seconds, ends the rest with Draining, so that
        callers resume them at the next manager, and ends `run`.
        """
        self._state.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._live.idle.wait()
        except TimeoutError:
            log.warning("grace time is over: calls end, and clients resume them elsewhere", requests=len(self._live))
        for request in self._live.all():
            self._totals.aborted_requests_total += 1
            self._ends.end(request, RequestEnd.ABORTED)
            request.stream.fail(draining())
        self._state.stopping = True
        self._state.cache.close(draining())
        self._wake.set()

    # -- called by services; only `queue` waits, for other requests

    @property
    def model(self) -> EngineInfo | None:
        """The served model; None until an executor is attached for the first time."""
        return self._state.model

    def not_attached(self) -> Unavailable:
        """The error of calls before `model` is known."""
        return self._state.not_attached()

    async def queue(self, command: GenerateCommand) -> RequestStream:
        """`submit`, in the order of a tenant's calls, after a long prompt was prepared in slices. Raises as `submit`
        does. Until it returns, the engine does not know the request, so cancelling the call ends it.
        """
        prompts, tenant = self._long_prompts, command.tenant.name
        self._check_admissible(command)
        waits = bool(prompts.num_entering)
        with prompts.entering(tenant, command.n):
            async with prompts.turns.of(tenant):
                if waits:
                    self._check_admissible(command, counted=command.n)
                table, media = self._state.serving().pool.table, command.identity.media
                prepared = await prompts.prepare(command.prompt_ids, media, self._root(command), table)
        # The tenant's next call, whose turn begins now, cannot run before this: there is no await in between.
        return self.submit(command, prepared)

    def submit(self, command: GenerateCommand, prepared: PreparedPrompt | None = None) -> RequestStream:
        """Queues a request, whose prompt may have been prepared. Raises AlreadyExists, Overloaded, Unavailable,
        InvalidRequest if it can never fit, or LimitExceeded if it cannot fit beside pinned blocks or exceeds its
        tenant's limits.
        """
        self._check_admissible(command)
        root, identity = self._root(command), command.identity
        # Another model may have come in between.
        request = self._live.add(command, root, prepared if prepared is not None and prepared.root == root else None)
        self._totals.requests_total += 1
        self._tenants.begin(request)
        self._state.cache.adapters.note(identity.namespace, identity.adapter_id)
        self._state.serving().add(request)
        self.observers.submitted(request)
        self._wake.set()
        return request.stream

    def _check_admissible(self, command: GenerateCommand, counted: int = 0) -> None:
        """`counted`: sequences of this request that are counted as entering already."""
        try:
            entering = self._long_prompts.num_entering
            own = entering[command.tenant.name]
            calls = self._long_prompts.num_calls[command.tenant.name] - (counted > 0)
            check_admissible(command, self._state, entering.total - counted, own - counted, calls)
        except Overloaded:
            self._totals.rejected_requests_total += 1
            self.observers.rejected()
            raise

    def _root(self, command: GenerateCommand) -> bytes:
        """Parent digest of the first block of a request to the present model."""
        return self._state.cache.root(command.identity)

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Ends the request of this id of one tenant or, with None, of every tenant; streams get finish ABORT. Returns
        False if there is none. Blocks are free at once.
        """
        own = None if tenant is None else self._live.get(request_id, tenant)
        requests = self._live.named(request_id) if tenant is None else [own] if own is not None else []
        for request in requests:
            self._ends.abort(request)
        return bool(requests)

    def release(self, stream: RequestStream) -> None:
        """The reader has gone: ends what still runs of the stream's request, as `abort` does, but never another request
        that has the same id by now. Must be called for every stream: its ended sequences count as unread until then.
        """
        request = self._live.release(stream)
        if request is not None:
            self._ends.abort(request)

    def finish_sequence(self, stream: RequestStream, index: int) -> None:
        """The reader found a stop string: ends one sequence, for which nothing more is pushed."""
        request = self._live.of(stream)
        if request is not None:
            self._state.serving().finish(request.sequences[index])
            self._ends.remove_if_finished(request, RequestEnd.FINISHED)
            self._wake.set()
