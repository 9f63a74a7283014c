"""Pages of long lists: their sizes, and the page tokens that say where the next page begins.

A token is the position after the last entry, with a checksum over it and the list's identity. So a token of another
list is refused, and no client comes to depend on the meaning of a position.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
from collections.abc import Callable
from typing import Any, TypeVar

from pagekv.common.errors import InvalidRequest

DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 4096
# Blocks of a page that are made before the event loop gets a turn: each takes some microseconds.
BLOCKS_AT_ONCE = 256
_CHECK_BYTES = 8

Page = TypeVar("Page")


def read_page_size(size: int) -> int:
    """Most entries of a page, from a request's `page_size`; 0 stands for the default. Raises InvalidRequest."""
    if size > MAX_PAGE_SIZE:
        raise InvalidRequest("page_size", f"must be from 0 to {MAX_PAGE_SIZE}, got {size}")
    return size or DEFAULT_PAGE_SIZE


async def page_in_slices(make: Callable[[int, str], Page], page_size: int, token: str) -> Page:
    """A page of blocks, made BLOCKS_AT_ONCE at a time, with a turn of the event loop in between. `make` gets a page
    size and a token, and returns a message with `blocks` and `next_page_token`.
    """
    page = make(min(page_size, BLOCKS_AT_ONCE), token)
    answer: Any = page
    while answer.next_page_token and (left := page_size - len(answer.blocks)):
        await asyncio.sleep(0)
        more: Any = make(min(left, BLOCKS_AT_ONCE), answer.next_page_token)
        answer.blocks.MergeFrom(more.blocks)
        answer.next_page_token = more.next_page_token
    return page


def page_token(of: bytes, position: int) -> str:
    """The token of a page that begins at `position` (0 to 2**64 - 1) in the list that `of` identifies."""
    packed = struct.pack("<Q", position)
    return base64.urlsafe_b64encode(packed + _check(of, packed)).decode().rstrip("=")


def read_page_token(of: bytes, token: str, end: int) -> int:
    """The position in a token, 0 for an empty one. Raises InvalidRequest unless it is of this list and below `end`."""
    if not token:
        return 0
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raw = b""
    packed, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if len(packed) == struct.calcsize("<Q") and check == _check(of, packed):
        (position,) = struct.unpack("<Q", packed)
        if position < end:
            return int(position)
    shown = token if len(token) <= 64 else f"{token[:61]}..."
    raise InvalidRequest("page_token", f"must be empty or next_page_token of a page of the same list, got {shown!r}")


def _check(of: bytes, packed: bytes) -> bytes:
    return hashlib.blake2b(packed + of, digest_size=_CHECK_BYTES).digest()
