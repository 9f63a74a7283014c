"""Single mutations of modules, and a seeded draw of them.

The operators are mutmut's: swapped operators and comparisons, changed constants, missing arguments, arms of a
condition. Two are added: a statement that is left out, and a negated condition. Texts stay as they are, and so do
annotations and decorators; and nothing becomes None, which fails wherever it is used first, whatever the tests are.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_assignment, operator_string


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one module: its path below the root of the tree, the whole new source, and the lines that differ.

    The same change has the same name for as long as its line stays as it is.
    """

    name: str
    path: str
    source: str
    diff: str


def digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def left_out(node: cst.Expr | cst.Assign | cst.AugAssign) -> Iterator[cst.Pass]:
    """A call, or a change of what outlives the function: a local variable that is never set fails at once."""
    match node:
        case cst.Expr(value=cst.Call()) | cst.AugAssign():
            yield cst.Pass()
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Attribute() | cst.Subscript())]):
            yield cst.Pass()


def negated(node: cst.If | cst.While) -> Iterator[cst.CSTNode]:
    condition = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(test=cst.UnaryOperation(operator=cst.Not(), expression=condition))


def shortened(node: cst.Call) -> Iterator[cst.Call]:
    yield from (call for call in operator_arg_removal(node) if len(call.args) < len(node.args))


_REPLACED = (operator_arg_removal, operator_assignment, operator_string)
OPERATORS: list[tuple[type, Callable[[Any], Iterable[cst.CSTNode]]]] = [
    *(each for each in mutation_operators if each[1] not in _REPLACED),
    (cst.Call, shortened),
    (cst.Expr, left_out),
    (cst.Assign, left_out),
    (cst.AugAssign, left_out),
    (cst.If, negated),
    (cst.While, negated),
]


class _Changes(cst.CSTVisitor):
    """For each line the nodes that begin there, each with what takes its place."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.of_line: dict[int, list[tuple[cst.CSTNode, cst.CSTNode]]] = defaultdict(list)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator):
            return False
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                line = self.get_metadata(PositionProvider, node).start.line
                self.of_line[line] += [(node, changed) for changed in operator(node)]
        return True


class _Module:
    """The mutations of one file, in a random order that `seed` fixes."""

    def __init__(self, root: Path, path: str, seed: int) -> None:
        self._path = path
        self._seed = seed
        self._text = (root / path).read_text()
        self._meaning = ast.dump(ast.parse(self._text))
        self._wrapper = MetadataWrapper(cst.parse_module(self._text))
        self._changes = _Changes()
        self._wrapper.visit(self._changes)

    def lines(self) -> Iterator[tuple[str, int]]:
        """The lines where a change begins, each with a name of its own, that edits of other lines leave as it is."""
        alike: Counter[str] = Counter()
        for number, line in enumerate(self._text.splitlines(), 1):
            alike[line] += 1
            if self._changes.of_line.get(number):
                yield digest(self._seed, self._path, line, alike[line]), number

    def mutation(self, name: str, line: int) -> Mutation | None:
        """The first change of the line that means anything to the compiler: some are no Python, or not another one."""
        changes = self._changes.of_line[line]
        for index in sorted(range(len(changes)), key=lambda index: digest(name, index)):
            tree = self._wrapper.module.deep_replace(*changes[index])
            assert isinstance(tree, cst.Module)
            try:
                meaning = ast.dump(ast.parse(tree.code))
            except SyntaxError:
                continue
            if meaning != self._meaning:
                before, after = self._text.splitlines(), tree.code.splitlines()
                diff = "\n".join(difflib.unified_diff(before, after, self._path, self._path, n=0, lineterm=""))
                return Mutation(digest(name, index), self._path, tree.code, diff)
        return None


def draw(root: Path, paths: Iterable[str], count: int, seed: int) -> list[Mutation]:
    """One mutation each of `count` lines of the files `paths` below `root`; of all lines where there are fewer."""
    modules = [_Module(root, path, seed) for path in paths]
    lines = sorted((name, line, index) for index, module in enumerate(modules) for name, line in module.lines())
    drawn: list[Mutation] = []
    for name, line, index in lines:
        if len(drawn) < count and (mutation := modules[index].mutation(name, line)):
            drawn.append(mutation)
    return drawn
