"""docs/requirements.md: every test, script and target that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/requirements.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    cited = set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", PAGE))
    assert len(cited) > 100
    missing = []
    for path, name in sorted(cited):
        file = ROOT / path
        tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}:
            missing.append(f"{path}::{name}")
    assert not missing


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
