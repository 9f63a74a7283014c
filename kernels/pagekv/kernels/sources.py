"""A kernel as one text, with its local headers inlined: NVRTC needs no other file, and a cache keyed by the text sees
every edit of a header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    """The text of `src/<name>` with every `#include "local"` replaced by that file.

    `#line` directives make the compiler's messages point at the real files. A guard macro keeps a header that is
    included twice, for example by two branches of a conditional, from being compiled twice. `#include <...>` stays.
    """
    return "\n".join(_inlined(name, ())) + "\n"


def _inlined(name: str, includers: tuple[str, ...]) -> Iterator[str]:
    yield f'#line 1 "{name}"'
    for number, line in enumerate(read(name).splitlines(), start=1):
        if include := INCLUDE.match(line):
            header = include[1]
            if header not in (*includers, name):
                guard = "PAGEKV_INCLUDED_" + re.sub(r"\W", "_", header).upper()
                yield f"#ifndef {guard}\n#define {guard}"
                yield from _inlined(header, (*includers, name))
                yield "#endif"
            yield f'#line {number + 1} "{name}"'
        else:
            yield "" if ONCE.match(line) else line  # meaningless in a main file
