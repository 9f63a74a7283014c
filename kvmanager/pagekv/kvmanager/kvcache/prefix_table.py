"""The prefix table: which block holds which prefix, found by digest or by token ids (DESIGN 5).

A published block has a digest, the token ids it was computed for, and a parent: the block or chain root before it. The
table is a forest: a block enters only after its parent and leaves with it at the latest. A block is found in two ways:
by its digest, in a dictionary, with token ids and parent compared on every hit; or by token ids alone, in `PrefixTrie`,
without hashing. Both find the same blocks, except blocks from the first medium on, which only their digests identify.

A digest that stands for another content already is a collision: no block enters under it or after it, so even a bad
hash function cannot make one prefix pass for another.

Blocks are never merged: if two held blocks have the same content, one has the entry and the other is its twin
(`twins`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.digest_map import DigestMap
from pagekv.kvmanager.kvcache.fresh_memory import fresh_zeros
from pagekv.kvmanager.kvcache.prefix_trie import Node, PrefixTrie
from pagekv.kvmanager.kvcache.retired_blocks import Note
from pagekv.kvmanager.kvcache.table_columns import TableColumns
from pagekv.kvmanager.kvcache.twins import Twins

Blocks = NDArray[np.int32]
# Token ids of several blocks, [n, block_size].
BlockTokens = NDArray[np.uint32]
# Namespace and adapter.
Names = tuple[str, str]


class Added(NamedTuple):
    """The outcome of offering a chain to the table."""

    # Positions of the blocks that entered the table.
    entered: list[int]
    # Blocks that lost their entries, and the copies that have these entries now.
    superseded: list[int]
    heirs: list[int]
    # Whether a digest belongs to a block with another content: a hash collision. Later blocks must not be offered.
    collided: bool


class PrefixTable:
    """Entries over the block ids of one pool. Arrays of block ids are int32."""

    def __init__(
        self, num_blocks: int, block_size: int, ref_count: Blocks, clock: Callable[[], float] | None = None
    ) -> None:
        """`ref_count`: holders of each block; the pool's column, read only. `clock`: monotonic seconds, from which
        blocks get an age; None: blocks have no age.
        """
        self.block_size = block_size
        self._ref_count = ref_count
        # Replaced by a new object whenever a block leaves. While it is the same, blocks found before are still there.
        self.generation = object()
        # Whether each block is in the table, [num_blocks].
        self.published = np.zeros(num_blocks, np.bool_)
        self._published_at = self.published.data
        self.map = DigestMap(num_blocks)
        self._block_of, self._digest, self._retired = self.map.block_of, self.map.column, self.map.retired
        self._tokens = fresh_zeros((num_blocks, block_size), np.uint32)
        # Only this table may change it.
        self.trie = PrefixTrie(self._tokens)
        # Blocks from the first medium of their chain on.
        self._media: set[int] = set()
        self._twins = Twins()
        # Namespace and adapter of blocks that have any; the blocks of a chain share one object.
        self._names: dict[int, Names] = {}
        self._clock = clock
        # When each content entered the table.
        self._entered_at = np.zeros(num_blocks if clock is not None else 0)

    def __len__(self) -> int:
        return len(self.map)

    # -- reading

    def lookup(self, digest: bytes) -> int | None:
        return self.map.lookup(digest)

    def digest(self, block: int) -> bytes | None:
        """The block's digest; None unless it is in the table."""
        return self._digest[block] if self._published_at[block] else None

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        """The digests of blocks that are in the table or retired."""
        return self.map.digests(blocks)

    def digest_objects(self, blocks: Blocks, digests: Sequence[bytes]) -> list[bytes]:
        """The table's own digest objects of held blocks; the given object for a block that is not entered."""
        found = list(map(self._digest.__getitem__, blocks.tolist()))
        for at in np.flatnonzero(~self.published[blocks]).tolist():
            digest = self._twins.digest(int(blocks[at]))
            found[at] = digests[at] if digest is None else self._digest[self._block_of[digest]]
        return found  # type: ignore[return-value]  # none is None any more

    def parent(self, block: int) -> bytes | None:
        """Digest of the block or chain root before it; None unless it is in the table."""
        parent = self.trie.parent(block)
        return self._digest[parent] if isinstance(parent, int) else parent

    def parents(self, blocks: Blocks) -> list[bytes]:
        """Digests of the blocks or chain roots before blocks in the table."""
        before = self.trie.parents(blocks)
        found = self.digests(before.tolist())
        for at in np.flatnonzero(before < 0).tolist():
            found[at] = self.parent(int(blocks[at])) or b""
        return found

    def token_ids(self, block: int) -> list[int]:
        """The token ids of a block in the table, [block_size]."""
        ids: list[int] = self._tokens[block].tolist()
        return ids

    def tokens(self, blocks: Blocks) -> BlockTokens:
        """The token ids of blocks in the table, as a copy."""
        return self._tokens[blocks]

    def names(self, blocks: Sequence[int]) -> list[Names | None] | None:
        """Namespace and adapter of each block, None if it has neither; None instead of a list if no block has any."""
        return list(map(self._names.get, blocks)) if self._names else None

    def age_s(self, block: int) -> float | None:
        """Seconds since the block's content entered the table; None if it is not there, or blocks have no age."""
        if self._clock is None or not self._published_at[block]:
            return None
        return self._clock() - float(self._entered_at[block])

    def columns(self) -> TableColumns:
        """A copy of the whole table, made in a few vector operations so that it takes little time."""
        return TableColumns(
            self.published.copy(),
            tuple(self._digest),
            self.trie.parents(slice(None)),
            self.trie.roots(),
            self._media.copy(),
            self._tokens.copy(),
            self._names.copy(),
        )

    def match(self, parent: Node, digests: Sequence[bytes], tokens: BlockTokens) -> tuple[list[int], bool]:
        """Longest leading run of cached blocks after `parent` with these digests; and whether it ended at a hash
        collision: a digest whose block has other token ids or another parent. Using that block would mix another
        prompt's text in.
        """
        blocks: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        if self._retired.count:
            blocks = self.map.leading(blocks)
        if not blocks:
            return blocks, False
        same = (self._tokens[blocks] == tokens[: len(blocks)]).all(axis=1)
        same &= self.trie.follow(np.array(blocks, np.int32), parent)
        if same.all():
            return blocks, False
        return blocks[: int(same.argmin())], True

    def is_entered(self, block: int) -> bool:
        """Whether a held block, or the block whose twin it is, is in the table."""
        return bool(self._published_at[block]) or block in self._twins

    # -- changing

    def add_one_each(
        self,
        blocks: Sequence[int],
        digests: Sequence[bytes],
        parents: Sequence[Node],
        parent_digests: Sequence[bytes],
        tokens: BlockTokens,
    ) -> list[int]:
        """Enters one block of each of several sequences, without media. Block i follows `parents[i]`, whose digest is
        `parent_digests[i]`: a block or, in chains without namespace and adapter, a root. Only the simple case: a block
        is left out if its digest is in the table already, or if its parent is not the block that the table has under
        the parent's digest. Returns the positions of blocks that were left out, for `add_chain`.
        """
        block_of, column = self._block_of, self._digest
        if self._retired.count:
            self.map.make_way(blocks, (*parent_digests, *digests))
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
            self.trie.add(block, parent)
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
        """Enters consecutive blocks of one sequence, at least one, that are not in the table. The first one follows the
        block with the digest `parent` or, if it is the `first` of a chain, that root. Handles every case; blocks whose
        parent is not in the table are refused.

        If a digest is in the table already and its block is held, the new block becomes its twin. If its block is not
        held, the new block gets the entry: the blocks after it are in use, and evicting a parent before its children
        would leave a hole in the chain. `media`: one of the blocks, or one before them, has a medium, so tokens alone
        must not find these blocks. `names`: namespace and adapter of the chain, None if it has neither.
        """
        added = Added([], [], [], False)
        ids = blocks.tolist()
        if self._retired.count:
            self.map.make_way(ids, (parent, *digests))
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
                # The first block with a medium stands apart from all text, and so do the blocks after it.
                self.trie.add_chain(blocks[run], before, apart=media and before not in self._media)
                if media:
                    self._media.update(ids[run])
                if names is not None:
                    # The object that the chain has already, so that its strings are stored once.
                    names = names if isinstance(before, bytes) else self._names.get(before, names)
                    self._names.update(dict.fromkeys(ids[run], names))
                added.entered.extend(range(position, end))
                position, before = end, ids[end - 1]
                continue
            # No block is in the table without its parent. So if the parent is missing, the entry is of another content.
            if before is None or not self._is_copy(present, before, tokens[position], media):
                return added._replace(collided=True)
            if present != block and not self._ref_count[present]:
                self._supersede(present, block)
                added.superseded.append(present)
                added.heirs.append(block)
                present = block
            elif present != block:
                self._twins.add(block, digests[position])
            position, before = position + 1, present
        return added

    def _enter(self, blocks: list[int], digests: Sequence[bytes], begin: int) -> int:
        """Enters blocks from position `begin` on, up to the first digest that is in the table; returns its position."""
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

    def _is_copy(self, block: int, parent: Node, tokens: BlockTokens, media: bool) -> bool:
        """Whether a block in the table has these token ids, [block_size], and this parent."""
        same_place = self.trie.parent(block) == parent and (block in self._media) == media
        return same_place and bool((self._tokens[block] == tokens).all())

    def let_go(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Notes that nobody holds these blocks any more: twins among them are no longer twins, and if an entered block
        has a twin, the twin takes over its entry. Returns the blocks that lost their entries, and the blocks that have
        these now.
        """
        for block in blocks:
            self._twins.remove(block)
        superseded: list[int] = []
        heirs: list[int] = []
        for block in blocks:
            digest = self._digest[block]
            heir = None if digest is None else self._twins.pop_oldest(digest)
            if heir is not None:
                self._supersede(block, heir)
                superseded.append(block)
                heirs.append(heir)
        return superseded, heirs

    @property
    def has_twins(self) -> bool:
        """Whether `let_go` has to be called for blocks that nobody holds any more."""
        return len(self._twins) > 0

    def _supersede(self, old: int, new: int) -> None:
        """Gives the entry of a block, with parent and children, to another block with the same content."""
        digest = self._digest[old]
        assert digest is not None
        self.generation = object()
        self._tokens[new] = self._tokens[old]
        if self._clock is not None:
            self._entered_at[new] = self._entered_at[old]
        self._block_of[digest] = new
        self._digest[new], self._digest[old] = digest, None
        self.published[new], self.published[old] = True, False
        if old in self._names:
            self._names[new] = self._names.pop(old)
        if old in self._media:
            self._media.remove(old)
            self._media.add(new)
        self.trie.replace(old, new)

    def remove(self, blocks: Blocks) -> tuple[Blocks, list[bytes]]:
        """Removes blocks of the table and all blocks that follow them; returns all of these, and their digests."""
        removed = self._take_out(blocks)
        block_of, column, has_twins = self._block_of, self._digest, self.has_twins
        digests: list[bytes] = []
        for block in removed.tolist():
            digest = column[block]
            if digest is None or block_of.pop(digest, None) != block:
                raise InvariantError(f"block {block} holds a digest that the prefix table maps elsewhere")
            digests.append(digest)
            column[block] = None
            if has_twins:
                self._twins.pop_all(digest)
        if self._media:
            self._media.difference_update(removed.tolist())
        return removed, digests

    def retire(self, blocks: Blocks, note: Note) -> Blocks | None:
        """`remove` for many blocks that nobody holds, in vector operations only: their digests are cleared later, and
        then passed to `note`. Returns all blocks that left the table; None, with nothing changed, if there are media.
        """
        if self._media:
            return None
        removed = self._take_out(blocks)
        # If a content is held, a held block has its entry, so only blocks that follow the given ones can have twins.
        for block in removed[len(blocks) :].tolist() if self.has_twins else ():
            self._twins.pop_all(self.map.digests([block])[0])
        self._retired.add(removed, note)
        return removed

    def _take_out(self, blocks: Blocks) -> Blocks:
        """Takes blocks and all blocks that follow them out of the forest; returns all of these."""
        self.generation = object()
        followers = self.trie.remove(blocks)
        removed = np.concatenate([blocks, np.array(followers, np.int32)]) if followers else blocks
        self.published[removed] = False
        if self._names:
            for block in removed.tolist():
                self._names.pop(block, None)
        return removed

    def clear(self) -> int:
        """Removes everything; returns how many blocks were in the table."""
        self.generation = object()
        self.map.settle()
        removed = len(self._block_of)
        for block in self._block_of.values():
            self._digest[block] = None
        self._block_of.clear()
        self._media.clear()
        self._twins.clear()
        self._names.clear()
        self.trie.clear()
        self.published[:] = False
        return removed
