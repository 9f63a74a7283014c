"""Namespace, adapter and media of blocks, learned from requests and handed from parent to child."""

from __future__ import annotations

import pytest

from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.events.batch import Tier
from pagekv.kvmanager.observe.kv_events import vllm_format
from pagekv.kvmanager.observe.kv_events.vllm_format import PLAIN, BlockExtraKeys, ExtraKeys


def test_children_have_what_their_parents_have() -> None:
    keys = ExtraKeys()
    keys.note_request(b"root", CacheIdentity("tenant", "adapter"))
    found = keys.stored(Tier.DEVICE, [b"a", b"b"], [b"root", b"a"])
    assert found == [BlockExtraKeys("tenant", "adapter", True), BlockExtraKeys("tenant", "adapter")]
    # The host pool's copy of a block has its keys from the device's.
    assert keys.stored(Tier.HOST, [b"b"], [b"a"]) == [BlockExtraKeys("tenant", "adapter")]


def test_plain_blocks_are_one_object_and_leave_nothing() -> None:
    keys = ExtraKeys()
    keys.note_request(b"root", CacheIdentity())
    first, second = keys.stored(Tier.DEVICE, [b"a", b"b"], [b"root", b"a"])
    assert (first, second) == (BlockExtraKeys(first=True), PLAIN)
    assert second is PLAIN
    assert keys._of == {}


def test_what_left_the_tables_is_forgotten() -> None:
    keys = ExtraKeys()
    keys.note_request(b"root", CacheIdentity("tenant"))
    keys.stored(Tier.DEVICE, [b"a", b"b"], [b"root", b"a"])
    keys.removed(Tier.DEVICE, [b"b"])
    assert list(keys._of) == [(Tier.DEVICE, b"a")]
    keys.cleared()
    assert keys._of == {}


def test_roots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_format, "MAX_ROOTS", 2)
    keys = ExtraKeys()
    for number in range(3):
        keys.note_request(bytes([number]), CacheIdentity(f"tenant {number}"))
    keys.note_request(bytes([1]), CacheIdentity("tenant 1"))
    assert list(keys._roots) == [bytes([2]), bytes([1])]
