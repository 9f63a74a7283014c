"""All rules in order, each with its verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc

from pagekv.conformance import meaning, protocol, refusals, sampling_rules
from pagekv.conformance.keepalive import IdleConnection
from pagekv.conformance.kit import Kit, Rule
from pagekv.conformance.link import Refusal
from pagekv.conformance.target import Target, Untestable
from pagekv.conformance.verdict import BrokenRule, NotTested, Verdict, during

_MEANING = sorted((*meaning.RULES, *sampling_rules.RULES), key=lambda rule: int(rule.number[1:]))
# In the order tested: what refusals say needs the protocol, and meaning both. P10 is not among them, which takes long.
RULES = (*protocol.RULES, *refusals.RULES, *_MEANING)


def judge(target: Target, idle: IdleConnection, note: Callable[[str], None]) -> Iterator[Verdict]:
    """The verdicts as they come; `note` is told of waits. Raises Untestable when another manager has the executor."""
    kit = Kit(target)
    try:
        kit.target.attach()
    except Refusal as refusal:
        if refusal.code is grpc.StatusCode.FAILED_PRECONDITION:
            raise Untestable(f"Attach is refused: {refusal}. Stop the manager that drives the executor") from refusal

    def stays(_: Kit) -> None:
        idle.check(lambda seconds: note(f"P10 waits for {seconds:.0f} s in which a connection is idle"))

    rules = [*RULES, Rule("P10", "pings on an idle connection are welcome", stays)]
    results = next(rule for rule in rules if rule.number == "P5")
    # Without answers no rule can be tested, and each would wait for them anew: P5 then comes first.
    answered = verdict_of(kit, replace(results, check=lambda _: None))
    reason = ""
    if answered.outcome == "failed":
        rules.remove(results)
        reason, answered = _seen_to_be_gone(target, answered)
        reason = reason or "a prompt alone is not answered correctly (see P5)"
        yield answered
    for rule in rules:
        if reason:
            yield Verdict(rule.number, rule.words, "skipped", reason, 0.0)
            continue
        verdict = verdict_of(kit, rule)
        if verdict.outcome == "failed":
            reason, verdict = _seen_to_be_gone(target, verdict)
        yield verdict


def _seen_to_be_gone(target: Target, failed: Verdict) -> tuple[str, Verdict]:
    """Why the rules behind a failed one are skipped, "" where the executor is still there, and the verdict, which says
    so too.
    """
    if target.link.is_there():
        return "", failed
    return "the executor is gone", replace(failed, why=f"{failed.why}; nobody answers at {target.link.target} any more")


def verdict_of(kit: Kit, rule: Rule) -> Verdict:
    answers, begin = kit.answers, time.monotonic()
    compared, ties = answers.num_compared, answers.num_ties
    outcome, why = "ok", ""
    try:
        # Before a rule opens an epoch, which another one for an answer would end.
        with during("a prompt alone"):
            kit.answers.prepare()
        rule.check(kit)
        # Rules of the other layers ask for more than tokens.
        tied = answers.num_ties > ties and answers.num_compared == compared
        if tied and rule.number.startswith("M"):
            outcome, why = "skipped", "the likeliest tokens are nearly tied everywhere"
    except NotTested as error:
        outcome, why = "skipped", str(error)
    except BrokenRule as error:
        outcome, why = "failed", str(error)
    except Refusal as refusal:
        outcome, why = "failed", f"a call that keeps every rule is refused: {refusal}"
    return Verdict(rule.number, rule.words, outcome, why, time.monotonic() - begin)
