"""Checks of single fields in TOML files. Errors quote no value that may be a misplaced secret."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from pagekv.kvmanager.access.identity import TENANT_NAME
from pagekv.kvmanager.access.toml_file import TomlFileError

# Most characters of a quoted text.
QUOTED_CHARACTERS = 64
_KINDS = {dict: "a table", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}


_Kind = TypeVar("_Kind")


def typed(field: str, value: Any, kind: type[_Kind]) -> _Kind:
    """The value, if it has exactly this type: a boolean is no number. Raises TomlFileError, also without a value."""
    if value is None:
        raise TomlFileError(f"{field}: must be {_KINDS[kind]}, is not there")
    if type(value) is not kind:
        raise TomlFileError(f"{field}: must be {_KINDS[kind]}, got {kind_of(value)}")
    return value


def check_names(field: str, table: dict[str, Any], known: tuple[str, ...], of_table: str = "") -> None:
    """Raises TomlFileError for the first unknown name in a table, which is the whole file if `field` is "". If the
    unknown name has a table, `of_table` comes before the other advice.
    """
    for name, value in table.items():
        if name not in known:
            near = difflib.get_close_matches(name[:QUOTED_CHARACTERS], known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            if of_table and type(value) is dict:
                advice = f"{of_table}; {advice}"
            raise TomlFileError(f"{field + '.' if field else ''}{named(name)}: is not known; {advice}")


def kind_of(value: Any) -> str:
    """The kind of a value, with its article, such as "a list"."""
    return _KINDS.get(type(value), "a date or time")


def quoted(text: str) -> str:
    """A text, quoted for one line; of a long text the beginning and the length."""
    if len(text) <= QUOTED_CHARACTERS:
        return repr(text)
    return f"{text[:QUOTED_CHARACTERS]!r}... ({len(text)} characters)"


def named(name: str) -> str:
    """A name as a part of a field's path, in quotes unless it has the form of a tenant's name."""
    return name if TENANT_NAME.fullmatch(name) else quoted(name)
