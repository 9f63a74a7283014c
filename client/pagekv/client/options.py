"""Options of a call as the keys of a TypedDict class. Python does not check the keys at run time, so unknown options
are refused here, and `help` shows the meaning of each option.

Python drops the string literals below the keys of a class; only editors read them. `described` copies them into the
docstring of the class, `with_options_of` into the docstring of a method.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

# Width of a line in characters; `help` indents it by 8.
_WIDTH = 100

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


def described(cls: Class) -> Class:
    """The class, with a line for each key added to its docstring. Unchanged if the source file cannot be read."""
    try:
        # Not with inspect.getsource, which takes ten times as long, at every start of a program.
        tree = ast.parse(Path(str(sys.modules[cls.__module__].__file__)).read_bytes())
    except OSError:
        return cls
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            _append(cls, "\n".join(_lines(node)))
    return cls


def with_options_of(options: type) -> Callable[[Function], Function]:
    """Decorator of a method: appends the docstring of its options class to the docstring of the method."""

    def decorate(function: Function) -> Function:
        _append(function, options.__doc__ or "")
        return function

    return decorate


def check_known(options: Mapping[str, Any], known: type, where: str = "", beside: Iterable[str] = ()) -> None:
    """Raises TypeError for options that are not keys of the class `known`. The message begins with `where` and also
    lists the function's other arguments, `beside`.
    """
    if unknown := sorted(options.keys() - known.__annotations__.keys()):
        names = sorted({*known.__annotations__, *beside})
        raise TypeError(f"{where}unknown option {unknown[0]!r}; known are {', '.join(names)}")


def _append(documented: Any, text: str) -> None:
    documented.__doc__ = f"{inspect.cleandoc(documented.__doc__ or '')}\n\n{text}"


def _lines(body: ast.ClassDef) -> Iterator[str]:
    for key, below in zip(body.body, body.body[1:], strict=False):
        match key, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield fill(f"{name}: {' '.join(text.split())}", _WIDTH, subsequent_indent="    ")
