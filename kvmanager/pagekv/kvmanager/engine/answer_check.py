"""Checks the executor's results against plan and vocabulary before they are used."""

from __future__ import annotations

from dataclasses import replace

from pagekv.kvmanager.engine.recovery import WrongAnswer
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult


class AnswerCheck:
    """Checks the results of one epoch, in the order of their steps."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # Sequences at the executor that asked for log-probabilities, and how many likeliest tokens each gets.
        self._asked: dict[int, int] = {}
        # Sequences at the executor that failed in an earlier step: such a sequence samples nothing until it leaves.
        self._failed: set[int] = set()

    def check(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result with samples in the order of the plan, and only with new failures. Raises WrongAnswer."""
        for seq_id in plan.finished:
            self._asked.pop(seq_id, None)
            self._failed.discard(seq_id)
        for new in plan.new:
            asked = new.sequence.request.num_likeliest
            if asked is not None:
                self._asked[new.seq_id] = min(asked, self._vocab_size)
        if result.computed_tokens != plan.num_tokens:
            raise WrongAnswer("computed_tokens", f"must be {plan.num_tokens}, as planned, got {result.computed_tokens}")
        expected = plan.sampling.tolist()
        if result.failed or self._failed:
            expected, result = self._take_failed(expected, result)
        if result.sampled_seq_ids != expected:
            result = _ordered(expected, result)
        tokens = result.sampled_tokens
        if tokens and max(tokens) >= self._vocab_size:
            raise WrongAnswer("sampled_tokens", f"must be from 0 to {self._vocab_size - 1}, got {max(tokens)}")
        if self._asked or result.logprobs:
            self._check_logprobs(result)
        return result

    def _take_failed(self, expected: list[int], result: StepResult) -> tuple[list[int], StepResult]:
        """The sequences that are still to sample, and the result with only new failures."""
        silent = sorted(self._failed.intersection(expected) - result.failed.keys())
        if silent:
            raise WrongAnswer("failed_seqs", f"must have sequences that failed in an earlier step, lacks {silent[:8]}")
        odd = sorted(result.failed.keys() - set(expected))
        if odd:
            raise WrongAnswer("failed_seqs", f"must be of sequences that would sample in this step, got {odd[:8]}")
        fresh = {seq_id: why for seq_id, why in result.failed.items() if seq_id not in self._failed}
        self._failed.update(fresh)
        return [seq_id for seq_id in expected if seq_id not in result.failed], replace(result, failed=fresh)

    def _check_logprobs(self, result: StepResult) -> None:
        asked = self._asked
        wanting = [seq_id for seq_id in result.sampled_seq_ids if seq_id in asked]
        if len(wanting) != len(result.logprobs) or any(seq_id not in result.logprobs for seq_id in wanting):
            odd = sorted(set(wanting) ^ result.logprobs.keys())
            raise WrongAnswer("logprobs", f"must be of the sampled sequences that asked, differs in {odd[:8]}")
        for seq_id, found in result.logprobs.items():
            if len(found.top) != asked[seq_id]:
                what = f"must have the {asked[seq_id]} entries that sequence {seq_id} asked for, has {len(found.top)}"
                raise WrongAnswer("logprobs.top_token_ids", what)
            if found.top and max(found.top)[0] >= self._vocab_size:
                what = f"must be from 0 to {self._vocab_size - 1}, got {max(found.top)[0]} of sequence {seq_id}"
                raise WrongAnswer("logprobs.top_token_ids", what)


def _ordered(expected: list[int], result: StepResult) -> StepResult:
    """The result in the order of `expected`, which is ascending: executors report in any order."""
    seq_ids, tokens = result.sampled_seq_ids, result.sampled_tokens
    order = sorted(range(len(seq_ids)), key=seq_ids.__getitem__)
    if [seq_ids[position] for position in order] != expected:
        odd = sorted(set(seq_ids) ^ set(expected))[:8] or "a sequence that stands there twice"
        raise WrongAnswer("sampled_seqs", f"must be the sequences that the plan expects, each once, differs in {odd}")
    return replace(result, sampled_seq_ids=expected, sampled_tokens=[tokens[position] for position in order])
