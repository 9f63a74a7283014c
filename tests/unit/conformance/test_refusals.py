"""Each refusal is missed by the rule that asks for it, and by the number that the refusal bears."""

from __future__ import annotations

import pytest
from support.executor.judged import ToyFault, assert_noticed, toy, verdicts

from pagekv.conformance.refusals import RULES

# The toy has no feature with lists of ids.
UNTRIED = "R19"
REFUSING = "        raise Refused(Code.INVALID_ARGUMENT, f"


@pytest.mark.parametrize("rule", [rule.number for rule in RULES if rule.number != UNTRIED])
def test_a_rule_that_the_executor_does_not_know_is_missed(rule: str) -> None:
    with toy(without=rule) as address:
        verdict = verdicts(address, rule)[rule]
    assert verdict.outcome == "failed", verdict


def test_rules_are_those_of_the_contract() -> None:
    assert [rule.number for rule in RULES] == [f"R{number}" for number in range(1, 36)]


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
