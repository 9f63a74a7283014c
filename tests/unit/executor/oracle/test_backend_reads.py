"""The oracle, which reads again only what was written again, judges as one that reads every slot in every step."""

from __future__ import annotations

import random

import pytest
from support.executor.expected_tokens import chain, mix

from pagekv.executor.backend.interface import BlockCopies, CopyDirection, Sampling, Scheduled, SequenceState
from pagekv.executor.oracle.backend import OracleBackend, OracleModel, SlotError

NUM_BLOCKS = 12


class History:
    """Sequences that come, share prefixes, grow and go, and copies of every kind, at random; now and then a block is
    given to two, or copied over while it is held.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.size = rng.choice([1, 2, 4])
        self.backend = OracleBackend(OracleModel(vocab_size=64), kv_bytes=2**16)
        self.backend.allocate(self.size, NUM_BLOCKS, NUM_BLOCKS)
        self.live: dict[int, SequenceState] = {}

    def unheld(self) -> list[int]:
        held = {block for state in self.live.values() for block in state.block_table}
        return [block for block in range(NUM_BLOCKS) if block not in held]

    def leave(self) -> None:
        for seq_id in [seq_id for seq_id in self.live if self.rng.random() < 0.1]:
            state = self.live.pop(seq_id)
            if self.rng.random() < 0.7:
                self.backend.finish([state])

    def copy(self) -> None:
        kind, count = self.rng.choice(list(CopyDirection)), self.rng.randint(1, 2)
        careful = kind is not CopyDirection.SWAP_OUT and self.rng.random() < 0.85
        room = self.unheld() if careful else list(range(NUM_BLOCKS))
        if len(room) >= count:
            sources = self.rng.sample(range(NUM_BLOCKS), count)
            self.backend.copy_blocks(BlockCopies(kind, sources, self.rng.sample(room, count)))

    def enter(self) -> None:
        """A sequence, which often begins with blocks of another."""
        length, room = self.rng.randint(1, 3 * self.size), self.unheld()
        need = -(-length // self.size)
        if len(self.live) == 4 or len(room) < need:
            return
        table, computed = self.rng.sample(room, need), 0
        tokens = [self.rng.randint(1, 3) for _ in range(length)]
        if self.live and self.rng.random() < 0.5:
            other = self.rng.choice(list(self.live.values()))
            shared = self.rng.randint(0, min(other.computed_tokens, length - 1) // self.size)
            computed = shared * self.size
            tokens[:computed], table[:shared] = other.token_ids[:computed], other.block_table[:shared]
        seq_id = self.rng.choice([number for number in range(5) if number not in self.live])
        self.live[seq_id] = SequenceState(seq_id, tokens, length, table, computed, Sampling())

    def schedule(self) -> list[Scheduled]:
        scheduled = []
        for state in self.live.values():
            count = self.rng.randint(1, len(state.token_ids) - state.computed_tokens)
            while len(state.block_table) * self.size < state.computed_tokens + count:
                room = self.unheld() if self.rng.random() < 0.97 else list(range(NUM_BLOCKS))
                if not room:
                    break
                state.block_table.append(self.rng.choice(room))
            else:
                if self.rng.random() < 0.7:
                    scheduled.append(Scheduled(state, state.computed_tokens, count))
        return scheduled

    def right(self, scheduled: list[Scheduled]) -> bool:
        """Whether every slot that the step reads holds what it must, one by one."""
        device = self.backend._device
        for item in scheduled:
            tokens = item.state.token_ids[: item.start + item.count]
            for position, (token, state) in enumerate(zip(tokens, chain(tokens), strict=True)):
                slot = item.state.block_table[position // self.size], position % self.size
                if device[slot].item() != (token, mix(state)):
                    return False
        return True


@pytest.mark.parametrize("seed", range(8))
def test_it_judges_as_one_that_reads_everything(seed: int) -> None:
    verdicts = {True: 0, False: 0}
    for number in range(25):
        history = History(random.Random(f"{seed} {number}"))
        for _ in range(60):
            history.leave()
            if history.rng.random() < 0.2:
                history.copy()
            if history.rng.random() < 0.4:
                history.enter()
            if not (scheduled := history.schedule()):
                continue
            try:
                sampled, right = history.backend.execute(scheduled), True
            except SlotError:
                sampled, right = {}, False
            assert right == history.right(scheduled)
            verdicts[right] += 1
            if not right:
                break
            for item in scheduled:
                state = item.state
                state.computed_tokens += item.count
                if state.seq_id in sampled:
                    state.token_ids.append(sampled[state.seq_id].token_id)
    assert verdicts[True] > 200
    assert verdicts[False] > 3
