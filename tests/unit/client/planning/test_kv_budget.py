"""The planner's arithmetic: published figures, and what must hold for any model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagekv.client.planning.kv_budget import (
    blocks_for,
    bytes_per_block,
    bytes_per_token,
    capacity,
    footprint,
    prefix_saving,
    shard_kv_heads,
    sharing_requests,
    table_bytes,
    tail_of,
    waste,
)
from pagekv.client.planning.kv_geometry import DTYPE_BYTES, KvGeometry

KIB, MIB, GIB = 2**10, 2**20, 2**30
GQA_32 = KvGeometry(layers=32, kv_heads=8, head_size=128)
GQA_80 = KvGeometry(layers=80, kv_heads=8, head_size=128)
MHA_96 = KvGeometry(layers=96, kv_heads=96, head_size=128)

geometries = st.builds(
    KvGeometry,
    layers=st.integers(1, 200),
    kv_heads=st.integers(1, 128),
    head_size=st.integers(1, 512),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    context=st.integers(1, 2**20),
)
block_sizes = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256])
ranks = st.integers(1, 64)
lengths = st.integers(1, 2**20)


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        (GQA_32, 128 * KIB),
        (GQA_80, 320 * KIB),
        (MHA_96, 4.5 * MIB),
        (KvGeometry(layers=80, kv_heads=64, head_size=128), 2.5 * MIB),
        (KvGeometry(layers=80, kv_heads=1, head_size=128), 40 * KIB),
    ],
)
def test_bytes_per_token_of_known_shapes(geometry: KvGeometry, expected: int) -> None:
    assert bytes_per_token(geometry) == expected


@pytest.mark.parametrize(
    ("geometry", "context", "batch", "gib"),
    [
        (GQA_32, 4096, 1, 0.5),
        (GQA_32, 32768, 1, 4),
        (GQA_80, 4096, 1, 1.25),
        (GQA_80, 32768, 1, 10),
        (MHA_96, 4096, 1, 18),
        (MHA_96, 32768, 1, 144),
        (GQA_80, 131072, 1, 40),
        (GQA_80, 4096, 128, 160),
    ],
)
def test_footprints_of_known_shapes(geometry: KvGeometry, context: int, batch: int, gib: float) -> None:
    assert footprint(geometry, 16, 1, context, batch).bytes_per_rank == gib * GIB


@pytest.mark.parametrize(("kv_heads", "shown"), [(64, "10.00"), (8, "1.25"), (1, "0.16")])
def test_fewer_kv_heads_shrink_a_4k_context(kv_heads: int, shown: str) -> None:
    """80 layers as MHA, GQA and MQA."""
    geometry = KvGeometry(layers=80, kv_heads=kv_heads, head_size=128)
    assert f"{footprint(geometry, 16, 1, 4096, 1).bytes_per_rank / GIB:.2f}" == shown


def test_llama_13b_takes_800_kib_a_token() -> None:
    """1.68 GB for 2048 tokens, not the 3 GB that 1.5 MB a token would make."""
    llama_13b = KvGeometry(layers=40, kv_heads=40, head_size=128)
    assert bytes_per_token(llama_13b) == 800 * KIB
    assert f"{footprint(llama_13b, 16, 1, 2048, 1).bytes_per_rank / 1e9:.2f}" == "1.68"


def test_a_reservation_of_4096_for_200_tokens_idles_3896() -> None:
    geometry = KvGeometry(layers=32, kv_heads=8, head_size=128, context=4096)
    found = waste(geometry, 16, [200])
    assert found.reserved_bytes - found.live_bytes == 3896 * bytes_per_token(geometry)


def test_reserving_the_context_leaves_most_of_it_unused_and_paging_does_not() -> None:
    """10.00 GiB reserved, 1.82 live, 81.8 % unused; paged under 4 %."""
    found = waste(GQA_80, 16, [600, 1250, 4000, 128])
    assert found.reserved_bytes == 10 * GIB
    assert f"{found.live_bytes / GIB:.2f}" == "1.82"
    assert f"{found.reserved_unused:.1%}" == "81.8%"
    assert found.paged_bytes == (38 + 79 + 250 + 8) * bytes_per_block(GQA_80, 16)
    assert found.paged_unused < 0.04


@pytest.mark.parametrize(("tokens", "slots", "unused"), [(505, 512, 7), (1000, 1008, 8), (4096, 4096, 0)])
def test_only_the_last_block_of_a_sequence_has_unused_slots(tokens: int, slots: int, unused: int) -> None:
    tail = tail_of(tokens, 16)
    assert (tail.slots, tail.unused) == (slots, unused)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (2048, 128), (131072, 8192)])
def test_blocks_of_a_sequence(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_six_full_8k_contexts_fit_in_8_gib_of_each_of_two_ranks() -> None:
    """320 KiB x 8192 / 2 = 1.25 GiB, x 1.04 = 1.30 GiB."""
    found = capacity(GQA_80, 16, 2, 8 * GIB, 0.04)
    assert found.full_context_requests == 6
    assert found.request_bytes / GIB == pytest.approx(1.30)
    assert found.num_blocks == 8 * GIB // (16 * 160 * KIB) == 3276
    assert found.tokens == 3276 * 16
    # A byte short of the seventh there are six.
    assert capacity(GQA_80, 16, 1, 7 * GIB // 2 * 5, 0).full_context_requests == 7
    assert capacity(GQA_80, 16, 1, 7 * GIB // 2 * 5 - 1, 0).full_context_requests == 6


def test_memory_for_exactly_one_request_admits_it() -> None:
    """No request is lost to the rounding of 1.04, which is no binary number."""
    geometry = KvGeometry(layers=1, kv_heads=1, head_size=1, dtype="int8", context=25)
    assert capacity(geometry, 1, 1, 52, 0.04).full_context_requests == 1
    assert capacity(geometry, 1, 1, 51, 0.04).full_context_requests == 0


def test_a_shared_prefix_is_held_once_by_all_that_fit() -> None:
    """Of 3,276 blocks 256 hold 4,096 common tokens; 256 more, and 4 %, for each request of 8,192."""
    found = capacity(GQA_80, 16, 2, 8 * GIB, 0.04)
    assert sharing_requests(GQA_80, 16, found, 4096) == int((3276 - 256) / (256 * 1.04)) == 11
    assert sharing_requests(GQA_80, 16, found, 15) == found.full_context_requests == 6
    assert sharing_requests(GQA_80, 16, capacity(GQA_80, 16, 2, 2**20, 0.04), 4096) == 0


def test_block_tables_take_four_bytes_an_entry() -> None:
    assert capacity(GQA_80, 16, 2, 8 * GIB, 0.04).table_bytes == table_bytes(GQA_80, 16, 6) == 6 * 512 * 4
    assert table_bytes(GQA_80, 256, 11) == 11 * 32 * 4


def test_fp8_halves_the_bytes_of_float16() -> None:
    fp8 = KvGeometry(layers=80, kv_heads=8, head_size=128, dtype="float8_e4m3fn")
    assert 2 * bytes_per_token(fp8) == bytes_per_token(GQA_80)
    assert capacity(fp8, 16, 1, 10 * GIB, 0).num_blocks == 2 * capacity(GQA_80, 16, 1, 10 * GIB, 0).num_blocks


def test_a_shared_1000_token_prefix_saves_97_4_percent_not_99() -> None:
    """Only the 62 full blocks are shared; each request has the last 8 tokens in another block."""
    found = prefix_saving(100, 1000, 16)
    assert (found.full_blocks, found.tail_tokens) == (62, 8)
    assert (found.blocks_unshared, found.blocks_shared) == (6300, 162)
    assert f"{found.saved:.1%}" == "97.4%"
    assert f"{found.saved_if_tail_were_shared:.1%}" == "99.0%"


def test_a_prefix_that_ends_with_a_block_is_shared_whole() -> None:
    """1008 tokens do reach 99.0 %."""
    found = prefix_saving(100, 1008, 16)
    assert found.saved == found.saved_if_tail_were_shared == pytest.approx(0.99)


@pytest.mark.parametrize(
    ("kv_heads", "tp", "per_rank"),
    [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 3, 8), (1, 4, 1), (8, 16, 1), (6, 4, 3), (2, 3, 2)],
)
def test_kv_heads_are_sharded_or_replicated_over_ranks(kv_heads: int, tp: int, per_rank: int) -> None:
    assert shard_kv_heads(kv_heads, tp).kv_heads == per_rank


@given(kv_heads=st.integers(1, 128), tp=ranks)
def test_ranks_hold_every_kv_head_and_none_more_than_all(kv_heads: int, tp: int) -> None:
    """Together at least one copy, on a rank never more than there are."""
    per_rank = shard_kv_heads(kv_heads, tp).kv_heads
    assert per_rank * tp >= kv_heads
    assert 1 <= per_rank <= kv_heads


@given(tokens=lengths, block_size=block_sizes)
def test_tail_waste_is_less_than_a_block(tokens: int, block_size: int) -> None:
    tail = tail_of(tokens, block_size)
    assert 0 <= tail.unused < block_size
    assert tail.tokens + tail.unused == tail.slots == tail.blocks * block_size


@given(geometries, block_sizes, ranks, st.integers(0, 2**50), st.floats(0, 10))
def test_admitted_requests_have_their_blocks(
    geometry: KvGeometry, block_size: int, tp: int, memory: int, overhead: float
) -> None:
    """Admitted requests fit in blocks and in memory; without overhead not one more would."""
    found = capacity(geometry, block_size, tp, memory, overhead)
    needed = blocks_for(geometry.context, block_size)
    assert found.full_context_requests * needed <= found.num_blocks
    bare = capacity(geometry, block_size, tp, memory, 0)
    assert found.full_context_requests <= bare.full_context_requests == bare.num_blocks // needed


@given(geometries, block_sizes, lengths, st.integers(1, 64))
def test_a_footprint_is_the_tokens_and_their_tails(
    geometry: KvGeometry, block_size: int, context: int, batch: int
) -> None:
    found = footprint(geometry, block_size, 1, context, batch)
    slots = batch * (context + tail_of(context, block_size).unused)
    assert (
        found.bytes_per_rank
        == slots * bytes_per_token(geometry)
        == found.blocks * bytes_per_block(geometry, block_size)
    )


@given(geometries, block_sizes, st.data())
def test_paging_takes_at_most_a_block_more_than_reserving(
    geometry: KvGeometry, block_size: int, data: st.DataObject
) -> None:
    """Both take at least the live bytes."""
    sequences = data.draw(st.lists(st.integers(1, geometry.context), min_size=1, max_size=8))
    found = waste(geometry, block_size, sequences)
    assert found.live_bytes <= found.reserved_bytes
    assert found.live_bytes <= found.paged_bytes
    assert found.paged_bytes <= found.reserved_bytes + len(sequences) * bytes_per_block(geometry, block_size)
    assert 0 <= found.paged_unused < 1
    assert 0 <= found.reserved_unused < 1


@given(st.integers(1, 1000), lengths, block_sizes)
def test_sharing_a_prefix_never_costs_and_never_beats_one_copy(
    requests: int, prefix_tokens: int, block_size: int
) -> None:
    """At least the blocks of one copy stay; a prefix below one block saves nothing."""
    found = prefix_saving(requests, prefix_tokens, block_size)
    assert blocks_for(prefix_tokens, block_size) <= found.blocks_shared <= found.blocks_unshared
    assert 0 <= found.saved <= found.saved_if_tail_were_shared < 1
    if prefix_tokens < block_size:
        assert found.saved == 0
