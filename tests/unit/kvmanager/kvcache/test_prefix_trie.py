from __future__ import annotations

import os
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache import prefix_trie as continuations
from pagekv.kvmanager.kvcache.prefix_trie import FIRST, PrefixTrie

ROOTS = [b"one root", b"another"]
NUM_BLOCKS = 40


def column(ids: list[int]) -> NDArray[np.int32]:
    return np.array(ids, np.int32)


def chunk(tokens: list[int] | list[list[int]]) -> NDArray[np.uint32]:
    return np.array(tokens, np.uint32)


def index(rows: list[list[int]]) -> PrefixTrie:
    """An index over blocks that hold these tokens, none of them in it."""
    return PrefixTrie(len(rows), np.array(rows, np.uint32))


def common(a: list[int], b: list[int]) -> int:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))


def test_the_child_with_the_longest_run_is_found() -> None:
    """CHECKLIST J4: the sources' example copies three tokens of a block of four."""
    them = index([[1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 9, 9], [5, 1, 1, 1], [9, 9, 9, 9]])
    them.add(column([0, 1, 2, 3, 4]), column([FIRST, 0, 0, 0, 0]), ROOTS[:1] * 5)
    assert them.longest_run(0, chunk([5, 6, 7, 1])) == (1, 3)
    assert them.longest_run(0, chunk([5, 6, 9, 1])) == (2, 3)
    assert them.longest_run(0, chunk([5, 1, 0, 0])) == (3, 2)
    assert them.longest_run(0, chunk([5, 6, 7, 8])) == (1, 4)
    assert them.longest_run(0, chunk([4, 6, 7, 8])) == (-1, 0)
    assert them.longest_run(ROOTS[0], chunk([1, 2, 9, 9])) == (0, 2)
    assert them.longest_run(ROOTS[1], chunk([1, 2, 9, 9])) == (-1, 0)
    assert them.longest_run(4, chunk([1, 2, 9, 9])) == (-1, 0)


def test_a_run_is_no_longer_than_what_is_asked_for() -> None:
    them = index([[1, 2, 3, 4]])
    them.add(column([0]), column([FIRST]), ROOTS[:1])
    assert them.longest_run(ROOTS[0], chunk([1, 2])) == (0, 2)
    assert them.longest_run(ROOTS[0], chunk([1, 2, 3, 4, 5])) == (0, 4)
    assert them.longest_run(ROOTS[0], chunk([])) == (-1, 0)


def test_token_ids_are_compared_whole() -> None:
    """Neighbours in order share bytes; a run counts whole tokens."""
    rows = [[0x01020304, 7], [0x01020305, 7], [0x02020304, 7], [0xFFFFFFFF, 7]]
    them = index(rows)
    them.add(column([0, 1, 2, 3]), column([FIRST] * 4), ROOTS[:1] * 4)
    for block, row in enumerate(rows):
        assert them.longest_run(ROOTS[0], chunk([row[0], 0])) == (block, 1)
    assert them.longest_run(ROOTS[0], chunk([0x01020306, 7])) == (-1, 0)


def test_a_chain_is_followed_by_its_tokens() -> None:
    """CHECKLIST F1: the leading run; what stands behind a hole is not found."""
    rows = [[i, i + 1] for i in range(0, 1200, 2)]
    them = index([*rows, [2, 9], [90, 91]])
    chain = list(range(600))
    them.add(column(chain), column([FIRST, *chain[:-1]]), ROOTS[:1] * 600)
    assert them.follow(ROOTS[0], chunk(rows)) == chain
    assert them.follow(ROOTS[0], chunk(rows[:7])) == chain[:7]
    assert them.follow(ROOTS[1], chunk(rows)) == []
    assert them.follow(ROOTS[0], chunk([*rows[:300], [2, 9], *rows[301:]])) == chain[:300]
    # A second child of the first block, which is then no longer followed without looking.
    them.add(column([600, 601]), column([0, 600]), ROOTS[:1] * 2)
    assert them.follow(ROOTS[0], chunk([[0, 1], [2, 9], [90, 91], [90, 91]])) == [0, 600, 601]
    assert them.follow(ROOTS[0], chunk(rows)) == chain
    assert them.remove(column([300])) == [(301, 300)]
    assert them.follow(ROOTS[0], chunk(rows)) == chain[:300]


def test_children_of_an_evicted_block_are_named_and_not_found_after_what_takes_its_place() -> None:
    tokens = np.array([[1, 1], [2, 2], [3, 3]], np.uint32)
    them = PrefixTrie(3, tokens)
    them.add(column([0, 1, 2]), column([FIRST, 0, 0]), ROOTS[:1] * 3)
    assert them.remove(column([0])) == [(1, 0), (2, 0)]
    assert (them.parent(1), 1 in them, 0 in them) == (FIRST, True, False)
    tokens[0] = [7, 7]
    them.add(column([0]), column([FIRST]), ROOTS[1:])
    assert them.longest_run(0, chunk([2, 2])) == (-1, 0)
    assert them.longest_run(ROOTS[1], chunk([7, 7])) == (0, 2)
    them.check_integrity({0: ROOTS[1], 1: 0, 2: 0})


def test_a_block_that_was_never_added_can_leave() -> None:
    """A block with media has no place in the index: its tokens do not identify it. Those after it may have one."""
    them = index([[1, 1], [2, 2], [3, 3]])
    assert them.remove(column([2])) == []
    them.add(column([1]), column([0]), ROOTS[:1])
    assert them.parent(1) == 0
    assert them.longest_run(0, chunk([2, 3])) == (1, 1)
    assert them.remove(column([0])) == [(1, 0)]
    assert them.longest_run(0, chunk([2, 3])) == (-1, 0)


def test_what_is_in_already_is_refused_and_nothing_changes() -> None:
    them = index([[i] for i in range(NUM_BLOCKS)])
    them.add(column([5]), column([FIRST]), ROOTS[:1])
    for blocks in ([6, 5], list(range(NUM_BLOCKS))):
        with pytest.raises(InvariantError, match="block 5 is"):
            them.add(column(blocks), column([FIRST] * len(blocks)), ROOTS[:1] * len(blocks))
        them.check_integrity({5: ROOTS[0]})


def test_only_a_copy_takes_a_place() -> None:
    them = index([[1], [1], [2], [1], [1]])
    them.add(column([0, 4]), column([FIRST, 3]), ROOTS[:1] * 2)
    for old, new in ((0, 2), (1, 3), (0, 4), (0, 3)):
        with pytest.raises(InvariantError, match="cannot take the place"):
            them.replace(old, new)
        them.check_integrity({0: ROOTS[0], 4: 3})
    them.replace(0, 1)
    them.check_integrity({1: ROOTS[0], 4: 3})


def test_rows_must_be_what_the_index_reads() -> None:
    for tokens in (np.zeros((3, 2), np.uint32), np.zeros((4, 2), np.int64), np.zeros((4, 4), np.uint32)[:, ::2]):
        with pytest.raises(ValueError, match="tokens: must be"):
            PrefixTrie(4, tokens)  # type: ignore[arg-type]  # the mistake under test


def test_a_chain_costs_8_bytes_a_block() -> None:
    """Memory per block in the usual case, every block the only child of the one before."""
    count = 100_000
    them = PrefixTrie(count, np.zeros((count, 1), np.uint32))
    chain = np.arange(count, dtype=np.int32)
    them.add(chain, chain - 1, ROOTS[:1] * count)
    columns = (them._parent, them._child)
    assert sum(part.nbytes for part in columns) <= 8 * count + 64
    assert all(part.nbytes == memoryview(part).nbytes for part in (them._parent_at, them._child_at))
    # Nothing else grows: one family, that of the root.
    assert (len(them._families), len(them._family_of_root), len(them._root_of_family)) == (1, 1, 1)
    assert them.remove(chain[::-1].copy()) == []
    assert (len(them._families), len(them._family_of_root), len(them._root_of_family)) == (0, 0, 0)


def test_families_leave_nothing_behind() -> None:
    count = 300
    them = index([[i] for i in range(count)])
    for turn in range(4):
        roots = [b"%d" % (turn * count + block) for block in range(count)]
        them.add(column(list(range(count))), column([FIRST] * count), roots)
        them.check_integrity(dict(enumerate(roots)))
        them.remove(column(list(range(count))))
        assert not them._families
        assert not them._family_of_root
        assert len(them._unused_families) == count


@pytest.mark.parametrize("damage", ["parent", "child", "family", "order", "root", "slot"])
def test_check_integrity_sees_damage(damage: str) -> None:
    them = index([[1], [2], [3], [4], [5]])
    them.add(column([0, 1, 2, 3]), column([FIRST, 0, 0, 1]), ROOTS[:1] * 4)
    right: dict[int, int | bytes] = {0: ROOTS[0], 1: 0, 2: 0, 3: 1}
    them.check_integrity(right)
    if damage == "parent":
        them._parent[3] = 2
    elif damage == "child":
        them._child[4] = 3
    elif damage == "family":
        del them._families[0][0]
    elif damage == "order":
        them._families[0].reverse()
    elif damage == "root":
        them._family_of_root[b"stray"] = 77
    else:
        them._child[FIRST] = 0
    with pytest.raises(InvariantError):
        them.check_integrity(right)
    with pytest.raises(InvariantError):
        index([[1]]).check_integrity({0: ROOTS[0]})


@dataclass
class Entry:
    """A block as the model knows it; no parent: an orphan."""

    row: list[int]
    parent: int | bytes | None


class Model:
    """A dictionary of entries; every answer looks at all of them."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}

    def remove(self, blocks: list[int]) -> list[tuple[int, int]]:
        gone = set(blocks)
        self.entries = {block: entry for block, entry in self.entries.items() if block not in gone}
        orphans = []
        for block, entry in self.entries.items():
            if isinstance(entry.parent, int) and entry.parent in gone:
                orphans.append((block, entry.parent))
                entry.parent = None
        return sorted(orphans)

    def children(self, parent: int | bytes) -> list[int]:
        return [block for block, entry in self.entries.items() if entry.parent == parent]

    def longest(self, parent: int | bytes, wanted: list[int]) -> int:
        return max((common(self.entries[child].row, wanted) for child in self.children(parent)), default=0)

    def follow(self, root: bytes, rows: list[list[int]]) -> list[list[int]]:
        """Rows of the longest run; where two children hold the same tokens any of them will do, so all are tried."""
        parents: list[int | bytes] = [root]
        for position, row in enumerate(rows):
            parents = [child for parent in parents for child in self.children(parent) if self.entries[child].row == row]
            if not parents:
                return rows[:position]
        return rows


class ContinuationsMachine(RuleBasedStateMachine):
    """Chains and loose batches come, anything leaves, ids are used again; two tokens, so that prefixes collide."""

    @initialize(block_size=st.integers(1, 4), few=st.sampled_from([1, 4, 1000]), stride=st.sampled_from([1, 256]))
    def start(self, block_size: int, few: int, stride: int) -> None:
        # Small batches and large ones take different ways, which must lead to the same place.
        self.bounds = mock.patch.multiple(continuations, _FEW=few, _STRIDE=stride)
        self.bounds.start()
        self.size = block_size
        self.tokens = np.zeros((NUM_BLOCKS, block_size), np.uint32)
        self.index = PrefixTrie(NUM_BLOCKS, self.tokens)
        self.model = Model()
        # Children of one parent mostly differ in the table, but need not here.
        self.row = st.lists(st.integers(0, 1), min_size=block_size, max_size=block_size)

    def absent(self) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if block not in self.model.entries]

    def enter(self, blocks: list[int], parents: list[int], roots: list[bytes], rows: list[list[int]]) -> None:
        for block, parent, root, row in zip(blocks, parents, roots, rows, strict=True):
            self.tokens[block] = row
            self.model.entries[block] = Entry(row, root if parent == FIRST else parent)
        self.index.add(column(blocks), column(parents), roots)

    @rule(data=st.data())
    def add_chain(self, data: st.DataObject) -> None:
        absent = self.absent()
        assume(absent)
        blocks = data.draw(st.permutations(absent))[: data.draw(st.integers(1, 12))]
        first = data.draw(st.sampled_from([FIRST, FIRST, *(b for b in range(NUM_BLOCKS) if b not in blocks)]))
        rows = [data.draw(self.row) for _ in blocks]
        self.enter(blocks, [first, *blocks[:-1]], [data.draw(st.sampled_from(ROOTS))] * len(blocks), rows)

    @rule(data=st.data())
    def add_batch(self, data: st.DataObject) -> None:
        """Each after any block, in the batch or not, in the index or not."""
        absent = self.absent()
        assume(absent)
        blocks = data.draw(st.permutations(absent))[: data.draw(st.integers(1, 10))]
        parents = []
        for position in range(len(blocks)):
            others = [block for block in range(NUM_BLOCKS) if block not in blocks[position:]]
            parents.append(data.draw(st.sampled_from([FIRST, *others])))
        order = data.draw(st.permutations(range(len(blocks))))
        self.enter(
            [blocks[i] for i in order],
            [parents[i] for i in order],
            [data.draw(st.sampled_from(ROOTS)) for _ in order],
            [data.draw(self.row) for _ in order],
        )

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        blocks = data.draw(st.permutations(range(NUM_BLOCKS)))[: data.draw(st.integers(1, 12))]
        self.leave(blocks)

    @rule(data=st.data(), deepest_first=st.booleans())
    def remove_chain(self, data: st.DataObject, deepest_first: bool) -> None:
        assume(self.model.entries)
        chain = [data.draw(st.sampled_from(sorted(self.model.entries)))]
        while children := [child for child in self.model.children(chain[-1]) if child not in chain]:
            chain.append(data.draw(st.sampled_from(children)))
        self.leave(chain[::-1] if deepest_first else chain)

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """Another copy of a block takes its place."""
        parents = {entry.parent for entry in self.model.entries.values()}
        childless = [block for block in self.absent() if block not in parents]
        assume(childless and self.model.entries)
        old = data.draw(st.sampled_from(sorted(self.model.entries)))
        new = data.draw(st.sampled_from(childless))
        self.tokens[new] = self.tokens[old]
        self.index.replace(old, new)
        self.model.entries[new] = self.model.entries.pop(old)
        for entry in self.model.entries.values():
            if entry.parent == old and isinstance(entry.parent, int):
                entry.parent = new

    def leave(self, blocks: list[int]) -> None:
        wanted = self.model.remove(blocks)
        assert sorted(self.index.remove(column(blocks))) == wanted
        # The next content of an id has nothing to do with the last.
        self.tokens[blocks] = 7

    @rule()
    def clear(self) -> None:
        self.model.entries.clear()
        self.index.clear()

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        wanted = data.draw(st.lists(st.integers(0, 1), max_size=self.size))
        for parent in [*ROOTS, *range(NUM_BLOCKS)]:
            block, run = self.index.longest_run(parent, chunk(wanted))
            assert run == self.model.longest(parent, wanted)
            if run:
                assert block in self.model.children(parent)
                assert common(self.model.entries[block].row, wanted) == run
            else:
                assert block == -1

    @rule(data=st.data(), root=st.sampled_from(ROOTS))
    def follow(self, data: st.DataObject, root: bytes) -> None:
        rows = data.draw(st.lists(self.row, min_size=1, max_size=4))
        found = self.index.follow(root, chunk(rows))
        assert [self.model.entries[block].row for block in found] == rows[: len(found)]
        assert [self.model.entries[block].parent for block in found] == [root, *found[:-1]][: len(found)]
        unique = {(str(entry.parent), tuple(entry.row)) for entry in self.model.entries.values()}
        if len(unique) == len(self.model.entries):
            assert rows[: len(found)] == self.model.follow(root, rows)

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity(
            {b: e.parent if e.parent is not None else b"" for b, e in self.model.entries.items()}
        )
        for block, entry in self.model.entries.items():
            assert self.index.parent(block) == (entry.parent if isinstance(entry.parent, int) else FIRST)
        assert self.index.parents().tolist() == [self.index.parent(block) for block in range(NUM_BLOCKS)]

    def teardown(self) -> None:
        if hasattr(self, "bounds"):
            self.bounds.stop()


TestContinuationsMachine = ContinuationsMachine.TestCase
TestContinuationsMachine.settings = settings(
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
    them = index(rows)
    them.add(column(list(range(len(rows)))), column([FIRST] * len(rows)), ROOTS[:1] * len(rows))
    block, run = them.longest_run(ROOTS[0], chunk(wanted))
    assert run == max(common(row, wanted) for row in rows)
    if run:
        assert common(rows[block], wanted) == run
