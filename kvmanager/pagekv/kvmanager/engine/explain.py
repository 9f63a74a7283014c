"""Explains block by block why a prompt hits or misses. Changes nothing but the alarm counter.

Only chains of the caller's own namespace are looked at. An answer about another namespace would tell whether somebody
there has sent these tokens, so such a block counts as never seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from pagekv.kvmanager.engine.paging import page_token, read_page_token
from pagekv.kvmanager.engine.prefix_match import PrefixMatch
from pagekv.kvmanager.kvcache.block_hash import MediaSpan
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.v1 import cache_service_pb2 as pb


class PrefixExplainer:
    """Compares one prompt with the table as it is now; its pages may be made later."""

    def __init__(
        self,
        pool: BlockPool,
        log: TableLog,
        root: bytes,
        match: PrefixMatch,
        media: Sequence[MediaSpan],
        other_roots: Sequence[tuple[str, bytes]],
        *,
        kept: int = 0,
        numbers: bool,
    ) -> None:
        """`root`: the digest before the first block. `match`: the prompt's blocks and their hits on the device. `kept`:
        how many blocks after these hits the host pool has. `other_roots`: other adapters ("": none), each with the root
        that the prompt would have with it. `numbers`: answers have block ids, and times are in steps, too.
        """
        self._numbers = numbers
        size = pool.block_size
        self._pool, self._log, self._root, self._media = pool, log, root, media
        self._tokens, chunks, self._digests, self._hits = match
        # Blocks that hit, on the device and then in the host pool.
        self._found = len(self._hits) + kept
        # Compared by tokens alone, so only up to the first medium.
        plain = min((span.position for span in media), default=len(self._tokens)) // size
        # For each other adapter, how many leading blocks are cached for it. The adapter with most of them is kept.
        reach = [(len(pool.table.trie.match(other, chunks[:plain])), adapter) for adapter, other in other_roots]
        self._elsewhere = max(reach, default=(0, ""), key=lambda pair: pair[0])
        # Computed now, because the hit blocks may have other contents when a later page is made.
        self._near = (-1, 0) if kept else self._nearest(len(self._hits))

    def page(self, page_size: int, token: str = "") -> pb.ExplainPrefixResponse:
        """Explains a page of the prompt's blocks. Raises InvalidRequest for a token that is not of this prompt."""
        size, full = self._pool.block_size, len(self._digests)
        total = -(-len(self._tokens) // size)
        of = b"explain" + (self._digests or [self._root])[-1] + self._tokens[full * size :].tobytes()
        start = read_page_token(of, token, total)
        end = min(total, start + page_size)
        return pb.ExplainPrefixResponse(
            blocks=[self._full_block(index) if index < full else self._tail() for index in range(start, end)],
            next_page_token=page_token(of, end) if end < total else "",
            prompt_tokens=len(self._tokens),
            cached_tokens=self._found * size,
        )

    def _full_block(self, index: int) -> pb.BlockExplanation:
        size, digest = self._pool.block_size, self._digests[index]
        explanation = partial(pb.BlockExplanation, start=index * size, end=(index + 1) * size, block_hash=digest.hex())
        if index < self._found:
            block = int(self._hits[index]) if index < len(self._hits) else None
            where = "the host pool" if block is None else f"block {block}"
            reason = f"cached in {where}" if self._numbers else "cached"
            if (index + 1) * size == len(self._tokens):
                reason += "; a request still computes the last token"
            return explanation(
                outcome=pb.BLOCK_OUTCOME_HIT, reason=reason, block_id=self._number(block), shared_tokens=size
            )
        removed = self._log.removed_ago(digest)
        if removed is not None:
            steps = removed.steps if self._numbers else None
            when = f"{f'{steps} steps and ' if self._numbers else ''}{removed.seconds:.1f} s ago"
            reason = f"the table was cleared {when}" if removed.cleared else f"evicted {when}"
            outcome = pb.BLOCK_OUTCOME_CLEARED if removed.cleared else pb.BLOCK_OUTCOME_EVICTED
            return explanation(outcome=outcome, reason=reason, steps_ago=steps, seconds_ago=removed.seconds)
        reach, adapter = self._elsewhere
        if index < reach:
            where = f"for adapter {adapter!r}" if adapter else "without an adapter"
            return explanation(outcome=pb.BLOCK_OUTCOME_OTHER_IDENTITY, reason=f"cached {where}")
        if index > self._found:
            return explanation(
                outcome=pb.BLOCK_OUTCOME_NEVER_SEEN, reason="never stored; it follows a block that misses"
            )
        near, shared = self._near
        if shared:
            reason = (
                f"{self._named(near)} follows the same prefix and shares {shared} of {size} tokens; "
                f"they differ at position {index * size + shared}"
            )
            return explanation(
                outcome=pb.BLOCK_OUTCOME_DIVERGED, reason=reason, block_id=self._number(near), shared_tokens=shared
            )
        return explanation(outcome=pb.BLOCK_OUTCOME_NEVER_SEEN, reason="never stored after this prefix")

    def _tail(self) -> pb.BlockExplanation:
        size, index = self._pool.block_size, len(self._digests)
        tail = len(self._tokens) - index * size
        reason = f"{tail} of {size} tokens: only full blocks are cached; {size - tail} more would fill it"
        near, shared = self._near if index == self._found else (-1, 0)
        if shared:
            reason += f"; {self._named(near)} begins with the first {shared} of these {tail}"
        return pb.BlockExplanation(
            start=index * size,
            end=len(self._tokens),
            outcome=pb.BLOCK_OUTCOME_PARTIAL_TAIL,
            reason=reason,
            block_id=self._number(near) if shared else None,
            shared_tokens=shared,
        )

    def _number(self, block: int | None) -> int | None:
        return block if self._numbers else None

    def _named(self, block: int) -> str:
        return f"block {block}" if self._numbers else "a cached block"

    def _nearest(self, index: int) -> tuple[int, int]:
        """The cached block after the hits that shares most leading tokens with block `index`, and how many."""
        start = index * self._pool.block_size
        tokens = self._tokens[start : start + self._pool.block_size]
        if any(span.position < start + len(tokens) and span.position + span.length > start for span in self._media):
            return -1, 0
        return self._pool.table.trie.longest_run(int(self._hits[-1]) if len(self._hits) else self._root, tokens)


# Most pairs of namespace and adapter that are kept, and most adapters of a namespace that are compared.
MAX_KNOWN = 4096
MAX_OTHERS = 16


class KnownAdapters:
    """The latest pairs of namespace and adapter, in bounded memory. No namespace learns of another one's adapters."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], None] = OrderedDict()

    def note(self, namespace: str, adapter_id: str) -> None:
        """Notes that a request uses this adapter, "" for none."""
        pair = (namespace, adapter_id)
        self._pairs[pair] = None
        self._pairs.move_to_end(pair)
        if len(self._pairs) > MAX_KNOWN:
            self._pairs.popitem(last=False)

    def others(self, namespace: str, adapter_id: str) -> list[str]:
        """Other adapters of the namespace, latest first."""
        found = [known for space, known in reversed(self._pairs) if space == namespace and known != adapter_id]
        return found[:MAX_OTHERS]
