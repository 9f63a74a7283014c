import hashlib
import hmac

from hypothesis import given
from hypothesis import strategies as st

from pagekv.kvmanager.kvcache.block_hash import (
    MediaSpan,
    block_digest,
    chain_digests,
    media_keys,
    root_digest,
    short_hash,
    short_hashes,
    token_bytes,
)


def test_known_answers() -> None:
    """Spelled out byte by byte, so that another implementation can check itself: msgpack of a 3-array is 0x93."""
    packed = b"\x93" + b"\xa2fp" + b"\xa4team" + b"\xa0"
    root = root_digest("fp", "team", "")
    assert root == hashlib.sha256(packed).digest()
    assert root_digest("fp", "team", "", b"secret") == hmac.new(b"secret", packed, hashlib.sha256).digest()
    tokens = b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert token_bytes([1, 258]) == tokens
    first = hashlib.sha256(root + tokens).digest()
    assert chain_digests(root, tokens * 2, 2) == [first, hashlib.sha256(first + tokens).digest()]
    # One medium that began one position before the block: msgpack [[-1, "ab"]].
    assert block_digest(root, tokens, [(-1, "ab")]) == hashlib.sha256(root + tokens + b"\x91\x92\xff\xa2ab").digest()


def test_only_full_blocks_have_an_identity() -> None:
    root = root_digest("m", "", "")
    assert chain_digests(root, token_bytes([1, 2, 3]), 4) == []
    assert len(chain_digests(root, token_bytes([1, 2, 3, 4]), 4)) == 1
    assert len(chain_digests(root, token_bytes(range(4097)), 16)) == 256


def test_short_hashes_are_those_of_each() -> None:
    digests = chain_digests(bytes(32), token_bytes(range(40)), 4)
    assert short_hashes(digests).tolist() == [short_hash(digest) for digest in digests]
    assert short_hashes([]).tolist() == []


def test_each_part_of_the_identity_changes_the_chain_from_block_0_on() -> None:
    roots = [root_digest(*parts) for parts in (("m", "", ""), ("n", "", ""), ("m", "a", ""), ("m", "", "a"))]
    assert len({chain_digests(root, token_bytes([1, 2]), 2)[0] for root in roots}) == 4


def test_media_change_the_blocks_they_cover_and_those_after() -> None:
    root, tokens = root_digest("m", "", ""), token_bytes([0] * 8)
    plain = chain_digests(root, tokens, 2)
    cat = chain_digests(root, tokens, 2, [MediaSpan(3, 2, "cat")])
    dog = chain_digests(root, tokens, 2, [MediaSpan(3, 2, "dog")])
    assert plain[0] == cat[0] == dog[0]
    for index in (1, 2, 3):
        assert len({plain[index], cat[index], dog[index]}) == 3
    assert media_keys([MediaSpan(3, 2, "cat")], 4, 6) == [(-1, "cat")]
    assert media_keys([MediaSpan(3, 2, "cat")], 6, 8) == []


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12), st.sampled_from([1, 2, 4]))
def test_equal_digest_exactly_when_the_whole_prefix_is_equal(a: list[int], b: list[int], size: int) -> None:
    root = root_digest("m", "", "")
    chain_a, chain_b = (chain_digests(root, token_bytes(tokens), size) for tokens in (a, b))
    for index, (x, y) in enumerate(zip(chain_a, chain_b, strict=False)):
        end = (index + 1) * size
        assert (x == y) == (a[:end] == b[:end])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=40), st.integers(1, 4))
def test_chain_can_be_continued_from_any_block(tokens: list[int], split: int) -> None:
    root = root_digest("m", "", "")
    media = [MediaSpan(2, 5, "x")]
    whole = chain_digests(root, token_bytes(tokens), 4, media)
    split = min(split, len(whole))
    head = chain_digests(root, token_bytes(tokens[: split * 4]), 4, media)
    tail = chain_digests(head[-1], token_bytes(tokens[split * 4 :]), 4, media, split)
    assert head + tail == whole


def test_a_tenant_and_a_secret_make_another_root() -> None:
    roots = [root_digest("m", "n", "", b"secret"), root_digest("m", "n", "", b"secret", "a")]
    roots += [
        root_digest("m", "n", "", b"secret", "b"),
        root_digest("m", "n", "", b"other", "a"),
        root_digest("m", "n", ""),
    ]
    assert len(set(roots)) == 5
    # The tenant is no part of another name.
    assert root_digest("m", "na", "", b"secret") != root_digest("m", "n", "", b"secret", "a")
