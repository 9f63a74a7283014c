"""Administration of the prefix cache between two steps: roots, pins, resets, and counters of admissions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pagekv.common.errors import LimitExceeded
from pagekv.kvmanager.engine.capacity import blocks_needed, total_tokens
from pagekv.kvmanager.engine.explain import KnownAdapters
from pagekv.kvmanager.engine.observer import Observer
from pagekv.kvmanager.engine.prefix_match import PrefixMatch, match_prefix
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, root_digest
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.pins import PinLease, Pins
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import NO_BLOCKS
from pagekv.kvmanager.scheduling.step_plan import Admitted
from pagekv.kvmanager.tenants.accounts import Account
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb


class CacheAdmin:
    """Owned by the engine loop, which calls `adopt` for the pools of each epoch.

    Outlives the pools: the log of removals and the watches go on after an executor is lost; pins end with the executor.
    """

    def __init__(
        self,
        prefix_cache: bool,
        max_pinned_share: float,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        secret: bytes = b"",
    ) -> None:
        """`prefix_cache`: whether blocks are reused across requests. `wake` is called when blocks became free or the
        table was cleared outside of a step. `secret`: a part of all digests, so that nobody can guess them.
        """
        self._secret = secret
        self.log = TableLog(clock)
        # Blocks of prompts that hit at first admission, and why others missed; cumulative.
        self.counters = operator_pb.GetStatsResponse()
        self._prefix_cache = prefix_cache
        self._max_pinned_share = max_pinned_share
        self._wake = wake
        self._clock = clock
        # Adapters of accepted requests.
        self.adapters = KnownAdapters()
        self._timer: asyncio.TimerHandle | None = None

    def adopt(self, pool: BlockPool, host: HostPool, fingerprint: str, observer: Observer) -> None:
        """Takes over the empty pools of a new epoch and its model; `observer` is told of pins."""
        self.pool = pool
        self.host = host
        self.pins = Pins(pool, self._max_pinned_share, self._clock, observer.pinned, observer.unpinned)
        self._fingerprint = fingerprint
        self._arm()
        self.log.attach(pool.table, host)

    def close(self, error: Exception) -> None:
        """Ends every watch with `error`, and stops the timer of leases."""
        self.log.end_watches(error)
        if self._timer is not None:
            self._timer.cancel()

    # -- requests

    def check_room(self, needed: int, tenant: int = 0) -> None:
        """Raises LimitExceeded if a request of this tenant that needs `needed` blocks cannot finish beside the pins and
        the floors of other tenants. Only tenant 0 is told how many blocks these are.
        """
        pinned, tenants = self.pins.num_blocks, self.pool.tenants
        room = self.pool.num_blocks - pinned
        if tenants is not None:
            most = tenants.most_for(tenant, np.flatnonzero(self.pins.holders).astype(np.int32) if pinned else NO_BLOCKS)
            kept = tenants.floors_beside(tenant)
            room = min(room, most) if kept else room
            if needed > most and kept and not tenant:
                raise LimitExceeded(
                    f"prompt and output need {needed} blocks; {most} of {self.pool.num_blocks} are left: floors "
                    f"of other tenants keep {kept}" + (f" and {pinned} are pinned" if pinned else ""),
                    needed_blocks=needed,
                    available_blocks=most,
                    pinned_blocks=pinned,
                )
        if needed > room and tenant:
            words = "more than pins and the floors of other tenants leave now"
            raise LimitExceeded(f"prompt and output need {needed} blocks, {words}", needed_blocks=needed)
        if needed > room:
            raise LimitExceeded(
                f"prompt and output need {needed} blocks; {pinned} of {self.pool.num_blocks} are pinned until they are "
                "unpinned or their leases end",
                needed_blocks=needed,
                available_blocks=room,
                pinned_blocks=pinned,
            )

    def count_admissions(self, admitted: Iterable[Admitted]) -> None:
        """Counts hits of prompts at their first admission, and why the first block after the hits missed."""
        totals, size = self.counters, self.pool.block_size
        for each in admitted:
            sequence, hits = each.sequence, each.hit_blocks
            totals.prompt_blocks_total += -(-sequence.num_prompt // size)
            totals.cached_blocks_total += min(hits, sequence.num_prompt // size)
            if each.missed is None:
                full, partial = divmod(sequence.num_tokens, size)
                looked_up = self._prefix_cache and sequence.request.command.identity.read
                totals.misses_partial_tail_total += bool(looked_up and partial and hits == full)
            elif (removed := self.log.removed_ago(each.missed)) is not None:
                totals.misses_cleared_total += removed.cleared
                totals.misses_evicted_total += not removed.cleared
            else:
                totals.misses_diverged_total += bool(each.shared_tokens)
                totals.misses_never_seen_total += not each.shared_tokens

    # -- prompts

    def match(self, token_ids: Sequence[int], identity: CacheIdentity, prepared: PreparedPrompt | None) -> PrefixMatch:
        """The cached part of a prompt now; `prepared` as in `match_prefix`."""
        return match_prefix(self.pool, self.root(identity), token_ids, identity.media, prepared)

    def root(self, identity: CacheIdentity) -> bytes:
        """Parent digest of the first block of this identity's prompts."""
        return self._root(identity, identity.adapter_id)

    def other_roots(self, identity: CacheIdentity) -> list[tuple[str, bytes]]:
        """The roots of this identity's prompts under the other adapters that accepted requests have named."""
        others = self.adapters.others(identity.namespace, identity.adapter_id)
        return [(adapter, self._root(identity, adapter)) for adapter in others]

    def _root(self, identity: CacheIdentity, adapter_id: str) -> bytes:
        return root_digest(self._fingerprint, identity.namespace, adapter_id, self._secret, identity.tenant)

    # -- pins

    def pin(
        self,
        token_ids: Sequence[int],
        identity: CacheIdentity,
        lease_s: float,
        live: Iterable[GenerateCommand],
        pin_id: str = "",
        prepared: PreparedPrompt | None = None,
        account: Account | None = None,
        owner: str = "",
    ) -> pb.PinPrefixResponse:
        """Pins the cached part of a prompt, as far as the `live` requests allow. If the owner has a pin of this id, it
        holds this part instead of its former blocks. `owner` is the name of the tenant that owns the pin, `account` its
        account. Raises, with nothing changed, AlreadyExists if the owner has a pin of this id in another namespace or
        of another adapter, and LimitExceeded, also if the owner's pins would hold too much.
        """
        self.pins.check_id(pin_id, identity, owner)
        blocks = self.match(token_ids, identity, prepared).hits
        if not len(blocks):
            self.unpin(pin_id, owner)
            return pb.PinPrefixResponse()
        if account is not None:
            held = sum(len(pin.blocks) for pin in self.pins.leases(owner) if pin.pin_id != pin_id)
            account.check_count("max_pinned_blocks", held, len(blocks))
        size, before = self.pool.block_size, len(self.pins)
        needs = [
            blocks_needed(total_tokens(command), size, command.sampling.beam_width) + self._kept_beside(command)
            for command in live
        ]
        info = self._info(self.pins.pin(blocks, lease_s, max(needs, default=0), pin_id, identity, owner))
        self._arm()
        if len(self.pins) == before:
            # The pin was renewed: blocks that it held before may be free now.
            self._wake()
        return pb.PinPrefixResponse(pin_id=info.pin_id, pinned_tokens=info.pinned_tokens, expire_time=info.expire_time)

    def _kept_beside(self, command: GenerateCommand) -> int:
        """Blocks that floors keep for other tenants than this request's."""
        return 0 if self.pool.tenants is None else self.pool.tenants.floors_beside(command.tenant.number)

    def list_pins(self, owner: str | None = None) -> pb.ListPinsResponse:
        """The pins of an owner, or with None of all owners, in order of expiry."""
        return pb.ListPinsResponse(pins=map(self._info, self.pins.leases(owner)))

    def _info(self, lease: PinLease) -> pb.PinInfo:
        info = pb.PinInfo(
            pin_id=lease.pin_id,
            pinned_tokens=len(lease.blocks) * self.pool.block_size,
            namespace=lease.identity.namespace,
            adapter=lease.identity.adapter_id,
        )
        info.expire_time.FromMilliseconds(round(1e3 * (time.time() + lease.expires_at - self._clock())))
        return info

    def unpin(self, pin_id: str, owner: str | None = None) -> int:
        """Ends the pins of this id, of one owner or, with None, of all. Returns the tokens that they held."""
        blocks = self.pins.unpin(pin_id, owner)
        if blocks:
            self._arm()
            self._wake()
        return blocks * self.pool.block_size

    def _arm(self) -> None:
        """Sets the timer for the next lease that ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.pins.next_expiry
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._clock()), self._expire)

    def _expire(self) -> None:
        if self.pins.expire():
            self._wake()
        self._arm()

    # -- the whole table

    def reset(self, scheduler: Scheduler, force: bool) -> operator_pb.ResetPrefixCacheResponse | None:
        """As `EngineQueries.reset_prefix_cache`."""
        if not force and self.pool.num_active:
            return None
        # Watchers get the change at the next step boundary, which must not wait for a step.
        self._wake()
        before, ended = scheduler.counters.preemptions, 0
        if force:
            scheduler.preempt_all()
            ended = self.pins.end_all()
            self._arm()
        # Draining sequences keep their blocks, as private blocks, until their last token arrives.
        removed = scheduler.clear_prefix_cache()
        preempted = scheduler.counters.preemptions - before
        return operator_pb.ResetPrefixCacheResponse(
            removed_blocks=removed, preempted_sequences=preempted, ended_pins=ended
        )
