"""The pools of the cuda backend: copies between them, and memory that cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.executor.cuda_host import HostDevice, LateStreams, host_backend

from pagekv.executor.backend.interface import BlockCopies, CopyDirection, Sampling, Scheduled, SequenceState
from pagekv.kernels.variants import UnsupportedVariant


def test_every_way_of_copying(llama: Path) -> None:
    device = HostDevice()
    backend = host_backend(llama, device)
    backend.allocate(2, 6, 4)
    assert device.pinned_bytes == backend.cache.host.nbytes > 0
    pools = backend.cache
    for block in range(6):
        pools.device[block] = block
    backend.copy_blocks(BlockCopies(CopyDirection.SWAP_OUT, [5, 2, 3], [0, 2, 3]))
    backend.copy_blocks(BlockCopies(CopyDirection.COPY, [0, 1], [3, 2]))
    backend.copy_blocks(BlockCopies(CopyDirection.SWAP_IN, [0, 3], [0, 5]))
    assert [set(pools.device[block].flatten().tolist()) for block in range(6)] == [{5}, {1}, {1}, {0}, {4}, {3}]
    backend.allocate(2, 6, 0)
    assert device.pinned_bytes == 0


def test_copies_and_steps_wait_for_the_swaps_of_their_blocks(llama: Path) -> None:
    """A copy between the pools runs as late as it may."""
    backend = host_backend(llama, HostDevice(streams=LateStreams()))
    backend.allocate(4, 6, 2)
    pools, prompt = backend.cache, [1, 2, 3, 4]
    first = SequenceState(1, [*prompt, 5], 4, [0, 1], 0, Sampling())
    backend.launch([Scheduled(first, 0, 4)])
    computed = pools.device[0].clone()
    assert computed.any()
    expected = backend.launch([Scheduled(first, 4, 1)]).collect()
    backend.copy_blocks(BlockCopies(CopyDirection.SWAP_OUT, [0], [1]))
    backend.copy_blocks(BlockCopies(CopyDirection.SWAP_IN, [1], [2]))
    assert not torch.equal(pools.device[2], computed)
    backend.copy_blocks(BlockCopies(CopyDirection.COPY, [2], [3]))
    assert torch.equal(pools.device[3], computed)
    backend.copy_blocks(BlockCopies(CopyDirection.SWAP_IN, [1], [4]))
    assert not torch.equal(pools.device[4], computed)
    second = SequenceState(2, [*prompt, 5], 4, [4, 5], 4, Sampling())
    found = backend.launch([Scheduled(second, 4, 1)]).collect()
    assert torch.equal(pools.device[4], computed)
    assert [one.token_id for one in found.values()] == [one.token_id for one in expected.values()]


def test_what_the_host_cannot_lock_is_offered_no_more(llama: Path) -> None:
    """Told with what to do; a manager that takes what it is offered comes by, in the end without a host pool."""

    class Locked(HostDevice):
        def pin(self, tensor: torch.Tensor) -> None:
            raise MemoryError(f"{tensor.nbytes} bytes of host memory cannot be page-locked: CUDA error 2")

    backend = host_backend(llama, Locked(), kv_memory=2**18)
    offers = []
    while blocks := (offer := backend.describe(4, 12)).host_kv_bytes // offer.bytes_per_block:
        offers.append(blocks)
        with pytest.raises(MemoryError, match=rf"^{blocks} host blocks: .* give the manager a smaller --num-host-bl"):
            backend.allocate(4, 8, blocks)
        with pytest.raises(RuntimeError, match="no pools"):
            backend.launch([])
    assert offers == [32, 16, 8, 4, 2, 1]
    backend.allocate(4, 8, 0)


class _CountingDevice(HostDevice):
    """Notes which host memory is pinned, and how often any was."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []
        self.num_pins = 0

    def pin(self, tensor: torch.Tensor) -> None:
        self.held.append(tensor.data_ptr())
        self.num_pins += 1

    def unpin(self, tensor: torch.Tensor) -> None:
        self.held.remove(tensor.data_ptr())


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), MemoryError),
        (UnsupportedVariant("head_size"), UnsupportedVariant),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failed_allocation_leaves_nothing_pinned(
    llama: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    """The host pool is pinned last; lack of memory becomes a MemoryError."""
    device = _CountingDevice()
    backend = host_backend(llama, device)

    def failing(*_: object, **_named: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("pagekv.executor.cuda.backend.StepRunner", failing)
        with pytest.raises(raised):
            backend.allocate(4, 8, 2)
    assert (device.num_pins, device.held) == (0, [])
    with pytest.raises(RuntimeError, match="no pools"):
        backend.launch([])
    backend.allocate(4, 8, 2)
    assert (device.num_pins, device.held) == (1, [backend.cache.host.data_ptr()])


@pytest.mark.parametrize("lacking", ["device", "host"])
def test_recordings_that_cannot_begin_leave_nothing_pinned(
    llama: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """Where inputs of graphs do not fit the device, or buffers for them the host."""
    device = _CountingDevice()
    backend = host_backend(llama, device)

    def full(*_: object) -> None:
        raise MemoryError("host memory cannot be page-locked")

    with monkeypatch.context() as patch:
        if lacking == "device":
            patch.setattr("pagekv.executor.cuda.runner.next_power", lambda _: 2**60)
        else:
            patch.setattr(device, "pinned", full)
        with pytest.raises(MemoryError, match=r"inputs of CUDA graphs|page-locked"):
            backend.allocate(4, 8, 2)
    assert (device.num_pins, device.held) == (1, [])
    with pytest.raises(RuntimeError, match="no pools"):
        backend.launch([])
