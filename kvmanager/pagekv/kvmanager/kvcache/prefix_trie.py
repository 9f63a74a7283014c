"""A trie over cached blocks: finds a prompt's cached prefix by its token ids, without hashing anything (DESIGN 5).

A node is a cached block or the root of its chain; the path from a root to a block spells a cached prefix. `match` walks
down that path. `longest_run` finds the child that shares most leading tokens with the prompt's next ones; a partial hit
copies that child.

Almost every block is the only child of its parent. So two int32 columns, parent and only child by block id, hold nearly
all of the trie in 8 bytes per block, and a chain is entered, compared and removed in a few vector operations. Nodes
with several children, and all roots, have a list of children sorted by their tokens instead. Binary search finds the
child with given tokens, and the child that shares most of them is next to that place.

A block may stand apart from its parent's other children, as the first block with media does: tokens alone then do not
find it, nor the blocks that follow it.

A block enters after its parent and is removed with it at the latest, so every block can be reached from its root.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.errors import InvariantError

_TOKEN_BITS = 32
# Values of the parent column. _ROOT: the parent is a root, see `_root_of`; _ABSENT: the block is not in the trie.
_ROOT = -1
_ABSENT = -2
# Values of the column of only children. _NONE: there is no child; _SEVERAL: there are several, see `_children_of`.
_NONE = -1
_SEVERAL = -2
# Blocks that `match` walks along before it compares the tokens of all of them at once.
_STRIDE = 256
# Blocks whose tokens `verify` compares at once.
_COMPARED = 2048

# A block id, or the digest of a chain's root.
Node = int | bytes


class PrefixTrie:
    """The parent and the children of every cached block.

    `tokens` is [num_blocks, block_size] uint32 in C order and belongs to the caller. A block's row must hold its tokens
    while the block is in the trie. Arrays of block ids are int32.
    """

    def __init__(self, tokens: NDArray[np.uint32]) -> None:
        self._tokens = tokens
        self._row_bytes = tokens.shape[1] * tokens.itemsize
        self._bytes = tokens.data.cast("B")
        self._parent = np.full(len(tokens), _ABSENT, np.int32)
        self._child = np.full(len(tokens), _NONE, np.int32)
        # The same memory, faster to read one number at a time.
        self._parent_at = self._parent.data
        self._child_at = self._child.data
        self._root_of: dict[int, bytes] = {}
        # Blocks that follow their parent apart from its other children.
        self._apart: set[int] = set()
        # Sorted by the bytes of their rows; any order would do that keeps equal beginnings together. Children that
        # stand apart are listed under (node,).
        self._children_of: dict[Node | tuple[Node], array[int]] = {}

    def __contains__(self, block: int) -> bool:
        return self._parent_at[block] != _ABSENT

    # -- changing

    def add(self, block: int, parent: Node) -> None:
        """Enters an absent block after its parent. Raises InvariantError, with nothing changed, if it cannot."""
        parent_at, child_at = self._parent_at, self._child_at
        if parent_at[block] != _ABSENT:
            raise InvariantError(f"block {block} is in the prefix trie already")
        if isinstance(parent, int) and parent_at[parent] != _ABSENT and child_at[parent] == _NONE:
            # The common case: a block continues a chain.
            parent_at[block] = parent
            child_at[parent] = block
        else:
            self._attach(block, parent, apart=False)

    def add_chain(self, blocks: NDArray[np.int32], parent: Node, *, apart: bool = False) -> None:
        """Enters absent blocks, at least one: the first after `parent`, each other one after the block before it.
        `match` and `longest_run` do not find a first block that stands `apart`. Raises InvariantError as `add` does.
        """
        present = self._parent[blocks] != _ABSENT
        if present.any():
            raise InvariantError(f"block {blocks[present.argmax()]} is in the prefix trie already")
        self._attach(int(blocks[0]), parent, apart)
        self._parent[blocks[1:]] = blocks[:-1]
        self._child[blocks[:-1]] = blocks[1:]

    def remove(self, blocks: NDArray[np.int32]) -> list[int]:
        """Removes blocks, each named once, and all that follow; returns the ones not named. Ignores absent blocks."""
        unnamed: list[int] = []
        while len(blocks):
            parents, children = self._parent[blocks], self._child[blocks]
            self._parent[blocks] = _ABSENT
            self._child[blocks] = _NONE
            parent_stays = (parents >= 0) & (self._parent[np.maximum(parents, 0)] != _ABSENT)
            for at in (parent_stays | (parents == _ROOT)).nonzero()[0].tolist():
                self._detach(int(blocks[at]), int(parents[at]))
            child_stays = (children >= 0) & (self._parent[np.maximum(children, 0)] != _ABSENT)
            below: list[int] = children[child_stays].tolist()
            for at in (children == _SEVERAL).nonzero()[0].tolist():
                below += (child for child in self._children_of.pop(int(blocks[at])) if child in self)
            if self._apart:
                for block in blocks.tolist():
                    below += (child for child in self._children_of.pop((block,), ()) if child in self)
                self._apart.difference_update(blocks.tolist())
            unnamed += below
            blocks = np.array(below, np.int32)
        return unnamed

    def replace(self, old: int, new: int) -> None:
        """Puts `new`, which is absent and has the same tokens, in the place of `old`, with its parent and children.
        Raises InvariantError, with nothing changed, if `new` is not such a block.
        """
        if old not in self or new in self or self._row(old) != self._row(new):
            raise InvariantError(f"block {new} cannot take the place of block {old} in the prefix trie")
        parent, child = self._parent_at[old], self._child_at[old]
        self._parent_at[new], self._parent_at[old] = parent, _ABSENT
        self._child_at[new], self._child_at[old] = child, _NONE
        node: Node = parent
        if parent == _ROOT:
            node = self._root_of[new] = self._root_of.pop(old)
        if old in self._apart:
            self._apart.remove(old)
            self._apart.add(new)
        siblings = self._children_of.get((node,) if new in self._apart else node)
        if siblings is not None:
            siblings[self._place(siblings, old)] = new
        else:
            self._child_at[parent] = new
        if child == _SEVERAL:
            self._children_of[new] = self._children_of.pop(old)
        for follower in self._children(new):
            self._parent_at[follower] = new
        if (old,) in self._children_of:
            self._children_of[new,] = self._children_of.pop((old,))
            for follower in self._children_of[new,]:
                self._parent_at[follower] = new

    def clear(self) -> None:
        self._parent[:] = _ABSENT
        self._child[:] = _NONE
        self._root_of.clear()
        self._apart.clear()
        self._children_of.clear()

    # -- reading

    def parent(self, block: int) -> Node | None:
        """The block or root before this block; None when the block is not in the trie."""
        parent = self._parent_at[block]
        return parent if parent >= 0 else self._root_of.get(block)

    def parents(self, blocks: NDArray[np.int32] | slice) -> NDArray[np.int32]:
        """The parent block of each of these blocks; -1 if the parent is a root or the block is not in the trie."""
        found: NDArray[np.int32] = np.maximum(self._parent[blocks], _ROOT)
        return found

    def follow(self, blocks: NDArray[np.int32], parent: Node) -> NDArray[np.bool_]:
        """Whether the first of these blocks, at least one, follows `parent`, and each other one the block before it."""
        follows: NDArray[np.bool_] = self._parent[blocks] == np.concatenate([[_ABSENT], blocks[:-1]])
        follows[0] = self.parent(int(blocks[0])) == parent
        return follows

    def roots(self) -> dict[int, bytes]:
        """The root of every block that follows one."""
        return self._root_of.copy()

    def match(self, parent: Node, tokens: NDArray[np.uint32]) -> list[int]:
        """The longest chain of blocks after `parent` that has the leading rows of `tokens`, [n, block_size]."""
        found: list[int] = []
        node = parent
        while len(found) < len(tokens):
            run = self._only_children(node, min(_STRIDE, len(tokens) - len(found)))
            if run:
                differs = self._tokens.take(run, axis=0) != tokens[len(found) : len(found) + len(run)]
                if differs.any():
                    return found + run[: int(differs.argmax()) // differs.shape[1]]
            else:
                row, children = tokens[len(found)].tobytes(), self._children(node)
                place = bisect_left(children, row, key=self._row)
                if place == len(children) or self._row(children[place]) != row:
                    break
                run = [children[place]]
            found += run
            node = run[-1]
        return found

    def verify(self, root: bytes, blocks: NDArray[np.int32], tokens: NDArray[np.uint32]) -> int:
        """How many leading ids of `blocks`, any ids, `match` would return after `root`. Only vector operations."""
        most = min(len(blocks), len(tokens))
        if not most or self._root_of.get(int(blocks[0])) != root or blocks.max() >= len(self._parent):
            return 0
        strangers = np.flatnonzero(self._parent[blocks[1:most]] != blocks[: most - 1])
        run = int(strangers[0]) + 1 if len(strangers) else most
        if self._apart:
            run = next((at for at, block in enumerate(blocks[:run].tolist()) if block in self._apart), run)
        # In pieces, so that the gathered rows stay in the processor's cache.
        for start in range(0, run, _COMPARED):
            piece = slice(start, min(start + _COMPARED, run))
            differs = self._tokens.take(blocks[piece], axis=0) != tokens[piece]
            if differs.any():
                same: int = start + int(differs.argmax()) // differs.shape[1]
                return same
        return run

    def longest_run(self, parent: Node, tokens: NDArray[np.uint32]) -> tuple[int, int]:
        """The child of `parent` that shares most leading tokens with `tokens`, and how many; (-1, 0) if no child shares
        the first token.

        Among equals it is the first child in the order of tokens, so equal histories give equal answers. Tokens beyond
        a block are ignored.
        """
        wanted = tokens.tobytes()[: self._row_bytes]
        children = self._children(parent)
        place = bisect_left(children, wanted, key=self._row)
        best, longest = -1, 0
        for block in children[max(place - 1, 0) : place + 1]:
            run = _common_tokens(self._row(block), wanted)
            if run > longest:
                best, longest = block, run
        return best, longest

    # -- parts

    def _only_children(self, node: Node, limit: int) -> list[int]:
        """At most `limit` blocks that follow `node` and each other, each the only child of its parent block."""
        run: list[int] = []
        if isinstance(node, int):
            child_at, block = self._child_at, node
            for _ in range(limit):
                block = child_at[block]
                if block < 0:
                    break
                run.append(block)
        return run

    def _children(self, node: Node) -> Sequence[int]:
        """The children of a node, sorted by their tokens, without those that stand apart."""
        only = self._child_at[node] if isinstance(node, int) else _SEVERAL
        if only >= 0:
            return (only,)
        return self._children_of.get(node, ())

    def _row(self, block: int) -> bytes:
        return bytes(self._bytes[block * self._row_bytes : (block + 1) * self._row_bytes])

    def _place(self, siblings: array[int], block: int) -> int:
        """The place of a block in the list; bisection finds the first block with the same tokens."""
        return siblings.index(block, bisect_left(siblings, self._row(block), key=self._row))

    def _attach(self, block: int, parent: Node, apart: bool) -> None:
        """Makes an absent block a child of `parent`."""
        if isinstance(parent, bytes):
            self._parent_at[block] = _ROOT
            self._root_of[block] = parent
        else:
            if parent not in self:
                raise InvariantError(f"block {block} follows block {parent}, which is not in the prefix trie")
            self._parent_at[block] = parent
        if apart:
            self._apart.add(block)
            siblings = self._children_of.setdefault((parent,), array("i"))
        elif isinstance(parent, bytes):
            siblings = self._children_of.setdefault(parent, array("i"))
        else:
            only = self._child_at[parent]
            if only == _NONE:
                self._child_at[parent] = block
                return
            if only != _SEVERAL:
                self._child_at[parent] = _SEVERAL
                self._children_of[parent] = array("i", [only])
            siblings = self._children_of[parent]
        insort_right(siblings, block, key=self._row)

    def _detach(self, block: int, parent: int) -> None:
        """Removes a block from the children of a parent that stays."""
        node: Node = self._root_of.pop(block) if parent == _ROOT else parent
        apart = block in self._apart
        listed = (node,) if apart else node
        siblings = self._children_of.get(listed)
        if siblings is None:
            self._child_at[parent] = _NONE
            return
        del siblings[self._place(siblings, block)]
        if parent == _ROOT or apart:
            if not siblings:
                del self._children_of[listed]
        elif len(siblings) == 1:
            self._child_at[parent] = siblings[0]
            del self._children_of[node]


def _common_tokens(row: bytes, wanted: bytes) -> int:
    """Number of equal leading tokens; `row` has at least as many tokens as `wanted`."""
    differing = int.from_bytes(row[: len(wanted)], "big") ^ int.from_bytes(wanted, "big")
    # The highest differing bit lies in the first differing token.
    return (8 * len(wanted) - differing.bit_length()) // _TOKEN_BITS
