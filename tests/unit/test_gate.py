"""The gate (.ci/run) runs each test once, whatever its marks and its folder, but for those of every night."""

from __future__ import annotations

import re
import shlex
from itertools import product

import pytest
from _pytest.mark.expression import Expression
from support.documentation import ROOT

MARKS = ("kernels", "long", "nightly")
GATE = (ROOT / ".ci" / "run").read_text()
# Targets of make that run tests, and their command.
RUNS = {
    target: shlex.split(command)
    for target, command in re.findall(
        r"^([a-z-]+):.*\n(?:\t.*\n)*?\t@.*python -m pytest (.*)$", (ROOT / "Makefile").read_text(), re.M
    )
}


class Marked:
    """A test that has these marks, as an expression asks for them."""

    def __init__(self, marks: set[str]) -> None:
        self._marks = marks

    def __call__(self, mark: str, /, **_values: str | int | bool | None) -> bool:
        return mark in self._marks


def test_one_run_has_the_tests_of_every_folder() -> None:
    assert {"test", "test-all", "kernels"} <= {*RUNS}
    called = [shlex.split(rest) for rest in re.findall(r"\bmake (-.*|[a-z].*)", GATE)]
    # The goals that run tests, each with the words behind it; `collect` imports them alone.
    runs = [
        (word, words[words.index(word) + 1 :]) for words in called for word in words if word in {*RUNS} - {"collect"}
    ]
    assert runs == [("test-all", ["2>&1", "|", "tee", "$log"])]
    assert "--collect-only" in RUNS["collect"]
    assert [word for word in RUNS["test-all"] if word.startswith(("tests", "--ignore", "--deselect", "-k"))] == []


@pytest.mark.parametrize("marked", list(product([True, False], repeat=len(MARKS))), ids=str)
def test_it_has_each_test_but_those_of_every_night(marked: tuple[bool, ...]) -> None:
    marks = {mark for mark, has in zip(MARKS, marked, strict=True) if has}
    chosen = Expression.compile(RUNS["test-all"][RUNS["test-all"].index("-m") + 1])
    assert chosen.evaluate(Marked(marks)) == ("nightly" not in marks)
