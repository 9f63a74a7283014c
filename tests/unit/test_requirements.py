"""docs/requirements.md: every test, script and target that it names exists, and every test of docs/security.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/requirements.md").read_text()
ATTACKS = (ROOT / "docs/security.md").read_text()


def defined(path: str) -> set[str]:
    """The tests and test classes of a file."""
    file = ROOT / path
    body = ast.parse(file.read_text()).body if file.is_file() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


@pytest.mark.parametrize(("page", "least"), [(PAGE, 100), (ATTACKS, 30)], ids=["requirements", "security"])
def test_every_test_that_is_named_exists(page: str, least: int) -> None:
    cited: dict[str, set[str]] = {}
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page):
        cited.setdefault(path, set()).add(name)
    assert sum(map(len, cited.values())) > least
    missing = {path: sorted(names - defined(path)) for path, names in cited.items() if names - defined(path)}
    assert missing == {}, "the page names tests that are not where it says"


def test_every_attack_has_a_test_or_is_said_to_be_open() -> None:
    rows = [line.split("|")[1:-1] for line in ATTACKS.splitlines() if line.startswith("| ") and "| ---" not in line]
    rows = [row for row in rows if row[0].strip() != "attack"]
    assert len(rows) > 30
    for row in rows:
        assert len(row) == 3, row
        assert re.search(r"tests/[\w/]+\.py::\w+", row[2]) or row[1].strip().startswith("**open**"), row


def test_every_script_and_target_that_is_named_exists() -> None:
    scripts = re.findall(r"python (tests/[\w/]+\.py)", PAGE)
    assert scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([\w-]+)", PAGE))
    assert [target for target in targets if f"\n{target}:" not in makefile] == []


def test_every_row_has_one_line_and_says_where_it_is_shown() -> None:
    rows = [re.split(r"(?<!\\)\|", line) for line in PAGE.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]
    ids = [row[1].strip() for row in rows]
    assert len(ids) == len(set(ids)) > 150
    assert all(len(row) == 5 and row[2].strip() and row[3].strip() for row in rows)
    assert PAGE.isascii()
