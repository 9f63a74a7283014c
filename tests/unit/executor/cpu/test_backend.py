"""`CpuBackend` outside of its arithmetic: what it says of a model, what it refuses, precision."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.executor.broken_sequence import KINDS, check_fails_alone
from support.executor.cpu_driver import VOCAB, Driver, prompts_of, save_model

from pagekv.common.errors import InvalidRequest
from pagekv.executor.backend.interface import (
    LAYOUT,
    BlockCopies,
    CopyDirection,
    Sampled,
    Sampling,
    Scheduled,
    SequenceState,
)
from pagekv.executor.cpu.attention_plan import CpuAttentionPlan
from pagekv.executor.cpu.backend import CpuBackend
from pagekv.executor.cpu.forward import StepForward
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.cpu.runner import run_step
from pagekv.executor.cpu.threads import Way
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_model("llama", directory)
    return directory


def test_ranks_of_a_machine_share_its_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of six are here."""
    loaded = SimpleNamespace(geometry=SimpleNamespace(bytes_per_block=lambda size: size))
    monkeypatch.setattr("pagekv.executor.cpu.backend.load_forward", lambda *_, **__: (loaded, None))
    monkeypatch.setattr("pagekv.executor.cpu.backend.available_bytes", lambda: 3000)
    for shards, available in ((None, 3000), (Shards(World(1, 6, 3), pytest.fail), 1000)):
        backend = CpuBackend(llama, "some/name", threads=1, shards=shards)
        assert backend._info.available == available
        # Pools of all ranks, too.
        with pytest.raises(MemoryError, match=f"; {available} are available: lower"):
            backend.allocate(16, 1000, 0)


@pytest.mark.parametrize(("threads", "first"), [(0, 1), (2, 2)])
def test_small_steps_begin_on_one_thread_unless_the_number_is_given(
    llama: Path, threads: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagekv.executor.cpu.backend.usable_cores", lambda: 2)
    chooser = CpuBackend(llama, "some/name", threads=threads)._chooser
    assert chooser.choose(1, 1).threads == first
    assert chooser.choose(2**20, 2**20).threads == 2


def test_description(llama: Path) -> None:
    backend = CpuBackend(llama, "some/name", threads=1, kv_memory=10**6, max_sequences=7)
    description = backend.describe(16, 64)
    assert description.model_id == "some/name"
    assert len(description.model_fingerprint) == 64
    assert (description.num_layers, description.num_kv_heads, description.head_size) == (3, 2, 12)
    assert (description.vocab_size, description.max_model_len, description.max_sequences) == (VOCAB, 256, 7)
    assert description.bytes_per_block == 3 * 2 * 16 * 2 * 12 * 4
    assert description.kv_dtype == "float32"
    assert description.device_kv_bytes == 10**6
    assert description.eos_token_ids == ()
    assert (description.layout, description.backend) == (LAYOUT, "cpu")
    assert {"torch", "transformers"} <= set(description.versions)
    assert description.prefill_tokens_per_s > 0
    assert description.host_to_device_bytes_per_s > 0


def test_memory_is_a_share_of_what_is_available_and_measured_once(llama: Path) -> None:
    small, large = (CpuBackend(llama, "m", threads=1, memory_share=share).describe(16, 64) for share in (0.05, 0.5))
    assert 4 < large.device_kv_bytes / small.device_kv_bytes < 20
    backend = CpuBackend(llama, "m", threads=1)
    first = backend.describe(16, 300)  # more than the model's context: several sequences
    backend.allocate(16, 100, 0)
    assert backend.describe(16, 300) == first
    assert backend.describe(32, 300).bytes_per_block == 2 * first.bytes_per_block


def test_memory_for_less_than_a_block_is_refused_before_a_step_is_profiled(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagekv.executor.cpu.backend.profile_step", lambda *_: pytest.fail("profiled"))
    backend = CpuBackend(llama, "m", threads=1, kv_memory=20_000)
    with pytest.raises(InvalidRequest, match="block of 64 tokens takes 36864 bytes, more than --kv-memory 20000"):
        backend.describe(64, 64)


def test_pools_that_cannot_fit_are_refused(llama: Path) -> None:
    backend = CpuBackend(llama, "m", threads=1)
    with pytest.raises(MemoryError, match="are available"):
        backend.allocate(256, 10**9, 0)
    with pytest.raises(RuntimeError, match="no pools"):
        backend.launch([])


def test_a_step_is_computed_when_launched(llama: Path) -> None:
    backend = CpuBackend(llama, "m", threads=1)
    backend.allocate(16, 4, 0)
    launch = backend.launch([Scheduled(SequenceState(4, [1], 1, [0], 0, Sampling()), 0, 1)])
    assert launch.ready
    assert list(launch.collect()) == [4]
    assert not backend.is_lost(RuntimeError())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_element_types(llama: Path, dtype: str) -> None:
    """In float64 chunks, batches and shared reads give the very same tokens even where logits nearly tie."""
    backend = CpuBackend(llama, "m", dtype=dtype, threads=1)
    prompts = prompts_of([20, 33, 7])
    driver = Driver(backend)
    sampling = Sampling(temperature=0.8, seed=11)
    together = driver.generate([driver.sequence(prompt, sampling=sampling) for prompt in prompts], 10)
    assert backend.cache.device.dtype == getattr(torch, dtype)
    assert all(0 <= token < VOCAB for tokens in together for token in tokens)
    if dtype == "float64":
        alone = [driver.generate([driver.sequence(prompt, sampling=sampling)], 10, 6)[0] for prompt in prompts]
        assert together == alone


def test_seeded_output_survives_batches_chunks_and_preemption(llama: Path) -> None:
    """In float64, where no rounding of a processor decides between two tokens."""
    driver = Driver(CpuBackend(llama, "m", dtype="float64", threads=1))
    prompts = prompts_of([20, 33, 7, 50])
    kinds = [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=2, sequence_index=1),
        Sampling(temperature=0.7, min_p=0.02, repetition_penalty=1.2, seed=3),
        Sampling(presence_penalty=0.5, frequency_penalty=0.3, bias_token_ids=(7,), biases=(3.0,)),
    ]
    states = [driver.sequence(prompt, sampling=kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    driver.generate(states, 8)
    for state in states:
        driver.preempt(state)
    together = driver.generate(states, 16, chunk=9)
    for prompt, kind, tokens in zip(prompts, kinds, together, strict=True):
        assert driver.generate([driver.sequence(prompt, sampling=kind)], 16) == [tokens]
    assert len({tuple(tokens) for tokens in together}) == 4


def test_unknown_element_type(llama: Path) -> None:
    with pytest.raises(ValueError, match="float32, bfloat16, float64"):
        CpuBackend(llama, "m", dtype="int8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_whose_logits_are_not_numbers_fails_alone(llama: Path, kind: Sampling) -> None:
    check_fails_alone(CpuBackend(llama, "m", threads=1), kind, ahead=False)


def test_a_sequence_that_comes_back_in_other_blocks_is_read_there(llama: Path) -> None:
    """Two decode; one leaves and comes back, with as many tokens, between two steps that would follow each other."""
    backend = CpuBackend(llama, "m", threads=1)
    backend.allocate(4, 16, 8)
    prompts = prompts_of([6, 5])
    tables = [[0, 1, 2], [4, 5, 6]]
    states = [SequenceState(number, prompts[number], 5, tables[number], 0, Sampling()) for number in range(2)]

    def step(states: list[SequenceState]) -> list[int]:
        scheduled = [
            Scheduled(each, each.computed_tokens, len(each.token_ids) - each.computed_tokens) for each in states
        ]
        sampled = backend.launch(scheduled).collect()
        for each in states:
            each.computed_tokens = len(each.token_ids)
            each.token_ids.append(sampled[each.seq_id].token_id)
        return [each.token_ids[-1] for each in states]

    step(states)
    step(states)
    plan = weakref.ref(backend._plan)
    step(states)
    assert backend._plan is plan()
    before = [(list(each.token_ids), each.computed_tokens) for each in states]
    expected = step(states)
    for each, (tokens, computed) in zip(states, before, strict=True):
        each.token_ids[:], each.computed_tokens = tokens, computed
    gone, stays = states
    backend.copy_blocks(BlockCopies(CopyDirection.SWAP_OUT, gone.block_table, [0, 1, 2]))
    backend.finish([gone])
    gc.collect()
    assert plan() is None
    backend.copy_blocks(BlockCopies(CopyDirection.SWAP_IN, [0, 1, 2], [9, 10, 11]))
    backend.cache.device[gone.block_table] = math.nan
    back = SequenceState(gone.seq_id, list(gone.token_ids), 5, [9, 10, 11], gone.computed_tokens, Sampling())
    assert step([back, stays]) == expected
    backend.allocate(4, 16, 0)
    assert backend._plan is None


def test_steps_are_computed_in_the_way_that_is_chosen(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagekv.executor.cpu.backend.usable_cores", lambda: 3)
    backend = CpuBackend(llama, "m")
    asked: list[tuple[int, int]] = []
    told: list[float] = []
    used: list[int] = []
    ways = iter([Way(3, True), Way(1, True), Way(2, False)])

    def choose(tokens: int, context: int) -> Way:
        asked.append((tokens, context))
        return next(ways)

    monkeypatch.setattr(backend._chooser, "choose", choose)
    monkeypatch.setattr(backend._chooser, "took", told.append)

    def compute(forward: StepForward, cache: KvCache, plan: CpuAttentionPlan, _: None) -> dict[int, Sampled]:
        used.append(torch.get_num_threads())
        return run_step(forward, cache, plan)

    monkeypatch.setattr("pagekv.executor.cpu.backend.run_step", compute)
    backend.allocate(16, 8, 0)
    state = SequenceState(1, [1, 2, 3, 4, 5], 5, [0], 0, Sampling())
    for _ in range(3):
        assert backend.launch([Scheduled(state, 0, 5), Scheduled(state, 2, 1)]).collect()
    assert asked == [(6, 8)] * 3
    assert (used, len(told)) == ([3, 1, 2], 3)
    assert min(told) > 0
    # A profile and pools are measured with all threads.
    backend.describe(16, 64)
    assert torch.get_num_threads() == 3


def test_threads_that_are_named_stay(llama: Path) -> None:
    backend = CpuBackend(llama, "m", threads=2)
    backend.allocate(16, 8, 0)
    state = SequenceState(1, [1, 2, 3], 3, [0], 0, Sampling())
    for seconds in (0.1, 0.1, 0.1, 9.0, 9.0, 9.0, 9.0):
        backend.launch([Scheduled(state, 0, 3)])
        assert torch.get_num_threads() == 2
        backend._chooser.took(seconds)


def test_the_start_says_what_computes(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    CpuBackend(llama, "m", "bfloat16", threads=1)
    line = next(record for record in caplog.records if record.message == "computing")
    found = line.fields  # type: ignore[attr-defined]  # added by Log
    assert found["instructions"].startswith(torch.backends.cpu.get_cpu_capability())
    assert (found["dtype"], found["threads"]) == (torch.bfloat16, 1)


@pytest.mark.parametrize(("threads", "warned"), [(0, 0), (2, 0), (3, 1)])
def test_more_threads_than_cores_are_warned_of(
    llama: Path, threads: int, warned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pagekv.executor.cpu.backend.usable_cores", lambda: 2)
    CpuBackend(llama, "m", threads=threads)
    assert [vars(record)["fields"] for record in caplog.records if "--threads" in record.message] == [
        {"threads": 3, "cores": 2}
    ] * warned
