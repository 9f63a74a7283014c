"""The prefix trie: alone, and against a dictionary of entries that is searched from end to end."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray
from support.engine.block_ids import ids
from support.engine.integrity import check_trie

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.prefix_trie import Node, PrefixTrie

ROOT, OTHER = ROOTS = [b"one root", b"another"]
NUM_BLOCKS = 40


def tokens(ids: list[int] | list[list[int]]) -> NDArray[np.uint32]:
    return np.array(ids, np.uint32)


def trie_of(rows: list[list[int]], parents: dict[int, Node]) -> PrefixTrie:
    """A trie over blocks that hold these tokens, with those of `parents` in it, in that order."""
    trie = PrefixTrie(len(rows), tokens(rows))
    for block, parent in parents.items():
        trie.add(block, parent)
    return trie


def common(a: list[int], b: list[int]) -> int:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))


def test_the_child_with_the_longest_run_is_found() -> None:
    """A partial hit: three tokens of a block of four are copied."""
    rows = [[1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 9, 9], [5, 1, 1, 1], [9, 9, 9, 9]]
    trie = trie_of(rows, {0: ROOT, 1: 0, 2: 0, 3: 0, 4: 0})
    assert trie.longest_run(0, tokens([5, 6, 7, 1])) == (1, 3)
    assert trie.longest_run(0, tokens([5, 6, 9, 1])) == (2, 3)
    assert trie.longest_run(0, tokens([5, 1, 0, 0])) == (3, 2)
    assert trie.longest_run(0, tokens([5, 6, 7, 8])) == (1, 4)
    assert trie.longest_run(0, tokens([4, 6, 7, 8])) == (-1, 0)
    assert trie.longest_run(ROOT, tokens([1, 2, 9, 9])) == (0, 2)
    assert trie.longest_run(OTHER, tokens([1, 2, 9, 9])) == (-1, 0)
    assert trie.longest_run(4, tokens([1, 2, 9, 9])) == (-1, 0)


def test_a_run_is_no_longer_than_the_tokens_that_are_given() -> None:
    trie = trie_of([[1, 2, 3, 4]], {0: ROOT})
    assert trie.longest_run(ROOT, tokens([1, 2])) == (0, 2)
    assert trie.longest_run(ROOT, tokens([1, 2, 3, 4, 5])) == (0, 4)
    assert trie.longest_run(ROOT, tokens([])) == (-1, 0)


def test_token_ids_are_compared_whole() -> None:
    """Neighbours in order share bytes; a run counts whole tokens."""
    rows = [[0x01020304, 7], [0x01020305, 7], [0x02020304, 7], [0xFFFFFFFF, 7]]
    trie = trie_of(rows, dict.fromkeys(range(4), ROOT))
    for block, row in enumerate(rows):
        assert trie.longest_run(ROOT, tokens([row[0], 0])) == (block, 1)
    assert trie.longest_run(ROOT, tokens([0x01020306, 7])) == (-1, 0)


def test_a_chain_is_matched_by_its_tokens() -> None:
    """The leading run is found; what follows a removed block goes with it."""
    rows = [[i, i + 1] for i in range(0, 1200, 2)]
    trie = trie_of([*rows, [2, 9], [90, 91]], {})
    chain = list(range(600))
    trie.add_chain(ids(chain), ROOT)
    assert trie.match(ROOT, tokens(rows)) == chain
    assert trie.match(ROOT, tokens(rows[:7])) == chain[:7]
    assert trie.match(OTHER, tokens(rows)) == []
    assert trie.match(ROOT, tokens([*rows[:300], [2, 9], *rows[301:]])) == chain[:300]
    assert trie.match(299, tokens(rows[300:])) == chain[300:]
    trie.add(600, 0)
    trie.add(601, 600)
    assert trie.match(ROOT, tokens([[0, 1], [2, 9], [90, 91], [90, 91]])) == [0, 600, 601]
    assert trie.match(ROOT, tokens(rows)) == chain
    assert sorted(trie.remove(ids([300]))) == chain[301:]
    assert trie.match(ROOT, tokens(rows)) == chain[:300]
    check_trie(trie, {*chain[:300], 600, 601})


def test_a_run_that_is_known_is_verified_up_to_what_differs() -> None:
    """Ids of another pool, of blocks that are gone and of another chain end it as other tokens do."""
    rows = [[i, i + 1] for i in range(0, 1200, 2)]
    trie = trie_of([*rows, [90, 91]], {})
    chain = list(range(600))
    trie.add_chain(ids(chain), ROOT)

    def verify(blocks: list[int], wanted: list[list[int]], root: bytes = ROOT) -> int:
        return trie.verify(root, ids(blocks), tokens(wanted))

    assert verify(chain, rows) == 600
    assert verify(chain, rows[:7]) == verify(chain[:7], rows) == 7
    assert verify(chain, [*rows[:599], [1198, 0]]) == 599
    assert verify(chain, [[5, 1], *rows[1:]]) == verify([], rows) == verify(chain, []) == 0
    assert verify(chain, rows, OTHER) == verify(chain[1:], rows[1:]) == 0
    assert verify([*chain[:4], 600, *chain[5:]], rows) == verify([0, 1, 2, 3, 5], rows) == 4
    assert verify([*chain, 601], rows) == verify([601], rows) == verify([600], [[90, 91]]) == 0
    trie.remove(ids([300]))
    assert verify(chain, rows) == 300
    assert verify([0, 1, 599], [*rows[:2], rows[599]]) == 2


def test_what_takes_the_place_of_a_removed_block_has_none_of_its_children() -> None:
    rows = tokens([[1, 1], [2, 2], [3, 3]])
    trie = PrefixTrie(3, rows)
    for block, parent in ((0, ROOT), (1, 0), (2, 0)):
        trie.add(block, parent)
    assert sorted(trie.remove(ids([0]))) == [1, 2]
    assert (trie.parent(1), 1 in trie, 0 in trie) == (None, False, False)
    rows[0] = [7, 7]
    trie.add(0, OTHER)
    assert trie.longest_run(0, tokens([2, 2])) == (-1, 0)
    assert trie.longest_run(OTHER, tokens([7, 7])) == (0, 2)
    assert trie.roots() == {0: OTHER}
    check_trie(trie, {0})


def test_what_stands_apart_is_not_found_by_tokens_and_leaves_with_its_parent() -> None:
    """As blocks with media do, two pictures with the same tokens among them."""
    trie = trie_of([[1, 1], [2, 2], [2, 2], [3, 3], [2, 2], [2, 2]], {0: ROOT, 1: 0})
    trie.add_chain(ids([2, 3]), 0, apart=True)
    trie.add_chain(ids([4]), 0, apart=True)
    trie.add_chain(ids([5]), ROOT, apart=True)
    check_trie(trie, {0, 1, 2, 3, 4, 5})
    assert [trie.parent(block) for block in (2, 3, 4, 5)] == [0, 2, 0, ROOT]
    assert trie.match(ROOT, tokens([[1, 1], [2, 2], [3, 3]])) == [0, 1]
    assert trie.match(ROOT, tokens([[2, 2]])) == []
    assert trie.longest_run(2, tokens([3, 3])) == (3, 2)
    assert trie.follow(ids([0, 2, 3]), ROOT).tolist() == [True, True, True]
    assert trie.follow(ids([4, 3]), 0).tolist() == [True, False]
    assert sorted(trie.remove(ids([0]))) == [1, 2, 3, 4]
    check_trie(trie, {5})
    trie.remove(ids([5]))
    check_trie(trie, set())


def test_a_block_that_was_never_added_can_be_removed() -> None:
    trie = trie_of([[1, 1]], {})
    assert trie.remove(ids([0])) == []
    check_trie(trie, set())


def test_misuse_is_refused_and_changes_nothing() -> None:
    trie = trie_of([[i] for i in range(NUM_BLOCKS)], {5: ROOT})
    with pytest.raises(InvariantError, match="block 5 is in the prefix trie already"):
        trie.add(5, OTHER)
    with pytest.raises(InvariantError, match="block 5 is in the prefix trie already"):
        trie.add_chain(ids([6, 5]), ROOT)
    for again, parent in ((5, 6), (5, 5), (8, 7)):
        with pytest.raises(InvariantError):
            trie.add(again, parent)
    with pytest.raises(InvariantError, match="block 8 follows block 7, which is not"):
        trie.add(8, 7)
    with pytest.raises(InvariantError, match="block 8 follows block 7, which is not"):
        trie.add_chain(ids([8, 9]), 7)
    check_trie(trie, {5})


def test_only_a_copy_takes_a_place() -> None:
    trie = trie_of([[1], [1], [2], [3], [1]], {0: ROOT, 3: 0, 4: OTHER})
    for old, new in ((0, 2), (1, 3), (0, 4), (1, 0)):
        with pytest.raises(InvariantError, match="cannot take the place"):
            trie.replace(old, new)
        check_trie(trie, {0, 3, 4})
    trie.replace(0, 1)
    assert trie.match(ROOT, tokens([[1], [3]])) == [1, 3]
    check_trie(trie, {1, 3, 4})


def test_all_children_follow_what_takes_the_place_of_their_parent() -> None:
    trie = trie_of([[1], [1], [2], [3]], {0: ROOT, 2: 0, 3: 0})
    trie.replace(0, 1)
    assert [trie.match(ROOT, tokens([[1], [last]])) for last in (2, 3)] == [[1, 2], [1, 3]]
    check_trie(trie, {1, 2, 3})


def test_rows_must_be_what_the_trie_reads() -> None:
    for rows in (np.zeros((3, 2), np.uint32), np.zeros((4, 2), np.int64), np.zeros((4, 4), np.uint32)[:, ::2]):
        with pytest.raises(ValueError, match="tokens: must be"):
            PrefixTrie(4, rows)  # type: ignore[arg-type]  # the mistake under test


def test_a_chain_costs_8_bytes_a_block_and_leaves_nothing_behind() -> None:
    count = 100_000
    chain, rows = np.arange(count, dtype=np.int32), np.zeros((count, 1), np.uint32)
    tracemalloc.start()
    try:
        trie = PrefixTrie(count, rows)
        trie.add_chain(chain, ROOT)
        assert tracemalloc.get_traced_memory()[0] <= 8 * count + 5000
        assert trie.remove(chain[::-1].copy()) == []
        for turn in range(5):
            for block in range(300):
                trie.add(block, b"%d" % (300 * turn + block))
            trie.remove(chain[:300])
        assert tracemalloc.get_traced_memory()[0] <= 8 * count + 50_000
    finally:
        tracemalloc.stop()


def test_check_trie_compares_with_the_blocks_that_should_be_there() -> None:
    trie = trie_of([[1], [2], [3], [4], [5]], {0: ROOT, 1: 0, 2: 0, 3: 1})
    check_trie(trie, {0, 1, 2, 3})
    for wrong in ({0, 1, 2}, {0, 1, 2, 3, 4}, {0, 1, 2, 4}):
        with pytest.raises(InvariantError):
            check_trie(trie, wrong)


def test_check_trie_sees_children_out_of_order() -> None:
    rows = tokens([[1], [2], [3]])
    trie = PrefixTrie(3, rows)
    for block, parent in ((0, ROOT), (1, 0), (2, 0)):
        trie.add(block, parent)
    rows[1] = 9
    with pytest.raises(InvariantError, match="has the children"):
        check_trie(trie, {0, 1, 2})


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
        self.trie = PrefixTrie(NUM_BLOCKS, self.tokens)
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
    trie = trie_of(rows, dict.fromkeys(range(len(rows)), ROOT))
    block, run = trie.longest_run(ROOT, tokens(wanted))
    assert run == max(common(row, wanted) for row in rows)
    if run:
        assert common(rows[block], wanted) == run
