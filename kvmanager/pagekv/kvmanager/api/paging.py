"""Bounds of the calls that return a part of a list."""

from __future__ import annotations

from pagekv.common.errors import InvalidRequest

MAX_LIMIT = 10_000


def check_start(start: int, num_blocks: int, of: str) -> None:
    if start >= num_blocks:
        raise InvalidRequest("start", f"must be from 0 to {num_blocks - 1} (the {of}), got {start}")


def check_limit(limit: int) -> None:
    if limit > MAX_LIMIT:
        raise InvalidRequest("limit", f"must be from 0 to {MAX_LIMIT}, got {limit}")
