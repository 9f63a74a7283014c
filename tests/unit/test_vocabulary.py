"""One word per thing: a public class name stands for one class of the product (DESIGN 2). Plain English: a docstring or
comment is about its object, so none begins a sentence with a pronoun for something else.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("proto/pagekv/common", "kvmanager/pagekv", "executor/pagekv", "kernels/pagekv", "client/pagekv")
PAGE = "kvmanager/pagekv/kvmanager/page/static"


def public_classes(body: list[ast.stmt]) -> Iterator[ast.ClassDef]:
    """Classes at the top of a module and those in their bodies; private ones and what is in them left out."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node
            yield from public_classes(node.body)


def test_no_two_public_classes_share_a_name() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            for node in public_classes(ast.parse(path.read_text()).body):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 200
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


# A sentence that begins so is about something that the docstring or comment does not name.
WORDS = r"(Who|What|Whoever|Whatever|Whose|Of those|Those|They|These)\b"
PRONOUN = re.compile(rf"(?:^|(?<=[.!?:]\s)){WORDS}.{{0,40}}")


def prose(text: str) -> Iterator[str]:
    """The docstrings and comments of a module, each as one line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield " ".join((ast.get_docstring(node) or "").split())
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


# A comment of a script: the `//` lines that stand together, or what stands behind code.
SCRIPT_COMMENT = re.compile(r"^[ \t]*//.*(?:\n[ \t]*//.*)*|(?<=\s)//\s.*", re.MULTILINE)


def script_prose(text: str) -> Iterator[str]:
    """The comments of a script of the page, each as one line."""
    for comment in SCRIPT_COMMENT.findall(text):
        yield " ".join(line.strip().lstrip("/ ") for line in comment.split("\n"))


def test_no_sentence_begins_with_a_pronoun_for_something_else() -> None:
    modules = [path for source in (*SOURCES, "tests") for path in sorted((ROOT / source).rglob("*.py"))]
    scripts = sorted((ROOT / PAGE).glob("*.js"))
    assert len(scripts) > 10
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for read, paths in ((prose, modules), (script_prose, scripts))
        for path in paths
        # Few files have such a word at all, and parsing them all takes seconds. The second word of two may be in the
        # next line.
        if re.search(WORDS.replace(" those", ""), text := path.read_text())
        for line in read(text)
        for match in PRONOUN.finditer(line)
    ]
    assert found == []
