"""Questions about a long prompt are answered from what was prepared in slices, as those about a short one are."""

from __future__ import annotations

import asyncio
import random
from array import array
from typing import Any

import numpy as np
import pytest
from support.engine.cached_prefixes import ROOT, cache, evict_all, hold
from support.engine.engine_harness import Bench, command, read, run
from support.event_loop import run_by

from pagekv.common.errors import Overloaded
from pagekv.kvmanager.engine import paging, prefix_match, queries
from pagekv.kvmanager.engine.explain import PrefixExplainer
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.prefix_match import match_prefix
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaSpan, chain_digests, token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.scheduling import prepared_prompt
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt

ANY = CacheIdentity()
LONG = [*range(1, 42)]


@pytest.mark.parametrize("seed", range(20))
def test_the_match_is_that_of_digests_alone_however_old_the_preparation(seed: int) -> None:
    """Prompts with and without media over a small pool, prepared long before they are asked for, or not at all."""
    chance = random.Random(seed)
    pool, size = BlockPool(12, 2), 2
    prompts = [[chance.randrange(2) for _ in range(chance.randrange(1, 20))] for _ in range(5)]
    media = [(), (), (MediaSpan(5, 3, "cat"),)]
    prepared: dict[tuple[int, ...], PreparedPrompt] = {}
    compared = 0
    for _ in range(80):
        prompt, spans = chance.choice(prompts), chance.choice(media)
        move = chance.random()
        if move < 0.4:
            pool.free(hold(pool, prompt, media=spans))
        elif move < 0.45:
            evict_all(pool)
        digests = chain_digests(ROOT, token_bytes(prompt), size, spans)
        which = (*prompt, len(spans))
        if which not in prepared or chance.random() < 0.2:
            prepared[which] = PreparedPrompt(ROOT)
            for _ in prepared[which].slices(array("I", prompt), spans, pool.table, None):
                pass
        for hint in (prepared[which], None):
            found = match_prefix(pool, ROOT, prompt, spans, hint)
            assert found.digests == digests
            assert found.hits.tolist() == pool.match(ROOT, digests, found.chunks)
            assert found.tokens.tolist() == prompt
            compared += len(found.hits)
    assert compared > 50


def test_what_was_prepared_for_another_root_is_not_used() -> None:
    pool = BlockPool(12, 2)
    blocks = cache(pool, LONG[:8])
    found = match_prefix(pool, ROOT, LONG[:8], (), PreparedPrompt(b"another", [bytes(32)] * 4))
    assert found.hits.tolist() == list(blocks)


def test_a_digest_that_stands_for_other_tokens_is_a_miss_and_an_alarm() -> None:
    pool, asked = BlockPool(12, 2), LONG[:4]
    digests = chain_digests(ROOT, token_bytes(asked), 2)
    rows = np.array([LONG[:2], [90, 91]], np.uint32)
    block = pool.allocate(2)
    assert block is not None
    pool.publish_chain(block, digests, ROOT, rows, first=True, media=False)
    assert match_prefix(pool, ROOT, asked, (), None).hits.tolist() == block[:1].tolist()
    assert pool.hash_alarms == 1


@pytest.mark.parametrize("question", ["lookup", "explain", "pin"])
@run_by(run, max_pinned_share=1.0)
async def test_a_question_about_a_long_prompt_is_prepared_in_slices(
    engine: EngineLoop, *, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    """One turn of the event loop behind each slice, and nothing left to hash or to walk along in the answer's own."""
    monkeypatch.setattr(prepared_prompt, "SLICE_BLOCKS", 2)
    await read(engine.submit(command("first", LONG, 1)))
    preparing = asyncio.create_task(engine.queries.prepare(array("I", LONG), ANY))
    turns = 0
    while not preparing.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 6
    prepared = preparing.result()
    assert prepared is not None
    assert not prepared.packed
    hashed: list[Any] = []
    monkeypatch.setattr(prepared_prompt, "chain_digests", lambda *args: hashed.append(args))
    monkeypatch.setattr(prefix_match, "PreparedPrompt", None)
    if question == "lookup":
        found = engine.queries.lookup_prefix(LONG, ANY, prepared).device_tokens
    elif question == "explain":
        found = (await engine.queries.explain_prefix(LONG, ANY, 99, prepared=prepared)).cached_tokens
    else:
        found = engine.queries.pin_prefix(LONG, ANY, 60, prepared=prepared).pinned_tokens
    assert found == 40
    assert hashed == []
    engine.queries.reset_prefix_cache(force=True)


@run_by(run)
async def test_a_question_about_a_short_prompt_waits_for_nothing(engine: EngineLoop) -> None:
    asking = engine.queries.prepare(array("I", LONG), ANY)
    with pytest.raises(StopIteration) as done:
        asking.send(None)
    assert done.value.value is None


@run_by(run)
async def test_questions_are_prepared_one_at_a_time(engine: EngineLoop, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of them hold the event loop for no more than one slice in a turn."""
    monkeypatch.setattr(prepared_prompt, "SLICE_BLOCKS", 2)
    under_way: list[int] = []
    slices = PreparedPrompt.slices

    def watched(self: PreparedPrompt, *args: Any) -> Any:
        under_way.append(1)
        yield from slices(self, *args)
        under_way.pop()

    monkeypatch.setattr(PreparedPrompt, "slices", watched)
    asked = [asyncio.create_task(engine.queries.prepare(array("I", LONG), ANY)) for _ in range(4)]
    most = 0
    while not all(task.done() for task in asked):
        await asyncio.sleep(0)
        most = max(most, len(under_way))
    assert most == 1


def test_questions_beyond_the_bound_are_refused_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that gave up while they waited, too."""
    monkeypatch.setattr(prepared_prompt, "SLICE_BLOCKS", 2)
    monkeypatch.setattr(queries, "MAX_ASKED_TOKENS", 100)
    monkeypatch.setattr(queries, "LEAST_COUNTED", 20)

    async def body(engine: EngineLoop, bench: Bench) -> None:
        def ask(count: int) -> asyncio.Task[PreparedPrompt | None]:
            return asyncio.create_task(engine.queries.prepare(array("I", LONG[:count]), ANY))

        asked = [ask(41), ask(41)]
        await asyncio.sleep(0)
        for count in (19, 1):
            with pytest.raises(Overloaded, match="of 82 tokens wait to be looked up; with this one the limit is 100"):
                await ask(count)
        asked[1].cancel()
        await asyncio.wait(asked)
        assert asked[0].result() is not None
        # One alone may have more.
        monkeypatch.setattr(queries, "MAX_ASKED_TOKENS", 10)
        assert await ask(41) is not None
        assert engine.queries._asked_tokens.total == 0

    run(body)


def test_questions_of_one_tenant_hold_up_and_refuse_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_prompt, "SLICE_BLOCKS", 2)
    monkeypatch.setattr(queries, "MAX_ASKED_TOKENS", 100)
    monkeypatch.setattr(queries, "LEAST_COUNTED", 20)

    async def body(engine: EngineLoop, bench: Bench) -> None:
        def ask(count: int, tenant: str) -> asyncio.Task[PreparedPrompt | None]:
            return asyncio.create_task(engine.queries.prepare(array("I", LONG[:count]), ANY, tenant))

        flood = [ask(41, "flood"), ask(41, "flood")]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="of 82 tokens wait"):
            await ask(20, "flood")
        # Its first is taken however long it is, more of it up to its share; and none waits for those of the other.
        quiet = ask(41, "quiet")
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="of 41 tokens wait"):
            await ask(20, "quiet")
        await quiet
        assert not flood[1].done()
        await asyncio.gather(*flood)
        assert engine.queries._asked_tokens.total == 0
        assert engine.queries._long_prompts.turns._turns == {}

    run(body)


def test_a_long_page_of_an_explanation_is_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what holds when it was asked for, whatever becomes of the blocks meanwhile."""
    monkeypatch.setattr(paging, "BLOCKS_AT_ONCE", 3)

    async def body(engine: EngineLoop, bench: Bench) -> None:
        await read(engine.submit(command("first", LONG, 1)))
        asked = [*LONG[:38], 0, 0, 0]
        explain = engine.queries.explain_prefix
        pages, whole, second = [], await explain(asked, ANY, 99), await explain(asked, ANY, 7)
        assert [len(page.blocks) for page in (whole, second)] == [11, 7]
        rest = await explain(asked, ANY, 99, second.next_page_token)
        assert [*second.blocks, *rest.blocks] == list(whole.blocks)
        assert (whole.next_page_token, rest.next_page_token) == ("", "")
        made = PrefixExplainer.page

        def watched(self: PrefixExplainer, page_size: int, token: str = "") -> Any:
            pages.append(page_size)
            return made(self, page_size, token)

        monkeypatch.setattr(PrefixExplainer, "page", watched)
        asking = asyncio.create_task(explain(asked, ANY, 7))
        await asyncio.sleep(0)
        engine.queries.reset_prefix_cache(force=False)
        assert list((await asking).blocks) == list(second.blocks)
        assert pages == [3, 3, 1]

    run(body)
