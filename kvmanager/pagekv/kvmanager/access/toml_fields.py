"""Checks of single fields in files of TOML. Errors quote no value: it may be a misplaced secret."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from pagekv.kvmanager.access.identity import TENANT_NAME
from pagekv.kvmanager.access.toml_file import TomlFileError

# Characters of a text that is quoted.
QUOTED_CHARACTERS = 64
_KINDS = {dict: "a table", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}


_Kind = TypeVar("_Kind")


def typed(field: str, value: Any, kind: type[_Kind]) -> _Kind:
    """The value, of just this type: a boolean is no number. Raises TomlFileError, also where it is not there."""
    if value is None:
        raise TomlFileError(f"{field}: must be {_KINDS[kind]}, is not there")
    if type(value) is not kind:
        raise TomlFileError(f"{field}: must be {_KINDS[kind]}, got {kind_of(value)}")
    return value


def check_names(field: str, table: dict[str, Any], known: tuple[str, ...], of_table: str = "") -> None:
    """Raises TomlFileError for the first name in a table, the whole file where `field` is "", that is not known.
    `of_table` is said before other advice where such a name has a table.
    """
    for name, value in table.items():
        if name not in known:
            near = difflib.get_close_matches(name[:QUOTED_CHARACTERS], known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            if of_table and type(value) is dict:
                advice = f"{of_table}; {advice}"
            raise TomlFileError(f"{field + '.' if field else ''}{named(name)}: is not known; {advice}")


def kind_of(value: Any) -> str:
    """The kind of a value, with its article."""
    return _KINDS.get(type(value), "a date or time")


def quoted(text: str) -> str:
    """A text as a part of one line, a long one by its beginning and its length."""
    if len(text) <= QUOTED_CHARACTERS:
        return repr(text)
    return f"{text[:QUOTED_CHARACTERS]!r}... ({len(text)} characters)"


def named(name: str) -> str:
    """A name in a field's path: as it is, or quoted where it would not read as one."""
    return name if TENANT_NAME.fullmatch(name) else quoted(name)
