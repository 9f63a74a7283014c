"""A model of the executor that takes step plans directly: a dictionary of slots, tokens that depend on what is read.

It is small on purpose: tests of the scheduler judge every decision by whether the tokens it leads to are right. Each
slot holds the whole prefix it was computed for, and its identity: a read through a wrong, stale or unwritten block
shows at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.request.command import SamplingParams
from pagekv.kvmanager.request.logprobs import TokenLogprobs
from pagekv.kvmanager.scheduling.beam_search import BeamSearch
from pagekv.kvmanager.scheduling.step_plan import BlockCopy, CopyKind, StepPlan, StepResult


def next_token(prefix: tuple[int, ...], vocab: int) -> int:
    """The token that follows a prefix: any fixed function that depends on all of it will do."""
    return (_fold(17, prefix) >> 7) % vocab


def _fold(value: int, tokens: Iterable[int]) -> int:
    for token in tokens:
        value = (value * 1_000_003 ^ token * 7_919 + 12_345) & 0xFFFF_FFFF
    return value


def likeliest(prefix: tuple[int, ...], vocab: int, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens after a prefix with their log-probabilities, best first."""
    value = _fold(17, prefix)
    weights = [1 + (_fold(value, (token,)) >> 7) % 1000 for token in range(vocab)]
    total = sum(weights)
    ranked = sorted(range(vocab), key=lambda token: (-weights[token], token))
    return [(token, math.log(weights[token] / total)) for token in ranked[:count]]


def beam_search(
    width: int, num_return: int, penalty: float, early: bool, new: int, end_ids: Iterable[int], least: int = 0
) -> BeamSearch:
    sampling = SamplingParams(
        max_tokens=new,
        min_tokens=least,
        stop_token_ids=tuple(end_ids),
        beam_width=width,
        length_penalty=penalty,
        early_stopping=early,
    )
    return BeamSearch(sampling, num_return)


def expected_beams(prompt: Sequence[int], search: BeamSearch, vocab: int) -> list[tuple[int, ...]]:
    """The result that a beam search must return: the search itself, without blocks."""
    while not search.done:
        search.advance([likeliest((*prompt, *beam.token_ids), vocab, search.num_candidates) for beam in search.beams])
    return [result.token_ids for result in search.results()]


def expected_output(prompt: Sequence[int], max_tokens: int, vocab: int, ends: tuple[int, ...] = ()) -> list[int]:
    """The tokens that a sequence must produce whatever happens around it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tuple(tokens), vocab))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


# Namespace, adapter, media and tokens.
_Content = tuple[str, str, list[tuple[int, str]], list[int]]
# The content of void slots, compared by identity.
VOID: _Content = ("", "", [], [-1])


@dataclass
class _Live:
    tokens: list[int]
    table: list[int]
    computed: int
    # Likeliest tokens to report; None: no log-probabilities.
    num_candidates: int | None
    identity: CacheIdentity

    def content(self, end: int) -> _Content:
        """The inputs of keys and values at position `end - 1`."""
        identity = self.identity
        media = [(span.position, span.digest) for span in identity.media if span.position < end]
        return identity.namespace, identity.adapter_id, media, self.tokens[:end]


class FakeExecutor:
    """Applies plans in order; raises AssertionError on any broken promise."""

    def __init__(self, num_blocks: int, block_size: int, vocab: int, host_blocks: int = 0) -> None:
        self.num_blocks, self.block_size, self.vocab = num_blocks, block_size, vocab
        self.host_blocks = host_blocks
        self.slots: dict[tuple[int, int], _Content] = {}
        self.host_slots: dict[tuple[int, int], _Content] = {}
        self.live: dict[int, _Live] = {}
        self.steps = 0
        self.computed_tokens = 0
        self.largest_step = 0
        # Whether a sequence with this prefix fails where it would sample.
        self.fails: Callable[[tuple[int, ...]], bool] = lambda prefix: False
        # Live sequences that failed.
        self.failed: set[int] = set()
        self.any_void = False

    def run(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.finished:
            del self.live[seq_id]
            self.failed.discard(seq_id)
        for move in plan.copies:
            self._copy(move)
        for new in plan.new:
            assert new.seq_id not in self.live
            assert 0 <= new.computed_tokens < len(new.token_ids)
            wanted = new.sequence.request.num_likeliest
            identity = new.sequence.request.command.identity
            tokens, table = list(new.token_ids), list(new.block_ids)
            self.live[new.seq_id] = _Live(tokens, table, new.computed_tokens, wanted, identity)
        for seq_id, block in zip(plan.append_seq_ids, plan.append_blocks, strict=True):
            self.live[seq_id].table.append(block)
        counts = dict(zip(plan.scheduled_seq_ids, plan.scheduled_tokens, strict=True))
        assert len(counts) == len(plan.scheduled_seq_ids), "a sequence is scheduled twice"
        shares = [(seq_id, seq, counts.get(seq_id, 1)) for seq_id, seq in self.live.items()]
        self._write(shares)
        samples = {seq_id for seq_id, seq, count in shares if self._samples(seq, count)}
        self.failed |= {seq_id for seq_id in samples if self.fails(tuple(self.live[seq_id].tokens))}
        # One that failed in an earlier step knows fewer tokens than the manager planned by.
        failed = [seq_id for seq_id, _, count in shares if seq_id in self.failed and count]
        self.any_void |= bool(failed)
        self._void(shares)
        prefixes = sorted(
            (seq_id, self._read(seq, count)) for seq_id, seq, count in shares if seq_id in samples - self.failed
        )
        sampled = [(seq_id, next_token(prefix, self.vocab)) for seq_id, prefix in prefixes]
        logprobs = {
            seq_id: TokenLogprobs(0, 0.0, tuple(likeliest(prefix, self.vocab, count)))
            for seq_id, prefix in prefixes
            if (count := self.live[seq_id].num_candidates) is not None
        }
        computed = sum(count for _, _, count in shares)
        assert computed == plan.num_tokens
        for seq_id, seq, count in shares:
            seq.computed += count
            past = seq.computed > len(seq.tokens) and seq_id not in self.failed
            assert not past, f"sequence {seq_id} computes past its tokens"
        for seq_id, token in sampled:
            self.live[seq_id].tokens.append(token)
        self.steps += 1
        self.computed_tokens += computed
        self.largest_step = max(self.largest_step, computed)
        seq_ids, tokens = [seq_id for seq_id, _ in sampled], [token for _, token in sampled]
        return StepResult(
            self.steps, seq_ids, tokens, logprobs, computed, 0, 0, dict.fromkeys(failed, "it was told to")
        )

    def _copy(self, move: BlockCopy) -> None:
        """A whole block: slots that were never written arrive unwritten."""
        source_pool, most_source = self.slots, self.num_blocks
        target_pool, most_target = self.slots, self.num_blocks
        if move.kind is CopyKind.SWAP_IN:
            source_pool, most_source = self.host_slots, self.host_blocks
        elif move.kind is CopyKind.SWAP_OUT:
            target_pool, most_target = self.host_slots, self.host_blocks
        assert 0 <= move.source < most_source
        assert 0 <= move.destination < most_target
        for offset in range(self.block_size):
            content = source_pool.get((move.source, offset))
            if content is None:
                target_pool.pop((move.destination, offset), None)
            else:
                target_pool[move.destination, offset] = content

    @staticmethod
    def _samples(seq: _Live, count: int) -> bool:
        return count > 0 and seq.computed + count == len(seq.tokens)

    def _write(self, shares: list[tuple[int, _Live, int]]) -> None:
        written: set[tuple[int, int]] = set()
        for seq_id, seq, count in shares:
            for position in range(seq.computed, seq.computed + count):
                assert position // self.block_size < len(seq.table), f"sequence {seq_id} has no block for {position}"
                block = seq.table[position // self.block_size]
                assert 0 <= block < self.num_blocks
                slot = (block, position % self.block_size)
                assert slot not in written, f"slot {slot} is written twice in one step"
                written.add(slot)
                self.slots[slot] = seq.content(position + 1)

    def _void(self, shares: list[tuple[int, _Live, int]]) -> None:
        """Voids slots that failed sequences wrote in this step, and all that is computed from void ones."""
        if not self.any_void:
            return
        left = [(seq_id, seq, count) for seq_id, seq, count in shares if count]
        while void := [each for each in left if each[0] in self.failed or self._reads_void(each[1], each[2])]:
            left = [each for each in left if each not in void]
            for _, seq, count in void:
                for position in range(seq.computed, seq.computed + count):
                    self.slots[self._slot(seq, position)] = VOID

    def _reads_void(self, seq: _Live, count: int) -> bool:
        return any(self.slots.get(self._slot(seq, position)) is VOID for position in range(seq.computed + count))

    def _slot(self, seq: _Live, position: int) -> tuple[int, int]:
        return seq.table[position // self.block_size], position % self.block_size

    def _read(self, seq: _Live, count: int) -> tuple[int, ...]:
        """The input of the model: the prefix, read slot by slot; another one where a slot is void."""
        end = seq.computed + count
        if self.any_void and self._reads_void(seq, count):
            return (VOID[3][0], *seq.tokens[:end])
        for position in range(end):
            slot, content = (
                (seq.table[position // self.block_size], position % self.block_size),
                seq.content(position + 1),
            )
            assert self.slots.get(slot) == content, f"slot {slot} does not hold position {position} of {content}"
        return tuple(seq.tokens[:end])
