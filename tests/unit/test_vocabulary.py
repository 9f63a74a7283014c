"""One word per thing: a public class name stands for one class of the product (DESIGN 2)."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("proto/pagekv/common", "kvmanager/pagekv", "executor/pagekv", "kernels/pagekv", "client/pagekv")


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
