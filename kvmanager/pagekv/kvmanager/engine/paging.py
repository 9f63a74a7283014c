"""Pages of long lists: how much a page has, and the tokens that say where the next one begins.

A token is the position behind the last entry, with a check that it belongs to the same list: of a manager's own tokens
none goes astray, and no client comes to depend on what a position is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct

from pagekv.common.errors import InvalidRequest

DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 4096
_CHECK_BYTES = 8


def read_page_size(size: int) -> int:
    """Entries of a page at most, from a request. Raises InvalidRequest."""
    if size > MAX_PAGE_SIZE:
        raise InvalidRequest("page_size", f"must be from 0 to {MAX_PAGE_SIZE}, got {size}")
    return size or DEFAULT_PAGE_SIZE


def page_token(of: bytes, position: int) -> str:
    """The token for the entries from `position` (0 to 2**64 - 1) on of the list that `of` identifies."""
    packed = struct.pack("<Q", position)
    return base64.urlsafe_b64encode(packed + _check(of, packed)).decode().rstrip("=")


def read_page_token(of: bytes, token: str, end: int) -> int:
    """The position in a token, 0 for an empty one. Raises InvalidRequest unless it is one of this list, below `end`."""
    if not token:
        return 0
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
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
