"""KV events as readers made for vLLM decode them: fields, order, types, chains, tiers, identities."""

from __future__ import annotations

import random
from collections.abc import Iterable, Set
from typing import Any

import pytest
from support.clients.kv_event_reader import AllBlocksCleared, BlockRemoved, BlockStored, EventReplica, decode
from support.clients.table_reader import Table, WatchedDriver, host_table_of, table_of

from pagekv.kvmanager.kvcache.block_hash import (
    CacheIdentity,
    MediaSpan,
    chain_digests,
    root_digest,
    short_hash,
    token_bytes,
)
from pagekv.kvmanager.kvcache.events.batch import Diff, Removed, Stored, Tier
from pagekv.kvmanager.kvcache.events.snapshot import take_snapshot
from pagekv.kvmanager.observe.kv_events import vllm_format
from pagekv.kvmanager.observe.kv_events.vllm_format import MAX_BATCH_TOKENS, Events, KvEventFormat, MediaKeysOf, pack

ROOT = root_digest("model", "", "")
SIZE = 4


def chain(
    diff: Diff,
    root: bytes,
    prompt: list[int],
    tier: Tier = Tier.DEVICE,
    first: int = 0,
    names: tuple[str, str] | None = None,
) -> list[bytes]:
    """Stores the prompt's full blocks from block `first` on; returns the digests of all."""
    digests = chain_digests(root, token_bytes(prompt), SIZE)
    for index in range(first, len(digests)):
        tokens = token_bytes(prompt[index * SIZE : (index + 1) * SIZE])
        parent, named = digests[index - 1] if index else root, [names] if names is not None else None
        diff.store(Stored(tier, [digests[index]], [parent], tokens, first=not index, names=named))
    return digests


def decoded(batches: Iterable[Events]) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    return [event for events in batches for event in decode(pack(1.5, events)).events]


def test_a_batch_is_packed_as_vllm_packs_it() -> None:
    form = KvEventFormat(MediaKeysOf())
    diff = Diff()
    hashes = list(map(short_hash, chain(diff, ROOT, [1, 2, 3, 4, 5, 6, 7, 2**32 - 1])))
    (events,) = form.changed(diff)
    batch = decode(pack(1234.5, events))
    assert (batch.ts, batch.data_parallel_rank) == (1234.5, 0)
    assert batch.events == [
        BlockStored(hashes, None, [1, 2, 3, 4, 5, 6, 7, 2**32 - 1], 4, None, "GPU", None, [None, None], 0,
                    "full_attention"),
    ]  # fmt: skip  # laid out as a table
    assert all(0 <= number < 2**64 for number in hashes)


def test_blocks_that_follow_one_another_are_one_event() -> None:
    form = KvEventFormat(MediaKeysOf())
    diff = Diff()
    known = list(map(short_hash, chain(diff, ROOT, [1] * 8)))
    other = list(map(short_hash, chain(diff, ROOT, [*[1] * 4, *[2] * 8], first=1)))
    kept = list(map(short_hash, chain(diff, ROOT, [1] * 8, Tier.HOST, first=1)))
    found = decoded(form.changed(diff))
    stored = [event for event in found if isinstance(event, BlockStored)]
    assert len(stored) == len(found)
    assert [(event.block_hashes, event.parent_block_hash, event.medium) for event in stored] == [
        (known, None, "GPU"),
        (other[1:], known[0], "GPU"),
        (kept[1:], known[0], "CPU"),
    ]


def test_events_of_single_blocks_are_like_all_others() -> None:
    """Single blocks are packed all together, with numbers of every size."""
    form = KvEventFormat(MediaKeysOf())
    diff = Diff()
    known = chain(diff, ROOT, [1] * 4)
    assert len(decoded(form.changed(diff))) == 1
    names = [bytes([0, 0, 0, 0, 0, 0, 0, number]) + bytes(24) for number in range(1, 4)]
    names += [bytes([number]) * 32 for number in range(128, 255)]
    token_ids = [0, 127, 2**16, 2**32 - 1]
    later = Diff()
    for name in names:
        later.store(Stored(Tier.DEVICE, [name], known, token_bytes(token_ids)))
    assert decoded(form.changed(later)) == [
        BlockStored([short_hash(name)], short_hash(known[0]), token_ids, 4, None, "GPU", None, [None], 0,
                    "full_attention")
        for name in names
    ]  # fmt: skip  # laid out as a table


def test_removals_come_first_and_name_the_medium() -> None:
    """A reader that knows hashes only keeps a block that moved from one tier to the other."""
    form = KvEventFormat(MediaKeysOf())
    diff = Diff()
    digests = chain(diff, ROOT, [1] * 12)
    assert len(decoded(form.changed(diff))) == 1
    moved = Diff()
    chain(moved, ROOT, [1] * 12, Tier.HOST, first=2)
    moved.remove(Removed(Tier.DEVICE, [digests[2], digests[1]]))
    removed, stored = decoded(form.changed(moved))
    assert removed == BlockRemoved([short_hash(digests[2]), short_hash(digests[1])], "GPU", 0)
    assert isinstance(stored, BlockStored)
    assert (stored.medium, stored.block_hashes) == ("CPU", [short_hash(digests[2])])
    cleared = Diff()
    cleared.clear()
    assert decoded(form.changed(cleared)) == [AllBlocksCleared()]
    assert decoded(form.changed(Diff())) == []


def test_large_changes_come_in_batches_of_bounded_size() -> None:
    form = KvEventFormat(MediaKeysOf())
    diff = Diff()
    digests = chain(diff, ROOT, [7] * (2 * MAX_BATCH_TOKENS + 8))
    batches = list(form.changed(diff))
    assert [
        sum(len(event.token_ids) for event in decoded([events]) if isinstance(event, BlockStored)) for events in batches
    ] == [
        MAX_BATCH_TOKENS, MAX_BATCH_TOKENS, 8,
    ]  # fmt: skip  # laid out as a table
    replica = EventReplica()
    for events in batches:
        replica.apply(decode(pack(0.0, events)))
    assert list(replica.blocks["GPU"]) == list(map(short_hash, digests))


def test_adapter_namespace_and_media_are_named_as_vllm_names_them() -> None:
    """Adapter and namespace reach blocks that follow later, the namespace is named where the chain begins only."""
    media = MediaKeysOf()
    form = KvEventFormat(media)
    identity = CacheIdentity("tenant", "lora", (MediaSpan(5, 4, "cafe"),))
    root, names = root_digest("model", "tenant", "lora"), ("tenant", "lora")
    diff = Diff()
    digests = chain(diff, root, [1] * 12, names=names)
    media.note(digests, SIZE, identity)
    (stored,) = decoded(form.changed(diff))
    assert isinstance(stored, BlockStored)
    assert (stored.lora_name, stored.lora_id, stored.parent_block_hash) == ("lora", None, None)
    assert stored.extra_keys == [("lora", "tenant"), ("lora", ["cafe", 1]), ("lora", ["cafe", -3])]
    later = Diff()
    chain(later, root, [1] * 16, first=3, names=names)
    later.remove(Removed(Tier.DEVICE, digests))
    chain(later, root, [1] * 16, Tier.HOST, first=3, names=names)
    found = decoded(form.changed(later))[1:]
    named = [(event.lora_name, event.extra_keys) for event in found if isinstance(event, BlockStored)]
    assert len(found) == 2
    assert named == [("lora", [("lora",)])] * 2
    plain = Diff()
    chain(plain, ROOT, [1] * 4)
    (stored,) = decoded(form.changed(plain))
    assert isinstance(stored, BlockStored)
    assert (stored.lora_name, stored.extra_keys) == (None, [None])


def test_blocks_with_media_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_format, "MAX_MEDIA_BLOCKS", 2)
    media, identity = MediaKeysOf(), CacheIdentity(media=(MediaSpan(5, 4, "cafe"),))
    assert not media
    media.note([b"none", b"first", b"second"], SIZE, identity)
    media.note([b"none", b"third"], SIZE, identity)
    assert [media.get(name) for name in (b"none", b"first", b"second", b"third")] == [
        [], [], [(-3, "cafe")], [(1, "cafe")],
    ]  # fmt: skip  # laid out as a table


def short(table: Table, roots: Set[bytes]) -> dict[int, tuple[int | None, list[int]]]:
    return {
        short_hash(digest): (None if parent in roots else short_hash(parent), tokens)
        for digest, (parent, tokens) in table.items()
    }


class PublishedDriver(WatchedDriver):
    """A strict reader of KV events is held against both tables after every step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.form = KvEventFormat(MediaKeysOf())
        self.replica = EventReplica()

    def check(self) -> None:
        super().check()
        for events in self.form.changed(self.watch.take_unread()):
            self.replica.apply(decode(pack(0.0, events)))
        roots = {request.root for request in self.requests}
        assert self.replica.blocks["GPU"] == short(table_of(self.pool), roots)
        assert self.replica.blocks["CPU"] == short(host_table_of(self.host), roots)


@pytest.mark.parametrize("seed", range(3))
def test_a_strict_reader_holds_both_tables_and_knows_whose_each_block_is(seed: int) -> None:
    rng = random.Random(seed)
    driver = PublishedDriver(num_blocks=16, block_size=4, host_blocks=12, preemption="swap", write_back=True)
    names = [CacheIdentity(), CacheIdentity("a"), CacheIdentity("a", "x"), CacheIdentity("", "x")]
    whose: dict[int, CacheIdentity] = {}
    for round_number in range(60):
        identity = rng.choice(names)
        prompt = [rng.randrange(2)] * rng.randrange(4, 17) + [rng.randrange(90) for _ in range(rng.randrange(1, 8))]
        request = driver.submit(prompt, max_tokens=rng.randrange(1, 12), identity=identity)
        for _ in range(rng.randrange(8)):
            driver.step()
        if round_number % 20 == 9:
            driver.scheduler.preempt_all()
            driver.scheduler.clear_prefix_cache()
            driver.check()
        driver.drain()
        tokens = token_bytes(list(request.sequences[0].token_ids))
        whose.update((short_hash(digest), identity) for digest in chain_digests(request.root, tokens, 4))
    assert driver.scheduler.counters.written_back
    for block_hash, (adapter, _) in driver.replica.names.items():
        assert adapter == (whose[block_hash].adapter_id or None)
    firsts = [
        block for blocks in driver.replica.blocks.values() for block, (parent, _) in blocks.items() if parent is None
    ]
    assert firsts
    for block_hash in firsts:
        keys = [key for key in (whose[block_hash].adapter_id, whose[block_hash].namespace) if key]
        assert driver.replica.names[block_hash][1] == (tuple(keys) or None)
    # A snapshot alone says as much, to a publisher that saw none of the requests.
    late = EventReplica()
    for events in KvEventFormat(MediaKeysOf()).snapshot([*take_snapshot(driver.pool.table, driver.host)]):
        late.apply(decode(pack(0.0, events)))
    assert late.blocks == driver.replica.blocks
    assert late.names == {name: driver.replica.names[name] for blocks in late.blocks.values() for name in blocks}
