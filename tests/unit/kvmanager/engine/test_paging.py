"""Page sizes and page tokens."""

from __future__ import annotations

import pytest

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.engine.paging import page_token, read_page_size, read_page_token


def test_no_size_is_a_thousand_and_the_largest_is_4096() -> None:
    assert [read_page_size(size) for size in (0, 1, 4096)] == [1000, 1, 4096]
    with pytest.raises(InvalidRequest, match="page_size: must be from 0 to 4096, got 4097"):
        read_page_size(4097)


@pytest.mark.parametrize("position", [0, 1, 2**32, 2**64 - 1])
def test_a_token_says_where_to_go_on_in_its_own_list_alone(position: int) -> None:
    token = page_token(b"blocks", position)
    assert read_page_token(b"blocks", token, 2**64) == position
    with pytest.raises(InvalidRequest, match="page_token: must be empty or next_page_token of a page of the same list"):
        read_page_token(b"requests", token, 2**64)
    with pytest.raises(InvalidRequest):
        read_page_token(b"blocks", token, position)


def test_no_token_is_the_beginning() -> None:
    assert read_page_token(b"blocks", "", 1) == 0


@pytest.mark.parametrize(
    "token", ["3", "AAAA", "A" * 22, "\u00e9" * 8, page_token(b"blocks", 3) + "A", "A" * 100_000, " ", "===="]
)
def test_anything_else_is_refused_and_shown_in_short(token: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_page_token(b"blocks", token, 9)
    assert refused.value.field == "page_token"
    assert len(refused.value.description) < 200
