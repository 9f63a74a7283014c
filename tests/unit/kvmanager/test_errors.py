"""Errors inside the manager itself."""

from __future__ import annotations

from pagekv.common.errors import PageKVError
from pagekv.kvmanager.errors import InvariantError


def test_a_bug_is_no_answer_for_a_client() -> None:
    assert issubclass(InvariantError, RuntimeError)
    assert not issubclass(InvariantError, PageKVError)
