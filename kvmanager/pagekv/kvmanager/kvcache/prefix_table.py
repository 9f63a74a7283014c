"""The prefix table: which block holds which prefix, found by digest or by token ids (DESIGN 5).

A published block has a digest, the token ids it was computed for and a parent, the block or chain root before it. The
table is a forest: a block enters only after its parent and leaves with it at the latest. Two ways lead to a block: by
digest, in a dictionary, with the token ids compared on every hit; and by token ids alone, along `PrefixTrie`, which
needs no hashing. Both find the same blocks, except blocks with media, which only their digests tell apart.

A digest that stands for another content already is a collision: nothing enters under it and nothing after it, so even a
bad hash function could not make one prefix pass for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.prefix_trie import Node, PrefixTrie

Blocks = NDArray[np.int32]
# Token ids of several blocks, [n, block_size].
BlockTokens = NDArray[np.uint32]
# Namespace and adapter.
Names = tuple[str, str]


@dataclass(frozen=True, slots=True)
class TableColumns:
    """A prefix table at one moment: columns by block id, whose rows mean something for published blocks only."""

    published: NDArray[np.bool_]
    digests: list[bytes | None]
    # The block before each in its chain; -1 when it is not in the table.
    parents: Blocks
    # Digest of the parent, of blocks with media and of the first blocks of chains.
    parent_digest_of: dict[int, bytes]
    # Blocks with media, which tokens alone do not identify.
    media: set[int]
    # [num_blocks, block_size].
    tokens: BlockTokens
    # Of blocks that have a namespace or an adapter.
    names: dict[int, Names]


class Added(NamedTuple):
    """The outcome of offering a chain to the table."""

    # Positions of the blocks that are in the table now, and whose digest was not.
    entered: list[int]
    # Blocks that were in the table and are no longer: another copy of the same content has their entry now.
    superseded: list[int]
    # A digest belongs to a block with another content: a hash collision. Blocks behind it must not be offered.
    collided: bool


class PrefixTable:
    """Entries over the block ids of one pool. Arrays of block ids are int32."""

    def __init__(
        self, num_blocks: int, block_size: int, ref_count: Blocks, clock: Callable[[], float] | None = None
    ) -> None:
        """`ref_count`: holders of each block; the pool's column, read only. `clock`: monotonic seconds, which give
        blocks an age; None: blocks have no age, and it costs nothing.
        """
        self.block_size = block_size
        self._ref_count = ref_count
        # Whether a block is in the table, as a column for vector operations.
        self.published = np.zeros(num_blocks, np.bool_)
        self._block_of: dict[bytes, int] = {}
        self._digest: list[bytes | None] = [None] * num_blocks
        self._tokens = np.zeros((num_blocks, block_size), np.uint32)
        # Parents: of blocks without media the trie knows them, of blocks with media this does, by digest.
        self._trie = PrefixTrie(num_blocks, self._tokens)
        self._parent_digest_of: dict[int, bytes] = {}
        # Of blocks with a namespace or an adapter; one object for a chain, and nothing for all others.
        self._names: dict[int, Names] = {}
        self._clock = clock
        # When each content entered the table.
        self._entered_at = np.zeros(num_blocks if clock is not None else 0)

    def __len__(self) -> int:
        return len(self._block_of)

    # -- reading

    def lookup(self, digest: bytes) -> int | None:
        """The block with this digest."""
        return self._block_of.get(digest)

    def digest(self, block: int) -> bytes | None:
        """The block's digest; None unless it is in the table."""
        return self._digest[block]

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        """The digests of blocks that are in the table."""
        return list(map(self._digest.__getitem__, blocks))  # type: ignore[arg-type]  # only other blocks have None

    def parent(self, block: int) -> bytes | None:
        """Digest of the block or chain root before it; None unless it is in the table."""
        parent = self._trie.parent(block)
        if parent is None:
            return self._parent_digest_of.get(block)
        return self._digest[parent] if isinstance(parent, int) else parent

    def token_ids(self, block: int) -> list[int]:
        """The token ids of a block in the table, [block_size]."""
        ids: list[int] = self._tokens[block].tolist()
        return ids

    def tokens(self, blocks: Blocks) -> BlockTokens:
        """The token ids of blocks in the table, as a copy."""
        return self._tokens[blocks]

    def names(self, blocks: Sequence[int]) -> list[Names | None] | None:
        """Namespace and adapter of each block, None where it has neither; None where that is so of every block."""
        return list(map(self._names.get, blocks)) if self._names else None

    def age_s(self, block: int) -> float | None:
        """Seconds since the block's content entered the table; None for other blocks, and where blocks have no age."""
        if self._clock is None or self._digest[block] is None:
            return None
        return self._clock() - float(self._entered_at[block])

    def newest_digests(self) -> Iterator[bytes]:
        """Every digest in the table, the one that entered last first."""
        return reversed(self._block_of)

    def columns(self) -> TableColumns:
        """A copy of everything, made in a few vector operations so that nobody waits long for it."""
        parents, media = self._trie.parents(), self._parent_digest_of
        parents[list(media)] = [self._block_of.get(digest, -1) for digest in media.values()]
        known_by_digest = self._trie.roots() | media
        return TableColumns(
            self.published.copy(),
            self._digest[:],
            parents,
            known_by_digest,
            set(media),
            self._tokens.copy(),
            self._names.copy(),
        )

    def match_tokens(self, parent: Node, tokens: BlockTokens) -> list[int]:
        """Longest leading run of cached blocks with these token ids after a chain root or a block, found without
        hashing.
        """
        return self._trie.match(parent, tokens)

    def verify(self, root: bytes, blocks: Blocks, tokens: BlockTokens) -> int:
        """How many of these block ids, any ids, are what `match_tokens` begins with after a chain root."""
        return self._trie.verify(root, blocks, tokens)

    def match(self, digests: Sequence[bytes], tokens: BlockTokens) -> tuple[list[int], bool]:
        """Longest leading run of cached blocks with these digests; and whether it ended at a digest whose block holds
        other token ids: a hash collision, which must not become somebody else's text.
        """
        blocks: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        same = (self._tokens[blocks] == tokens[: len(blocks)]).all(axis=1)
        if same.all():
            return blocks, False
        return blocks[: int(same.argmin())], True

    def longest_run(self, parent: Node, tokens: NDArray[np.uint32]) -> tuple[int, int]:
        """The block after `parent` (a block, or a chain root) that shares most leading token ids with `tokens`, and
        how many; (-1, 0) when none shares any.
        """
        return self._trie.longest_run(parent, tokens)

    # -- changing

    def add_after(
        self,
        blocks: Sequence[int],
        digests: Sequence[bytes],
        parents: Sequence[Node],
        parent_digests: Sequence[bytes],
        tokens: BlockTokens,
    ) -> list[int]:
        """Enters blocks without media, block i after `parents[i]`, a block or, of chains without namespace and adapter,
        a root, whose digest is `parent_digests[i]`. Covers only the simple case: every block whose digest is in the
        table already, or whose parent is not what the table has under its digest, is left out, and its position is
        returned.
        """
        block_of, column = self._block_of, self._digest
        left_out: list[int] = []
        for position, (block, digest, parent) in enumerate(zip(blocks, digests, parents, strict=True)):
            parent_known = block_of.get(parent_digests[position]) == parent or isinstance(parent, bytes)
            if parent_known and block_of.setdefault(digest, block) == block:
                column[block] = digest
            else:
                left_out.append(position)
        if left_out:
            entered = [position for position in range(len(blocks)) if position not in left_out]
            blocks, parents, tokens = [blocks[at] for at in entered], [parents[at] for at in entered], tokens[entered]
        self._fill(np.array(blocks, np.int32), tokens)
        for block, parent in zip(blocks, parents, strict=True):
            self._trie.add(block, parent)
        if self._names:
            of = self._names
            of.update((block, of[parent]) for block, parent in zip(blocks, parents, strict=True) if parent in of)
        return left_out

    def add_chain(
        self,
        blocks: Blocks,
        digests: Sequence[bytes],
        parent: bytes,
        tokens: BlockTokens,
        *,
        first: bool,
        media: bool,
        names: Names | None = None,
    ) -> Added:
        """Enters consecutive blocks of one sequence, at least one, that are not in the table, the first one after the
        block with the digest `parent` or, if it is the `first` of a chain, after that root. Blocks whose parent is not
        in the table are refused.

        Where a digest is there already and somebody holds its block, the new one remains private: blocks are never
        merged. Where nobody does, the new one gets the entry: the blocks after it are in use, and a parent that is
        evicted before its children would leave a hole in the chain.
        `media`: the tokens alone do not identify the blocks, so `match_tokens` must not find them. `names`: namespace
        and adapter of the chain, None where it has neither.
        """
        added = Added([], [], False)
        ids, parents = blocks.tolist(), [parent, *digests[:-1]]
        before: Node | None = parent if first else self._block_of.get(parent)
        position = 0
        while position < len(ids):
            block, present = ids[position], self._block_of.get(digests[position])
            if present is None:
                if before is None:
                    position += 1
                    continue
                end = self._enter(ids, digests, position)
                run = slice(position, end)
                self._fill(blocks[run], tokens[run])
                if media:
                    self._parent_digest_of.update(zip(ids[run], parents[run], strict=True))
                else:
                    self._trie.add_chain(blocks[run], before)
                if names is not None:
                    # The object that the chain has already, so that its strings are kept once.
                    names = names if isinstance(before, bytes) else self._names.get(before, names)
                    self._names.update(dict.fromkeys(ids[run], names))
                added.entered.extend(range(position, end))
                position, before = end, ids[end - 1]
                continue
            # Nothing is in the table without its parent, so this content could not be there if the parent is missing.
            if before is None or not self._is_copy(present, before, parents[position], tokens[position], media):
                return added._replace(collided=True)
            if present != block and not self._ref_count[present]:
                self._supersede(present, block)
                added.superseded.append(present)
                present = block
            position, before = position + 1, present
        return added

    def _enter(self, blocks: list[int], digests: Sequence[bytes], begin: int) -> int:
        """Enters blocks from position `begin` on under their digests, up to the first digest that is there already;
        returns its position.
        """
        block_of, column = self._block_of, self._digest
        for position in range(begin, len(blocks)):
            block, digest = blocks[position], digests[position]
            if block_of.setdefault(digest, block) != block:
                return position
            column[block] = digest
        return len(blocks)

    def _fill(self, blocks: Blocks, tokens: BlockTokens) -> None:
        """Fills the columns of blocks that enter."""
        self._tokens[blocks] = tokens
        self.published[blocks] = True
        if self._clock is not None:
            self._entered_at[blocks] = self._clock()

    def _is_copy(self, block: int, parent: Node, parent_digest: bytes, tokens: BlockTokens, media: bool) -> bool:
        """Whether a block in the table has these token ids, [block_size], and this parent; with media the digest of the
        parent tells.
        """
        if not (self._tokens[block] == tokens).all():
            return False
        return self._parent_digest_of.get(block) == parent_digest if media else self._trie.parent(block) == parent

    def _supersede(self, old: int, new: int) -> None:
        """Gives the entry of a block, with parent and children, to another copy of it."""
        digest = self._digest[old]
        assert digest is not None
        self._tokens[new] = self._tokens[old]
        if self._clock is not None:
            self._entered_at[new] = self._entered_at[old]
        self._block_of[digest] = new
        self._digest[new], self._digest[old] = digest, None
        self.published[new], self.published[old] = True, False
        if old in self._names:
            self._names[new] = self._names.pop(old)
        if old in self._trie:
            self._trie.replace(old, new)
        else:
            self._parent_digest_of[new] = self._parent_digest_of.pop(old)

    def remove(self, blocks: Blocks) -> tuple[Blocks, list[bytes]]:
        """Removes blocks of the table, and with them all that follow; returns all of them, and their digests."""
        followers = self._trie.remove(blocks)
        removed = np.concatenate([blocks, np.array(followers, np.int32)]) if followers else blocks
        block_of, column, media, names = self._block_of, self._digest, self._parent_digest_of, self._names
        digests: list[bytes] = []
        for block in removed.tolist():
            digest = column[block]
            if digest is None or block_of.pop(digest, None) != block:
                raise InvariantError(f"block {block} holds a digest that the prefix table maps elsewhere")
            digests.append(digest)
            column[block] = None
            if media:
                media.pop(block, None)
            if names:
                names.pop(block, None)
        self.published[removed] = False
        return removed, digests

    def clear(self) -> int:
        """Removes everything; returns how many blocks were in the table."""
        removed = len(self._block_of)
        for block in self._block_of.values():
            self._digest[block] = None
        self._block_of.clear()
        self._parent_digest_of.clear()
        self._names.clear()
        self._trie.clear()
        self.published[:] = False
        return removed
