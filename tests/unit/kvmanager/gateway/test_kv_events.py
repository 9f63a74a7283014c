"""Batches for a gateway: enough to rebuild the prefix table, and only blocks that its requests can hit."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from smg_grpc_proto.generated import common_pb2 as common

from pagekv.kvmanager.gateway.kv_events import MAX_BLOCKS, KvEvents
from pagekv.kvmanager.kvcache.block_hash import block_digest, root_digest, short_hash, token_bytes
from pagekv.kvmanager.kvcache.events.batch import Diff, Removed, Stored, Tier, join

BLOCK = 4
ROOT = root_digest("f00d", "", "")
TENANTS_ROOT = root_digest("f00d", "tenant", "")
OTHER_MODELS_ROOT = root_digest("cafe", "", "")
ROOTS = ROOT, TENANTS_ROOT, OTHER_MODELS_ROOT


def block(parent: bytes, *token_ids: int) -> Stored:
    tokens = token_bytes(token_ids)
    return Stored(Tier.DEVICE, [block_digest(parent, tokens)], [parent], tokens, first=parent in ROOTS)


def name(digest: bytes) -> int:
    """The name of a block: 56 bits of its digest."""
    return short_hash(digest) >> 8


def diff(stored: Iterable[Stored] = (), removed: Iterable[bytes] = (), cleared: bool = False) -> Diff:
    made = Diff()
    if cleared:
        made.clear()
    made.remove(Removed(Tier.DEVICE, list(removed)))
    for one in stored:
        made.store(one)
    return made


class Reader:
    """The state of a gateway: parent and tokens of each block, by name."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.next = 1

    def take(self, batches: Iterable[bytes]) -> None:
        for batch in map(common.KvEventBatch.FromString, batches):
            assert batch.sequence_number == self.next
            self.next += 1
            for event in batch.events:
                self._apply(event)

    def _apply(self, event: common.KvCacheEvent) -> None:
        if event.HasField("cleared"):
            self.blocks.clear()
        elif event.HasField("removed"):
            for gone in event.removed.block_hashes:
                del self.blocks[gone]
        else:
            stored = event.stored
            parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
            assert parent is None or parent in self.blocks
            for added in stored.blocks:
                assert added.block_hash not in self.blocks
                assert added.block_size == len(added.token_ids) == BLOCK
                self.blocks[added.block_hash] = (parent, tuple(added.token_ids))
                parent = added.block_hash


def reader_of(events: KvEvents) -> Reader:
    reader = Reader()
    reader.take([events.begin()])
    return reader


def only(batches: Iterable[bytes]) -> common.KvEventBatch:
    (batch,) = batches
    return common.KvEventBatch.FromString(batch)


def test_every_block_is_an_event_and_the_first_of_a_prompt_follows_none() -> None:
    events = KvEvents(lambda: ROOT, BLOCK)
    first = block(ROOT, 1, 2, 3, 4)
    second = block(first.digests[0], 5, 6, 7, 8)
    other = block(ROOT, 9, 9, 9, 9)
    events.begin()
    batch = only(events.changed(diff([first, second, other])))
    assert [list(event.stored.blocks[0].token_ids) for event in batch.events] == [[1, 2, 3, 4], [5, 6, 7, 8], [9] * 4]
    assert [event.stored.HasField("parent_block_hash") for event in batch.events] == [False, True, False]
    batch = only(events.changed(diff([block(second.digests[0], 1, 1, 1, 1)])))
    assert batch.events[0].stored.parent_block_hash == name(second.digests[0])


def test_blocks_are_named_by_56_bits_of_their_digests() -> None:
    events = KvEvents(lambda: ROOT, BLOCK)
    first = block(ROOT, 1, 2, 3, 4)
    small = Stored(Tier.DEVICE, [bytes(6) + b"\x05" + bytes(25)], first.digests, token_bytes([2**32 - 1, 0, 1, 2]))
    large = Stored(Tier.DEVICE, [b"\xff" * 32], small.digests, token_bytes([5, 6, 7, 8]))
    batch = only(events.changed(diff([first, small, large])))
    stored = [event.stored for event in batch.events]
    assert [one.blocks[0].block_hash for one in stored] == [name(first.digests[0]), 5, 2**56 - 1]
    assert [one.parent_block_hash for one in stored] == [0, name(first.digests[0]), 5]
    assert list(stored[1].blocks[0].token_ids) == [2**32 - 1, 0, 1, 2]


@pytest.mark.parametrize(("size", "blocks"), [(1, MAX_BLOCKS), (64, MAX_BLOCKS), (256, 128)])
def test_a_message_holds_a_bounded_number_of_blocks_and_tokens(size: int, blocks: int) -> None:
    events = KvEvents(lambda: ROOT, size)
    digests = [number.to_bytes(32, "big") for number in range(1, 2 * blocks + 2)]
    stored = Stored(Tier.DEVICE, digests, [ROOT, *digests[:-1]], token_bytes([7] * size * len(digests)), first=True)
    batches = [common.KvEventBatch.FromString(batch) for batch in events.stored([stored])]
    assert [len(batch.events) for batch in batches] == [blocks, blocks, 1]


def test_what_leaves_is_told_before_what_comes() -> None:
    events = KvEvents(lambda: ROOT, BLOCK)
    old, new = block(ROOT, 1, 2, 3, 4), block(ROOT, 5, 6, 7, 8)
    list(events.changed(diff([old])))
    batch = only(events.changed(diff([new], removed=old.digests)))
    assert [event.WhichOneof("data") for event in batch.events] == ["removed", "stored"]


def test_blocks_that_a_gateways_prompt_cannot_hit_are_not_told() -> None:
    foreign = block(TENANTS_ROOT, 1, 2, 3, 4)
    below = block(foreign.digests[0], 5, 6, 7, 8)
    mine = block(ROOT, 1, 2, 3, 4)
    media = mine._replace(digests=[block_digest(ROOT, mine.tokens, [(0, "picture")])], text=False)
    host = mine._replace(tier=Tier.HOST)
    events = KvEvents(lambda: ROOT, BLOCK)
    reader = reader_of(events)
    reader.take(events.changed(diff([foreign, below, media, host])))
    assert reader.blocks == {}
    reader.take(events.changed(diff(removed=[foreign.digests[0]])))
    reader.take(events.changed(diff([mine])))
    assert list(reader.blocks.values()) == [(None, (1, 2, 3, 4))]
    # Blocks that a step publishes come together, whosever they are.
    after = block(mine.digests[0], 5, 6, 7, 8)
    last = block(below.digests[0], 9, 9, 9, 9)
    reader.take(events.changed(diff([foreign])))
    reader.take(events.changed(diff([join([below, after]), last])))
    assert [*reader.blocks] == [name(mine.digests[0]), name(after.digests[0])]


def test_another_model_starts_from_its_own_root() -> None:
    roots = [ROOT]
    events = KvEvents(lambda: roots[0], BLOCK)
    reader = reader_of(events)
    reader.take(events.changed(diff([block(ROOT, 1, 2, 3, 4)])))
    roots[0] = OTHER_MODELS_ROOT
    reader.take(events.changed(diff([block(roots[0], 5, 6, 7, 8)], cleared=True)))
    assert list(reader.blocks.values()) == [(None, (5, 6, 7, 8))]


def test_large_changes_travel_in_pieces() -> None:
    events = KvEvents(lambda: ROOT, BLOCK)
    reader = reader_of(events)
    batches = list(events.stored([block(ROOT, number, 0, 0, 0) for number in range(2 * MAX_BLOCKS + 1)]))
    assert len(batches) == 3
    reader.take(batches)
    assert len(reader.blocks) == 2 * MAX_BLOCKS + 1


def test_random_histories_rebuild_the_table() -> None:
    rng = random.Random(5)
    events = KvEvents(lambda: ROOT, BLOCK)
    reader = reader_of(events)
    table: dict[bytes, Stored] = {}
    for _ in range(300):
        change = Diff()
        if rng.random() < 0.02:
            change.clear()
            table.clear()
        for _ in range(rng.randrange(8)):
            leaves = [d for d in table if not any(entry.parents[0] == d for entry in table.values())]
            if leaves and rng.random() < 0.45:
                gone = rng.choice(leaves)
                del table[gone]
                change.remove(Removed(Tier.DEVICE, [gone]))
            else:
                parent = rng.choice([ROOT, TENANTS_ROOT, *table])
                # Blocks behind media are marked like them: tokens alone do not lead there.
                text = rng.random() < 0.8 and (parent not in table or table[parent].text)
                entries = [block(parent, *(rng.randrange(2) for _ in range(BLOCK)))._replace(text=text)]
                while rng.random() < 0.5:
                    entries.append(block(entries[-1].digests[0], *(rng.randrange(2) for _ in range(BLOCK))))
                entries = [entry._replace(text=text) for entry in entries]
                if table.keys().isdisjoint(entry.digests[0] for entry in entries):
                    table |= {entry.digests[0]: entry for entry in entries}
                    change.store(join(entries))
        change.settle()
        reader.take(events.changed(change))
        # Not told: a chain that a tenant's request began, and blocks from the first one with media on.
        expected = {
            name(digest): (None if parent == ROOT else name(parent), tuple(token_ids))
            for entry in table.values()
            if not foreign(entry, table)
            for digest, parent, token_ids in entry.each()
        }
        assert reader.blocks == expected


def foreign(entry: Stored, table: dict[bytes, Stored]) -> bool:
    """Whether a chain in the table begins at the tenant's root, or has media."""
    if not entry.text:
        return True
    while not entry.first:
        entry = table[entry.parents[0]]
    return entry.parents == [TENANTS_ROOT]
