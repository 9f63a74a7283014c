"""Random histories of the prefix trie, against a dictionary of entries that is searched from end to end."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.engine.arrays import ids, tokens
from support.engine.integrity import check_trie

from pagekv.kvmanager.kvcache.prefix_trie import Node, PrefixTrie

ROOTS = [b"one root", b"another"]
NUM_BLOCKS = 40


def common(a: list[int], b: list[int]) -> int:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))


@dataclass
class Entry:
    """A block as the model knows it."""

    row: list[int]
    parent: Node
    apart: bool = False


class Model:
    """A dictionary of entries; every answer looks at all of them."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}

    def remove(self, blocks: list[int]) -> list[int]:
        gone = set(blocks)
        while more := {b for b, entry in self.entries.items() if b not in gone and entry.parent in gone}:
            gone |= more
        self.entries = {block: entry for block, entry in self.entries.items() if block not in gone}
        return sorted(gone - set(blocks))

    def children(self, parent: Node) -> list[int]:
        return [block for block, entry in self.entries.items() if entry.parent == parent and not entry.apart]

    def longest(self, parent: Node, wanted: list[int]) -> int:
        return max((common(self.entries[child].row, wanted) for child in self.children(parent)), default=0)

    def match(self, root: bytes, rows: list[list[int]]) -> list[list[int]]:
        """Rows of the longest run; where two children hold the same tokens any of them will do, so all are tried."""
        parents: list[Node] = [root]
        for position, row in enumerate(rows):
            parents = [child for parent in parents for child in self.children(parent) if self.entries[child].row == row]
            if not parents:
                return rows[:position]
        return rows


class TrieMachine(RuleBasedStateMachine):
    """Chains and single blocks come, anything leaves, ids are used again; two tokens, so that prefixes collide."""

    @initialize(block_size=st.integers(1, 4))
    def start(self, block_size: int) -> None:
        self.size = block_size
        self.tokens = np.zeros((NUM_BLOCKS, block_size), np.uint32)
        self.trie = PrefixTrie(self.tokens)
        self.model = Model()
        # Children of one parent mostly differ in the table, but need not here.
        self.row = st.lists(st.integers(0, 1), min_size=block_size, max_size=block_size)

    def absent(self) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if block not in self.model.entries]

    def present(self) -> st.SearchStrategy[Node]:
        parents: list[Node] = [*ROOTS, *self.model.entries]
        return st.sampled_from(parents)

    def enter(self, data: st.DataObject, block: int, parent: Node, apart: bool = False) -> None:
        row = data.draw(self.row)
        self.tokens[block] = row
        self.model.entries[block] = Entry(row, parent, apart)

    @rule(data=st.data(), apart=st.sampled_from([False, False, True]))
    def add_chain(self, data: st.DataObject, apart: bool) -> None:
        absent = self.absent()
        assume(absent)
        parent = data.draw(self.present())
        blocks = data.draw(st.permutations(absent))[: data.draw(st.integers(1, 12))]
        for block, before in zip(blocks, [parent, *blocks[:-1]], strict=True):
            self.enter(data, block, before, apart and block == blocks[0])
        self.trie.add_chain(ids(blocks), parent, apart=apart)

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        absent = self.absent()
        assume(absent)
        block = data.draw(st.sampled_from(absent))
        parent = data.draw(self.present())
        self.enter(data, block, parent)
        self.trie.add(block, parent)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.permutations(range(NUM_BLOCKS)))[: data.draw(st.integers(1, 12))])

    @rule(data=st.data(), deepest_first=st.booleans())
    def remove_chain(self, data: st.DataObject, deepest_first: bool) -> None:
        assume(self.model.entries)
        chain = [data.draw(st.sampled_from(sorted(self.model.entries)))]
        while children := self.model.children(chain[-1]):
            chain.append(data.draw(st.sampled_from(children)))
        self.leave(chain[::-1] if deepest_first else chain)

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """Another copy of a block takes its place."""
        absent = self.absent()
        assume(absent and self.model.entries)
        old = data.draw(st.sampled_from(sorted(self.model.entries)))
        new = data.draw(st.sampled_from(absent))
        self.tokens[new] = self.tokens[old]
        self.trie.replace(old, new)
        self.model.entries[new] = self.model.entries.pop(old)
        for entry in self.model.entries.values():
            if entry.parent == old:
                entry.parent = new

    def leave(self, blocks: list[int]) -> None:
        wanted = self.model.remove(blocks)
        assert sorted(self.trie.remove(ids(blocks))) == wanted
        # The next content of an id has nothing to do with the last.
        self.tokens[blocks + wanted] = 7

    @rule()
    def clear(self) -> None:
        self.model.entries.clear()
        self.trie.clear()

    @rule(data=st.data())
    def longest_run(self, data: st.DataObject) -> None:
        wanted = data.draw(st.lists(st.integers(0, 1), max_size=self.size))
        for parent in [*ROOTS, *range(NUM_BLOCKS)]:
            block, run = self.trie.longest_run(parent, tokens(wanted))
            assert run == self.model.longest(parent, wanted)
            if run:
                assert block in self.model.children(parent)
                assert common(self.model.entries[block].row, wanted) == run
            else:
                assert block == -1

    @rule(data=st.data(), root=st.sampled_from(ROOTS))
    def match(self, data: st.DataObject, root: bytes) -> None:
        rows = data.draw(st.lists(self.row, min_size=1, max_size=4))
        found = self.trie.match(root, tokens(rows))
        assert [self.model.entries[block].row for block in found] == rows[: len(found)]
        assert [self.model.entries[block].parent for block in found] == [root, *found[:-1]][: len(found)]
        unique = {(str(entry.parent), tuple(entry.row)) for entry in self.model.entries.values()}
        if len(unique) == len(self.model.entries):
            assert rows[: len(found)] == self.model.match(root, rows)
            guess = data.draw(st.lists(st.integers(0, NUM_BLOCKS), max_size=4))
            for blocks in (found, guess, [*found[:1], *guess]):
                same = [left == right for left, right in zip(blocks, found, strict=False)]
                run = [*same, False].index(False)
                # One id that no pool of this size has tells of another pool.
                assert self.trie.verify(root, ids(blocks), tokens(rows)) == (0 if NUM_BLOCKS in blocks else run)

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "trie"):
            return
        entries = self.model.entries
        check_trie(self.trie, entries.keys())
        parents = {block: entry.parent for block, entry in entries.items()}
        assert {block: self.trie.parent(block) for block in range(NUM_BLOCKS) if block in self.trie} == parents
        assert self.trie.roots() == {block: parent for block, parent in parents.items() if isinstance(parent, bytes)}
        blocks = [parent if isinstance(parent := parents.get(b), int) else -1 for b in range(NUM_BLOCKS)]
        assert self.trie.parents(slice(None)).tolist() == blocks


TestTrieMachine = TrieMachine.TestCase
TestTrieMachine.settings = settings(
    max_examples=int(os.environ.get("PAGEKV_TEST_EXAMPLES", "40")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@given(
    st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3), min_size=1, max_size=30),
    st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3),
    st.integers(0, 3),
)
def test_any_tokens_compare_like_a_search_through_all(rows: list[list[int]], wanted: list[int], taken: int) -> None:
    wanted = [*rows[0][:taken], *wanted[taken:]]
    trie = PrefixTrie(tokens(rows))
    for block in range(len(rows)):
        trie.add(block, ROOTS[0])
    block, run = trie.longest_run(ROOTS[0], tokens(wanted))
    assert run == max(common(row, wanted) for row in rows)
    if run:
        assert common(rows[block], wanted) == run
