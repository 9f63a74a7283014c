"""Blocks that a prompt finds cached and shares: golden values, driven through the scheduler."""

from __future__ import annotations

import hashlib
import random

import pytest
from support.engine.fake_executor import expected_output
from support.engine.scheduler_driver import Driver, cached, expect, finished, output

from pagekv.kvmanager.kvcache import block_hash
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaSpan
from pagekv.kvmanager.scheduling import publishing
from pagekv.kvmanager.scheduling.sequence import LiveRequest


def serve(driver: Driver, prompt: list[int], max_tokens: int = 1, identity: CacheIdentity | None = None) -> int:
    """Runs a request to its end; its output must be right. Returns its cached tokens."""
    request = driver.submit(prompt, max_tokens, identity=identity)
    driver.drain()
    assert output(request) == expect(prompt, max_tokens)
    return cached(request)


def table(request: LiveRequest) -> list[int]:
    return list(request.sequences[0].block_table)


# -- what is equal


@pytest.mark.parametrize(("common", "hit"), [(2, 0), (3, 0), (4, 4), (7, 4), (8, 8)])
def test_a_hit_is_a_whole_number_of_blocks(common: int, hit: int) -> None:
    """With blocks of four, two or three common tokens hit nothing, seven hit four."""
    driver = Driver(block_size=4)
    serve(driver, [*range(common), 90, 90, 90, 90, 90, 90])
    assert serve(driver, [*range(common), 80, 80, 80, 80, 80, 80]) == hit


def test_the_same_words_after_another_beginning_are_another_block() -> None:
    """ "fries" after a burger is not "fries" after a steak, also where whole blocks look alike."""
    driver = Driver(block_size=4)
    burger, steak, fries = [1, 1, 1, 1], [2, 2, 2, 2], [7, 7, 7, 7]
    serve(driver, [*burger, *fries, 9])
    assert serve(driver, [*steak, *fries, 9]) == 0
    assert driver.pool.num_published == 4
    assert serve(driver, [*steak, *fries, 9]) == 8


def test_blocks_behind_a_hole_are_not_used() -> None:
    """The leading run of hits, though the block behind the first miss is cached."""
    driver = Driver(block_size=4)
    serve(driver, [*[1] * 4, *[2] * 4, *[3] * 4, 9])
    assert serve(driver, [*[1] * 4, *[8] * 4, *[3] * 4, 9]) == 4


def test_a_block_is_published_once_when_it_is_full() -> None:
    """A partial block has no identity; the entry appears with its last token and never again."""
    driver = Driver(block_size=4, depth=1)
    driver.submit([1, 2], max_tokens=8)
    published = []
    while driver.plan() is not None:
        driver.complete()
        published.append(driver.pool.num_published)
    # Positions 0 to 8 are computed, which fill two blocks.
    assert published[:2] == [0, 0]
    assert published == sorted(published)
    assert published[-1] == 2


def test_of_4097_tokens_256_blocks_are_found_again() -> None:
    """Blocks 0 to 255; the last token stands alone."""
    driver = Driver(num_blocks=600, block_size=16, max_batch_tokens=4200)
    prompt = [i % 90 for i in range(4097)]
    serve(driver, prompt)
    assert serve(driver, prompt) == 4096
    assert serve(driver, prompt[:4090]) == 4080


@pytest.mark.parametrize(
    "other",
    [
        CacheIdentity(namespace="team"),
        CacheIdentity(adapter_id="lora"),
        CacheIdentity(media=(MediaSpan(0, 1, "cat"),)),
        CacheIdentity(namespace="team", adapter_id="lora"),
    ],
)
def test_another_identity_shares_nothing_from_block_0_on(other: CacheIdentity) -> None:
    """Namespace, adapter and medium are part of every block's identity."""
    driver = Driver(block_size=4, partial_hits=True)
    prompt = list(range(13))
    serve(driver, prompt)
    assert serve(driver, prompt, identity=other) == 0
    assert serve(driver, prompt, identity=other) == 12


def test_equal_prompts_of_two_namespaces_are_stored_twice_and_tell_nothing_of_each_other() -> None:
    """Three full blocks each, and a count of cached tokens that knows of its own namespace alone; those of one
    namespace are stored once.
    """
    driver = Driver(block_size=4, partial_hits=True)
    prompt = list(range(13))
    mine, other = CacheIdentity(namespace="mine"), CacheIdentity(namespace="other")
    counts = [serve(driver, prompt, identity=identity) for identity in (mine, other, mine, other)]
    assert counts == [0, 0, 12, 12]
    assert driver.pool.num_published == 6


def test_a_medium_changes_the_blocks_it_covers_and_those_after() -> None:
    """The same placeholder tokens stand for another picture from position 6 on."""
    driver = Driver(block_size=4, partial_hits=True)
    prompt = [1, 2, 3, 4, 5, 6, 0, 0, 0, 7, 8, 9, 10]
    cat, dog = (CacheIdentity(media=(MediaSpan(6, 3, name),)) for name in ("cat", "dog"))
    serve(driver, prompt, identity=cat)
    assert serve(driver, prompt, identity=dog) == 4
    assert serve(driver, prompt, identity=cat) == 12


class _Forgetful:
    """A hash of a block's own tokens, whatever stands before them: the parent digest is the first 32 bytes."""

    def __init__(self, data: bytes) -> None:
        self._hash = hashlib.sha256(data[32:])

    def digest(self) -> bytes:
        return self._hash.digest()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("partial", [False, True])
def test_equal_tokens_after_another_prefix_are_told_apart_without_a_hash(
    monkeypatch: pytest.MonkeyPatch, partial: bool, seed: int
) -> None:
    """Every block collides with all that hold the same tokens, and every output is right. Every hit was
    reached from the root over blocks whose token ids were compared.
    """
    for module in (block_hash, publishing):
        monkeypatch.setattr(module, "sha256", _Forgetful)
    chance = random.Random(seed)
    driver = Driver(num_blocks=32, block_size=2, max_running=4, partial_hits=partial, vocab=3)
    prompts = [[chance.randrange(3) for _ in range(chance.randrange(1, 14))] for _ in range(80)]
    requests = []
    for prompt in prompts:
        requests.append(driver.submit(prompt, max_tokens=chance.randrange(1, 8)))
        for _ in range(chance.randrange(3)):
            driver.step()
    driver.drain()
    for prompt, request in zip(prompts, requests, strict=True):
        assert output(request) == expected_output(prompt, request.command.sampling.max_tokens, 3)
    assert driver.pool.hash_alarms > 0
    assert sum(cached(request) for request in requests) > 0


@pytest.mark.parametrize("partial", [False, True])
def test_outputs_do_not_know_of_the_cache(partial: bool) -> None:
    """The same requests with and without it, and a hit changes no token."""
    prompts = [[*range(9), r % 3, *range(r % 5)] for r in range(12)]
    with_cache = Driver(block_size=4, partial_hits=partial)
    without = Driver(block_size=4, prefix_cache=False)
    hits = [serve(with_cache, prompt, 5) for prompt in prompts]
    assert [serve(without, prompt, 5) for prompt in prompts] == [0] * 12
    assert sum(hits) > 0
    assert without.pool.num_published == 0


# -- sharing


@pytest.mark.parametrize(("prefix_cache", "blocks"), [(False, 6300), (True, 62 + 100)])
def test_a_hundred_requests_share_62_of_63_blocks(prefix_cache: bool, blocks: int) -> None:
    """100 prompts with the same first 1,000 tokens, blocks of 16. Only full blocks are shared, so
    each keeps one of its own: 97.4 % saved, not 99.0 %.
    """
    driver = Driver(
        num_blocks=6300, block_size=16, max_batch_tokens=110_000, max_running=100, prefix_cache=prefix_cache
    )
    prefix = [i % 90 for i in range(1000)]
    requests = [driver.submit([*prefix, number], max_tokens=2) for number in range(100)]
    driver.plan()
    assert driver.pool.num_active == blocks
    assert sum(len(table(request)) for request in requests) == 6300
    if prefix_cache:
        assert f"{1 - blocks / 6300:.1%}" == "97.4%"
        assert [cached(request) for request in requests] == [0] + [992] * 99
        assert driver.plans[0].num_tokens == 1001 + 99 * 9


def test_a_shared_block_counts_its_holders() -> None:
    """Two requests, ref_count 2; it falls as they end, and at 0 the block still hits."""
    driver = Driver(block_size=4, depth=1)
    first = driver.submit([1, 2, 3, 4, 5], max_tokens=2)
    driver.step()
    second = driver.submit([1, 2, 3, 4, 6], max_tokens=3)
    driver.plan()
    block = table(second)[0]
    assert driver.pool.ref_count(block) == 2
    driver.complete()
    assert finished(first)
    assert (driver.pool.ref_count(block), driver.pool.num_cached_free) == (1, 0)
    driver.drain()
    assert (driver.pool.ref_count(block), driver.pool.num_cached_free) == (0, 1)
    assert serve(driver, [1, 2, 3, 4, 7]) == 4
    assert driver.pool.evictions == 0


def test_a_full_hit_computes_one_token() -> None:
    """The rest is read, and without a token there would be nothing to sample from; of 4,096
    cached tokens and 128 new ones 128 are computed, not 4,224.
    """
    driver = Driver(num_blocks=300, block_size=16, max_batch_tokens=4224)
    prefix = [i % 90 for i in range(4096)]
    serve(driver, prefix)
    assert driver.executor.computed_tokens == 4096
    serve(driver, [*prefix, *[91] * 128])
    assert driver.executor.computed_tokens == 4096 + 128
    serve(driver, [*prefix, 91])
    assert driver.executor.computed_tokens == 4096 + 128 + 1


@pytest.mark.parametrize(("partial", "computed"), [(False, 4), (True, 1)])
def test_of_a_prompt_that_is_cached_to_its_last_token_that_one_is_computed(partial: bool, computed: int) -> None:
    """With the rest of its block, where that cannot be copied."""
    driver = Driver(block_size=4, partial_hits=partial)
    prompt = list(range(8))
    serve(driver, prompt)
    assert driver.executor.computed_tokens == 8
    assert serve(driver, prompt) == 8 - computed
    assert driver.executor.computed_tokens == 8 + computed


def test_a_hit_is_never_evicted_by_the_request_it_belongs_to() -> None:
    """Hits are held before anything is allocated. Here the hit is the oldest block there is."""
    driver = Driver(num_blocks=5, block_size=4)
    serve(driver, [1, 2, 3, 4])
    serve(driver, [5, 6, 7, 8, 9, 9, 9, 9])
    assert serve(driver, [1, 2, 3, 4, *[6] * 15], max_tokens=2) == 4
    assert driver.pool.evictions == 2


def test_a_block_is_not_read_before_it_is_computed() -> None:
    """The second request hits the chunks that were planned, not the whole prompt, whatever is in
    flight; the executor of these tests fails on a slot that nobody has written.
    """
    driver = Driver(block_size=4, max_batch_tokens=8)
    prompt = list(range(24))
    driver.submit(prompt, max_tokens=1)
    second = driver.submit([*prompt[:20], 90], max_tokens=1)
    driver.plan()
    assert driver.pool.num_published == 2
    driver.drain()
    assert output(second) == expect([*prompt[:20], 90], 1)


def test_preemption_gives_shared_blocks_up_like_an_end_does() -> None:
    """Blocks that a preempted request shared are held by the others alone."""
    driver = Driver(num_blocks=7, block_size=4, depth=1)
    common = [1, 2, 3, 4]
    first = driver.submit([*common, 5, 5, 5], max_tokens=12)
    driver.step()
    second = driver.submit([*common, 6, 6, 6], max_tokens=12)
    while not second.sequences[0].preemptions:
        driver.step()
        shared = table(first)[0]
    assert (driver.pool.ref_count(shared), table(second)) == (1, [])
    driver.drain()
    assert [len(output(request)) for request in (first, second)] == [12, 12]
