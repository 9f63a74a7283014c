"""Identity of a block: a SHA-256 chain over everything its keys and values depend on (DESIGN 5).

    root  = SHA-256(msgpack([model fingerprint, namespace, adapter id]))
            with tenants HMAC-SHA-256(cluster secret, msgpack([fingerprint, namespace, adapter id, tenant]))
    block = SHA-256(parent digest + token ids as little-endian uint32 + msgpack(media keys, only if there are any))

A parent has 32 bytes and the token part 4 * block_size bytes, so the three parts are never ambiguous.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 32
TOKEN_BYTES = 4
# Digest of a block without media: sha256(parent digest + token bytes).digest().
sha256 = hashlib.sha256
# One media key: where the span starts relative to the block (negative when it began before), and its digest.
MediaKeys = list[tuple[int, str]]


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, the form that is hashed and compared. Ids must be below 2**32."""
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


class Root(bytes):
    """The digest before the first block of a chain; no block has it."""

    __slots__ = ()


def root_digest(model_fingerprint: str, namespace: str, adapter_id: str, secret: bytes = b"", tenant: str = "") -> Root:
    """Parent digest of the first block of a chain: 32 bytes. It differs whenever any argument does. With a `secret`
    nobody else can compute it, nor any digest of the chain.
    """
    parts = [model_fingerprint, namespace, adapter_id, *([tenant] if tenant else [])]
    identity: bytes = msgpack.packb(parts)
    if secret:
        return Root(hmac.new(secret, identity, hashlib.sha256).digest())
    return Root(hashlib.sha256(identity).digest())


def media_keys(media: Sequence[MediaSpan], start: int, end: int) -> MediaKeys:
    """Keys of the media that overlap token positions [start, end), in order of position.

    A key has only the start of its span; the keys of the following blocks show how far the span reaches.
    """
    overlapping = [span for span in media if span.position < end and span.position + span.length > start]
    return [(span.position - start, span.digest) for span in sorted(overlapping, key=lambda span: span.position)]


def block_digest(parent: bytes, tokens: bytes, keys: MediaKeys | None = None) -> bytes:
    """Digest (32 bytes) of a full block after `parent`; `tokens` as `token_bytes` gives them."""
    if keys:
        return sha256(parent + tokens + msgpack.packb(keys)).digest()
    return sha256(parent + tokens).digest()


def chain_digests(
    parent: bytes, tokens: bytes, block_size: int, media: Sequence[MediaSpan] = (), first_block: int = 0
) -> list[bytes]:
    """Digests of the full blocks in `tokens`; a partial tail is left out (only full blocks have an identity).

    `parent` is the digest before the first block, `first_block` its logical index, which places the media.
    """
    stride = block_size * TOKEN_BYTES
    starts = range(0, len(tokens) // stride * stride, stride)
    digests: list[bytes] = []
    if not media:
        # The least time that an uncached prompt takes: this loop contains nothing but the hash.
        append = digests.append
        for (block,) in struct.iter_unpack(f"{stride}s", memoryview(tokens)[: starts.stop]):
            parent = sha256(parent + block).digest()
            append(parent)
        return digests
    for index, start in enumerate(starts, first_block):
        keys = media_keys(media, index * block_size, (index + 1) * block_size)
        parent = block_digest(parent, tokens[start : start + stride], keys)
        digests.append(parent)
    return digests


def short_hash(digest: bytes) -> int:
    """The first 64 bits of a digest, for formats without room for more. Never used as an identity inside PageKV."""
    return int.from_bytes(digest[:8], "big")


def short_hashes(digests: Sequence[bytes]) -> NDArray[np.uint64]:
    """`short_hash` of each digest, [n]."""
    return np.frombuffer(b"".join(digests), ">u8")[:: DIGEST_BYTES // 8]


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Prompt positions [position, position + length) stand for a medium whose content has this digest."""

    position: int
    length: int
    digest: str


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """The parts of a block's identity besides its tokens, and whether the request reads and writes the cache. `tenant`:
    the blocks' tenant; "" without identities, and in a namespace that tenants share.
    """

    namespace: str = ""
    adapter_id: str = ""
    media: tuple[MediaSpan, ...] = ()
    read: bool = True
    write: bool = True
    tenant: str = ""
