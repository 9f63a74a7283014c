"""Verdicts as printed, and where a broken rule was seen."""

from __future__ import annotations

import pytest

from pagekv.conformance.verdict import BrokenRule, Verdict, during, require


def test_one_line_a_rule() -> None:
    assert str(Verdict("P3", "words", "ok", "", 0.1)) == "P3 ok words"
    assert str(Verdict("R9", "words", "failed", "a reason", 0.1)) == "R9 FAILED words: a reason"
    assert str(Verdict("M5", "words", "skipped", "no host_pool", 0.1)) == "M5 skipped: no host_pool"


def test_require_says_what_and_during_says_where() -> None:
    require(1, "nothing")
    with pytest.raises(BrokenRule, match=r"^in the test: inside: not so$"), during("in the test"), during("inside"):
        require([], "not so")
