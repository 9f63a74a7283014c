"""Swapping takes blocks in batches; here it is held against taking them one after the other, on random histories."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
from support.engine.scheduler_driver import Driver

from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, chain_digests, root_digest, token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import NO_BLOCK, HostPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks, BlockTokens
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.counters import SchedulerCounters
from pagekv.kvmanager.scheduling.encoded_sizes import IdBytes
from pagekv.kvmanager.scheduling.sequence import Seq, Swapped, live_request
from pagekv.kvmanager.scheduling.step_plan import BlockCopy, CopyKind
from pagekv.kvmanager.scheduling.step_room import StepRoom
from pagekv.kvmanager.scheduling.swapping import Swapper

ROOT = root_digest("model", "", "")


class Written(NamedTuple):
    """A logical block that holds something; without a digest it is private."""

    sequence: Seq
    device: int
    start: int
    end: int
    digest: bytes | None
    parent: bytes
    tokens: BlockTokens
    # Others hold it too, and its digest finds it.
    elsewhere: bool


def keep(host: HostPool, digest: bytes | None, tokens: BlockTokens, parent: bytes) -> tuple[int, bool]:
    """A host block that holds this content, held, and whether it has yet to be filled; NO_BLOCK: no room."""
    blocks, fresh = host.keep([digest], tokens, [parent])
    return (blocks[0], bool(fresh)) if blocks else (NO_BLOCK, False)


def state(host: HostPool) -> tuple[list[int], list[bytes | None], list[int], int]:
    """State that decides what a pool does next."""
    return list(host._free), host._key[:], host.ref_counts.tolist(), host.evictions


class CheckedSwapper(Swapper):
    """Says first, block by block and on a copy of the host pool, what is to come out."""

    # How often each kind of comparison was made.
    checks: ClassVar[Counter[str]] = Counter()

    def _one_by_one(self, group: Sequence[Seq]) -> Iterator[Written]:
        size = self._pool.block_size
        inside = Counter(block for sequence in group for block in sequence.block_table)
        for sequence in group:
            for place, device in enumerate(sequence.block_table):
                start, end = place * size, min(sequence.num_computed, (place + 1) * size)
                if start >= end:
                    break
                published = self._pool.table.digest(device) is not None
                elsewhere = self._shared and published and self._pool.ref_count(device) > inside[device]
                digest, parent, tokens = None, b"", np.empty((0, size), np.uint32)
                if self._shared and sequence.publishes and end == start + size and place < len(sequence.digests):
                    digest = sequence.digests[place]
                    parent = sequence.digests[place - 1] if place else sequence.request.root
                    tokens = sequence.chunks(size, place, place + 1)
                yield Written(sequence, device, start, end, digest, parent, tokens, elsewhere)

    def cost(self, group: Sequence[Seq]) -> tuple[int, int, int]:
        distinct = {w.device: w for w in reversed(list(self._one_by_one(group))) if not w.elsewhere}.values()
        out = sum(self.host.find([w.digest], w.tokens, [w.parent]) == [NO_BLOCK] for w in distinct)
        cost = super().cost(group)
        assert cost == (out, len(distinct), sum(w.end - w.start for w in distinct))
        self.checks["cost"] += 1
        return cost

    def swap_out(self, group: Sequence[Seq]) -> None:
        host, moves, copies = deepcopy(self.host), list(self._room.copies), dict[int, int]()
        kept: dict[Seq, list[int]] = {sequence: [] for sequence in group}
        computed: dict[Seq, int] = {}
        full: set[Seq] = set()
        for w in self._one_by_one(group):
            block, fresh = NO_BLOCK, False
            if w.sequence in full:
                continue
            if not w.elsewhere:
                if w.device in copies:
                    block = copies[w.device]
                    host.hold([block])
                else:
                    block, fresh = keep(host, w.digest, w.tokens, w.parent)
                if block == NO_BLOCK:
                    full.add(w.sequence)
                    continue
                copies[w.device] = block
            if fresh:
                moves.append(BlockCopy(CopyKind.SWAP_OUT, w.device, block))
            kept[w.sequence].append(block)
            computed[w.sequence] = w.end
        super().swap_out(group)
        assert state(self.host) == state(host)
        assert list(self._room.copies) == moves
        for sequence, blocks in kept.items():
            wanted = (blocks, computed[sequence]) if set(blocks) - {NO_BLOCK} else None
            swapped = sequence.swapped
            assert wanted == (None if swapped is None else (swapped.blocks, swapped.num_computed))
            self.checks["shared" if len(group) > 1 else "alone"] += 1
            self.checks["full"] += sequence in full
            self.checks["elsewhere"] += NO_BLOCK in blocks

    def write_back(self, blocks: Blocks) -> None:
        host, moves, table = deepcopy(self.host), list(self._room.copies), self._pool.table
        # The last ones, where there is not room for all.
        for device in blocks.tolist()[max(0, len(blocks) - host.num_free) :]:
            parent, tokens = table.parent(device), np.array([table.token_ids(device)], np.uint32)
            assert parent is not None
            block, fresh = keep(host, table.digest(device), tokens, parent)
            if block == NO_BLOCK:
                break
            if fresh:
                moves.append(BlockCopy(CopyKind.SWAP_OUT, device, block))
            host.release([block])
        super().write_back(blocks)
        assert state(self.host) == state(host)
        assert list(self._room.copies) == moves
        self.checks["write_back"] += len(blocks) > 1

    def match(self, sequence: Seq, first: int, most: int) -> tuple[list[int], int]:
        size, limit = self._pool.block_size, len(sequence.token_ids) - 1
        swapped, reads = sequence.swapped, self._shared and sequence.request.command.identity.read
        own = swapped.blocks if swapped is not None and swapped.pool is self.host else []
        blocks: list[int] = []
        held = first * size
        for place in range(first, min(first + most, -(-limit // size))):
            full = (place + 1) * size
            end, block = min(full, limit), own[place] if place < len(own) else NO_BLOCK
            if block != NO_BLOCK and swapped is not None:
                end = min(end, swapped.num_computed)
            elif reads and end == full and place < len(sequence.digests):
                digest, chunk = sequence.digests[place], sequence.chunks(size, place, place + 1)
                before = [sequence.digests[place - 1] if place else sequence.request.root]
                if (
                    place > first
                    and self.host.lookup(before[0]) == blocks[-1]
                    and (place - 1 >= len(own) or own[place - 1] == NO_BLOCK)
                ):
                    # Or as the block is known that was just found.
                    before.append(self.host.key(blocks[-1]) or b"")
                block = max(self.host.find([digest], chunk, [parent])[0] for parent in before)
            if block == NO_BLOCK:
                break
            self.checks["by digest"] += place >= len(own) or own[place] == NO_BLOCK
            blocks.append(block)
            held = end
            if end < full:
                break
        found = super().match(sequence, first, most)
        assert found[0] == blocks
        if blocks:
            assert found[1] == held
            self.checks["match"] += 1
        return found


# Every one of these must have come up often.
CHECKED = ("cost", "alone", "shared", "full", "elsewhere", "write_back", "match", "by digest")


def history(rng: random.Random) -> None:
    """Requests of a few families come, go, and are preempted together and apart, in pools that are too small."""
    driver = Driver(
        num_blocks=rng.randint(8, 30),
        block_size=rng.choice([1, 2, 4]),
        max_batch_tokens=rng.randint(4, 40),
        max_running=6,
        vocab=2,
        prefix_cache=rng.random() < 0.8,
        fork_sharing=rng.random() < 0.7,
        host_blocks=rng.choice([3, 8, 20, 60]),
        preemption=rng.choice(["swap", "auto"]),
        write_back=rng.random() < 0.5,
    )
    families = [[rng.randint(0, 1) for _ in range(24)] for _ in range(3)]
    for _ in range(40):
        move = rng.random()
        if move < 0.35:
            prompt = rng.choice(families)[: rng.randint(1, 24)] + [rng.randint(0, 1)] * rng.randint(0, 3)
            tokens, n = rng.randint(1, 10), rng.choice([1, 1, 2, 3])
            if -(-(len(prompt) + tokens - 1) // driver.block_size) <= driver.pool.num_blocks:
                identity = CacheIdentity(read=rng.random() < 0.8, write=rng.random() < 0.8)
                driver.submit(prompt, tokens, n=n, identity=identity)
        elif move < 0.5 and driver.scheduler.running:
            driver.scheduler.preemption.preempt_behind(driver.scheduler.running[0])
        elif move < 0.55:
            driver.scheduler.preempt_all()
        elif move < 0.6:
            driver.scheduler.preempt_all()
            driver.pool.clear_prefix_table()
        else:
            driver.step()
    driver.drain()
    assert driver.host.num_held == 0


def test_batches_are_the_same_as_one_block_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagekv.kvmanager.scheduling.block_tables.Swapper", CheckedSwapper)
    monkeypatch.setattr(CheckedSwapper, "checks", Counter())
    for seed in range(40):
        history(random.Random(seed))
    assert min(CheckedSwapper.checks[what] for what in CHECKED) > 20


def test_a_return_finds_what_is_there_block_by_block() -> None:
    """Also where chance hardly leads: preempted in the middle of a prompt that others have computed further since."""
    rng = random.Random(0)
    for _ in range(2_000):
        size, tokens = rng.choice([1, 2, 4]), list(range(rng.randint(1, 24)))
        command = GenerateCommand("r", tokens, SamplingParams())
        (sequence,) = live_request(command, RequestStream("r", 1), 0, ROOT, 0).sequences
        sequence.digests = chain_digests(ROOT, token_bytes(tokens), size)
        host = HostPool(40, size)
        for place, digest in enumerate(sequence.digests):
            # There, there with another content, or not.
            there = rng.choice([*[0] * 12, 1, None])
            if there is not None:
                host.keep([digest], sequence.chunks(size, place, place + 1) + np.uint32(there), [ROOT])
        own = [rng.choice([NO_BLOCK, 30, 31, 32]) for _ in range(rng.randint(0, -(-len(tokens) // size)))]
        if own:
            computed = rng.randint((len(own) - 1) * size + 1, min(len(own) * size, len(tokens)))
            sequence.swapped = Swapped(host, own, computed)
        room, shared = StepRoom(10**6, 1, IdBytes()), rng.random() < 0.8
        swapper = CheckedSwapper(BlockPool(1, size), host, room, SchedulerCounters(), shared=shared)
        # Around the last of its own blocks most can go wrong.
        first = min(max(0, len(own) + rng.randint(-3, 2)), len(tokens) // size)
        swapper.match(sequence, first, rng.choice([0, 1, 5, 24]))
