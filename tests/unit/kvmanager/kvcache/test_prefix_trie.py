"""The prefix trie alone; `test_prefix_trie_histories.py` holds it against a model."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from support.engine.arrays import ids, tokens
from support.engine.integrity import check_trie

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.prefix_trie import Node, PrefixTrie

ROOT, OTHER = [b"one root", b"another"]
NUM_BLOCKS = 40


def trie_of(rows: list[list[int]], parents: dict[int, Node]) -> PrefixTrie:
    """A trie over blocks that hold these tokens, with those of `parents` in it, in that order."""
    trie = PrefixTrie(tokens(rows))
    for block, parent in parents.items():
        trie.add(block, parent)
    return trie


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
    trie = PrefixTrie(rows)
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


def test_a_chain_costs_8_bytes_a_block_and_leaves_nothing_behind() -> None:
    count = 100_000
    chain, rows = np.arange(count, dtype=np.int32), np.zeros((count, 1), np.uint32)
    tracemalloc.start()
    try:
        trie = PrefixTrie(rows)
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
    trie = PrefixTrie(rows)
    for block, parent in ((0, ROOT), (1, 0), (2, 0)):
        trie.add(block, parent)
    rows[1] = 9
    with pytest.raises(InvariantError, match="has the children"):
        check_trie(trie, {0, 1, 2})
