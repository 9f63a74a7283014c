"""Fields of files of TOML: what is taken, and the words for what is not, which quote no value."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from pagekv.kvmanager.access.toml_fields import check_names, kind_of, named, quoted, typed
from pagekv.kvmanager.access.toml_file import TomlFileError

VALUES = {"a table": {"s": 1}, "a list": ["s"], "a text": "secret", "a boolean": True, "a number": 7}


@pytest.mark.parametrize(("wanted", "kind"), [("a table", dict), ("a list", list), ("a text", str), ("a number", int)])
def test_a_value_of_its_type_is_taken_and_any_other_refused_unquoted(wanted: str, kind: type) -> None:
    for shown, value in {**VALUES, "a date or time": date(1979, 5, 27)}.items():
        if shown == wanted:
            assert typed("a.b", value, kind) is value
        else:
            with pytest.raises(TomlFileError, match=f"^a.b: must be {wanted}, got {shown}$"):
                typed("a.b", value, kind)
    with pytest.raises(TomlFileError, match=f"^a.b: must be {wanted}, is not there$"):
        typed("a.b", None, kind)


@pytest.mark.parametrize(
    ("field", "table", "words"),
    [
        ("", {"keyz": 1}, "keyz: is not known; did you mean keys?"),
        ("a.b", {"qqq": 1}, "a.b.qqq: is not known; there are keys, jwt"),
        ("a", {"x\ny": 1}, "a.'x\\ny': is not known; there are keys, jwt"),
        ("a", {"keys": 1, "y" * 99: 1}, f"a.{'y' * 64!r}... (99 characters): is not known; there are keys, jwt"),
        ("a", {"qqq": {}}, "a.qqq: is not known; it is nested; there are keys, jwt"),
    ],
)
def test_a_name_that_is_not_known(field: str, table: dict[str, Any], words: str) -> None:
    with pytest.raises(TomlFileError) as caught:
        check_names(field, table, ("keys", "jwt"), "it is nested")
    assert str(caught.value) == words


def test_names_that_are_known() -> None:
    check_names("", {"jwt": {}}, ("keys", "jwt"))
    check_names("", {}, ())


def test_parts_of_one_line() -> None:
    assert named("al.ice-1_B") == "al.ice-1_B"
    assert named("a b") == "'a b'"
    assert named("") == "''"
    assert quoted("x" * 64) == repr("x" * 64)
    assert quoted("\n" * 65) == f"{chr(10) * 64!r}... (65 characters)"
    assert [kind_of(value) for value in VALUES.values()] == list(VALUES)
    assert kind_of(1.5) == "a number"
