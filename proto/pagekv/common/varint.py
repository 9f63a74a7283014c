"""Variable-length numbers of protobuf's encoding (protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations


def varint(number: int) -> bytes:
    """A number that is not negative: seven bits a byte, the lowest first, and a bit for "more follows"."""
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)
