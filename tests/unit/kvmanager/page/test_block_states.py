"""The page's bytes: the state of each block, and changes that lead from one state of the pool to another."""

from __future__ import annotations

import base64

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.browser.page_reader import apply_change

from pagekv.kvmanager.kvcache.block_hash import chain_digests, root_digest, token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.pins import Pins
from pagekv.kvmanager.page import block_states as states
from pagekv.kvmanager.page.block_states import STATES, change, counts, device_bytes, host_bytes, whole

arrays = st.lists(st.integers(0, 255), max_size=60)


def of_device(pool: BlockPool, pins: Pins) -> states.Bytes:
    return device_bytes(pool.ref_counts, pins.holders, pool.table.published)


def of_host(host: HostPool) -> list[int]:
    return list(host_bytes(host.ref_counts, host.keyed_blocks()))


def names(pool: BlockPool, pins: Pins) -> list[tuple[str, int]]:
    """State and holders of each block."""
    return [(STATES[byte & states.STATE_MASK], byte >> states.STATE_BITS) for byte in of_device(pool, pins).tolist()]


def test_a_block_is_free_cached_active_shared_or_pinned() -> None:
    pool = BlockPool(4, 2)
    pins = Pins(pool, 1.0)
    assert names(pool, pins) == [("free", 0)] * 4
    blocks = pool.allocate(2)
    assert blocks is not None
    assert names(pool, pins) == [("active", 1), ("active", 1), ("free", 0), ("free", 0)]
    root = root_digest("model", "", "")
    digests = chain_digests(root, token_bytes([1, 2, 3, 4]), 2, ())
    chunks = np.array([[1, 2], [3, 4]], np.uint32)
    pool.publish_chain(blocks, digests, root, chunks, first=True, media=False)
    pool.share(blocks[:1])
    assert names(pool, pins) == [("shared", 2), ("active", 1), ("free", 0), ("free", 0)]
    pins.pin([0, 1], 60, 0)
    # As in ListBlocks: a block that is pinned and used is active.
    assert names(pool, pins)[:2] == [("shared", 3), ("active", 2)]
    pool.free(blocks[:1])
    pool.free(blocks)
    assert names(pool, pins)[:2] == [("pinned", 1), ("pinned", 1)]
    pins.end_all()
    assert names(pool, pins)[:2] == [("cached", 0), ("cached", 0)]
    assert counts(of_device(pool, pins), STATES) == dict(zip(STATES, [2, 2, 0, 0, 0], strict=True))


def test_more_holders_than_fit_are_as_many_as_fit() -> None:
    pool = BlockPool(1, 2)
    blocks = pool.allocate(1)
    assert blocks is not None
    for _ in range(99):
        pool.share(blocks)
    assert names(pool, Pins(pool, 1.0)) == [("shared", states.MAX_HOLDERS)]


def test_a_host_block_is_free_cached_or_held() -> None:
    host = HostPool(3, 2)
    assert of_host(host) == [0, 0, 0]
    (keyed, _), _ = host.keep([b"k" * 32, None], np.array([[1, 2]], np.uint32), [b"p" * 32])
    assert of_host(host) == [2 | 1 << states.STATE_BITS, 2 | 1 << states.STATE_BITS, 0]
    host.release([keyed])
    assert of_host(host) == [1, 2 | 1 << states.STATE_BITS, 0]


def test_of_a_huge_pool_the_first_blocks_are_shown() -> None:
    host = HostPool(states.MAX_SHOWN + 5, 1)
    assert len(of_host(host)) == states.MAX_SHOWN


@given(st.data())
def test_a_change_leads_from_any_state_to_any_other(data: st.DataObject) -> None:
    old = np.array(data.draw(arrays), np.uint8)
    new = np.array(data.draw(st.lists(st.integers(0, 255), min_size=len(old), max_size=len(old))), np.uint8)
    read = bytearray(old.tobytes())
    apply_change(read, change(old, new))
    assert read == new.tobytes()
    read = bytearray(len(new))
    apply_change(read, whole(new))
    assert read == new.tobytes()


def test_only_what_changed_travels_and_never_more_than_everything() -> None:
    old = np.zeros(100_000, np.uint8)
    new = old.copy()
    assert change(old, new) == {}
    new[500:600] = 9
    new[600] = 10
    assert len(base64.b64decode(change(old, new)["runs"])) == 2 * 9
    scattered = np.arange(100_000).astype(np.uint8)
    assert len(base64.b64decode(change(old, scattered)["all"])) == 100_000
