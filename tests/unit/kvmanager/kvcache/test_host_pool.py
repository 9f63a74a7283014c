"""The host pool: keys, holders and eviction, and that a batch is the same as one block after the other."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.engine.integrity import check_host

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import root_digest
from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.kvmanager.kvcache.host_pool import NO_BLOCK, HostPool

# A digest, by a number, and one of the contents that have it: several contents collide. None: no key.
Content = tuple[int, int] | None


@cache
def digest(number: int) -> bytes:
    """One object for one prefix."""
    return bytes([number]) * 32


def rows(contents: list[Content]) -> NDArray[np.uint32]:
    """Token ids, two a block, of the contents that have a key, which come first."""
    return np.array([content for content in contents if content is not None], np.uint32).reshape(-1, 2)


def keep(pool: HostPool, contents: list[Content]) -> tuple[list[int], list[int]]:
    """Contents without a key come last; each follows the digest before its own."""
    digests = [None if content is None else digest(content[0]) for content in contents]
    parents = [digest(content[0] + 100) for content in contents if content is not None]
    return pool.keep(digests, rows(contents), parents)


def find(pool: HostPool, contents: list[Content]) -> list[int]:
    digests = [None if content is None else digest(content[0]) for content in contents]
    return pool.find(digests, rows(contents), [digest(content[0] + 100) for content in contents if content is not None])


def test_blocks_are_evicted_least_recently_used_first_and_never_while_held() -> None:
    pool = HostPool(3, 2)
    blocks, fresh = keep(pool, [(0, 0), (1, 0), (2, 0)])
    assert fresh == [0, 1, 2]
    assert keep(pool, [(3, 0)]) == ([], [])
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.hold([blocks[1]])
    pool.release([blocks[1]])
    # 0 is the older one now, 2 is held.
    assert keep(pool, [(3, 0)]) == ([blocks[0]], [0])
    assert find(pool, [(0, 0), (1, 0), (2, 0), (3, 0)]) == [NO_BLOCK, blocks[1], blocks[2], blocks[0]]
    assert (pool.evictions, pool.num_free) == (1, 1)
    check_host(pool, [[blocks[2]], [blocks[0]]])


def test_what_is_there_is_held_and_not_filled_again() -> None:
    pool = HostPool(4, 2)
    first, _ = keep(pool, [(0, 0), (1, 0), None])
    pool.release(first)
    second, fresh = keep(pool, [(1, 0), (0, 0), (2, 0), None])
    assert second[:2] == [first[1], first[0]]
    assert fresh == [2, 3]
    assert pool.num_held == 4


def test_as_far_as_there_is_room() -> None:
    pool = HostPool(3, 2)
    held, _ = keep(pool, [(0, 0)])
    blocks, fresh = keep(pool, [(1, 0), (0, 0), (2, 0), (3, 0), (0, 0)])
    assert (len(blocks), fresh) == (3, [0, 2])
    assert blocks[1] == held[0]
    check_host(pool, [held, blocks])


def test_what_makes_room_for_another_is_not_there_any_more() -> None:
    """The second content is found, but is the least recently used when the first one needs a block."""
    pool = HostPool(2, 2)
    pool.release(keep(pool, [(1, 0), (2, 0)])[0])
    blocks, fresh = keep(pool, [(0, 0), (1, 0)])
    assert fresh == [0, 1]
    assert find(pool, [(0, 0), (1, 0), (2, 0)]) == [*blocks, NO_BLOCK]


def test_a_colliding_digest_is_a_miss_an_alarm_and_private() -> None:
    """Token comparison protects the second tier too."""
    pool = HostPool(3, 2)
    first, _ = keep(pool, [(0, 0)])
    assert find(pool, [(0, 1)]) == [NO_BLOCK]
    assert pool.hash_alarms == 1
    second, fresh = keep(pool, [(0, 1), (1, 0)])
    assert fresh == [0, 1]
    assert find(pool, [(0, 0), (1, 0)]) == [first[0], second[1]]
    check_host(pool, [first, second])


@pytest.mark.parametrize("damage", ["ref", "key", "queue"])
def test_check_host_sees_damage(damage: str) -> None:
    pool = HostPool(3, 2)
    blocks, _ = keep(pool, [(0, 0)])
    check_host(pool, [blocks])
    if damage == "ref":
        pool.ref_counts[2] = 1
    elif damage == "key":
        pool._key[blocks[0]] = None
    else:
        pool._free.remove(np.array([2], np.int32))
    with pytest.raises(InvariantError):
        check_host(pool, [blocks])


def test_a_prefix_is_the_same_where_its_digest_object_is() -> None:
    """Equal tokens under equal digests after equal digests are no proof: each of the three may collide."""
    pool, row = HostPool(8, 1), np.array([[5], [6]], np.uint32)
    ours, theirs = ([bytes([value]) * 32 for value in (7, 8)] for _ in range(2))
    root, other = root_digest("model", "", ""), root_digest("model", "other", "")
    blocks, _ = pool.keep(ours, row, [root, ours[0]])
    # A root is known by its value, which is no block's.
    again = root_digest("model", "", "")
    assert pool.find(ours, row, [again, ours[0]]) == blocks
    assert pool.find(ours, row, [other, ours[0]]) == [NO_BLOCK, blocks[1]]
    assert pool.find(ours, row, [bytes(root), ours[0]]) == [NO_BLOCK, blocks[1]]
    # Theirs may be another prefix, unless the block before is found to be the same one.
    assert pool.find(theirs[1:], row[1:], theirs[:1]) == [NO_BLOCK]
    assert pool.find(theirs, row, [again, theirs[0]]) == [blocks[0], NO_BLOCK]
    assert pool.find(theirs, row, [again, theirs[0]], hashed_anew=True) == blocks
    assert pool.find(theirs, row, [other, theirs[0]], hashed_anew=True) == [NO_BLOCK, NO_BLOCK]
    assert pool.find(theirs, row, [again, ours[1]], hashed_anew=True) == [blocks[0], NO_BLOCK]
    assert pool.hash_alarms == 0
    assert pool.find(ours, row[::-1], [root, ours[0]]) == [NO_BLOCK, NO_BLOCK]
    assert pool.hash_alarms == 2


def test_watchers_are_told_of_void_content() -> None:
    log = TableLog(lambda: 0.0)
    log.watched = True
    pool = HostPool(4, 2, log)
    keep(pool, [(1, 1), (2, 2)])
    pool.invalidate([digest(2), digest(3)])
    assert [removed.digests for removed in log._pending.removed] == [[digest(2)]]


def test_what_nobody_holds_cannot_be_released() -> None:
    pool = HostPool(2, 2)
    blocks, _ = keep(pool, [(0, 0)])
    with pytest.raises(InvariantError, match=r"host block 1, which nobody holds"):
        pool.release([*blocks, 1])


# -- against a model that takes everything one by one

Event = tuple[str, bytes] | tuple[str, bytes, bytes, tuple[int, ...]]


class Log(TableLog):
    """Keys that entered and left, in order."""

    watched = True

    def __init__(self) -> None:
        self.events: list[Event] = []

    def host_stored(
        self, digest: bytes, parent: bytes, tokens: NDArray[np.uint32], names: tuple[str, str] | None = None
    ) -> None:
        self.events.append(("stored", digest, parent, tuple(tokens.tolist())))

    def host_removed(self, digest: bytes) -> None:
        self.events.append(("removed", digest))


class PlainPool:
    """Lists and dictionaries, one block at a time."""

    def __init__(self, num_blocks: int) -> None:
        # Least recently used first.
        self.free = list(range(num_blocks))
        self.holders: Counter[int] = Counter()
        self.content: dict[int, tuple[int, int]] = {}
        self.events: list[Event] = []

    def find(self, content: Content) -> int:
        return next((block for block, kept in self.content.items() if kept == content), NO_BLOCK)

    def hold(self, block: int) -> None:
        if block in self.free:
            self.free.remove(block)
        self.holders[block] += 1

    def release(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            self.free.append(block)

    def keep(self, content: Content) -> tuple[int, bool]:
        block = self.find(content)
        if block != NO_BLOCK or not self.free:
            if block != NO_BLOCK:
                self.hold(block)
            return block, False
        block = self.free[0]
        if block in self.content:
            self.events.append(("removed", digest(self.content.pop(block)[0])))
        self.hold(block)
        if content is not None and all(kept[0] != content[0] for kept in self.content.values()):
            self.content[block] = content
            self.events.append(("stored", digest(content[0]), digest(content[0] + 100), content))
        return block, True

    def keep_all(self, contents: list[Content]) -> tuple[list[int], list[int]]:
        blocks: list[int] = []
        fresh: list[int] = []
        for position, content in enumerate(contents):
            block, filled = self.keep(content)
            if block == NO_BLOCK:
                break
            blocks.append(block)
            fresh += [position] if filled else []
        return blocks, fresh


# Few digests, which come with another content now and then.
keyed = st.tuples(st.integers(0, 7), st.sampled_from([0, 0, 0, 1]))
contents_lists = st.builds(
    lambda contents, private: [*contents, *[None] * private],
    st.lists(keyed, max_size=8, unique_by=lambda content: content[0]),
    st.sampled_from([0, 0, 1, 3]),
)


@given(st.data())
def test_a_batch_is_the_same_as_one_after_the_other(data: st.DataObject) -> None:
    size, log = data.draw(st.integers(1, 10)), Log()
    pool, plain = HostPool(size, 2, log), PlainPool(size)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 20))):
        move = data.draw(st.sampled_from(["keep", "keep", "hold", "release", "release", "clear"]))
        if move == "keep":
            contents = data.draw(contents_lists)
            kept = keep(pool, contents)
            assert kept == plain.keep_all(contents)
            held.append(kept[0])
        elif move == "hold":
            contents = data.draw(contents_lists)
            found = find(pool, contents)
            assert found == [plain.find(content) for content in contents]
            held.append([block for block in found if block != NO_BLOCK])
            pool.hold(held[-1])
            for block in held[-1]:
                plain.hold(block)
        elif move == "release" and held:
            blocks = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pool.release(blocks)
            for block in blocks:
                plain.release(block)
        elif move == "clear":
            pool.clear()
            plain.content.clear()
        check_host(pool, held)
        assert list(pool._free) == plain.free
        assert [pool.key(block) for block in range(size)] == [
            digest(plain.content[block][0]) if block in plain.content else None for block in range(size)
        ]
        assert {block: tuple(pool._tokens[block].tolist()) for block in plain.content} == plain.content
        assert log.events == plain.events
    assert pool.evictions == sum(event[0] == "removed" for event in log.events)
