"""Which cached block goes on after another: prefixes found by token ids alone, and the longest common run inside the
next block, which is what a hit on a part of a block copies (DESIGN 5, CHECKLIST J4, Z10).

The children of a parent, a block or the root of a chain, are kept in the order of their tokens. The child that shares
most leading tokens with a chunk then stands beside the place where the chunk itself would go: O(log children)
comparisons, and never a look at the rest of the table.

States of a block id:

    absent   not in the index
    child    of a block or a root, and found through it
    orphan   its parent left first; not found again until it has left too and come back

Two int32 columns hold them, because almost every block is the only child of its parent: each block's parent and its
child. Children that have siblings, and those of roots, stand in their parent's family besides. An absent block can have
children: it may hold something that is not to be found, and still be followed by blocks that are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort_right
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.errors import InvariantError

# What `add` is told instead of a parent block when the parent is a root.
FIRST = -1

_TOKEN_BITS = 32
# The parent column holds the parent of an only child, one of these, or _MEMBER - n for the members of family n.
# Family n is that of block n, or from num_blocks on that of a root.
_ABSENT = -2
_ORPHAN = -3
_MEMBER = -4
# The child column holds the only child, or one of these.
_NONE = -1
_SEVERAL = -2
# So many blocks are faster one by one than with NumPy.
_FEW = 24
# Blocks that `follow` walks along before it first compares their tokens.
_STRIDE = 256

Column = NDArray[np.int32]


class PrefixTrie:
    """The children of every block and root.

    `tokens` is [num_blocks, block_size] uint32 in C order and stays the caller's. A block's row must hold its tokens
    from the call that adds it to the call that removes it. Columns of block ids are int32.
    """

    def __init__(self, num_blocks: int, tokens: NDArray[np.uint32]) -> None:
        if tokens.ndim != 2 or len(tokens) != num_blocks or tokens.dtype != np.uint32 or not tokens.flags.c_contiguous:
            raise ValueError(
                f"tokens: must be [{num_blocks}, block size] uint32 in C order, got {list(tokens.shape)} {tokens.dtype}"
            )
        self._num_blocks = num_blocks
        self._tokens = tokens
        self._row_bytes = tokens.shape[1] * tokens.itemsize
        self._bytes = tokens.data.cast("B")
        self._parent = np.full(num_blocks, _ABSENT, np.int32)
        # One more than there are blocks: as an index FIRST is the last, and what follows a root always is a family.
        self._child = np.full(num_blocks + 1, _NONE, np.int32)
        self._child[FIRST] = _SEVERAL
        # The same memory, faster to read one number at a time.
        self._parent_at = self._parent.data
        self._child_at = self._child.data
        # Of blocks with two children or more and of roots: their children, ordered by the bytes of their rows. Any
        # order would do in which equal beginnings stand together.
        self._families: dict[int, array[int]] = {}
        # Roots that have children, and family numbers of roots that no longer do.
        self._family_of_root: dict[bytes, int] = {}
        self._root_of_family: dict[int, bytes] = {}
        self._unused_families: list[int] = []

    def __contains__(self, block: int) -> bool:
        return self._parent_at[block] != _ABSENT

    # -- changing

    def add(self, blocks: Column, parents: Column, roots: Sequence[bytes]) -> None:
        """Enters absent blocks: block i after block `parents[i]`, which may be one of them too, or if that is FIRST
        after the root with the digest `roots[i]`.

        Raises InvariantError, and changes nothing, when a block is not absent.
        """
        if len(blocks) <= _FEW:
            self._add_few(blocks.tolist(), parents.tolist(), roots)
            return
        present = (self._parent[blocks] != _ABSENT).nonzero()[0]
        if len(present):
            raise InvariantError(f"block {blocks[present[0]]} is among the continuations already")
        before = self._child[parents]
        self._parent[blocks] = parents
        self._child[parents] = blocks
        taken = (before != _NONE).nonzero()[0]
        if len(taken):
            self._child[parents[taken]] = before[taken]
        # Where a parent has another child, from before or from this batch, or is a root.
        rest = (self._child[parents] != blocks).nonzero()[0].tolist()
        for position in rest:
            self._attach(int(blocks[position]), int(parents[position]), roots[position])

    def remove(self, blocks: Column) -> list[tuple[int, int]]:
        """Takes blocks out, each named once, and returns the children that stay, as orphans, with the parents they had.

        A block that was never added only loses its children. Whatever gets another content must pass here, or its
        children would be found after the new content. Cheapest where chains leave deepest block first.
        """
        if len(blocks) <= _FEW:
            ids = blocks.tolist()
            return self._cut(ids, ids)
        if self._parent_at[blocks[1]] == blocks[0]:
            blocks = blocks[::-1]
        # Inside a stretch in which each block is the only child of the next one both columns just forget. What is left
        # are its ends: the children of the deepest block, and the parent of the topmost.
        ends = (self._parent[blocks[:-1]] != blocks[1:]).nonzero()[0]
        deepest, topmost = [int(blocks[0])], [int(blocks[-1])]
        if len(ends):
            deepest, topmost = deepest + blocks[ends + 1].tolist(), blocks[ends].tolist() + topmost
        orphans = self._cut(deepest, topmost)
        self._parent[blocks] = _ABSENT
        self._child[blocks] = _NONE
        return orphans

    def replace(self, old: int, new: int) -> None:
        """Puts `new`, which is absent, has no children and holds the same tokens, where `old` is: after its parent and
        before its children. Raises InvariantError, and changes nothing, when it is not so.
        """
        if old not in self or new in self or self._child_at[new] != _NONE or self._row(old) != self._row(new):
            raise InvariantError(f"block {new} cannot take the place of block {old} among the continuations")
        parent, child = self._parent_at[old], self._child_at[old]
        self._parent_at[new], self._parent_at[old] = parent, _ABSENT
        if parent >= 0:
            self._child_at[parent] = new
        elif parent <= _MEMBER:
            members = self._families[_MEMBER - parent]
            members[members.index(old, bisect_left(members, self._row(old), key=self._row))] = new
        self._child_at[new], self._child_at[old] = child, _NONE
        if child == _SEVERAL:
            members = self._families[new] = self._families.pop(old)
            for member in members:
                self._parent_at[member] = _MEMBER - new
        elif child != _NONE:
            self._parent_at[child] = new

    def clear(self) -> None:
        """Takes every block out."""
        self._parent[:] = _ABSENT
        self._child[:FIRST] = _NONE
        self._families.clear()
        self._family_of_root.clear()
        self._root_of_family.clear()
        self._unused_families.clear()

    # -- asking

    def parent(self, block: int) -> int:
        """The parent block; FIRST when that is a root or not known."""
        parent = self._parent_at[block]
        if parent <= _MEMBER:
            parent = _MEMBER - parent
        return parent if 0 <= parent < self._num_blocks else FIRST

    def parents(self) -> Column:
        """`parent` of every block, [num_blocks]."""
        parents = np.where(self._parent <= _MEMBER, _MEMBER - self._parent, self._parent)
        return np.where((parents >= 0) & (parents < self._num_blocks), parents, FIRST).astype(np.int32)

    def follow(self, root: bytes, chunks: NDArray[np.uint32]) -> list[int]:
        """The longest run of blocks, each a child of the one before and the first of a root, that hold `chunks`,
        [n, block_size].
        """
        found: list[int] = []
        family = self._family_of_root.get(root)
        stride = _STRIDE
        while family is not None and len(found) < len(chunks):
            walked = self._only_children(family, min(stride, len(chunks) - len(found)))
            if walked:
                differs = self._tokens.take(walked, axis=0) != chunks[len(found) : len(found) + len(walked)]
                if differs.any():
                    return found + walked[: int(differs.argmax()) // differs.shape[1]]
                stride *= 2
            else:
                twin = self._twin(family, chunks[len(found)].tobytes())
                if twin is None:
                    break
                walked = [twin]
            found += walked
            family = walked[-1]
        return found

    def longest_run(self, parent: int | bytes, chunk: NDArray[np.uint32]) -> tuple[int, int]:
        """The child of a block, or of the root with this digest, that shares most leading tokens with `chunk`, and how
        many; (-1, 0) when no child shares the first.

        Of children that share as many it is the first in the family's order, so equal histories give equal answers.
        Tokens of `chunk` beyond a block are ignored.
        """
        family = self._family_of_root.get(parent) if isinstance(parent, bytes) else int(parent)
        if family is None:
            return -1, 0
        wanted = chunk.tobytes()[: self._row_bytes]
        only = self._child_at[family] if family < self._num_blocks else _SEVERAL
        if only == _NONE:
            return -1, 0
        if only != _SEVERAL:
            nearest: Sequence[int] = (only,)
        else:
            members = self._families[family]
            place = bisect_left(members, wanted, key=self._row)
            nearest = members[max(place - 1, 0) : place + 1]
        best, longest = -1, 0
        for block in nearest:
            run = _common_tokens(self._row(block), wanted)
            if run > longest:
                best, longest = block, run
        return best, longest

    def _only_children(self, family: int, limit: int) -> list[int]:
        """At most so many blocks that follow one another, each an only child."""
        walked: list[int] = []
        if family >= self._num_blocks:
            return walked
        child_at, block = self._child_at, family
        for _ in range(limit):
            block = child_at[block]
            if block < 0:
                break
            walked.append(block)
        return walked

    def _twin(self, family: int, row: bytes) -> int | None:
        """The member of a family with these tokens."""
        members = self._families.get(family, ())
        place = bisect_left(members, row, key=self._row)
        return members[place] if place < len(members) and self._row(members[place]) == row else None

    def _row(self, block: int) -> bytes:
        return bytes(self._bytes[block * self._row_bytes : (block + 1) * self._row_bytes])

    # -- one block

    def _add_few(self, blocks: list[int], parents: list[int], roots: Sequence[bytes]) -> None:
        for block in blocks:
            if self._parent_at[block] != _ABSENT:
                raise InvariantError(f"block {block} is among the continuations already")
        for position, block in enumerate(blocks):
            self._attach(block, parents[position], roots[position])

    def _attach(self, block: int, parent: int, root: bytes) -> None:
        """Makes a block the child of a block or, if that is FIRST, of a root."""
        if parent == FIRST:
            parent = self._root_family(root)
        else:
            other = self._child_at[parent]
            if other == _NONE:
                self._parent_at[block] = parent
                self._child_at[parent] = block
                return
            if other != _SEVERAL:
                self._families[parent] = array("i", [other])
                self._parent_at[other] = _MEMBER - parent
                self._child_at[parent] = _SEVERAL
        self._parent_at[block] = _MEMBER - parent
        insort_right(self._families[parent], block, key=self._row)

    def _root_family(self, root: bytes) -> int:
        """The number of a root's family, which is made if there is none."""
        family = self._family_of_root.get(root)
        if family is None:
            count = self._num_blocks + len(self._root_of_family)
            family = self._unused_families.pop() if self._unused_families else count
            self._family_of_root[root] = family
            self._root_of_family[family] = root
            self._families[family] = array("i")
        return family

    def _cut(self, deepest: list[int], topmost: list[int]) -> list[tuple[int, int]]:
        """Frees the children of the deepest block of each stretch of a chain, and the parent of its topmost block.
        Returns the children and the parents they had, without those that are the topmost of a stretch themselves.
        """
        orphans: list[tuple[int, int]] = []
        for block, top in zip(deepest, topmost, strict=True):
            child = self._child_at[block]
            if child != _NONE:
                members = self._families.pop(block) if child == _SEVERAL else (child,)
                for child in members:
                    self._parent_at[child] = _ORPHAN
                    orphans.append((child, block))
                self._child_at[block] = _NONE
            parent = self._parent_at[top]
            self._parent_at[top] = _ABSENT
            if parent >= 0:
                self._child_at[parent] = _NONE
            elif parent <= _MEMBER:
                self._leave_family(top, _MEMBER - parent)
        return [(child, block) for child, block in orphans if self._parent_at[child] == _ORPHAN]

    def _leave_family(self, block: int, family: int) -> None:
        """Takes a member out. One that is left becomes its parent's only child; the family of a root ends empty."""
        members = self._families[family]
        # Bisection finds the first of those with the same tokens.
        del members[members.index(block, bisect_left(members, self._row(block), key=self._row))]
        if family < self._num_blocks:
            if len(members) == 1:
                self._parent_at[members[0]] = family
                self._child_at[family] = members[0]
                del self._families[family]
        elif not members:
            del self._families[family]
            del self._family_of_root[self._root_of_family.pop(family)]
            self._unused_families.append(family)

    # -- proof

    def check_integrity(self, published: Mapping[int, int | bytes]) -> None:
        """Recomputes the index from the blocks that should be in it, each with its parent block or root.

        Each may be an orphan all the same: a parent that left may have come back as another block. Raises
        InvariantError with the numbers.
        """
        children: dict[int, list[int]] = {}
        for block, parent in enumerate(self._parent.tolist()):
            if (parent == _ABSENT) == (block in published):
                raise InvariantError(f"block {block} has the parent {parent}, published {published.get(block)!r}")
            if parent in (_ABSENT, _ORPHAN):
                continue
            family = _MEMBER - parent if parent <= _MEMBER else parent
            if self._root_of_family.get(family, family) != published[block]:
                raise InvariantError(f"block {block} is in family {family}, its parent is {published[block]!r}")
            if (parent <= _MEMBER) != (family in self._families):
                raise InvariantError(f"block {block} has the parent {parent}, families are {sorted(self._families)}")
            children.setdefault(family, []).append(block)
        for block, child in enumerate(self._child[:FIRST].tolist()):
            found = children.get(block, [])
            if child != (_NONE if not found else found[0] if len(found) == 1 else _SEVERAL):
                raise InvariantError(f"block {block} has the child {child}, those that name it as parent are {found}")
        for family, members in self._families.items():
            if sorted(members) != children.get(family) or (family < self._num_blocks and len(members) < 2):
                raise InvariantError(f"family {family}: {members.tolist()}, by their parents {children.get(family)}")
            if members.tolist() != sorted(members, key=self._row):
                raise InvariantError(f"family {family} is out of order: {members.tolist()}")
        numbers = {family for family in self._families if family >= self._num_blocks}
        if numbers != self._root_of_family.keys() or len(self._family_of_root) != len(numbers):
            raise InvariantError(f"{len(numbers)} families of roots, {len(self._family_of_root)} roots")
        if self._child[FIRST] != _SEVERAL:
            raise InvariantError(f"the child of FIRST reads {self._child[FIRST]}, must be {_SEVERAL}")


def _common_tokens(row: bytes, wanted: bytes) -> int:
    """Leading tokens that are the same; `row` has at least as many as `wanted`."""
    differing = int.from_bytes(row[: len(wanted)], "big") ^ int.from_bytes(wanted, "big")
    # The highest bit that differs lies in the first token that does.
    return (8 * len(wanted) - differing.bit_length()) // _TOKEN_BITS
