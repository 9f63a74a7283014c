"""Beam search over one prompt: which hypotheses live on after a step, and which have ended. No pool, no scheduler.

Makes the decisions of transformers' `generate(num_beams=width, do_sample=False)`, release 5.23, whose rules are in
`GenerationMixin._beam_search` and the functions around it, `_update_finished_beams` and `_check_early_stop_heuristic`:

- A live hypothesis is ranked by its cumulative log-probability, an ended one by its score
  `logprob / num_tokens ** length_penalty`, where the end token counts as a token.
- The best `width` continuations of all beams that do not end live on. A continuation that ends is kept only if it is
  among the best `width` of all. The best `width` ended hypotheses are kept.
- The search is over when `width` hypotheses have ended and, unless `early_stopping`, the best beam could not beat the
  worst of them if it ended now; or at `max_new_tokens`, where the best `width` continuations end by length. With a
  positive length penalty a longer hypothesis might still have won; transformers uses the same heuristic.

Sums are in float64 here and in float32 in transformers, so near-ties can be decided differently.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from pagekv.kvmanager.request.command import FinishReason, SamplingParams

# (token id, natural-log probability) pairs, best first.
Candidates: TypeAlias = Sequence[tuple[int, float]]

# Most alternatives that an executor reports for a token: the bound of StepSampling.logprobs.
MAX_CANDIDATES = 128


class Continuation(NamedTuple):
    """A beam that lives on: the beam at position `parent` before this step, with one more token."""

    parent: int
    token_id: int
    # Log-probability of this token alone.
    logprob: float


@dataclass(frozen=True, slots=True)
class Beam:
    """A live hypothesis: the tokens generated so far and the sum of their log-probabilities."""

    token_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A hypothesis that has ended: by STOP with an end token, which is the last of `token_ids`, or by LENGTH."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish: FinishReason


class BeamSearch:
    """States: searching → done. One call of `advance` per step; at first there is a single beam without tokens."""

    def __init__(self, sampling: SamplingParams, num_return: int, eos_token_ids: Iterable[int] = ()) -> None:
        """`eos_token_ids` are those of the model."""
        self.width = sampling.beam_width
        self._num_return = num_return
        self._sampling = sampling
        # Token ids that end a hypothesis, unless fewer than `min_tokens` tokens come before.
        self._end_ids = sampling.end_ids(eos_token_ids)
        # Best first, at most `width`; empty when done.
        self.beams: list[Beam] = [Beam((), 0.0)]
        # Best first, at most `width`; of equal scores the older first.
        self._ended: list[Hypothesis] = []
        self.num_tokens = 0

    @property
    def done(self) -> bool:
        """Nothing can be added to the results."""
        return not self.beams

    @property
    def num_candidates(self) -> int:
        """Number of likeliest tokens of every beam that `advance` needs; the whole vocabulary if that is smaller. If
        all end tokens are among them, `width` others are left.
        """
        return self.width + len(self._end_ids)

    def advance(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        """Takes in a step: the `num_candidates` likeliest tokens of every beam, in the order of `beams`.

        Returns the continuations that become the new beams, best first; empty when the search is done. Raises
        ValueError if there is not one list for every beam.
        """
        is_last = self.num_tokens + 1 == self._sampling.max_tokens
        continuing: list[Continuation] = []
        beams: list[Beam] = []
        for rank, (logprob, continuation) in enumerate(self._ranked(candidates)):
            if len(beams) == self.width or (is_last and rank == self.width):
                break
            beam = Beam((*self.beams[continuation.parent].token_ids, continuation.token_id), logprob)
            ends = continuation.token_id in self._end_ids
            if not ends and not is_last:
                continuing.append(continuation)
                beams.append(beam)
            elif rank < self.width:
                self._end(beam, FinishReason.STOP if ends else FinishReason.LENGTH)
        self.num_tokens += 1
        if is_last or self._cannot_improve(beams):
            continuing, beams = [], []
        self.beams = beams
        return continuing

    def results(self) -> list[Hypothesis]:
        """The best `num_return` hypotheses that have ended, best first. There are `num_return` of them once the search
        is done, if the vocabulary has `num_candidates` tokens.
        """
        return self._ended[: self._num_return]

    def _ranked(self, candidates: Sequence[Candidates]) -> Iterator[tuple[float, Continuation]]:
        """Yields cumulative log-probability and continuation, best first; among equals, the better beam's first."""
        may_end = self.num_tokens >= self._sampling.min_tokens

        def continuations(parent: int, beam: Beam, tokens: Candidates) -> Iterable[tuple[float, Continuation]]:
            for token_id, logprob in tokens:
                if may_end or token_id not in self._end_ids:
                    yield beam.logprob + logprob, Continuation(parent, token_id, logprob)

        ways = [
            continuations(parent, beam, tokens)
            for parent, (beam, tokens) in enumerate(zip(self.beams, candidates, strict=True))
        ]
        return heapq.merge(*ways, key=itemgetter(0), reverse=True)

    def _end(self, beam: Beam, finish: FinishReason) -> None:
        score = self._score(beam.logprob, len(beam.token_ids))
        self._ended.append(Hypothesis(beam.token_ids, beam.logprob, score, finish))
        self._ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self._ended[self.width :]

    def _score(self, logprob: float, num_tokens: int) -> float:
        return float(logprob / num_tokens**self._sampling.length_penalty)

    def _cannot_improve(self, beams: list[Beam]) -> bool:
        """Whether the beams that a step has left, best first, cannot improve the results any more."""
        if not beams:
            return True
        if len(self._ended) < self.width:
            return False
        return self._sampling.early_stopping or self._score(beams[0].logprob, self.num_tokens) <= self._ended[-1].score
