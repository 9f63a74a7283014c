"""Bounds of list calls."""

from __future__ import annotations

import pytest

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.api.paging import check_limit, check_start


def test_the_largest_and_the_first_too_large_limit() -> None:
    check_limit(10_000)
    with pytest.raises(InvalidRequest, match="limit: must be from 0 to 10000, got 10001"):
        check_limit(10_001)


def test_the_last_and_the_first_start_beyond() -> None:
    check_start(4, 5, "pool")
    with pytest.raises(InvalidRequest, match=r"start: must be from 0 to 4 \(the pool\), got 5"):
        check_start(5, 5, "pool")
