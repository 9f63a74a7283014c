"""Queries and changes of cached prefixes, for the services: lookups, explanations, pins, resets and watches.

Every call that is not awaited takes effect, or is a snapshot, between two awaits of the engine loop. Answers are
messages of the contract, if it has them, so each field of an answer is written in one place. Methods raise Unavailable
before the first attachment unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagekv.common.errors import Overloaded
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.explain import PrefixExplainer
from pagekv.kvmanager.engine.long_prompts import LongPrompts
from pagekv.kvmanager.engine.packed import packed_field
from pagekv.kvmanager.engine.paging import page_in_slices
from pagekv.kvmanager.engine.prefix_match import PrefixMatch
from pagekv.kvmanager.engine.state import RETRY_DELAY_S, EngineState, draining
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.events.subscription import TableWatch
from pagekv.kvmanager.kvcache.host_pool import NO_BLOCK
from pagekv.kvmanager.request.tenant_counts import TenantCounts
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt
from pagekv.kvmanager.tenants.accounts import Account
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb

# Most tokens of the prompts that wait to be looked up, some 12 bytes each; and the least that a prompt counts as. One
# prompt alone may have more.
MAX_ASKED_TOKENS, LEAST_COUNTED = 16 * 2**20, 1024
# Blocks looked up in the host pool together.
_HOST_BLOCKS = 256


class EngineQueries:
    """Owned by the engine loop, which shares its state."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        # Separate from the long prompts of requests, which do not wait for queries.
        self._long_prompts = LongPrompts(None)
        # By tenant: tokens of the prompts that are being looked up or wait for it.
        self._asked_tokens: TenantCounts[str] = TenantCounts()

    @property
    def cache(self) -> CacheAdmin:
        """The prefix cache itself, for calls that need nothing else of the engine: roots, listing and ending pins."""
        self._state.serving()
        return self._state.cache

    async def prepare(
        self, token_ids: Sequence[int], identity: CacheIdentity, tenant: str = ""
    ) -> PreparedPrompt | None:
        """Prepares a prompt for a lookup, an explanation or a pin: a long prompt is hashed and looked up in slices, one
        prompt of each tenant at a time. Returns None for a short prompt, which needs no preparation. Raises Overloaded
        if prompts of too many tokens wait, and this tenant's are more than its share of the limit.
        """
        cache = self.cache
        # Short prompts wait for their turn, too, and each holds a message.
        counted = max(len(token_ids), LEAST_COUNTED)
        asked, own = self._asked_tokens.total, self._asked_tokens[tenant]
        share = MAX_ASKED_TOKENS // self._asked_tokens.num_tenants(tenant) if tenant else 0
        within_share = bool(tenant) and (not own or own + counted <= share)
        if asked and asked + counted > MAX_ASKED_TOKENS and not within_share:
            # A tenant is told only the number of its own tokens.
            what = f"prompts of {own if tenant else asked} tokens wait to be looked up"
            raise Overloaded(f"{what}; with this one the limit is {MAX_ASKED_TOKENS}", RETRY_DELAY_S, MAX_ASKED_TOKENS)
        self._asked_tokens.add(tenant, counted)
        try:
            async with self._long_prompts.turns.of(tenant):
                table = cache.pool.table
                return await self._long_prompts.prepare(token_ids, identity.media, cache.root(identity), table)
        finally:
            self._asked_tokens.add(tenant, -counted)

    def lookup_prefix(
        self, token_ids: Sequence[int], identity: CacheIdentity, prepared: PreparedPrompt | None = None
    ) -> pb.LookupPrefixResponse:
        """The cached part of a prompt, with the tokens that a partial hit would add; changes nothing."""
        limits, cache = self._state.serving().limits, self._state.cache
        pool, root, match = cache.pool, cache.root(identity), cache.match(token_ids, identity, prepared)
        tokens, hits = match.tokens, match.hits
        found, kept = len(hits) * pool.block_size, self._kept_behind(match, root) * pool.block_size
        partial = 0
        if limits.prefix_cache and limits.partial_hits and not kept and not identity.media and found < len(tokens):
            before = int(hits[-1]) if len(hits) else root
            _, partial = pool.table.trie.longest_run(before, tokens[found : found + pool.block_size])
        answer = pb.LookupPrefixResponse(
            prompt_tokens=len(tokens), device_tokens=found, host_tokens=kept, partial_tokens=partial
        )
        answer.MergeFromString(packed_field(pb.LookupPrefixResponse.BLOCK_IDS_FIELD_NUMBER, hits))
        return answer

    def _kept_behind(self, match: PrefixMatch, root: bytes) -> int:
        """How many blocks after the hits the host pool has, up to the first block that it lacks."""
        table, host, begin = self.cache.pool.table, self.cache.host, len(match.hits)
        parent = table.digests(match.hits[-1:].tolist())[0] if begin else root
        kept = 0
        while host.num_blocks and begin < len(match.digests):
            part = slice(begin, begin + _HOST_BLOCKS)
            digests = match.digests[part]
            blocks = host.find(digests, match.chunks[part], [parent, *digests], hashed_anew=True)
            found = [*blocks, NO_BLOCK].index(NO_BLOCK)
            kept += found
            if found < len(digests):
                break
            # The digest object that the next block follows in the host pool.
            parent = host.key(blocks[-1]) or digests[-1]
            begin += found
        return kept

    async def explain_prefix(
        self,
        token_ids: Sequence[int],
        identity: CacheIdentity,
        page_size: int,
        token: str = "",
        prepared: PreparedPrompt | None = None,
        *,
        numbers: bool = True,
    ) -> pb.ExplainPrefixResponse:
        """Why each block in a page of a prompt hits or misses at the moment of the call; changes nothing. A long page
        is made in slices, with turns of the event loop in between. `numbers`: as in PrefixExplainer. Raises
        InvalidRequest.
        """
        cache, root = self.cache, self.cache.root(identity)
        match, others = cache.match(token_ids, identity, prepared), cache.other_roots(identity)
        explainer = PrefixExplainer(
            *(cache.pool, cache.log, root, match, identity.media, others),
            kept=self._kept_behind(match, root),
            numbers=numbers,
        )
        return await page_in_slices(explainer.page, page_size, token)

    def pin_prefix(
        self,
        token_ids: Sequence[int],
        identity: CacheIdentity,
        lease_s: int,
        pin_id: str = "",
        prepared: PreparedPrompt | None = None,
        account: Account | None = None,
        tenant: str = "",
    ) -> pb.PinPrefixResponse:
        """Pins the cached part of a prompt for `lease_s` seconds; if the tenant has a pin of this id, it holds this
        part instead of its former blocks. `account`: the tenant's. Raises AlreadyExists and LimitExceeded, with nothing
        changed.
        """
        live = (request.command for request in self._state.live.all())
        return self.cache.pin(token_ids, identity, lease_s, live, pin_id, prepared, account, tenant)

    def reset_prefix_cache(self, force: bool) -> operator_pb.ResetPrefixCacheResponse | None:
        """Removes every cached block; None while blocks are held, unless `force` preempts and unpins."""
        return self._state.cache.reset(self._state.serving(), force)

    @property
    def instance_id(self) -> str:
        """The name of this run of the manager, to which revisions of the tables belong."""
        return self._state.instance_id

    def watch_events(self, start_revision: int = 0) -> TableWatch:
        """A watch from now or from a revision on, to be closed. Raises Overloaded, RevisionGone, InvalidRequest."""
        if self._state.stopping:
            raise draining()
        return self.cache.log.watch(start_revision)
