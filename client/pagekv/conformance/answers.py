"""Answers that the executor gives when asked in the simplest way, and how other ways are held against them.

An answer is the greedy continuation of a prompt that is computed at once, alone, in blocks in order. Two of them may
differ where the likeliest token is within rounding of the next: with log-probabilities such tokens are left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pagekv.conformance.played import PlayedEpoch, PlayedSequence
from pagekv.conformance.target import Target
from pagekv.conformance.verdict import require
from pagekv.steps.v1 import executor_service_pb2 as pb

# Tokens of an answer.
NUM_OUTPUTS = 6
# A likeliest token that is so much likelier than the next (natural logarithm) is not a matter of rounding, in bfloat16
# either; and rounding moves no log-probability so far.
MARGIN = 0.1
TOLERANCE = 0.25
# Prompts tried for one whose answer has no near tie.
MAX_TRIES = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens, and their log-probabilities where the executor has them."""

    tokens: list[int]
    rows: list[pb.SampledLogprobs]

    def is_clear(self, index: int) -> bool:
        """Whether rounding cannot have chosen the token."""
        if not self.rows:
            return True
        likeliest = self.rows[index].top_logprobs
        return bool(likeliest[0] - likeliest[1] >= MARGIN)

    @property
    def num_clear(self) -> int:
        return sum(map(self.is_clear, range(len(self.tokens))))


class Answers:
    """Prompts of a few lengths and the executor's answers to them, each asked for once."""

    def __init__(self, target: Target) -> None:
        self.target = target
        # Tokens compared so far, and those that could not be: near ties.
        self.num_compared = self.num_ties = 0
        self._known: dict[tuple[int, ...], Answer] = {}
        self._prompts: dict[int, list[int]] = {}

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts that end inside a block, shortly behind one and with one; beginnings have nothing in common."""
        size = self.target.block_size
        return [self.prompt(length) for length in (2 * size + size // 2 + 1, size + 2, 3 * size, 2 * size + 1)]

    def prepare(self) -> None:
        """Asks for the answers to `prompts`, each in an epoch of its own, unless they are known."""
        for prompt in self.prompts:
            self.of(prompt)

    def prompt(self, length: int) -> list[int]:
        """A prompt whose answer has no near tie, or few."""
        if length not in self._prompts:
            self._prompts[length] = self._clearest([], length)
        return self._prompts[length]

    def tail(self, beginning: Sequence[int], length: int) -> list[int]:
        """Tokens behind the beginning of a prompt, so that the answer to both has no near tie, or few. To be asked for
        before an epoch is opened, which an answer that is not known ends.
        """
        return self._clearest(beginning, length)[len(beginning) :]

    def _clearest(self, beginning: Sequence[int], length: int) -> list[int]:
        candidates: list[list[int]] = []
        for attempt in range(MAX_TRIES):
            candidates.append([*beginning, *self.random_tokens(length, attempt)])
            answer = self.of(candidates[-1])
            if answer.num_clear == NUM_OUTPUTS and len(set(answer.tokens)) > 1:
                break
        return max(candidates, key=lambda prompt: self.of(prompt).num_clear)

    def random_tokens(self, length: int, salt: int) -> list[int]:
        """Tokens of a prompt; the same for the same numbers."""
        rng = random.Random(1000 * length + salt)
        return [rng.randrange(self.target.description.vocab_size) for _ in range(length)]

    def of(self, prompt: Sequence[int]) -> Answer:
        """The answer to a prompt, of NUM_OUTPUTS tokens."""
        key = tuple(prompt)
        if key not in self._known:
            with PlayedEpoch(self.target) as epoch:
                seq = epoch.alone(prompt, NUM_OUTPUTS)
            self._known[key] = Answer(seq.outputs, seq.rows)
        return self._known[key]

    def compare(self, seq: PlayedSequence, what: str) -> None:
        """Raises BrokenRule where a sequence went on otherwise than the answer to its prompt. Nothing behind a near tie
        that fell otherwise is compared.
        """
        answer = self.of(seq.tokens[: seq.num_prompt])
        outputs = seq.outputs[:NUM_OUTPUTS]
        # Tokens that it came with are not sampled.
        rows = [None] * (len(seq.outputs) - len(seq.rows)) + seq.rows if seq.rows else []
        for index, (token, expected) in enumerate(zip(outputs, answer.tokens, strict=False)):
            is_clear = answer.is_clear(index)
            require(token == expected or not is_clear, f"{what}: output {outputs} instead of {answer.tokens}")
            # Also where a near tie fell otherwise: the likeliest token is as likely as ever.
            row = rows[index] if rows else None
            if row is not None and answer.rows:
                off = abs(row.chosen - answer.rows[index].chosen)
                require(off <= TOLERANCE, f"{what}: output token {index} has a log-probability that is {off:.3f} off")
            self.num_compared += is_clear
            self.num_ties += not is_clear
            if token != expected:
                break
