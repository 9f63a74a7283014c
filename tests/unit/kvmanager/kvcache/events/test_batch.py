"""Changes of the prefix tables: batches of blocks, and the net change of many of them."""

from __future__ import annotations

import random
from array import array

import pytest

from pagekv.kvmanager.kvcache.block_hash import token_bytes
from pagekv.kvmanager.kvcache.events.batch import Diff, Removed, Stored, Tier, join


def name(number: int) -> bytes:
    return bytes([number]) * 32


def stored(numbers: list[int], tier: Tier = Tier.DEVICE, first: bool = False) -> Stored:
    """Blocks of two tokens, each after the block whose number is one less."""
    tokens = token_bytes([token for number in numbers for token in (number, number + 1)])
    return Stored(tier, list(map(name, numbers)), [name(number - 1) for number in numbers], tokens, first=first)


def test_each_block_comes_with_its_parent_and_tokens() -> None:
    found = list(stored([3, 7]).each())
    assert found == [(name(3), name(2), array("I", [3, 4])), (name(7), name(6), array("I", [7, 8]))]


def test_a_cut_is_a_batch_of_its_own() -> None:
    batch = stored([3, 4, 5], first=True)
    assert batch.cut(0, 3) is batch
    assert batch.cut(0, 2) == stored([3, 4], first=True)
    assert batch.cut(1, 3) == stored([4, 5])


def test_batches_are_joined_in_order() -> None:
    assert join([stored([3]), stored([7, 8]), stored([1])]) == stored([3, 7, 8, 1])


def test_what_cancels_out_is_no_change_and_tiers_are_apart() -> None:
    diff = Diff()
    diff.remove(Removed(Tier.DEVICE, [name(1), name(9)]))
    diff.store(stored([2, 1, 3]))
    diff.store(stored([9], Tier.HOST))
    diff.remove(Removed(Tier.DEVICE, [name(2)]))
    diff.settle()
    assert diff.removed == [Removed(Tier.DEVICE, [name(9)])]
    assert sorted(diff.stored, key=lambda batch: batch.tier) == [stored([3]), stored([9], Tier.HOST)]
    assert diff.size == 3


@pytest.mark.parametrize("tier", Tier)
def test_a_tier_without_changes_that_cancel_out_keeps_none_of_the_other(tier: Tier) -> None:
    """Whichever of the two comes first."""
    (other,) = set(Tier) - {tier}
    diff = Diff()
    diff.remove(Removed(tier, [name(1)]))
    diff.remove(Removed(other, [name(2)]))
    diff.store(stored([2], other))
    diff.settle()
    assert (diff.removed, diff.stored, diff.size) == ([Removed(tier, [name(1)])], [], 1)


def test_blocks_are_text_behind_other_blocks_unless_it_is_said() -> None:
    one = Stored(Tier.HOST, [name(3)], [name(2)], b"")
    assert (one.text, one.first, one.names) == (True, False, None)


def test_clearing_replaces_what_came_before() -> None:
    diff, later = Diff(), Diff()
    diff.store(stored([1, 2]))
    later.clear()
    later.store(stored([5]))
    diff.extend(later)
    assert (diff.cleared, diff.removed, diff.stored, diff.size) == (True, [], [stored([5])], 2)


def test_a_settled_change_leads_to_the_same_table() -> None:
    rng = random.Random(0)
    for _ in range(300):
        before = set(rng.sample(range(1, 9), rng.randrange(9)))
        table, diff = before.copy(), Diff()
        for _ in range(rng.randrange(12)):
            number = rng.randrange(1, 9)
            if number in table:
                diff.remove(Removed(Tier.DEVICE, [name(number)]))
                table.remove(number)
            else:
                diff.store(stored([number]))
                table.add(number)
        diff.settle()
        removed = {digest for batch in diff.removed for digest in batch.digests}
        entered = {digest for batch in diff.stored for digest in batch.digests}
        assert removed == set(map(name, before - table))
        assert entered == set(map(name, table - before))
        assert diff.size == len(removed) + len(entered)
