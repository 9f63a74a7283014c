"""Long prompts prepared slice by slice: the work of a slice is bounded, and no decision differs."""

from __future__ import annotations

import hashlib
import random
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.engine.scheduler_driver import Driver, expect, output, small_driver, streamed
from support.engine.tables_alone import ROOT, cache, complete, sequence_of, tables_of

from pagekv.kvmanager.kvcache import block_hash, block_pool
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaSpan, chain_digests, token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.prefix_table import BlockTokens, PrefixTable
from pagekv.kvmanager.kvcache.prefix_trie import Node
from pagekv.kvmanager.observe.recording.step_recorder import plan_columns
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling import prepared_prompt, publishing
from pagekv.kvmanager.scheduling.block_tables import Arrival
from pagekv.kvmanager.scheduling.prepared_prompt import SLICE_BLOCKS, SLICE_TOKENS, PreparedPrompt, slice_blocks
from pagekv.kvmanager.scheduling.sequence import live_request


@pytest.fixture
def slices_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_prompt, "SLICE_BLOCKS", 2)


def replace_by(pool: BlockPool, prompt: list[int], blocks: list[int]) -> None:
    """Enters a prompt into an emptied table of a pool with as many blocks, under the same ids in the same order."""
    pool.clear_prefix_table()
    # Taken and let go, so that an id stands at the same place in the other chain.
    around = pool.allocate(pool.num_blocks)
    assert around is not None
    pool.free(around)
    assert cache(pool, prompt) == blocks


def prepared_around(after: int, prompt: list[int], other: list[int]) -> tuple[BlockPool, PreparedPrompt, list[int]]:
    """A cached prompt of 10 blocks prepared, and behind so many slices its blocks taken for another one; and their
    ids.
    """
    pool = BlockPool(10, 2)
    found = cache(pool, prompt)
    prepared = PreparedPrompt(ROOT)
    slices = prepared.slices(array("I", prompt), (), pool.table, array.tobytes)
    for _ in range(after):
        next(slices)
    replace_by(pool, other, found)
    for _ in slices:
        pass
    return pool, prepared, found


@pytest.mark.parametrize(("size", "num_media", "most"), [(16, 0, 1024), (1, 0, 1024), (256, 0, 64), (16, 256, 31)])
def test_the_work_of_a_slice_is_bounded(monkeypatch: pytest.MonkeyPatch, size: int, num_media: int, most: int) -> None:
    """Blocks hashed, blocks looked up and token ids packed, each counted between two items, of a prompt whose first
    third is cached.
    """
    assert (slice_blocks(size, num_media), SLICE_BLOCKS, SLICE_TOKENS) == (most, 1024, 16_384)
    length = 7 * most * size + 5
    prompt = np.random.default_rng(3).integers(0, 2**32, length, np.uint32)
    pool = BlockPool(8 * most, size)
    cache(pool, prompt[: length // 3].tolist())
    work: list[tuple[str, int]] = []
    total = 0

    def hashed(parent: bytes, tokens: bytes, block_size: int, *others: Any) -> list[bytes]:
        work.append(("hashed", len(tokens) // 4 // block_size))
        return chain_digests(parent, tokens, block_size, *others)

    def packed(token_ids: array[int]) -> bytes:
        work.append(("packed", len(token_ids)))
        return token_ids.tobytes()

    match = pool.table.trie.match

    def looked_up(*args: Any) -> list[int]:
        work.append(("looked up", len(args[1])))
        return match(*args)

    monkeypatch.setattr(prepared_prompt, "chain_digests", hashed)
    monkeypatch.setattr(pool.table.trie, "match", looked_up)
    media = [MediaSpan(length - 1 - index, 1, "m") for index in range(num_media)]
    prepared, slices = PreparedPrompt(ROOT), 0
    for _ in prepared.slices(array("I", prompt.tobytes()), media, pool.table, packed):
        done, slices = work[total:], slices + 1
        total = len(work)
        assert [kind for kind, _ in done].count("packed") == 1
        assert dict(done)["packed"] <= most * size <= SLICE_TOKENS
        assert all(count <= most for kind, count in done if kind != "packed")
    assert (slices, total) == (8, len(work))
    cached = length // 3 // size
    assert sum(count for kind, count in work if kind == "hashed") == length // size - cached
    assert len(prepared.cached) == cached
    assert prepared.packed == prompt.tobytes()
    assert prepared.digests == chain_digests(ROOT, prompt.tobytes(), size, media)


@pytest.mark.usefixtures("slices_of_two")
def test_what_is_cached_is_found_and_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, prompt = BlockPool(20, 2), list(range(1, 22))
    assert complete(pool.table, prompt).cached.tolist() == []
    blocks = cache(pool, prompt)
    prepared = complete(pool.table, [*prompt[:18], 99, 99, 99])
    assert prepared.cached.tolist() == blocks[:9]
    with monkeypatch.context() as without:
        without.setattr(prepared_prompt, "chain_digests", None)
        assert complete(pool.table, prompt).digests == chain_digests(ROOT, token_bytes(prompt), 2)


@pytest.mark.usefixtures("slices_of_two")
def test_from_a_medium_on_blocks_are_identified_by_their_digests() -> None:
    pool, prompt = BlockPool(20, 2), list(range(1, 22))
    blocks, media = cache(pool, prompt), [MediaSpan(7, 2, "cat")]
    prepared = complete(pool.table, prompt, media)
    assert prepared.cached.tolist() == blocks[:3]
    assert prepared.digests == chain_digests(ROOT, token_bytes(prompt), 2, media)


@pytest.mark.usefixtures("slices_of_two")
@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("follower", [[9, 10], [99, 99]])
def test_digests_are_right_whatever_becomes_of_the_table_meanwhile(after: int, follower: list[int]) -> None:
    """The blocks found so far are evicted, and their ids taken for another prefix before the same tokens."""
    prompt = list(range(1, 21))
    _, prepared, _ = prepared_around(after, prompt, [50, 51, *prompt[2:8], *follower, *prompt[10:]])
    assert prepared.digests == chain_digests(ROOT, token_bytes(prompt), 2)


@pytest.mark.usefixtures("slices_of_two")
@pytest.mark.parametrize("after", range(6))
def test_no_digest_object_stands_for_two_prefixes(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Even if values collide: here a digest is that of the block's own tokens. The ids found are those of another
    prefix by the next slice.
    """
    monkeypatch.setattr(block_hash, "sha256", lambda data: hashlib.sha256(data[32:]))
    prompt = list(range(1, 21))
    pool, prepared, found = prepared_around(after, prompt, [50, 51, *prompt[2:]])
    others = {id(digest) for digest in pool.table.digests(found)}
    assert not [digest for digest in prepared.digests if id(digest) in others]


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_the_objects_of_a_prefix_that_came_back_are_taken(host_blocks: int) -> None:
    """The same ids hold the same tokens, under other digest objects."""
    pool, prompt = BlockPool(10, 2), list(range(1, 22))
    found = cache(pool, prompt)
    prepared = complete(pool.table, prompt)
    replace_by(pool, prompt, found)
    sequence = sequence_of(prompt, prepared)
    # It does not fit, and has looked.
    assert tables_of(pool, host_blocks).admit([Arrival(sequence)], 0) == 1
    assert sequence.hint.tolist() == found
    same = [mine is own for mine, own in zip(sequence.digests, pool.table.digests(found), strict=True)]
    assert all(same) or not host_blocks


def test_a_sequence_has_token_ids_of_its_own() -> None:
    """From when it enters the executor: the command's stay as they were sent, and each gets its outputs alone."""
    prompt = list(range(1, 22))
    prepared = complete(PrefixTable(4, 2, np.zeros(4, np.int32)), prompt)
    command = GenerateCommand("r", array("I", prompt), SamplingParams(max_tokens=2), 2)
    first, second = live_request(command, RequestStream("r", 2), 0, ROOT, 0, prepared).sequences
    first.own_token_ids().append(5)
    second.own_token_ids().append(6)
    assert [ids.tolist() for ids in (command.prompt_ids, first.token_ids, second.token_ids)] == [  # type: ignore[attr-defined]  # an array
        prompt,
        [*prompt, 5],
        [*prompt, 6],
    ]


@pytest.mark.parametrize("way", ["none", "evicted", "evicted together", "void", "reset", "a copy has the entry now"])
@pytest.mark.parametrize("host_blocks", [0, 8])
def test_what_has_left_the_table_since_is_not_hit(monkeypatch: pytest.MonkeyPatch, way: str, host_blocks: int) -> None:
    """By each of the ways in which a block leaves; and where none did, the blocks found are not looked at again."""
    pool, prompt = BlockPool(20, 2), list(range(1, 22))
    blocks = cache(pool, prompt)
    prepared = complete(pool.table, prompt)
    if way.startswith("evicted"):
        monkeypatch.setattr(block_pool, "RETIRED_TOGETHER", 1 if way == "evicted together" else 100)
        taken = pool.allocate(20)
        assert taken is not None
        pool.free(taken)
    elif way == "void":
        pool.invalidate(prepared.digests[:1])
    elif way == "reset":
        pool.clear_prefix_table()
    elif way == "a copy has the entry now":
        cache(pool, prompt)
    else:
        monkeypatch.setattr(pool.table.trie, "verify", None)
    sequence = sequence_of(prompt, prepared)
    assert tables_of(pool, host_blocks).admit([Arrival(sequence)], 0) == 0
    assert sequence.num_computed == (20 if way in ("none", "a copy has the entry now") else 0)
    hits = sequence.block_table[: sequence.num_computed // 2].tolist()
    assert pool.table.digests(hits) == prepared.digests[: len(hits)]
    assert (hits == blocks) == (way == "none")
    if host_blocks:
        assert all(mine is own for mine, own in zip(sequence.digests, pool.table.digests(hits), strict=False))


def test_a_prepared_prompt_leaves_nothing_to_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither cold nor cached, and the cached one is not walked along either."""
    driver, prompt = Ahead(num_blocks=80, block_size=2, max_batch_tokens=8), [*range(90), 5]
    driver.fresh = True
    monkeypatch.setattr(publishing, "chain_digests", None)
    first = driver.submit(prompt, max_tokens=1)
    driver.drain()
    walked: list[int] = []
    match = driver.pool.table.trie.match

    def walk(parent: Node, tokens: BlockTokens) -> list[int]:
        found = match(parent, tokens)
        walked.append(len(found))
        return found

    again = driver.submit(prompt, max_tokens=1)
    monkeypatch.setattr(driver.pool.table.trie, "match", walk)
    driver.drain()
    assert output(first) == output(again) == expect(prompt, 1)
    assert [request.sequences[0].cached_tokens for request in (first, again)] == [0, 90]
    assert walked == [0]


class Ahead(Driver):
    """Prepares every prompt, sometimes long before its request comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.long_ago: dict[tuple[bytes, bytes, tuple[MediaSpan, ...]], PreparedPrompt] = {}
        self.fresh = False

    def _prepare(self, command: GenerateCommand, root: bytes) -> PreparedPrompt:
        which = root, token_bytes(command.prompt_ids), command.identity.media
        if which in self.long_ago and len(self.requests) % 3 and not self.fresh:
            old = self.long_ago[which]
            # A prompt is prepared for one request, and the digest objects that it made are of no other.
            found, hashed = old.digests[: len(old.cached)], old.digests[len(old.cached) :]
            digests = [*found, *(bytes(memoryview(digest)) for digest in hashed)]
            return replace(old, digests=digests, token_ids=array("I", command.prompt_ids))
        prepared = PreparedPrompt(root)
        for _ in prepared.slices(
            array("I", command.prompt_ids), command.identity.media, self.pool.table, array.tobytes
        ):
            pass
        self.long_ago[which] = prepared
        return prepared


@pytest.mark.usefixtures("slices_of_two")
@pytest.mark.parametrize("seed", range(12))
def test_decisions_are_those_of_prompts_that_were_not_prepared(seed: int) -> None:
    """Random requests over a small pool with evictions, preemptions, forks, beams, media and lost executors: each plan
    and each output is the same, however old and wrong by now what was prepared is.

    Several sequences of one prompt only without a host pool: prepared, they have the same digest objects, so that pool
    may keep their prefix once where it would keep it twice.
    """
    plans = []
    for kind in (Driver, Ahead):
        chance = random.Random(seed)
        driver = small_driver(seed, chance, kind)
        prompts = [[chance.randrange(3) for _ in range(chance.randrange(1, 24))] for _ in range(8)]
        for _ in range(60):
            prompt = chance.choice(prompts)
            media = (MediaSpan(chance.randrange(len(prompt)), 1, "cat"),) if not chance.randrange(4) else ()
            identity = CacheIdentity(chance.choice(["", "", "n"]), "", media, read=chance.random() < 0.9)
            shape: dict[str, Any] = chance.choice([{}, {}, {"n": 3}, {"beam_width": 2}])
            if driver.host.num_blocks:
                shape.pop("n", None)
            driver.submit(prompt, chance.randrange(1, 8), identity=identity, **shape)
            for _ in range(chance.randrange(5)):
                driver.step()
            if not chance.randrange(20):
                driver.lose_executor()
        driver.drain()
        tokens = [streamed(request, index) for request in driver.requests for index in range(request.command.n)]
        plans.append(([plan_columns(plan) for plan in driver.plans], tokens))
    assert plans[0] == plans[1]
    assert len(plans[0][0]) > 60
