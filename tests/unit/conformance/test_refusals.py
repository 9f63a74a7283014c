"""Each refusal is missed by the rule that asks for it, and by the number that the refusal bears."""

from __future__ import annotations

from unittest import mock

import pytest
from support.executor.judged import ToyFault, assert_noticed, toy, verdicts

from pagekv.conformance.refusals import RULES, longer_than_the_model
from pagekv.conformance.verdict import NotTested

# The toy has no feature with lists of ids.
UNTRIED = "R19"
REFUSING = "        raise Refused(Code.INVALID_ARGUMENT, f"


@pytest.mark.parametrize("rule", [rule.number for rule in RULES if rule.number != UNTRIED])
def test_a_rule_that_the_executor_does_not_know_is_missed(rule: str) -> None:
    with toy(without=rule) as address:
        verdict = verdicts(address, rule)[rule]
    assert verdict.outcome == "failed", verdict


def test_rules_are_those_of_the_contract() -> None:
    assert [rule.number for rule in RULES] == [f"R{number}" for number in range(1, 38)]


def test_a_model_without_end_is_not_sent_a_sequence_of_its_length() -> None:
    for length in ("2**31 - 1", "8 * 2**20"):
        with toy(("256, 300", f"256, {length}")) as address:
            verdict = verdicts(address, "R11")["R11"]
        assert (verdict.outcome, verdict.why) == ("ok", "")
    scene = mock.Mock(max_len=2**31 - 1)
    with pytest.raises(NotTested, match="max_model_len 2147483647 does not fit into a step of 4194304 bytes"):
        longer_than_the_model(scene)


@pytest.mark.parametrize(
    "fault",
    [
        ToyFault("R12", "another field is named", (('"R12", f"{path}.token_ids"', '"R12", f"{path}.block_ids"'),)),
        ToyFault("R12", "another sequence is named", (('"R12", f"{path}.', '"R12", f"new_seqs[7].'),)),
        ToyFault("R12", "another rule is named", (('"R12"', '"R13"'),)),
        ToyFault("R12", "another status", (("Refused(Code.INVALID_ARGUMENT, f", "Refused(Code.ABORTED, f"),)),
        ToyFault(
            "R12",
            "a refused step leaves something behind",
            (
                ("def need(holds", "broken: list[str] = []\n\n\ndef need(holds"),
                (REFUSING, "        broken.append(rule)\n" + REFUSING),
                ("repr((read, *seeds))", "repr((read, broken, *seeds))"),
            ),
        ),
    ],
    ids=str,
)
def test_planted_faults_are_noticed(fault: ToyFault) -> None:
    assert_noticed(fault)
