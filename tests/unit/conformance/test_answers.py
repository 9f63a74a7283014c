"""Answers are asked for once, near ties are left out, and differences are told."""

from __future__ import annotations

import pytest
from support.executor.judged import kit_of, toy

from pagekv.conformance.answers import NUM_OUTPUTS, Answer
from pagekv.conformance.played import PlayedSequence, neutral
from pagekv.conformance.verdict import BrokenRule
from pagekv.steps.v1 import executor_service_pb2 as pb

PROMPT = [1, 2]


def row(first: float, second: float) -> pb.SampledLogprobs:
    return pb.SampledLogprobs(chosen=first, top_token_ids=[0, 1], top_logprobs=[first, second])


def played(outputs: list[int], rows: list[pb.SampledLogprobs]) -> PlayedSequence:
    seq = PlayedSequence(1, PROMPT + outputs, len(PROMPT), neutral())
    seq.rows = rows
    return seq


def test_prompts_differ_and_are_answered_once() -> None:
    with toy() as address, kit_of(address) as kit:
        answers = kit.answers
        assert [len(prompt) for prompt in answers.prompts] == [41, 18, 48, 33]
        assert len({prompt[0] for prompt in answers.prompts}) > 1
        answers.prepare()
        epoch = kit.target.attach()
        assert len(answers.of(answers.prompts[0]).tokens) == NUM_OUTPUTS
        answers.prepare()
        call = kit.target.run()
        call.send(pb.StepRequest(epoch=epoch, step=1))
        assert call.result().step == 1  # no other epoch came
        call.close()


def test_answers_may_part_at_near_ties_alone() -> None:
    with toy() as address, kit_of(address) as kit:
        answers = kit.answers
        clear, tie = row(-0.5, -1.5), row(-0.5, -0.55)
        answers._known[tuple(PROMPT)] = Answer([7, 8, 9], [clear, tie, clear])
        answers.compare(played([7, 8, 9], [clear, tie, clear]), "same")
        assert (answers.num_compared, answers.num_ties) == (2, 1)
        answers.compare(played([7, 1, 2], [clear, tie, clear]), "parted at a tie")
        answers.compare(played([7, 8, 9], [clear]), "came with two tokens")
        with pytest.raises(BrokenRule, match=r"^other: output \[6, 8\] instead of \[7, 8, 9\]"):
            answers.compare(played([6, 8], []), "other")
        with pytest.raises(BrokenRule, match=r"token 1 has a log-probability that is 0\.600 off"):
            answers.compare(played([7, 1], [clear, row(-1.1, -1.2)]), "parted at a tie, with another likelihood")
        with pytest.raises(BrokenRule, match="token 2 has a log-probability"):
            answers.compare(played([7, 8, 9], [clear, tie, row(-1.5, -9.0)]), "off")


def test_a_tail_without_ties_is_looked_for() -> None:
    with toy() as address, kit_of(address) as kit:
        answers = kit.answers
        first, second = ([1, 2, *answers.random_tokens(5, salt)] for salt in range(2))
        answers._known[tuple(first)] = Answer([1] * 5 + [2], [row(-0.5, -0.55)] * 6)
        answers._known[tuple(second)] = Answer([1] * 5 + [2], [row(-0.5, -1.5)] * 6)
        assert [1, 2, *answers.tail([1, 2], 5)] == second


def test_a_prompt_without_ties_is_looked_for() -> None:
    with toy() as address, kit_of(address) as kit:
        answers = kit.answers
        first, second = (answers.random_tokens(5, salt) for salt in range(2))
        answers._known[tuple(first)] = Answer([1] * 5 + [2], [row(-0.5, -0.55)] * 6)
        answers._known[tuple(second)] = Answer([1] * 5 + [2], [row(-0.5, -1.5)] * 6)
        assert answers.prompt(5) == second
