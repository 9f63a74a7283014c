"""Pools: layout, writes, gathers, and copies that really arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagekv.executor.backend.interface import LAYOUT, BlockCopies, CopyDirection
from pagekv.executor.cpu import kv_cache
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.model.loading import BlockGeometry

GEOMETRY = BlockGeometry(num_layers=3, num_kv_heads=2, head_size=5, dtype=torch.float32)
BLOCK_SIZE = 4


@pytest.fixture
def cache() -> KvCache:
    torch.manual_seed(0)
    cache = KvCache(GEOMETRY, BLOCK_SIZE, 6, 6)
    cache.device[:6] = torch.randn(6, 3, 2, BLOCK_SIZE, 2, 5)
    cache.host.copy_(torch.randn(6, 3, 2, BLOCK_SIZE, 2, 5))
    return cache


def test_a_block_is_one_contiguous_slab(cache: KvCache) -> None:
    assert LAYOUT == "blocks-first-v1"
    assert cache.device.shape == (7, 3, 2, BLOCK_SIZE, 2, 5)
    assert cache.device.is_contiguous()
    assert cache.host.shape == (6, 3, 2, BLOCK_SIZE, 2, 5)
    assert cache.device[0].nbytes == GEOMETRY.bytes_per_block(BLOCK_SIZE) == 3 * 2 * BLOCK_SIZE * 2 * 5 * 4
    assert cache.device.nbytes + cache.host.nbytes == 13 * GEOMETRY.bytes_per_block(BLOCK_SIZE)


@pytest.mark.parametrize("at_once", [1, 2, 8])
@pytest.mark.parametrize("kind", CopyDirection)
def test_copies_arrive_and_touch_nothing_else(
    cache: KvCache, kind: CopyDirection, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing into the temporary that indexing makes would lose them."""
    monkeypatch.setattr(kv_cache, "COPIED_BYTES", at_once * GEOMETRY.bytes_per_block(BLOCK_SIZE))
    sources, destinations = [0, 3, 1], [5, 2, 4]
    before = {"device": cache.device.clone(), "host": cache.host.clone()}
    cache.copy(BlockCopies(kind, sources, destinations))
    source = before["host" if kind is CopyDirection.SWAP_IN else "device"]
    changed = "host" if kind is CopyDirection.SWAP_OUT else "device"
    before[changed][destinations] = source[sources]
    assert torch.equal(cache.device, before["device"])
    assert torch.equal(cache.host, before["host"])


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "index":
            self.made = max(self.made, found.nbytes)
        return found


def test_a_large_swap_takes_little_memory_besides(cache: KvCache, monkeypatch: pytest.MonkeyPatch) -> None:
    size = GEOMETRY.bytes_per_block(BLOCK_SIZE)
    monkeypatch.setattr(kv_cache, "COPIED_BYTES", 2 * size + 1)
    with _Largest() as largest:
        cache.copy(BlockCopies(CopyDirection.SWAP_OUT, [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]))
    assert largest.made == 2 * size


def test_a_swap_there_and_back_is_bit_exact(cache: KvCache) -> None:
    before = cache.device.clone()
    cache.copy(BlockCopies(CopyDirection.SWAP_OUT, [2, 4], [1, 0]))
    cache.device[[2, 4]] = 0
    cache.copy(BlockCopies(CopyDirection.SWAP_IN, [1, 0], [2, 4]))
    assert torch.equal(cache.device, before)


def test_written_slots_are_gathered(cache: KvCache) -> None:
    keys, values = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    before = cache.device.clone()
    cache.write(1, (torch.tensor([4, 4, 0]), torch.tensor([3, 0, 2])), keys, values)
    before[[4, 4, 0], 1, 0, [3, 0, 2]] = keys
    before[[4, 4, 0], 1, 1, [3, 0, 2]] = values
    assert torch.equal(cache.device, before)
    gathered_keys, gathered_values = cache.gather(1, torch.tensor([0, 4]))
    assert torch.equal(gathered_keys, before[[0, 4], 1, 0].flatten(0, 1))
    assert torch.equal(gathered_values, before[[0, 4], 1, 1].flatten(0, 1))


def test_slots_said_to_be_unwritten_come_out_as_zeros(cache: KvCache) -> None:
    cache.device[:] = torch.nan
    cache.device[2, 1] = 7
    keys, values = cache.gather(1, torch.tensor([2, 5]), torch.tensor([4, 5, 6, 7, 3, 8 + 4, 8 + 5, 8 + 6, 8 + 7]))
    assert keys[:, 0, 0].tolist() == [7, 7, 7, 0, 0, 0, 0, 0]
    assert values[:, 1, 4].tolist() == [7, 7, 7, 7, 0, 0, 0, 0]


def test_the_null_block_is_zero(cache: KvCache) -> None:
    keys, values = cache.gather(2, torch.tensor([cache.null_block]))
    assert not keys.any()
    assert not values.any()


def test_pools_that_do_not_fit_are_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"^1000000000000 device .*: lower --kv-memory, or .* --num-host-blocks$"):
        KvCache(GEOMETRY, BLOCK_SIZE, 10**12)


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of its pages, those that the kernel has given, as smaps tells of the mapping."""
    begin, found = f"{tensor.data_ptr():x}-", 0
    for part in Path("/proc/self/smaps").read_text().split("\nVmFlags:"):
        lines = part.splitlines()
        if any(line.startswith(begin) for line in lines):
            found += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    return found


def test_memory_for_what_is_written_next_is_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "LEAST_AHEAD_BYTES", 3 * 2**21)
    monkeypatch.setattr(kv_cache, "MOST_AHEAD_BYTES", 3 * 2**21)
    geometry = BlockGeometry(num_layers=1, num_kv_heads=1, head_size=64, dtype=torch.float32)
    # 256 blocks are as much as is prepared at a time.
    cache = KvCache(geometry, 16, 4096)
    cache.device[7] = 1
    pieces = 1
    while cache.prepare():
        pieces += 1
    assert pieces == 3
    assert not cache.prepare()
    before = resident_bytes(cache.device)
    if before < 3 * 2**21:
        pytest.skip("this kernel gives no memory before it is needed")
    # Far behind: what lies between was not written.
    cache.copy(BlockCopies(CopyDirection.COPY, [7], [2999]))
    assert cache.prepare()
    while cache.prepare():
        pass
    assert before < resident_bytes(cache.device) < cache.device.nbytes
    assert (cache.device[[7, 2999]] == 1).all()
    assert not cache.device[8:2999].any()
    assert not cache.device[3000:].any()
    cache.reached(4095)
    while cache.prepare():
        pass
    assert not cache.prepare()


def test_a_kernel_that_gives_no_memory_ahead_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_POPULATE_WRITE", 2**20)
    cache = KvCache(BlockGeometry(1, 1, 64, torch.float32), 16, 4096)
    assert not cache.prepare()
    cache.reached(1000)
    assert not cache.prepare()


@pytest.mark.parametrize(("least", "most", "pieces"), [(1, 8, 4), (6, 8, 6), (1, 3, 3), (64, 64, 16)])
def test_a_quarter_of_the_pool_is_prepared_within_bounds(
    least: int, most: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "LEAST_AHEAD_BYTES", least * 2**21)
    monkeypatch.setattr(kv_cache, "MOST_AHEAD_BYTES", most * 2**21)
    asked = list[int]()

    class Kernel:
        """Counts what it is advised to populate."""

        def madvise(self, _begin: object, size: Any, _advice: int) -> int:
            asked.append(size.value)
            return 0

    monkeypatch.setattr("ctypes.CDLL", lambda _: Kernel())
    # 16 pieces, the null block included.
    cache = KvCache(BlockGeometry(num_layers=1, num_kv_heads=1, head_size=64, dtype=torch.float32), 16, 4095)
    while cache.prepare():
        pass
    assert asked == [2**21] * pieces
