"""Decides at submission whether a request may enter the queue: every request that enters can be computed to its end."""

from __future__ import annotations

from pagekv.common.errors import AlreadyExists, InvalidRequest, Overloaded, Unavailable
from pagekv.kvmanager.engine.capacity import blocks_needed, check_output_fits, check_prompt_fits, total_tokens
from pagekv.kvmanager.engine.features import check_supported
from pagekv.kvmanager.engine.state import RETRY_DELAY_S, EngineState, draining
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.request.command import GenerateCommand


def check_admissible(
    command: GenerateCommand, state: EngineState, num_entering: int = 0, own_entering: int = 0, own_calls: int = 0
) -> None:
    """Checks whether a request may enter the queue. `num_entering`: sequences of other requests that are still being
    prepared, and count as waiting; `own_entering`: those of the same tenant among them, in `own_calls` requests. Raises
    AlreadyExists, Overloaded, Unavailable, InvalidRequest if the request can never fit, or LimitExceeded if it cannot
    fit beside pinned blocks, or exceeds its tenant's limits.
    """
    if state.draining:
        raise draining()
    scheduler, model, config = state.serving(), state.model, state.config
    assert model is not None
    if state.live.get(command.request_id, command.tenant.name) is not None:
        raise AlreadyExists(
            "request_id", f"{command.request_id!r} is in use by a running request", "request", command.request_id
        )
    # Checked by `read_generate`, but another executor may have come since: encoding a long text takes time.
    if command.model_fingerprint not in ("", model.model_fingerprint):
        raise Unavailable("the executor came back with another model while the request was read")
    check_supported(command.sampling, model)
    total, max_tokens = total_tokens(command), command.sampling.max_tokens
    width, most = command.sampling.beam_width, min(scheduler.limits.max_running, model.num_device_blocks)
    if width > most:
        raise InvalidRequest(
            "sampling_params.beam_width",
            f"must be from 0 to {most} (--max-running and what executor and pool take), got {width}",
        )
    check_prompt_fits("prompt", total - max_tokens, width, model)
    check_output_fits(total - max_tokens, max_tokens, width, model)
    if command.n > config.max_queue:
        raise InvalidRequest(
            "sampling_params.n", f"must be from 1 to {config.max_queue} (--max-queue), got {command.n}"
        )
    _check_tenant(command, state, model, own_calls)
    state.cache.check_room(blocks_needed(total, model.block_size, width), command.tenant.number)
    _check_queue(command, state, num_entering, own_entering)


def _check_queue(command: GenerateCommand, state: EngineState, num_entering: int, own_entering: int) -> None:
    """Raises Overloaded if too many sequences wait, or too many have ended and are unread. A tenant with less than its
    share of the limit is admitted all the same, because others have filled it. A tenant is not told counts that include
    others.
    """
    scheduler, config, live, tenant = state.serving(), state.config, state.live, command.tenant
    waiting = scheduler.num_waiting + num_entering
    if waiting + command.n > config.max_queue:
        own = scheduler.waiting.count(tenant.number) + own_entering
        if not tenant.name or own + command.n > config.max_queue // live.num_tenants(tenant.name):
            _count_refusal(command, state, "max_queue")
            counts = "" if tenant.name else f": {waiting} sequences wait, at most {config.max_queue}"
            raise Overloaded(f"the queue is full{counts}", RETRY_DELAY_S, config.max_queue, "--max-queue")
    unread, own_unread = live.num_unread.total, live.num_unread[tenant.name]
    share = config.max_unread // live.num_reading(tenant.name)
    if unread >= config.max_unread and not (tenant.name and own_unread < share):
        _count_refusal(command, state, "max_unread")
        what = "too many" if tenant.name else unread
        # No flag sets this bound: clients that read never reach it.
        raise Overloaded(
            f"{what} sequences have ended that their clients have not read, at most {config.max_unread}: read open "
            f"streams to their ends, or cancel them",
            RETRY_DELAY_S,
            config.max_unread,
        )


def _count_refusal(command: GenerateCommand, state: EngineState, limit: str) -> None:
    """Counts a refusal for a limit that all tenants share."""
    account = state.accounts.known(command.tenant.name)
    if account is not None:
        account.usage.refusals[limit] += 1


def _check_tenant(command: GenerateCommand, state: EngineState, model: EngineInfo, own_calls: int) -> None:
    """Raises Overloaded and LimitExceeded if the request exceeds what its tenant may have now."""
    if not command.tenant.name:
        return
    account = state.accounts.of(command.tenant.name)
    account.check_tokens()
    width = command.sampling.beam_width
    needed = blocks_needed(total_tokens(command), model.block_size, width) * (1 if width else command.n)
    account.check_count("max_blocks", 0, needed)
    if account.limits.max_waiting is not None:
        running = state.serving().num_running_requests(command.tenant.number)
        waiting = max(0, account.live - running) + own_calls
        account.check_count("max_waiting", waiting, retry_delay_s=RETRY_DELAY_S)
