"""Options of a call as the keys of a class: one that the class does not have is refused, since Python does not look at
the keys, and `help` shows what each means.

Python drops the literals below a class's keys, which only editors read: `described` puts them into the docstring of the
class, `with_options_of` into that of a method.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

# Of a line, in characters; `help` indents it by 8.
_WIDTH = 100

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


def described(cls: Class) -> Class:
    """The class, whose docstring has a line for each key. Unchanged where its source is not there to be read."""
    try:
        # Not by inspect.getsource, which takes ten times as long, at every start of a program.
        tree = ast.parse(Path(str(sys.modules[cls.__module__].__file__)).read_bytes())
    except OSError:
        return cls
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            _append(cls, "\n".join(_lines(node)))
    return cls


def with_options_of(options: type) -> Callable[[Function], Function]:
    """Decorator of a method: its docstring ends with that of its options."""

    def decorate(function: Function) -> Function:
        _append(function, options.__doc__ or "")
        return function

    return decorate


def check_known(options: Mapping[str, Any], known: type, where: str = "") -> None:
    """Raises TypeError for options that are no keys of the class `known`; the message begins with `where`."""
    names = sorted(known.__annotations__)
    if unknown := sorted(options.keys() - names):
        raise TypeError(f"{where}unknown option {unknown[0]!r}; known are {', '.join(names)}")


def _append(documented: Any, text: str) -> None:
    documented.__doc__ = f"{inspect.cleandoc(documented.__doc__ or '')}\n\n{text}"


def _lines(body: ast.ClassDef) -> Iterator[str]:
    for key, below in zip(body.body, body.body[1:], strict=False):
        match key, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield fill(f"{name}: {' '.join(text.split())}", _WIDTH, subsequent_indent="    ")
