"""One kernel as one text: its local headers inlined, so that the text alone says what is compiled.

Compilers that are handed text (NVRTC, and CuPy on top of it) look for no neighbours, and caches keyed by the text (such
as CuPy's, whose key leaves out included files) see every edit of a header.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$')
ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b")


SOURCES = files("pagekv.kernels") / "src"


def read(name: str) -> str:
    """The text of a file of `src/`. Raises FileNotFoundError where there is none."""
    return (SOURCES / name).read_text(encoding="utf-8")


@cache
def translation_unit(name: str) -> str:
    """The text of `src/<name>` with every `#include "local"` replaced by that file, each once.

    `#line` directives keep the compiler's messages pointing at the real files. `#include <...>` is left alone.
    """
    lines: list[str] = []
    _inline(name, lines, set())
    return "\n".join(lines) + "\n"


def _inline(name: str, lines: list[str], seen: set[str]) -> None:
    seen.add(name)
    lines.append(f'#line 1 "{name}"')
    for number, line in enumerate(read(name).splitlines(), start=1):
        if include := INCLUDE.match(line):
            # Every header is written to be included once, as its `#pragma once` says.
            if include[1] not in seen:
                _inline(include[1], lines, seen)
            lines.append(f'#line {number + 1} "{name}"')
        elif not ONCE.match(line):  # has no meaning in a main file
            lines.append(line)
        else:
            lines.append("")
