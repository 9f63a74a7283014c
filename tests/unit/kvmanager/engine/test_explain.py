"""Explanations of blocks that hit, and of each way to miss."""

from __future__ import annotations

import pytest
from support.clock import Clock
from support.engine.cached_prefixes import ROOT, cache, evict_all, hold, root_of
from support.engine.integrity import check_pool

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine.explain import KnownAdapters, PrefixExplainer
from pagekv.kvmanager.engine.prefix_match import match_prefix
from pagekv.kvmanager.kvcache.block_hash import MediaSpan
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.v1 import cache_service_pb2 as pb

HIT, NEVER, TAIL = pb.BLOCK_OUTCOME_HIT, pb.BLOCK_OUTCOME_NEVER_SEEN, pb.BLOCK_OUTCOME_PARTIAL_TAIL


class Bench:
    def __init__(self, num_blocks: int = 20, block_size: int = 4) -> None:
        self.clock = Clock()
        self.log = TableLog(self.clock)
        self.pool = BlockPool(num_blocks, block_size, log=self.log)
        self.log.attach(self.pool.table)

    def explain(
        self,
        prompt: list[int],
        root: bytes = ROOT,
        media: tuple[MediaSpan, ...] = (),
        others: tuple[str, ...] = (),
        page_size: int = 4096,
        token: str = "",
        numbers: bool = True,
        kept: int = 0,
    ) -> pb.ExplainPrefixResponse:
        other_roots = [(adapter, root_of(adapter_id=adapter)) for adapter in others]
        match = match_prefix(self.pool, root, prompt, media, None)
        explainer = PrefixExplainer(self.pool, self.log, root, match, media, other_roots, kept=kept, numbers=numbers)
        return explainer.page(page_size, token)

    def outcomes(self, prompt: list[int], **more: object) -> list[pb.BlockOutcome.ValueType]:
        return [block.outcome for block in self.explain(prompt, **more).blocks]  # type: ignore[arg-type]  # by name


def test_hits_then_a_partial_tail() -> None:
    bench = Bench()
    first, second = cache(bench.pool, [*range(8)])
    found = bench.explain([*range(8), 99])
    assert (found.cached_tokens, found.next_page_token) == (8, "")
    one, two, tail = found.blocks
    digest = bench.pool.table.digest(first)
    assert digest is not None
    assert one == pb.BlockExplanation(
        end=4, outcome=HIT, reason=f"cached in block {first}", block_hash=digest.hex(), block_id=first, shared_tokens=4
    )
    assert (two.start, two.end, two.outcome, two.block_id) == (4, 8, HIT, second)
    reason = "1 of 4 tokens: only full blocks are cached; 3 more would fill it"
    assert tail == pb.BlockExplanation(start=8, end=9, outcome=TAIL, reason=reason)


def test_numbers_that_others_change_can_be_left_out() -> None:
    """Numbers of blocks and of steps; the outcomes, and times in seconds, stay."""
    told, untold = list[pb.BlockExplanation](), list[pb.BlockExplanation]()
    for bench, numbers, found in ((Bench(3), True, told), (Bench(3), False, untold)):
        cache(bench.pool, [*range(8)])
        # Evicts the second block.
        cache(bench.pool, [*range(50, 58)])
        for prompt in (
            [50, 51, 52, 53, 54, 55, 56, 57],
            [50, 51, 52, 53, 54, 9, 9, 9],
            [50, 51, 52, 53, 54],
            [*range(8)],
        ):
            found += bench.explain(prompt, numbers=numbers).blocks
    assert [(each.outcome, each.shared_tokens) for each in told] == [(e.outcome, e.shared_tokens) for e in untold]
    assert {each.outcome for each in told} >= {HIT, pb.BLOCK_OUTCOME_DIVERGED, pb.BLOCK_OUTCOME_EVICTED, TAIL}
    assert any(each.HasField("block_id") for each in told)
    assert any(each.HasField("steps_ago") for each in told)
    assert not any(each.HasField("block_id") or each.HasField("steps_ago") for each in untold)
    reasons = {each.reason for each in untold}
    assert not any("steps" in reason or "block 1" in reason or "block 2" in reason for reason in reasons)
    assert "cached; a request still computes the last token" in reasons
    assert any(reason.startswith("a cached block follows the same prefix and shares 1 of 4") for reason in reasons)


def test_looking_changes_nothing() -> None:
    bench = Bench()
    cache(bench.pool, [*range(8)])
    before = list(bench.pool._free)
    bench.explain([*range(8)])
    assert list(bench.pool._free) == before
    assert bench.pool.num_active == 0


def test_a_whole_prompt_that_is_cached_still_computes_a_token() -> None:
    bench = Bench()
    cache(bench.pool, [*range(8)])
    assert bench.explain([*range(8)]).blocks[1].reason.endswith("; a request still computes the last token")


def test_golden_alignment() -> None:
    """Of 4,097 tokens blocks 0 to 255 are cacheable; 4,090 would have to be padded to 4,096."""
    bench = Bench(300, 16)
    prompt = [*range(4097)]
    cache(bench.pool, prompt)
    found = bench.explain(prompt)
    assert found.cached_tokens == 4096
    assert [block.outcome for block in found.blocks] == [HIT] * 256 + [TAIL]
    assert found.blocks[256].reason.startswith("1 of 16 tokens")
    short = bench.explain(prompt[:4090])
    assert (short.cached_tokens, len(short.blocks)) == (4080, 256)
    assert "10 of 16 tokens: only full blocks are cached; 6 more would fill it" in short.blocks[255].reason


def test_what_the_host_pool_keeps_behind_the_device_hits_too() -> None:
    """Neither is it told as evicted, nor is what the device has after the same prefix compared with what follows it."""
    bench = Bench()
    cache(bench.pool, [*range(12)])
    evict_all(bench.pool)
    first, _ = cache(bench.pool, [*range(4), 90, 91, 92, 93])
    prompt = [*range(12), 12, 13]
    assert bench.outcomes(prompt) == [HIT, pb.BLOCK_OUTCOME_EVICTED, pb.BLOCK_OUTCOME_EVICTED, TAIL]
    found = bench.explain(prompt, kept=1)
    assert [block.outcome for block in found.blocks] == [HIT, HIT, pb.BLOCK_OUTCOME_EVICTED, TAIL]
    assert [block.reason for block in found.blocks[:2]] == [f"cached in block {first}", "cached in the host pool"]
    assert [block.HasField("block_id") for block in found.blocks[:2]] == [True, False]
    assert (found.cached_tokens, found.blocks[1].shared_tokens) == (8, 4)
    parted = bench.explain([*range(8), 90, 91, 92, 93, 90], kept=1)
    assert [block.outcome for block in parted.blocks] == [HIT, HIT, NEVER, TAIL]
    assert [block.reason for block in bench.explain(prompt, kept=1, numbers=False).blocks[:2]] == ["cached", "cached"]


def test_no_device_block_is_compared_with_what_follows_the_host_pool() -> None:
    """One cached block begins as the first of the prompt, one as the third; neither follows the second."""
    bench = Bench()
    cache(bench.pool, [0, 1, 9, 9])
    cache(bench.pool, [8, 8, 8, 9])
    for prompt in ([*range(8), 8, 8, 8, 8], [*range(8), 8, 8, 8]):
        miss = bench.explain(prompt, kept=2).blocks[-1]
        assert (miss.outcome, miss.shared_tokens) == (NEVER if len(prompt) == 12 else TAIL, 0)


def test_never_seen() -> None:
    bench = Bench()
    cache(bench.pool, [*range(8)])
    assert [(b.outcome, b.reason) for b in bench.explain([50] * 8).blocks] == [
        (NEVER, "never stored after this prefix"),
        (NEVER, "never stored; it follows a block that misses"),
    ]


def test_evicted_says_when() -> None:
    bench = Bench()
    cache(bench.pool, [*range(4)])
    bench.log.step_boundary(10)
    evict_all(bench.pool)
    bench.log.step_boundary(22)
    bench.clock.now += 3.4
    (block,) = bench.explain([*range(4)]).blocks
    assert (block.outcome, block.reason) == (pb.BLOCK_OUTCOME_EVICTED, "evicted 12 steps and 3.4 s ago")
    assert (block.steps_ago, block.seconds_ago) == (12, bench.clock.now - 100)


def test_cleared_says_when() -> None:
    bench = Bench()
    cache(bench.pool, [*range(4)])
    bench.pool.clear_prefix_table()
    bench.log.step_boundary(3)
    (block,) = bench.explain([*range(4)]).blocks
    assert (block.outcome, block.reason) == (pb.BLOCK_OUTCOME_CLEARED, "the table was cleared 3 steps and 0.0 s ago")


@pytest.mark.parametrize("media", [(), (MediaSpan(0, 1, "cat"),), (MediaSpan(5, 1, "cat"),), (MediaSpan(9, 1, "cat"),)])
def test_what_follows_an_evicted_block_leaves_with_it(media: tuple[MediaSpan, ...]) -> None:
    """A chain never has a hole, even where its end is held."""
    bench = Bench(6)
    hold(bench.pool, [*range(8)], media=media)
    long = hold(bench.pool, [*range(8), *range(60, 64)], media=media)
    # The first request ends, the longer one lets go of all but its last block.
    bench.pool.free(long[:2])
    bench.pool.free(long[:2])
    evict_all(bench.pool)
    blocks = bench.explain([*range(8), *range(60, 64)], media=media).blocks
    assert [b.outcome for b in blocks] == [pb.BLOCK_OUTCOME_EVICTED] * 3
    assert bench.pool.num_published == 0
    check_pool(bench.pool, [long[2:].tolist()])


def test_diverged_says_where() -> None:
    bench = Bench()
    blocks = cache(bench.pool, [*range(8)])
    found = bench.explain([0, 1, 2, 3, 4, 5, 99, 7, 8])
    diverged = found.blocks[1]
    assert (diverged.outcome, diverged.block_id, diverged.shared_tokens) == (pb.BLOCK_OUTCOME_DIVERGED, blocks[1], 2)
    assert diverged.reason == (
        f"block {blocks[1]} follows the same prefix and shares 2 of 4 tokens; they differ at position 6"
    )
    # From the very first block on, too.
    assert bench.explain([0, 9, 9, 9]).blocks[0].shared_tokens == 1


def test_a_tail_may_begin_like_a_cached_block() -> None:
    bench = Bench()
    blocks = cache(bench.pool, [*range(8)])
    tail = bench.explain([0, 1, 2, 3, 4, 5, 99]).blocks[1]
    assert (tail.outcome, tail.block_id, tail.shared_tokens) == (TAIL, blocks[1], 2)
    assert tail.reason.endswith(f"; block {blocks[1]} begins with the first 2 of these 3")


def test_another_adapter_of_the_namespace_is_named() -> None:
    bench = Bench()
    cache(bench.pool, [*range(8)], root_of(adapter_id="a"))
    blocks = bench.explain([*range(12)], others=("b", "a")).blocks
    assert [b.outcome for b in blocks] == [pb.BLOCK_OUTCOME_OTHER_IDENTITY] * 2 + [NEVER]
    assert blocks[0].reason == "cached for adapter 'a'"
    cache(bench.pool, [7] * 4)
    (block,) = bench.explain([7] * 4, root=root_of(adapter_id="b"), others=("",)).blocks
    assert block.reason == "cached without an adapter"


def test_adapters_are_known_in_their_own_namespace_the_latest_first() -> None:
    known = KnownAdapters()
    for namespace, adapter in (("mine", "a"), ("mine", ""), ("theirs", "b"), ("mine", "c"), ("mine", "a")):
        known.note(namespace, adapter)
    assert known.others("mine", "") == ["a", "c"]
    assert known.others("mine", "a") == ["c", ""]
    assert known.others("theirs", "") == ["b"]
    assert known.others("nobodys", "") == []


def test_another_namespace_is_never_told() -> None:
    """A block of another namespace looks as if nobody had ever sent it, also when it was evicted there."""
    bench = Bench()
    cache(bench.pool, [*range(8)], root_of("theirs"))
    new = bench.explain([50] * 8, root=root_of("mine"), others=("", "a"))
    same = bench.explain([*range(8)], root=root_of("mine"), others=("", "a"))
    told = [[(b.outcome, b.reason, b.block_id, b.shared_tokens) for b in found.blocks] for found in (new, same)]
    assert told[0] == told[1]
    evict_all(bench.pool)
    assert bench.outcomes([*range(8)], root=root_of("mine"), others=("", "a")) == [NEVER, NEVER]


def test_media_are_part_of_the_identity() -> None:
    bench = Bench()
    cat, dog = (MediaSpan(4, 2, "cat"),), (MediaSpan(4, 2, "dog"),)
    cache(bench.pool, [*range(12)], media=cat)
    assert bench.outcomes([*range(12)], media=cat) == [HIT] * 3
    # The tokens alone would go on, but what they stand for differs: no divergence at some token, no other adapter.
    assert bench.outcomes([*range(12)], media=dog) == [HIT, NEVER, NEVER]
    cache(bench.pool, [*range(12)], root_of(adapter_id="a"))
    assert bench.outcomes([*range(12)], media=dog, others=("a",)) == [HIT, NEVER, NEVER]


def test_a_long_prompt_comes_in_pages() -> None:
    bench = Bench()
    cache(bench.pool, [*range(8)])
    prompt = [*range(18)]
    whole = bench.explain(prompt)
    assert not whole.next_page_token
    pages = [bench.explain(prompt, page_size=2)]
    while pages[-1].next_page_token:
        pages.append(bench.explain(prompt, page_size=2, token=pages[-1].next_page_token))
    assert [len(page.blocks) for page in pages] == [2, 2, 1]
    for other in (prompt[:-1], [*prompt[:-1], 99], [1, *prompt[1:]]):
        with pytest.raises(InvalidRequest, match="page_token: must be empty or next_page_token of a page of the same"):
            bench.explain(other, token=pages[0].next_page_token)
    assert [block for page in pages for block in page.blocks] == whole.blocks
    assert {page.cached_tokens for page in pages} == {8}
