"""Prefix hits of the real scheduler and pool against those of a plain radix tree over the same history."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.fake_executor import expected_output
from support.engine.plain_lists import PlainLists
from support.engine.radix_tree import RadixTree, SegmentedTree
from support.engine.scheduler_driver import Driver, output

from pagekv.kvmanager.kvcache.eviction_policy import DEFAULT_POLICY, DEFAULT_PROTECTED_SHARE, EvictionOrder

# Two tokens only, so prefixes collide all the time.
VOCAB = 2

quick = settings(max_examples=int(os.environ.get("PAGEKV_TEST_EXAMPLES", "60")), deadline=None)


@dataclass(frozen=True)
class Turn:
    """A request: so many tokens of what an earlier one left behind, then new ones."""

    earlier: int
    kept: int
    new: list[int]
    max_tokens: int


turns = st.lists(
    st.builds(
        Turn,
        earlier=st.integers(0, 11),
        kept=st.integers(0, 40),
        new=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
        max_tokens=st.integers(1, 9),
    ),
    min_size=1,
    max_size=12,
)
block_sizes = st.sampled_from([1, 2, 4])
budgets = st.sampled_from([3, 64])
# Of the pool, protected by the default policy; None: least recently used.
shares = st.sampled_from([None, DEFAULT_PROTECTED_SHARE])


def prompts(history: list[Turn], *, one_of_its_own: bool) -> list[tuple[list[int], list[int]]]:
    """Prompt and output of every request; with `one_of_its_own` each prompt ends with a token that no other has."""
    played: list[tuple[list[int], list[int]]] = []
    for number, turn in enumerate(history):
        prompt, answer = played[turn.earlier % number] if number else ([], [])
        before = [*prompt, *answer]
        prompt = before[: turn.kept] + turn.new
        if one_of_its_own:
            prompt.append(VOCAB + number)
        played.append((prompt, expected_output(prompt, turn.max_tokens, VOCAB)))
    return played


def blocks_of(prompt: list[int], answer: list[int], block_size: int) -> int:
    return -(-(len(prompt) + len(answer) - 1) // block_size)


def cached_tokens(driver: Driver, prompt: list[int], answer: list[int]) -> int:
    """Runs one request to its end, alone."""
    request = driver.submit(prompt, max_tokens=len(answer))
    driver.drain()
    assert output(request) == answer
    cached = request.sequences[0].cached_tokens
    assert cached is not None
    return cached


@quick
@given(history=turns, block_size=block_sizes, budget=budgets)
def test_hits_equal_those_of_a_radix_tree(history: list[Turn], block_size: int, budget: int) -> None:
    """With memory for everything, the table of digests finds what a walk down a tree finds."""
    played = prompts(history, one_of_its_own=False)
    driver = Driver(sum(blocks_of(*turn, block_size) for turn in played), block_size, budget, vocab=VOCAB)
    tree = RadixTree(block_size)
    for turn in played:
        assert cached_tokens(driver, *turn) == tree.serve(*turn)
    assert driver.pool.num_published == len(tree.nodes)
    assert driver.pool.evictions == 0


@pytest.mark.long
@quick
@given(history=turns, block_size=block_sizes, budget=budgets, spare=st.integers(0, 12))
def test_hits_equal_those_of_a_tree_that_evicts_its_oldest_leaf(
    history: list[Turn], block_size: int, budget: int, spare: int
) -> None:
    """Least recently used first, the deepest first on equal age, and never a hole in a chain.

    Every prompt ends with a token of its own, so nothing is computed twice; copies that nobody finds have no node.
    """
    played = prompts(history, one_of_its_own=True)
    capacity = max(blocks_of(*turn, block_size) for turn in played) + spare
    driver = Driver(capacity, block_size, budget, vocab=VOCAB)
    tree = RadixTree(block_size, capacity)
    for turn in played:
        assert cached_tokens(driver, *turn) == tree.serve(*turn)
        assert driver.pool.num_published == len(tree.nodes)
        assert driver.pool.evictions == tree.evictions


def prefixes_in_use(rng: random.Random, block_size: int) -> list[tuple[list[int], list[int]]]:
    """Prompt and output of 30 requests behind six prefixes, some of which are asked for much more often than others;
    each prompt ends with a token that no other has.
    """
    prefixes = [[rng.randrange(VOCAB) for _ in range(block_size * rng.randint(1, 6))] for _ in range(6)]
    played = []
    for number in range(30):
        prefix = prefixes[min(rng.randrange(6), rng.randrange(6))]
        prompt = [*prefix[: rng.randint(block_size, len(prefix))], VOCAB + number]
        played.append((prompt, expected_output(prompt, rng.randint(1, 2 * block_size), VOCAB)))
    return played


@quick
@given(
    seed=st.integers(0, 2**32 - 1), block_size=block_sizes, share=st.sampled_from([DEFAULT_PROTECTED_SHARE, 0.6, 1.0])
)
def test_hits_equal_those_of_a_tree_under_the_default_policy(seed: int, block_size: int, share: float) -> None:
    """Segmented LRU: blocks that were hit go last, up to a share of the pool; a chain still never has a hole."""
    assert DEFAULT_POLICY == "slru"
    rng = random.Random(seed)
    played = prefixes_in_use(rng, block_size)
    capacity = max(blocks_of(*turn, block_size) for turn in played) + rng.randint(0, 20)
    driver = Driver(capacity, block_size, vocab=VOCAB, protected_share=share)
    order = EvictionOrder(capacity, "slru", share)
    tree = SegmentedTree(block_size, PlainLists(capacity, order.capacity, order.depth))
    for turn in played:
        assert cached_tokens(driver, *turn) == tree.serve(*turn)
        assert driver.pool.num_published == len(tree.places)
        assert driver.pool.evictions == tree.evictions


@pytest.mark.long
@quick
@given(history=turns, block_size=block_sizes, budget=budgets, spare=st.integers(0, 12))
def test_what_is_computed_again_is_as_young_as_its_latest_copy(
    history: list[Turn], block_size: int, budget: int, spare: int
) -> None:
    """The same, with prompts and outputs that come again and are computed again in part."""
    played = prompts(history, one_of_its_own=False)
    capacity = max(blocks_of(*turn, block_size) for turn in played) + spare
    driver = Driver(capacity, block_size, budget, vocab=VOCAB)
    tree = RadixTree(block_size, capacity)
    for turn in played:
        assert cached_tokens(driver, *turn) == tree.serve(*turn)
        assert driver.pool.num_published == len(tree.nodes)


@pytest.mark.long
@quick
@given(history=turns, block_size=block_sizes, partial=st.booleans(), spare=st.integers(0, 12), share=shares)
def test_eviction_costs_hits_and_no_token(
    history: list[Turn], block_size: int, partial: bool, spare: int, share: float | None
) -> None:
    """Blocks that are computed again change no output, and full hits are at most those of an endless memory. With hits
    on parts of blocks the bound is less than a block higher.
    """
    played = prompts(history, one_of_its_own=False)
    capacity = max(blocks_of(*turn, block_size) for turn in played) + spare
    driver = Driver(capacity, block_size, vocab=VOCAB, partial_hits=partial, protected_share=share)
    tree = RadixTree(block_size)
    for turn in played:
        most = tree.serve(*turn) + (block_size - 1 if partial else 0)
        assert cached_tokens(driver, *turn) <= most
