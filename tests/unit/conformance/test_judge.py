"""A sound executor passes, every rule of the contract is tested, and what cannot be tested is said."""

from __future__ import annotations

import re
import runpy
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from support.executor.judged import BACKEND, Edit, broken, kit_of, served_backend, toy, verdicts

from pagekv.conformance import link
from pagekv.conformance.judge import RULES, judge, verdict_of
from pagekv.conformance.keepalive import IdleConnection
from pagekv.conformance.kit import Kit, Rule
from pagekv.conformance.target import Untestable
from pagekv.conformance.verdict import BrokenRule
from pagekv.executor.oracle.backend import OracleBackend, OracleModel

PROTO = Path(__file__).resolve().parents[3] / "proto" / "pagekv" / "steps" / "v1" / "executor_service.proto"


def test_the_minimal_executor_of_the_docs_passes() -> None:
    with toy() as address:
        found = verdicts(address)
    assert broken(found) == {}
    skipped = {number for number, verdict in found.items() if verdict.outcome == "skipped"}
    assert skipped == {"P13", "R19", "M5", "M13", "M14", "M15", "M16", "M17"}


def test_the_backend_of_the_docs_passes_every_layer() -> None:
    example = runpy.run_path(str(BACKEND))
    with served_backend(example["ToyBackend"]()) as address:
        found = verdicts(address)
    assert broken(found) == {}
    assert [number for number, verdict in found.items() if verdict.outcome == "skipped"] == ["M17"]


def test_the_backend_of_the_docs_is_short() -> None:
    assert len(BACKEND.read_text().splitlines()) <= 100


@pytest.mark.long
@pytest.mark.parametrize(
    ("edit", "size"),
    [
        (("256, 300", "256, 30"), 2),
        (("4 * 2**17", "4 * 64"), 1),
        (("return 1 <= size <= 256", "return size == 256"), 256),
        (("256, 300", "2, 300"), 16),
    ],
)
def test_a_sound_executor_of_other_sizes_passes(edit: Edit, size: int) -> None:
    longer = [("256, 300", "256, 1040")] if size == 256 else []
    with toy(edit, *longer) as address:
        found = verdicts(address)
        with kit_of(address) as kit:
            assert kit.target.block_size == size
    assert broken(found) == {}


@pytest.mark.long
@pytest.mark.parametrize("vocab", [1, 2])
def test_a_sound_executor_of_few_tokens_passes(vocab: int) -> None:
    model = OracleModel(vocab_size=vocab, max_model_len=100, eos_token_ids=())
    with served_backend(OracleBackend(model, kv_bytes=12 * 2**12)) as address:
        found = verdicts(address)
    assert broken(found) == {}
    assert found["M9"].why == f"draws from a vocabulary of {vocab} are often equal by chance"


def test_every_rule_of_the_contract_has_a_check() -> None:
    named = re.findall(r"^//   ([PRM]\d+) ", PROTO.read_text(), re.MULTILINE)
    assert len(named) == len(set(named))
    assert sorted(named) == sorted([*(rule.number for rule in RULES), "P10"])


def test_p10_comes_last_and_waits_are_told() -> None:
    notes: list[str] = []
    with toy() as address, kit_of(address) as kit:
        idle = IdleConnection(address, 100)
        idle.idle_s = 3600.0
        idle._lost.set()
        *_, last = judge(kit.target, idle, notes.append)
        idle.close()
    assert (last.rule, last.outcome) == ("P10", "failed")
    assert len(notes) == 1
    assert "P10 waits for" in notes[0]


def test_tokens_that_are_near_ties_show_nothing() -> None:
    def tied(kit: Kit) -> None:
        kit.answers.num_ties += 1

    with toy() as address, kit_of(address) as kit:
        outcomes = {number: verdict_of(kit, Rule(number, "words", tied)) for number in ("M1", "P1")}
    assert {number: verdict.outcome for number, verdict in outcomes.items()} == {"M1": "skipped", "P1": "ok"}
    assert outcomes["M1"].why == "the likeliest tokens are nearly tied everywhere"


def test_an_executor_that_dies_is_not_asked_on() -> None:
    with ExitStack() as running:
        address = running.enter_context(toy())
        kit = running.enter_context(kit_of(address))
        idle = IdleConnection(address)
        judged = judge(kit.target, idle, print)
        assert next(judged).outcome == "ok"
        running.enter_context(mock.patch.object(link, "CONNECT_S", 0.2))
        kit.target.link.run = kit.target.link.attach = _dead  # type: ignore[method-assign,assignment]  # as if dead
        running.enter_context(mock.patch.object(kit.target.link, "is_there", return_value=False))
        rest = [(verdict.outcome, verdict.why) for verdict in judged]
        idle.close()
    assert rest[0] == ("failed", f"nobody answers; nobody answers at {address} any more")
    assert set(rest[1:]) == {("skipped", "the executor is gone")}


def _dead(*_: object) -> None:
    raise BrokenRule("nobody answers")


@pytest.mark.parametrize(
    ("edit", "seconds", "why"),
    [
        (("yield mine.run(step)", "mine.run(step)"), 0.2, "step 1: no answer within 0 s"),
        (("step=step.step", "step=step.step + 1"), 9.0, r"result of epoch, step \(\d+, 2\), not \(\d+, 1\)"),
        (("need(step.step ==", "need(step.step !="), 9.0, "step 1: the stream ended with INVALID_ARGUMENT, field step"),
        (("return pb.AttachResponse(epoch=self.last)", "await refuse(context, Refused(Code.INTERNAL, 'no'))"), 9.0, ""),
    ],
)
def test_an_executor_that_answers_no_prompt_is_asked_once(edit: Edit, seconds: float, why: str) -> None:
    with mock.patch.object(link, "RESULT_S", seconds), toy(edit) as address, kit_of(address) as kit:
        idle = IdleConnection(address)
        first, *rest = judge(kit.target, idle, print)
        idle.close()
    assert (first.rule, first.outcome) == ("P5", "failed")
    assert re.match(f"a prompt alone: {why}" if why else "a call that keeps every rule is refused: INTERNAL", first.why)
    assert {(verdict.outcome, verdict.why) for verdict in rest} == {
        ("skipped", "a prompt alone is not answered correctly (see P5)")
    }
    assert len(rest) == len(RULES)


def test_an_executor_in_use_is_left_alone() -> None:
    with toy() as address, kit_of(address) as kit, kit.epoch(manager_id="somebody") as epoch:
        epoch.step([epoch.sequence([1, 2, 3])])
        with pytest.raises(Untestable, match="Stop the manager"):
            next(judge(kit.target, IdleConnection(address), print))
        epoch.decode(1)
