"""Errors of libraries in words."""

from __future__ import annotations

import pytest

from pagekv.kvmanager.text.library_errors import words_of


class Panic(BaseException):
    """As a panic of Rust code comes to Python."""


@pytest.mark.parametrize(
    ("error", "words"), [(ValueError("no id"), "no id"), (AssertionError(), "AssertionError"), (Panic(), "Panic")]
)
def test_any_class_of_error_has_words(error: BaseException, words: str) -> None:
    assert words_of(error) == words


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_the_end_of_the_process_goes_on(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        words_of(error)
    assert caught.value is error
