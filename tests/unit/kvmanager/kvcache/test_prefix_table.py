"""The prefix table alone: what enters, what is found, collisions, copies, and what leaves with what."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from support.engine.arrays import ids
from support.engine.integrity import check_table

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import block_digest, chain_digests, root_digest, token_bytes
from pagekv.kvmanager.kvcache.prefix_table import Added, PrefixTable

ROOT = root_digest("model", "", "")
SIZE = 2


def rows(tokens: list[int]) -> NDArray[np.uint32]:
    return np.array(tokens, np.uint32).reshape(-1, SIZE)


class Table(PrefixTable):
    """A table of 12 blocks, with its column of holders."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.holders = np.ones(12, np.int32)
        super().__init__(12, SIZE, self.holders, clock)

    def publish(
        self, blocks: list[int], tokens: list[int], first: int = 0, digests: list[bytes] | None = None
    ) -> Added:
        """Adds the blocks of a prompt from logical block `first` on; `blocks` are those."""
        digests = chain_digests(ROOT, token_bytes(tokens), SIZE) if digests is None else digests
        parent = digests[first - 1] if first else ROOT
        added = self.add_chain(
            ids(blocks), digests[first:], parent, rows(tokens)[first:], first=first == 0, media=False
        )
        check_table(self)
        return added

    def found(self, tokens: list[int]) -> list[int]:
        """Both ways to find cached blocks, which must agree."""
        blocks, collided = self.match(ROOT, chain_digests(ROOT, token_bytes(tokens), SIZE), rows(tokens))
        assert not collided
        assert self.trie.match(ROOT, rows(tokens)) == blocks
        return blocks


def test_a_chain_is_found_both_ways_and_tells_what_it_is() -> None:
    table = Table()
    tokens = [1, 2, 3, 4, 5, 6]
    assert table.publish([4, 2, 7], tokens) == Added([0, 1, 2], [], [], False)
    digests = chain_digests(ROOT, token_bytes(tokens), SIZE)
    assert len(table) == 3
    assert table.found(tokens) == [4, 2, 7]
    assert table.found([1, 2, 3, 4, 9, 9]) == [4, 2]
    assert table.digests([4, 2, 7]) == digests
    assert [table.parent(block) for block in (4, 2, 7)] == [ROOT, *digests[:-1]]
    assert [table.lookup(digest) for digest in digests] == [4, 2, 7]
    assert (table.digest(0), table.parent(0)) == (None, None)
    assert table.token_ids(2) == [3, 4]
    assert table.tokens(ids([7, 4])).tolist() == [[5, 6], [1, 2]]
    assert list(table.map.newest()) == digests[::-1]


def test_the_longest_run_of_tokens_behind_a_block_is_found() -> None:
    table = Table()
    table.publish([0, 1], [1, 2, 3, 4])
    table.publish([2], [1, 2, 3, 9], first=1)
    assert table.trie.longest_run(0, np.array([3, 9], np.uint32)) == (2, 2)
    assert table.trie.longest_run(0, np.array([3, 5], np.uint32)) == (1, 1)
    assert table.trie.longest_run(ROOT, np.array([1, 7], np.uint32)) == (0, 1)
    assert table.trie.longest_run(1, np.array([1, 7], np.uint32)) == (-1, 0)


def test_a_block_enters_only_after_its_parent() -> None:
    table = Table()
    assert table.publish([1, 2], [1, 2, 3, 4, 5, 6], first=1) == Added([], [], [], False)
    assert len(table) == 0
    table.publish([0], [1, 2])
    assert table.publish([1, 2], [1, 2, 3, 4, 5, 6], first=1) == Added([0, 1], [], [], False)


def test_a_copy_of_a_held_block_remains_private_and_what_follows_it_enters() -> None:
    table = Table()
    table.publish([0], [1, 2])
    assert table.publish([1, 2], [1, 2, 3, 4]) == Added([1], [], [], False)
    assert table.digest(1) is None
    assert table.found([1, 2, 3, 4]) == [0, 2]


@pytest.mark.parametrize("followers", [0, 1, 2])
def test_a_copy_of_a_block_that_nobody_holds_takes_its_entry(followers: int) -> None:
    """The blocks after the copy are in use: a parent that is evicted before its children would leave a hole."""
    table = Table(clock=lambda: 5.0)
    table.publish([0], [1, 2])
    for follower in range(followers):
        table.publish([3 + follower], [1, 2, 3, follower], first=1)
    table.holders[0] = 0
    assert table.publish([1, 2], [1, 2, 7, 7]) == Added([1], [0], [1], False)
    assert table.found([1, 2, 7, 7]) == [1, 2]
    assert table.digest(0) is None
    for follower in range(followers):
        assert table.found([1, 2, 3, follower]) == [1, 3 + follower]
    assert table.age_s(1) == 0.0


@pytest.mark.parametrize("digests", [[b"x" * 32] * 2, [b"x" * 32, b"y" * 32]])
def test_a_digest_of_another_content_is_a_collision_and_nothing_enters_after_it(digests: list[bytes]) -> None:
    table = Table()
    table.publish([0], [1, 2], digests=[digests[-1]])
    assert table.publish([1, 2, 3], [3, 4, 5, 6, 7, 8], digests=[*digests, b"z" * 32]).collided
    assert table.lookup(b"z" * 32) is None
    assert table.lookup(digests[-1]) == 0
    assert table.match(ROOT, [digests[-1]], rows([1, 2])) == ([0], False)
    assert table.match(ROOT, [digests[-1]], rows([3, 4])) == ([], True)
    assert table.match(ROOT, [b"unknown" * 4], rows([3, 4])) == ([], False)


def test_the_same_tokens_after_another_parent_are_a_collision() -> None:
    table = Table()
    table.publish([0, 1], [1, 2, 5, 5], digests=[b"a" * 32, b"b" * 32])
    assert table.publish([2, 3], [3, 4, 5, 5], digests=[b"c" * 32, b"b" * 32]) == Added([0], [], [], True)


def test_what_follows_leaves_with_a_block() -> None:
    table = Table()
    table.publish([0, 1, 2], [1, 2, 3, 4, 5, 6])
    table.publish([3], [1, 2, 9, 9], first=1)
    removed, digests = table.remove(ids([1]))
    assert removed.tolist() == [1, 2]
    assert digests == chain_digests(ROOT, token_bytes([1, 2, 3, 4, 5, 6]), SIZE)[1:]
    check_table(table)
    assert table.found([1, 2, 9, 9]) == [0, 3]
    assert sorted(table.remove(ids([0]))[0].tolist()) == [0, 3]
    assert len(table) == 0
    with pytest.raises(InvariantError, match="block 5 holds a digest that the prefix table maps elsewhere"):
        table.remove(ids([5]))


def test_blocks_with_media_are_found_by_digest_alone() -> None:
    table = Table()
    table.publish([0], [1, 2])
    (parent,) = table.digests([0])
    pictures = [block_digest(parent, token_bytes([7, 7]), [(0, name)]) for name in ("cat", "dog")]
    for block, digest in enumerate(pictures, 1):
        table.add_chain(ids([block]), [digest], parent, rows([7, 7]), first=False, media=True)
    check_table(table)
    assert [table.lookup(digest) for digest in pictures] == [1, 2]
    assert [table.parent(block) for block in (1, 2)] == [parent, parent]
    assert table.trie.match(ROOT, rows([1, 2, 7, 7])) == [0]
    assert [table.trie.verify(ROOT, ids([0, block]), rows([1, 2, 7, 7])) for block in (1, 2)] == [1, 1]
    # A copy with the same digest and parent; the first one is held by nobody.
    table.holders[1] = 0
    added = table.add_chain(ids([3]), pictures[:1], parent, rows([7, 7]), first=False, media=True)
    assert added == Added([], [1], [3], False)
    columns = table.columns()
    assert (columns.media, columns.parents[[2, 3]].tolist()) == ({2, 3}, [0, 0])
    # Both leave with the block before, held or not.
    assert sorted(table.remove(ids([0]))[0].tolist()) == [0, 2, 3]
    check_table(table)
    assert len(table) == 0


def test_text_with_the_digest_of_a_block_with_media_is_a_collision() -> None:
    table = Table()
    table.add_chain(ids([0]), [b"a" * 32], ROOT, rows([1, 2]), first=True, media=True)
    assert table.publish([1], [1, 2], digests=[b"a" * 32]).collided
    assert table.trie.match(ROOT, rows([1, 2])) == []
    assert (table.is_entered(0), table.is_entered(1)) == (True, False)


def test_a_digest_after_another_block_is_a_collision_too() -> None:
    """Digests of whole chains may collide, so that tokens of single blocks tell nothing."""
    table = Table()
    table.publish([0, 1], [1, 2, 5, 5], digests=[b"a" * 32, b"b" * 32])
    table.publish([2], [3, 4], digests=[b"c" * 32])
    assert table.match(ROOT, [b"a" * 32, b"b" * 32], rows([1, 2, 5, 5])) == ([0, 1], False)
    assert table.match(ROOT, [b"c" * 32, b"b" * 32], rows([3, 4, 5, 5])) == ([2], True)
    assert table.match(b"another root", [b"a" * 32], rows([1, 2])) == ([], True)
    assert table.match(0, [b"b" * 32], rows([5, 5])) == ([1], False)


# -- twins


@pytest.mark.parametrize("media", [False, True])
def test_a_twin_takes_the_entry_over_when_its_block_is_let_go(media: bool) -> None:
    """In the order in which the twins came, with parent and children; one that was let go before is passed over."""
    table = Table(clock=lambda: 5.0)
    table.publish([0], [1, 2])
    (parent,) = table.digests([0])
    digests = [b"b" * 32, b"c" * 32]
    for blocks in ([1, 2], [3, 4], [5, 6], [7, 8]):
        added = table.add_chain(ids(blocks), digests, parent, rows([3, 4, 5, 6]), first=False, media=media)
        assert added.entered == ([0, 1] if blocks == [1, 2] else [])
    check_table(table)
    assert table.has_twins
    assert [table.is_entered(block) for block in (0, 1, 3, 9)] == [True, True, True, False]

    def let_go(blocks: list[int]) -> tuple[list[int], list[int]]:
        table.holders[blocks] = 0
        found = table.let_go(blocks)
        check_table(table)
        return found

    assert let_go([4, 3]) == ([], [])
    assert let_go([2, 1]) == ([2, 1], [6, 5])
    assert [table.lookup(digest) for digest in digests] == [5, 6]
    assert (table.digest(1), table.is_entered(1)) == (None, False)
    assert [table.parent(block) for block in (5, 6)] == [parent, digests[0]]
    assert (table.trie.match(ROOT, rows([1, 2, 3, 4])) == [0, 5]) is not media
    assert let_go([8, 7]) == ([], [])
    assert not table.has_twins
    assert let_go([6, 5]) == ([], [])
    # Cached: what nobody holds is no twin, and has none.
    assert [table.lookup(digest) for digest in digests] == [5, 6]


def test_digests_of_one_prefix_are_one_object() -> None:
    """Each sequence hashes its prompt anew, and an object that stands for another prefix is left alone."""
    table = Table()
    first, second = (chain_digests(ROOT, token_bytes([1, 2, 3, 4]), SIZE) for _ in range(2))
    table.publish([0, 1], [1, 2, 3, 4], digests=first)
    table.publish([2, 3], [1, 2, 3, 4], digests=second)
    foreign = bytes(bytearray(first[0]))
    objects = table.digest_objects(ids([2, 3, 0, 9]), [*second, second[0], foreign])
    assert [found is wanted for found, wanted in zip(objects, [*first, first[0], foreign], strict=True)] == [True] * 4
    assert second[0] is not first[0]


def test_a_block_that_is_offered_again_is_a_twin_once() -> None:
    table = Table()
    table.publish([0], [1, 2])
    for _ in range(2):
        assert table.publish([1], [1, 2]) == Added([], [], [], False)
    table.holders[1] = 0
    assert table.let_go([1]) == ([], [])
    assert not table.has_twins


@pytest.mark.parametrize("everything", [False, True])
def test_what_leaves_the_table_has_no_twins(everything: bool) -> None:
    table = Table()
    table.publish([0, 1], [1, 2, 3, 4])
    table.publish([2, 3], [1, 2, 3, 4])
    if everything:
        table.clear()
    else:
        table.remove(ids([0]))
    check_table(table)
    assert not table.has_twins
    assert [table.is_entered(block) for block in range(4)] == [False] * 4


def test_one_block_each_of_several_sequences_enters_in_the_simple_case_alone() -> None:
    """Publications of sequences that decode: each block after the sequence's own one, or else left out."""
    table = Table()
    table.publish([0, 1], [1, 1, 2, 2])
    digests = table.digests([0, 1])
    news = [bytes([number]) * 32 for number in range(5)]
    left_out = table.add_one_each(
        [2, 3, 4, 5, 6],
        [news[0], digests[1], news[2], news[3], news[0]],
        [1, 0, ROOT, 0, 1],
        [digests[1], digests[0], ROOT, digests[1], digests[1]],
        rows([3, 3, 2, 2, 7, 7, 3, 3, 3, 3]),
    )
    # There already; the parent digest is another block's; there since this call.
    assert left_out == [1, 3, 4]
    assert [table.lookup(digest) for digest in news] == [2, None, 4, None, None]
    assert table.trie.match(ROOT, rows([1, 1, 2, 2, 3, 3])) == [0, 1, 2]
    assert table.trie.match(ROOT, rows([7, 7])) == [4]
    assert len(table) == 4
    check_table(table)


def test_names_follow_the_chain_and_go_with_its_blocks() -> None:
    """Later blocks have those of the block before, and a copy that takes an entry over has them too."""
    table, names = Table(), ("n", "a")
    root = root_digest("model", *names)
    digests = chain_digests(root, token_bytes([1, 2, 3, 4, 5, 6]), SIZE)
    assert table.names([4, 2]) is None
    table.add_chain(ids([4]), digests[:1], root, rows([1, 2]), first=True, media=False, names=names)
    assert table.add_one_each([2], digests[1:2], [4], digests[:1], rows([3, 4])) == []
    table.publish([5], [9, 9])
    table.add_chain(ids([6]), digests[2:], digests[1], rows([5, 6]), first=False, media=False, names=("n", "a"))
    assert table.names([4, 2, 6, 5]) == [names, names, names, None]
    assert table._names[6] is names
    table.holders[4] = 0
    table.add_chain(ids([7]), digests[:1], root, rows([1, 2]), first=True, media=False, names=names)
    assert table.names([4, 7]) == [None, names]
    assert table.columns().names == {7: names, 2: names, 6: names}
    table.remove(ids([2]))
    assert table.names([7, 2, 6]) == [names, None, None]
    table.clear()
    assert table.names([7]) is None
