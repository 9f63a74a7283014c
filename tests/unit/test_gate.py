"""The gate (.ci/run) runs each test once, whatever its marks and its folder, but for those of every night."""

from __future__ import annotations

import re
import shlex
import tomllib
from itertools import product

import pytest
from _pytest.mark.expression import Expression
from support.documentation import ROOT

MARKS = ("kernels", "long", "nightly")
GATE = (ROOT / ".ci" / "run").read_text()


class Marked:
    """A test that has these marks, as an expression asks for them."""

    def __init__(self, marks: set[str]) -> None:
        self._marks = marks

    def __call__(self, mark: str, /, **_values: str | int | bool | None) -> bool:
        return mark in self._marks


def arguments(target: str) -> list[str]:
    """The gate's for this target of make, as pytest has them."""
    found = re.findall(rf'make --silent {target} ARGS="(.*?)"', GATE)
    assert len(found) == 1
    return shlex.split(found[0])


def expression(given: list[str]) -> Expression:
    return Expression.compile(given[given.index("-m") + 1])


def sections() -> list[tuple[str, Expression, set[bool]]]:
    """Name, marks, and whether it has the tests in tests/kernels, and those that are elsewhere."""
    assert "make --silent test 2>" in GATE
    usual = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    others = arguments("test-all")
    assert "--ignore=tests/kernels" in others
    return [
        ("tests", expression(shlex.split(usual)), {True, False}),
        ("kernels", expression(arguments("kernels")), {True}),
        ("long tests", expression(others), {False}),
    ]


@pytest.mark.parametrize("of_kernels", [True, False])
@pytest.mark.parametrize("marked", list(product([True, False], repeat=len(MARKS))), ids=str)
def test_one_section_has_each_test(marked: tuple[bool, ...], of_kernels: bool) -> None:
    marks = {mark for mark, has in zip(MARKS, marked, strict=True) if has}
    found = [name for name, chosen, folders in sections() if of_kernels in folders and chosen.evaluate(Marked(marks))]
    assert len(found) == ("nightly" not in marks), (marks, found)
