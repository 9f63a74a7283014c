"""The prefix table: which block holds which prefix, found by digest or by walking tokens (DESIGN 5, CHECKLIST E10).

A published block has a digest, the token ids it was computed for and a parent, the block or chain root before it. The
table is a forest: a block enters only after its parent and leaves with it at the latest. Two ways lead to a block. By
digest, in a dictionary, with the token ids compared on every hit. And along `PrefixTrie`, from parent to child by
token ids alone, which needs no hashing. Both give the same blocks, but for those told apart by media, which only their
digests find.

A digest that belongs to another content already is a collision: nothing enters under it and nothing after it, so even a
bad hash function could not make one prefix pass for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.prefix_trie import FIRST, PrefixTrie

Blocks = NDArray[np.int32]
# Token ids of consecutive blocks, [n, block_size].
Chunks = NDArray[np.uint32]

# In place of a parent block that is not in the table.
_MISSING = -2


@dataclass(frozen=True, slots=True)
class TableColumns:
    """A prefix table at one moment: columns by block id, of which only those of published blocks mean anything."""

    published: NDArray[np.bool_]
    digests: list[bytes | None]
    # The block before each in its chain; -1 when it is not in the table.
    parents: Blocks
    # Digests of the parents of which `parents` does not know the digest.
    loose_parents: dict[int, bytes]
    # Those with media, which tokens alone do not lead to.
    media: set[int]
    # [num_blocks, block_size].
    tokens: NDArray[np.uint32]


class Added(NamedTuple):
    """What became of the blocks offered to the table, by position."""

    # In the table now, and their digest was not.
    entered: list[int]
    # Their digest belongs to a block with another content: a hash collision. What follows them must not be offered.
    collided: list[int]
    # Blocks that were in the table and are not any more: another copy of the same content has their entry now.
    superseded: list[int]


class PrefixTable:
    """Entries over the block ids of one pool. Arrays of block ids are int32."""

    def __init__(
        self, num_blocks: int, block_size: int, ref_count: Blocks, clock: Callable[[], float] | None = None
    ) -> None:
        """`ref_count`: how many hold each block; the pool's column, read only. `clock`: seconds that never go back, by
        which blocks have an age; None: they have none, and it costs nothing.
        """
        self.block_size = block_size
        self._ref_count = ref_count
        # Whether a block is in the table, as a column for vector operations.
        self.published = np.zeros(num_blocks, np.bool_)
        self._block_of: dict[bytes, int] = {}
        self._digest: list[bytes | None] = [None] * num_blocks
        # Parent digests of the first blocks of chains, and of all blocks that the walk must not find.
        self._loose_parent: dict[int, bytes] = {}
        self._tokens = np.zeros((num_blocks, block_size), np.uint32)
        self._continuations = PrefixTrie(num_blocks, self._tokens)
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
        return list(map(self._digest.__getitem__, blocks))  # type: ignore[arg-type]  # others alone have None

    def parent(self, block: int) -> bytes | None:
        """Digest of the block or chain root before it; None unless it is in the table."""
        if self._digest[block] is None:
            return None
        loose = self._loose_parent.get(block)
        return loose if loose is not None else self._digest[self._continuations.parent(block)]

    def parents(self, blocks: Sequence[int]) -> list[bytes]:
        """`parent` of blocks that are in the table."""
        return list(map(self.parent, blocks))  # type: ignore[arg-type]  # others alone have None

    def token_ids(self, block: int) -> list[int]:
        """The token ids of a block in the table, [block_size]."""
        ids: list[int] = self._tokens[block].tolist()
        return ids

    def chunks(self, blocks: Blocks) -> Chunks:
        """The token ids of blocks in the table, as a copy."""
        return self._tokens[blocks]

    def age_s(self, block: int) -> float | None:
        """Seconds since the block's content entered the table; None unless it is in there and blocks have ages."""
        if self._clock is None or self._digest[block] is None:
            return None
        return self._clock() - float(self._entered_at[block])

    def newest_digests(self) -> Iterator[bytes]:
        """Every digest in the table, the one that entered last first."""
        return reversed(self._block_of)

    def columns(self) -> TableColumns:
        """A copy of everything, made in a few vector operations so that nobody waits long for it."""
        parents, loose = self._continuations.parents(), dict(self._loose_parent)
        # What the walk cannot reach may have its parent in the table all the same.
        parents[list(loose)] = [self._block_of.get(digest, -1) for digest in loose.values()]
        media = {block for block in loose if block not in self._continuations}
        return TableColumns(self.published.copy(), self._digest[:], parents, loose, media, self._tokens.copy())

    def follow(self, root: bytes, chunks: Chunks) -> list[int]:
        """Longest leading run of cached blocks with these token ids after a chain root, found without hashing."""
        return self._continuations.follow(root, chunks)

    def match(self, digests: Sequence[bytes], chunks: Chunks) -> tuple[list[int], bool]:
        """Longest leading run of cached blocks with these digests; and whether it ended at a digest whose block holds
        other token ids: a hash collision, which must not become somebody else's text.
        """
        blocks: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        same = (self._tokens[blocks] == chunks[: len(blocks)]).all(axis=1)
        if same.all():
            return blocks, False
        return blocks[: int(same.argmin())], True

    def longest_run(self, parent: int | bytes, tokens: NDArray[np.uint32]) -> tuple[int, int]:
        """The block after `parent` (a block, or a chain root) that shares most leading token ids with `tokens`, and
        how many; (-1, 0) when none shares any.
        """
        return self._continuations.longest_run(parent, tokens)

    # -- changing

    def add_after(
        self,
        blocks: Sequence[int],
        digests: Sequence[bytes],
        parents: Sequence[int],
        parent_digests: Sequence[bytes],
        chunks: Chunks,
    ) -> list[int]:
        """Enters blocks of text, block i after block `parents[i]` or, if that is FIRST, after the root
        `parent_digests[i]`. Only the simple case: left out, and returned by position, is every block whose digest is in
        the table already or whose parent is not what the table has under its digest.
        """
        table, column = self._block_of, self._digest
        left_out: list[int] = []
        for position, (block, digest, parent) in enumerate(zip(blocks, digests, parents, strict=True)):
            if parent == FIRST:
                if table.setdefault(digest, block) == block:
                    self._loose_parent[block] = parent_digests[position]
                    column[block] = digest
                    continue
            elif table.get(parent_digests[position]) == parent and table.setdefault(digest, block) == block:
                column[block] = digest
                continue
            left_out.append(position)
        new, after = np.array(blocks, np.int32), np.array(parents, np.int32)
        if left_out:
            rest = [position for position in range(len(blocks)) if position not in left_out]
            new, after, chunks = new[rest], after[rest], chunks[rest]
            parent_digests = [parent_digests[position] for position in rest]
        self._enter(new, after, parent_digests, chunks, False)
        return left_out

    def _is_copy(self, block: int, parent_block: int, parent: bytes, chunk: NDArray[np.uint32], media: bool) -> bool:
        """Whether a block in the table has these token ids and this parent; of media only the digest tells."""
        if media == (block in self._continuations) or not (self._tokens[block] == chunk).all():
            return False
        if media or parent_block == FIRST:
            return self._loose_parent.get(block) == parent
        return self._continuations.parent(block) == parent_block

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
        if old in self._loose_parent:
            self._loose_parent[new] = self._loose_parent.pop(old)
        if old in self._continuations:
            self._continuations.replace(old, new)

    def add_chain(
        self, blocks: Blocks, digests: Sequence[bytes], parent: bytes, chunks: Chunks, *, first: bool, media: bool
    ) -> Added:
        """Enters consecutive blocks of one sequence, at least one, that are not in the table, the first one after the
        block with the digest `parent` or, if it is the `first` of a chain, after that root. Refused are those whose
        parent is not in the table.

        Where a digest is there already and somebody holds its block, the new one remains private: blocks are never
        merged. Where nobody does, the new one has the entry from now on: what follows it is in use, and a parent that
        was evicted before would leave a hole (CHECKLIST G4).
        `media`: the tokens alone do not identify the blocks, so the walk must not find them.
        """
        table, column = self._block_of, self._digest
        parents = [parent, *digests[:-1]]
        parent_block = FIRST if first else table.get(parent, _MISSING)
        if parent_block == _MISSING or len(set(digests)) < len(digests) or not table.keys().isdisjoint(digests):
            return self._add_chain_slowly(blocks, digests, parents, chunks, first, media)
        ids = blocks.tolist()
        table.update(zip(digests, ids, strict=True))
        for block, digest in zip(ids, digests, strict=True):
            column[block] = digest
        if media:
            self._loose_parent.update(zip(ids, parents, strict=True))
        elif first:
            self._loose_parent[ids[0]] = parent
        found = np.empty(len(ids), np.int32)
        found[0], found[1:] = parent_block, blocks[:-1]
        self._enter(blocks, found, parents, chunks, media)
        return Added(list(range(len(ids))), [], [])

    def _add_chain_slowly(
        self,
        blocks: Blocks,
        digests: Sequence[bytes],
        parents: Sequence[bytes],
        chunks: Chunks,
        first: bool,
        media: bool,
    ) -> Added:
        """Block by block, as each has to find its parent; up to the first collision."""
        added = Added([], [], [])
        for position, (block, digest, parent) in enumerate(zip(blocks.tolist(), digests, parents, strict=True)):
            parent_block = FIRST if first and position == 0 else self._block_of.get(parent, _MISSING)
            present = self._block_of.get(digest)
            if present is None:
                if parent_block != _MISSING:
                    self._block_of[digest] = block
                    self._digest[block] = digest
                    if parent_block == FIRST or media:
                        self._loose_parent[block] = parent
                    one = slice(position, position + 1)
                    self._enter(blocks[one], np.array([parent_block], np.int32), [parent], chunks[one], media)
                    added.entered.append(position)
            # Nothing is in the table without its parent, so this content could not be there if that is missing.
            elif parent_block == _MISSING or not self._is_copy(present, parent_block, parent, chunks[position], media):
                added.collided.append(position)
                break
            elif present != block and not self._ref_count[present]:
                self._supersede(present, block)
                added.superseded.append(present)
        return added

    def _enter(
        self, blocks: Blocks, parent_blocks: Blocks, parents: Sequence[bytes], chunks: Chunks, media: bool
    ) -> None:
        """Fills the columns of blocks that are in the dictionary."""
        self._tokens[blocks] = chunks
        self.published[blocks] = True
        if self._clock is not None:
            self._entered_at[blocks] = self._clock()
        if not media:
            self._continuations.add(blocks, parent_blocks, parents)

    def remove(self, blocks: Blocks) -> tuple[Blocks, list[bytes]]:
        """Takes blocks of the table out, and with them what follows on from them; returns all of them, and their
        digests.
        """
        removed: list[int] = []
        while len(blocks):
            removed += blocks.tolist()
            blocks = np.array([child for child, _ in self._continuations.remove(blocks)], np.int32)
        column, table, loose = self._digest, self._block_of, self._loose_parent
        digests: list[bytes] = []
        for block in removed:
            digest = column[block]
            if digest is None or table.pop(digest, None) != block:
                raise InvariantError(f"block {block} holds a digest that the prefix table maps elsewhere")
            digests.append(digest)
            column[block] = None
            loose.pop(block, None)
        everything = np.array(removed, np.int32)
        self.published[everything] = False
        return everything, digests

    def clear(self) -> int:
        """Forgets everything; returns how many blocks were in the table."""
        removed = len(self._block_of)
        for block in self._block_of.values():
            self._digest[block] = None
        self._block_of.clear()
        self._loose_parent.clear()
        self._continuations.clear()
        self.published[:] = False
        return removed

    # -- proof

    def check_integrity(self) -> None:
        """Recomputes everything from the digests; raises InvariantError."""
        held = {digest: block for block, digest in enumerate(self._digest) if digest is not None}
        if held != self._block_of:
            raise InvariantError(f"{len(held)} blocks hold digests, the prefix table has {len(self._block_of)}")
        if sorted(held.values()) != np.flatnonzero(self.published).tolist():
            raise InvariantError(f"{len(held)} blocks hold digests, {int(self.published.sum())} are marked published")
        stray = self._loose_parent.keys() - set(held.values())
        if stray:
            raise InvariantError(f"parents kept of blocks that are not in the table, such as {sorted(stray)[:8]}")
        walked: dict[int, int | bytes] = {}
        for block in held.values():
            parent = self._continuations.parent(block)
            if block in self._continuations:
                walked[block] = self._loose_parent[block] if parent == FIRST else parent
            if parent != FIRST and not self.published[parent]:
                raise InvariantError(f"block {block} follows block {parent}, which is not in the table")
        self._continuations.check_integrity(walked)
