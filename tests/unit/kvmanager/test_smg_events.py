"""What a gateway is told of the prefix table: enough to rebuild it, and only what its requests can hit."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable

from smg_grpc_proto.generated import common_pb2 as common

from pagekv.kvmanager.block_hash import block_digest, root_digest, short_hash
from pagekv.kvmanager.smg_events import MAX_BLOCKS, KvEvents
from pagekv.kvmanager.table_diff import Key, Tier
from pagekv.kvmanager.table_watch import Diff, StoredBlock

BLOCK = 4
ROOT = root_digest("f00d", "", "")


def block(parent: bytes, *tokens: int) -> tuple[Key, StoredBlock]:
    ids = array("I", tokens)
    return (Tier.DEVICE, block_digest(parent, ids.tobytes())), StoredBlock(parent, ids)


def diff(stored: Iterable[tuple[Key, StoredBlock]] = (), removed: Iterable[bytes] = (), cleared: bool = False) -> Diff:
    made = Diff()
    if cleared:
        made.clear()
    made.remove((Tier.DEVICE, digest) for digest in removed)
    for key, entry in stored:
        made.store(key, entry)
    return made


class Reader:
    """Keeps what a gateway would know: the tokens of each block and its parent, by 64-bit hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.next = 1

    def take(self, batches: Iterable[common.KvEventBatch]) -> None:
        for batch in batches:
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


def test_the_blocks_of_a_prompt_are_one_event_from_the_root() -> None:
    events = KvEvents(lambda: ROOT, BLOCK)
    first = block(ROOT, 1, 2, 3, 4)
    second = block(first[0][1], 5, 6, 7, 8)
    other = block(ROOT, 9, 9, 9, 9)
    events.begin()
    (batch,) = events.changed(diff([first, second, other]))
    assert [len(event.stored.blocks) for event in batch.events] == [2, 1]
    assert not any(event.stored.HasField("parent_block_hash") for event in batch.events)
    (batch,) = events.changed(diff([block(second[0][1], 1, 1, 1, 1)]))
    assert batch.events[0].stored.parent_block_hash & (2**64 - 1) == short_hash(second[0][1])


def test_blocks_that_a_gateways_prompt_cannot_hit_are_not_told() -> None:
    foreign = block(root_digest("f00d", "tenant", ""), 1, 2, 3, 4)
    below = block(foreign[0][1], 5, 6, 7, 8)
    ids = array("I", [1, 2, 3, 4])
    media = (Tier.DEVICE, block_digest(ROOT, ids.tobytes(), [(0, "picture")])), StoredBlock(ROOT, ids)
    mine = block(ROOT, 1, 2, 3, 4)
    host = (Tier.HOST, mine[0][1]), mine[1]
    events = KvEvents(lambda: ROOT, BLOCK)
    reader = reader_of(events)
    reader.take(events.changed(diff([foreign, below, media, host])))
    assert reader.blocks == {}
    reader.take(events.changed(diff(removed=[foreign[0][1]])))
    reader.take(events.changed(diff([mine])))
    assert list(reader.blocks.values()) == [(None, (1, 2, 3, 4))]


def test_another_model_starts_from_its_own_root() -> None:
    roots = [ROOT]
    events = KvEvents(lambda: roots[0], BLOCK)
    reader = reader_of(events)
    reader.take(events.changed(diff([block(ROOT, 1, 2, 3, 4)])))
    roots[0] = root_digest("cafe", "", "")
    reader.take(events.changed(diff([block(roots[0], 5, 6, 7, 8)], cleared=True)))
    assert list(reader.blocks.values()) == [(None, (5, 6, 7, 8))]


def test_large_changes_travel_in_pieces() -> None:
    events = KvEvents(lambda: ROOT, BLOCK)
    reader = reader_of(events)
    batches = list(events.stored(block(ROOT, number, 0, 0, 0) for number in range(2 * MAX_BLOCKS + 1)))
    assert len(batches) == 3
    reader.take(batches)
    assert len(reader.blocks) == 2 * MAX_BLOCKS + 1


def test_random_histories_rebuild_the_table() -> None:
    rng = random.Random(5)
    events = KvEvents(lambda: ROOT, BLOCK)
    reader = reader_of(events)
    table: dict[bytes, StoredBlock] = {}
    for _ in range(300):
        change = Diff()
        if rng.random() < 0.02:
            change.clear()
            table.clear()
        for _ in range(rng.randrange(8)):
            leaves = [d for d in table if not any(entry.parent == d for entry in table.values())]
            if leaves and rng.random() < 0.45:
                gone = rng.choice(leaves)
                del table[gone]
                change.remove([(Tier.DEVICE, gone)])
            else:
                key, entry = block(rng.choice([ROOT, *table]), *(rng.randrange(2) for _ in range(BLOCK)))
                if key[1] not in table:
                    table[key[1]] = entry
                    change.store(key, entry)
        reader.take(events.changed(change))
        expected = {
            short_hash(digest): (None if entry.parent == ROOT else short_hash(entry.parent), tuple(entry.token_ids))
            for digest, entry in table.items()
        }
        unsigned = 2**64 - 1
        known = {
            name & unsigned: (None if parent is None else parent & unsigned, tokens)
            for name, (parent, tokens) in reader.blocks.items()
        }
        assert known == expected
