"""Answers of an executor are held against plan and vocabulary, field by field."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.engine.engine_harness import VOCAB, Bench, command, expect, read, run
from support.engine.scheduler_driver import Driver

from pagekv.kvmanager.engine.answer_check import AnswerCheck
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.recovery import WrongAnswer
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.logprobs import TokenLogprobs
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult

VOCABULARY = 90


class Checked:
    """Three sequences that decode, of which number 1 asked for two likeliest tokens, and the step that is due."""

    def __init__(self) -> None:
        driver = Driver(depth=1, vocab=VOCABULARY)
        for number, logprobs in enumerate([None, 2, None]):
            driver.submit([number, 5, 6], logprobs=logprobs)
        self.check = AnswerCheck(VOCABULARY)
        self.driver, self.due, self.answer = driver, StepPlan(), StepResult(0, [], [], {}, 0, 0, 0)
        self.go_on()
        self.check.check(self.due, self.answer)
        self.go_on()

    def go_on(self) -> None:
        """Takes the next step."""
        driver = self.driver
        if driver.in_flight:
            driver.scheduler.commit(driver.in_flight.popleft(), replace(self.answer, logprobs={}))
        plan = driver.plan()
        assert plan is not None
        self.due, answer = plan, driver.executor.run(plan)
        self.answer = replace(answer, logprobs={1: TokenLogprobs(answer.sampled_tokens[1], -1, ((3, -1.0), (4, -2.0)))})


def test_a_sound_answer_comes_back_in_the_order_of_the_plan() -> None:
    checked = Checked()
    answer = checked.answer
    turned = replace(answer, sampled_seq_ids=answer.sampled_seq_ids[::-1], sampled_tokens=answer.sampled_tokens[::-1])
    assert checked.check.check(checked.due, turned) == answer


TOP = ((3, -1.0), (4, -2.0))


@pytest.mark.parametrize(
    ("bend", "words"),
    [
        (lambda good: replace(good, computed_tokens=2), r"computed_tokens: must be 3, as planned, got 2"),
        (
            lambda good: replace(good, sampled_tokens=[1, VOCABULARY, 2]),
            r"sampled_tokens: must be from 0 to 89, got 90",
        ),
        (
            lambda good: replace(good, sampled_seq_ids=[0, 1], sampled_tokens=[1, 2]),
            r"sampled_seqs: must be the sequences that the plan expects, each once, differs in \[2\]",
        ),
        (
            lambda good: replace(good, sampled_seq_ids=[0, 1, 2, 9], sampled_tokens=[1, 2, 3, 4]),
            r"sampled_seqs: .* differs in \[9\]",
        ),
        (
            lambda good: replace(good, sampled_seq_ids=[0, 1, 2, 2], sampled_tokens=[1, 2, 3, 4]),
            r"sampled_seqs: .* a sequence that stands there twice",
        ),
        (lambda good: replace(good, logprobs={}), r"logprobs: must be of the .* that asked, differs in \[1\]"),
        (
            lambda good: replace(good, logprobs={**good.logprobs, 2: TokenLogprobs(1, -1, TOP)}),
            r"logprobs: must be of the sampled sequences that asked, differs in \[2\]",
        ),
        (
            lambda good: replace(good, logprobs={1: TokenLogprobs(1, -1, TOP[:1])}),
            r"logprobs\.top_token_ids: must have the 2 entries that sequence 1 asked for, has 1",
        ),
        (
            lambda good: replace(good, logprobs={1: TokenLogprobs(1, -1, ((3, -1.0), (VOCABULARY, -2.0)))}),
            r"logprobs\.top_token_ids: must be from 0 to 89, got 90 of sequence 1",
        ),
        (
            lambda good: replace(good, failed={7: "no reason"}),
            r"failed_seqs: must be of sequences that would sample in this step, got \[7\]",
        ),
        (lambda good: replace(good, failed={2: "no reason"}), r"sampled_seqs: .* differs in \[2\]"),
    ],
)
def test_a_lie_is_refused_by_field(bend: Callable[[StepResult], StepResult], words: str) -> None:
    checked = Checked()
    with pytest.raises(WrongAnswer, match=r"^StepResult\." + words):
        checked.check.check(checked.due, bend(checked.answer))


def test_a_sequence_that_failed_samples_nothing_more() -> None:
    """Steps in flight that would sample it name it again."""
    checked = Checked()
    due, good = checked.due, checked.answer
    without = replace(good, sampled_seq_ids=[0, 1], sampled_tokens=good.sampled_tokens[:2], failed={2: "why"})
    assert checked.check.check(due, without).failed == {2: "why"}
    later = StepPlan(num_tokens=3, sampling=due.sampling)
    assert checked.check.check(later, without).failed == {}
    for answer in (good, replace(without, failed={})):
        with pytest.raises(WrongAnswer, match=r"failed_seqs: must have sequences that .* earlier step, lacks \[2\]"):
            checked.check.check(later, answer)
    # Its number is given to another sequence.
    anew = StepPlan(finished=[2], num_tokens=3, sampling=due.sampling)
    assert checked.check.check(anew, good) == good


LIES: list[Callable[[StepResult], StepResult]] = [
    lambda good: replace(good, step=good.step + 1),
    lambda good: replace(good, computed_tokens=good.computed_tokens + 1),
    lambda good: replace(good, sampled_seq_ids=[999], sampled_tokens=[1]),
    lambda good: replace(good, sampled_tokens=[VOCAB] * len(good.sampled_tokens)),
    lambda good: replace(good, failed={999: "nobody"}),
    lambda good: replace(good, logprobs={}),
    lambda good: replace(
        good, logprobs={number: TokenLogprobs(0, -1.0, ((3, -1.0), (VOCAB, -2.0))) for number in good.logprobs}
    ),
]


@pytest.mark.parametrize("lie", range(len(LIES)))
def test_a_lie_costs_an_epoch_and_no_token(caplog: pytest.LogCaptureFixture, lie: int) -> None:
    """The log names field and value, and no invariant of the manager is broken."""

    async def body(engine: EngineLoop, bench: Bench) -> None:
        def once(result: StepResult) -> StepResult:
            return result if result.step < 3 or len(bench.attaches) > 1 else LIES[lie](result)

        bench.bend = once
        search = SamplingParams(temperature=0.0, max_tokens=6, beam_width=2)
        beams = engine.submit(GenerateCommand("beams", [4, 5], search, n=2))
        assert await read(engine.submit(command("a", [1, 2, 3]))) == expect([1, 2, 3])
        assert len(await beams.take()) == 2
        assert len(bench.attaches) == 2

    run(body)
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert record.getMessage() == "no executor"
    assert str(record.fields["reason"]).startswith("StepResult.")  # type: ignore[attr-defined]  # set by Log
