"""`CudaBackend` outside of its arithmetic: what it says, what it refuses by name, and how steps go through an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.executor.cpu_driver import Driver, prompts_of, save_model
from support.executor.cuda_host import HostDevice, host_backend, save_small_model
from support.executor.executor_steps import new_sequence

from pagekv.common.errors import OutOfMemory
from pagekv.executor.backend.interface import BlockCopies, CopyDirection, Sampling, Scheduled, SequenceState
from pagekv.executor.backend.layout import LAYOUT
from pagekv.executor.config import parse_config
from pagekv.executor.cuda.backend import CudaBackend
from pagekv.executor.cuda.kernel_attention import KernelAttention
from pagekv.executor.server import load_backend
from pagekv.executor.session.epoch import Epoch
from pagekv.executor.session.step import Step
from pagekv.executor.session.step_check import EpochLimits
from pagekv.kernels.variants import UnsupportedVariant


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_small_model("llama", directory)
    return directory


def test_description(llama: Path) -> None:
    device = HostDevice()
    backend = host_backend(llama, device, max_sequences=7, dtype="bfloat16", kv_dtype="fp8")
    description = backend.describe(16, 20)
    assert (description.num_layers, description.num_kv_heads, description.head_size) == (2, 2, 64)
    assert description.kv_dtype == "float8_e4m3fn"
    assert description.bytes_per_block == 2 * 2 * 16 * 2 * 64
    # What the device has, less what a step takes and the logits of the largest graph (8 rows), times the share.
    logits = 8 * description.vocab_size * 2
    assert description.device_kv_bytes == int(0.9 * (device.memory - device.peak_bytes() - logits))
    without = host_backend(llama, max_sequences=7, graphs=False).describe(16, 20)
    assert without.device_kv_bytes == int(0.9 * (device.memory - device.peak_bytes()))
    assert description.host_kv_bytes > 0
    assert (description.layout, description.backend, description.max_sequences) == (LAYOUT, "cuda", 7)
    assert (description.device_to_host_bytes_per_s, description.host_to_device_bytes_per_s) == device.bandwidth()
    assert description.prefill_tokens_per_s > 0
    assert description.versions["gpu"] == "emulated"
    # Kernels are compiled before anything is served.
    assert device.prepared is not None
    assert (device.prepared.dtype, device.prepared.kv_dtype) == ("bfloat16", "float8_e4m3fn")


def test_memory_given_is_memory_taken(llama: Path) -> None:
    assert host_backend(llama, kv_memory=10**6).describe(16, 4).device_kv_bytes == 10**6


def test_pools_are_left_alone_by_a_description(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that asks while another's pools are there gets the profile of a step at least as large."""
    backend = host_backend(llama)
    first = backend.describe(16, 20)
    backend.allocate(16, 4, 0)
    pool = backend.cache.device

    def full(*_: object) -> None:
        raise MemoryError("device blocks")

    monkeypatch.setattr("pagekv.executor.cuda.backend.profile_step", full)
    assert backend.describe(8, 12).prefill_tokens_per_s == first.prefill_tokens_per_s
    assert backend.cache.device is pool
    with pytest.raises(OutOfMemory, match="token_budget: a step of 40 tokens does not fit"):
        backend.describe(16, 40)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {}, r"LlamaForCausalLM cannot be served by the cuda backend: head_size: .* got 12"),
        ("gpt2", {}, r"GPT2LMHeadModel .* head_size"),
    ],
)
def test_head_sizes_without_a_kernel_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], reason: str
) -> None:
    save_model(name, tmp_path)
    with pytest.raises(ValueError, match=reason):
        host_backend(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float64"}, "dtype: must be one of auto, float32, float16, bfloat16 with the cuda backend"),
        ({"kv_dtype": "int8"}, "kv_dtype: must be one of auto, fp8, got 'int8'"),
        ({"dtype": "float32", "kv_dtype": "fp8"}, "kv_dtype: must be one of float32 with dtype float32"),
    ],
)
def test_element_types_without_a_kernel_are_refused(llama: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        host_backend(llama, **options)


def test_a_machine_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"--backend cuda: there is no NVIDIA driver|--backend cuda: .* no GPU"):
        load_backend(parse_config(["--backend", "cuda"], env={}))
    with pytest.raises(ValueError, match="--kv-dtype fp8 needs --backend cuda"):
        load_backend(parse_config(["--kv-dtype", "fp8"], env={}))


def test_pools_that_cannot_fit_are_refused(llama: Path) -> None:
    backend = host_backend(llama)
    with pytest.raises(MemoryError, match="are available"):
        backend.allocate(256, 10**6, 0)
    with pytest.raises(MemoryError, match="host blocks"):
        backend.allocate(256, 1, 10**8)
    with pytest.raises(RuntimeError, match="no pools"):
        backend.launch([])


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ([3, 99], r"block_tables: block 99 .*must be in \[0, 8\)"),
        ([3, -1], "block -1"),
        ([3], "block -1 of sequence 0"),
    ],
)
def test_ids_are_checked_before_anything_is_launched(llama: Path, table: list[int], reason: str) -> None:
    backend = host_backend(llama)
    backend.allocate(4, 8, 0)
    backend.cache.device.fill_(7)
    state = SequenceState(1, [1, 2, 3, 4, 5], 5, table, 0, Sampling())
    with pytest.raises(ValueError, match=reason):
        backend.launch([Scheduled(state, 0, 5)])
    assert bool((backend.cache.device == 7).all())


def test_more_input_than_the_buffer_holds(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer moves, and what was recorded over the old one is not replayed."""
    monkeypatch.setattr("pagekv.executor.cuda.runner.UPLOAD_WORDS", 128)
    prompts = prompts_of([3, 30])
    expected = [_alone(host_backend(llama), prompt) for prompt in prompts]
    backend = host_backend(llama)
    driver = Driver(backend, 16)
    states = [driver.sequence(prompt) for prompt in prompts]
    driver.generate(states[:1], 5)
    assert driver.generate(states, 8) == expected


def _alone(backend: CudaBackend, prompt: list[int]) -> list[int]:
    driver = Driver(backend, 16)
    return driver.generate([driver.sequence(prompt)], 8)[0]


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


def test_steps_of_an_epoch_launched_ahead(llama: Path) -> None:
    """Through checks and bookkeeping of real steps: enter, decode twice ahead, leave; a later sequence gets its handle,
    its id and its blocks."""
    backend = host_backend(llama, max_sequences=1)
    backend.allocate(4, 8, 0)
    epoch = Epoch(1, "m", EpochLimits(4, 8, 0, 256, 256, 1), backend)
    prompts = prompts_of([5, 6])
    outputs = []
    step = 0
    for prompt in prompts:
        sampling = Sampling(frequency_penalty=0.5)
        entering = new_sequence(3, prompt, [1, 2, 3], sampling=sampling)
        steps = [
            Step(
                1,
                step + 1,
                finished_seqs=[3] if step else [],
                new_seqs=[entering],
                scheduled_seqs=[3],
                scheduled_tokens=[len(prompt)],
            )
        ]
        steps += [Step(1, step + number) for number in (2, 3, 4)]
        step += 4
        launched = [epoch.launch(one) for one in steps]
        reports = [one.collect() for one in launched]
        outputs.append([report.sampled[3].token_id for report in reports])
    for prompt, output in zip(prompts, outputs, strict=True):
        driver = Driver(host_backend(llama), 4)
        expected = driver.generate([driver.sequence(prompt, sampling=Sampling(frequency_penalty=0.5))], 4)
        assert [output] == expected


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


def test_weights_that_do_not_fit_are_refused_before_and_while_they_are_read(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = r"of the GPU's memory 0\.00 GiB are free .*: use .*a smaller"
    with monkeypatch.context() as patch:
        patch.setattr("pagekv.executor.cuda.backend.load_model", None)
        with pytest.raises(ValueError, match=words):
            host_backend(llama, HostDevice(memory=2**10))

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr("pagekv.executor.cuda.backend.load_model", full)
    with pytest.raises(ValueError, match=r"loading ran out of GPU memory, of the GPU's .* \(CUDA out of memory"):
        host_backend(llama)


@dataclass
class _MortalDevice(HostDevice):
    dead: bool = False

    def synchronize(self) -> None:
        if self.dead:
            raise RuntimeError("CUDA error: unspecified launch failure")


def test_the_device_is_asked_whether_it_is_lost(llama: Path) -> None:
    device = _MortalDevice()
    backend = host_backend(llama, device)
    errors = (RuntimeError("CUDA error"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError("host"))
    assert not any(backend.is_lost(error) for error in errors)
    device.dead = True
    assert all(backend.is_lost(error) for error in errors)
    # Tokens that are not numbers are no fault of the device, and it is not asked.
    assert not backend.is_lost(ArithmeticError("the logits are not numbers"))


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
    """What fails after the host pool was pinned unpins it; what runs out of memory is a MemoryError, which is told."""
    device = _CountingDevice()
    backend = host_backend(llama, device)

    def failing(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("pagekv.executor.cuda.backend.StepRunner", failing)
        with pytest.raises(raised):
            backend.allocate(4, 8, 2)
    assert (device.num_pins, device.held) == (1, [])
    with pytest.raises(RuntimeError, match="no pools"):
        backend.launch([])
    backend.allocate(4, 8, 2)
    assert (device.num_pins, device.held) == (2, [backend.cache.host.data_ptr()])


def test_rows_that_fill_a_graph_up_attend_to_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences in a graph of four rows, replayed: nothing that follows attention sees memory nobody wrote."""
    backend, seen = host_backend(llama, max_sequences=4, dtype="float32"), list[torch.Tensor]()
    attend = KernelAttention.attend

    def watch(self: KernelAttention, layer: int, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = attend(self, layer, query, *rest)
        if query.shape[1] == 4:
            seen.append(out)
        return out

    unwritten = SimpleNamespace(empty=lambda shape, **options: torch.full(shape, torch.nan, **options))
    monkeypatch.setattr("pagekv.executor.cuda.kernel_attention.torch", unwritten)
    monkeypatch.setattr(KernelAttention, "attend", watch)
    driver = Driver(backend, 16)
    driver.generate([driver.sequence(prompt) for prompt in prompts_of([3, 4, 250])], 4)
    assert backend.runner.graphs.num_replayed > 0
    assert len(seen) >= 6
    assert all(bool(out[:3].any()) and not out[3].any() for out in seen)


def test_graphs_leave_their_logits_in_one_buffer(llama: Path) -> None:
    """Two shapes, recorded and replayed: what each returns lies in the runner's buffer, not in memory of the graph."""
    returned: list[int] = []

    class Watching(HostDevice):
        def capture(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            returned.append(function().data_ptr())
            return super().capture(function)

    backend = host_backend(llama, Watching(), max_sequences=3)
    driver = Driver(backend, 16)
    for count in (1, 2):
        states = [driver.sequence(prompt) for prompt in prompts_of([3, 4][:count])]
        driver.generate(states, 4)
        backend.finish(states)
    assert len(returned) == 2
    assert set(returned) == {backend.runner._graph_logits.data_ptr()}
