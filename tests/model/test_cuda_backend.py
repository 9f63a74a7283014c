"""The CUDA backend's greedy output is token for token that of transformers' own `generate`, however it is computed.

No GPU: tensors are on the CPU and the kernels' sources run in the emulation of `tests/kernels`; what is not exercised
are streams, pinned memory and the recording of graphs.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor.cpu_driver import Driver, prompts_of, reference
from support.executor.cuda_host import HostDevice, NeverWaits, host_backend, save_small_model

from pagekv.executor.backend.interface import (
    UNKNOWN_TOKEN,
    BlockCopies,
    CopyDirection,
    Launch,
    Sampling,
    Scheduled,
    SequenceState,
)
from pagekv.executor.cpu import CpuBackend
from pagekv.executor.cuda.backend import CudaBackend

# Longer than the window of the windowed models, several blocks, none a multiple of a block.
LENGTHS = [1, 23, 37, 5, 41, 2]
NEW = 6
# Groups of 2 and of 4 query heads, none; windows, alternating with full attention and with capped scores; no rotation.
NAMES = ["llama", "llama-mqa", "qwen3", "mistral", "gemma2", "gpt2"]


class Case:
    """A model on both sides and transformers' answers to the prompts of LENGTHS."""

    def __init__(self, name: str, directory: Path) -> None:
        self.directory = directory
        self.model: Any = save_small_model(name, directory)
        self.backend = host_backend(directory)
        self.prompts = prompts_of(LENGTHS)
        self.answers = [reference(self.model, prompt, NEW) for prompt in self.prompts]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Small work: threads would wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", tmp_path_factory.mktemp("plain-llama"))


class PipelinedDriver(Driver):
    """Launches every step before the one before it is collected, as the executor does."""

    def __init__(self, backend: CudaBackend, block_size: int = 4, num_blocks: int = 400) -> None:
        super().__init__(backend, block_size, num_blocks)
        self.cuda = backend
        self.under_way: deque[tuple[Launch, list[tuple[SequenceState, int]]]] = deque()

    def step(self, counts: dict[int, int], states: list[SequenceState]) -> None:
        self.launch(counts, states)
        if len(self.under_way) > 1:
            self.collect()

    def launch(self, counts: dict[int, int], states: list[SequenceState]) -> None:
        """One step, launched."""
        scheduled = []
        for state in states:
            count = min(counts[state.seq_id], len(state.token_ids) - state.computed_tokens)
            while len(state.block_table) * self.block_size < state.computed_tokens + count:
                state.block_table.append(self.free.pop())
            if count:
                scheduled.append(Scheduled(state, state.computed_tokens, count))
        launch = self.cuda.launch(scheduled)
        sampling = []
        for item in scheduled:
            item.state.computed_tokens += item.count
            if item.state.computed_tokens == len(item.state.token_ids):
                sampling.append((item.state, len(item.state.token_ids)))
                item.state.token_ids.append(UNKNOWN_TOKEN)
        self.under_way.append((launch, sampling))

    def collect(self) -> None:
        """The oldest step's tokens."""
        launch, sampling = self.under_way.popleft()
        sampled = launch.collect()
        assert set(sampled) == {state.seq_id for state, _ in sampling}
        for state, index in sampling:
            state.token_ids[index] = sampled[state.seq_id].token_id

    def generate(self, states: list[SequenceState], new: int, chunk: int = 10**6) -> list[list[int]]:
        outputs = super().generate(states, new, chunk)
        while self.under_way:
            self.collect()
        return [self.output(state)[: len(output)] for state, output in zip(states, outputs, strict=True)]


@pytest.mark.parametrize("block_size", [1, 16])
def test_mixed_lengths_in_one_batch(case: Case, block_size: int) -> None:
    driver = Driver(case.backend, block_size)
    states = [driver.sequence(prompt) for prompt in case.prompts]
    assert driver.generate(states, NEW) == case.answers
    assert case.backend.runner.graphs.num_replayed >= NEW - 2


@pytest.mark.parametrize("chunk", [3, 16])
def test_chunked_prefill_and_steps_launched_ahead(case: Case, chunk: int) -> None:
    """Short prompts decode, by tokens only the device knows, while long ones are still computed."""
    driver = PipelinedDriver(case.backend, block_size=8)
    states = [driver.sequence(prompt) for prompt in case.prompts]
    assert driver.generate(states, NEW, chunk) == case.answers


def test_prefix_hits(case: Case) -> None:
    """Sequences share leading blocks to different depths, and go on with and without new prompt tokens."""
    base, tail = prompts_of([40, 12], seed=1)
    prompts = [base, base + tail[:1], base[:24] + tail, base[:39]]
    hits = [0, 40, 24, 32]
    answers = [reference(case.model, prompt, NEW) for prompt in prompts]
    driver = Driver(case.backend, block_size=8)
    owner = driver.sequence(base)
    driver.step({owner.seq_id: 40}, [owner])
    others = [driver.sequence(prompt) for prompt in prompts[1:]]
    for state, hit in zip(others, hits[1:], strict=True):
        driver.share(owner, state, hit)
    assert driver.generate([owner, *others], NEW) == answers


def test_prefix_computed_in_the_same_step(case: Case) -> None:
    """The step that computes a prefix may already read it for others: writes of a layer come before its reads."""
    base, one = prompts_of([32, 7], seed=2)
    driver = Driver(case.backend, block_size=4)
    states = [driver.sequence(prompt) for prompt in (base + one, [*base, 3])]
    states[0].block_table = [driver.free.pop() for _ in range(8)]
    driver.share(states[0], states[1], 32)
    answers = [reference(case.model, list(state.token_ids), NEW) for state in states]
    assert driver.generate(states, NEW) == answers


def test_copy_on_write(case: Case) -> None:
    """A partly equal block is copied, and overwritten from where the sequences part."""
    base, tail = prompts_of([30, 9], seed=3)
    prompt = base[:27] + tail
    driver = Driver(case.backend, block_size=8)
    owner, other = driver.sequence(base), driver.sequence(prompt)
    driver.step({owner.seq_id: 30}, [owner])
    driver.share(owner, other, 24)
    copy = driver.free.pop()
    driver.backend.copy_blocks(BlockCopies(CopyDirection.COPY, [owner.block_table[3]], [copy]))
    other.block_table.append(copy)
    other.computed_tokens = 27
    answers = [reference(case.model, base, NEW), reference(case.model, prompt, NEW)]
    assert driver.generate([owner, other], NEW) == answers


def test_preemption_by_recompute_and_by_swap(case: Case) -> None:
    driver = Driver(case.backend, block_size=4, host_blocks=64)
    states = [driver.sequence(prompt) for prompt in case.prompts]
    driver.generate(states, 2)
    for state in states[::2]:
        driver.preempt(state)
    for state in states[1::2]:
        driver.swap_out_and_in(state)
    assert driver.generate(states, NEW, chunk=11) == case.answers


def test_random_schedules(case: Case) -> None:
    """Steps of random sequences and random sizes."""
    rng = random.Random(4)
    driver = PipelinedDriver(case.backend, block_size=4)
    states = [driver.sequence(prompt) for prompt in case.prompts]
    while left := [state for state in states if len(driver.output(state)) < NEW]:
        driver.step(
            {state.seq_id: rng.choice([0, 1, 1, 2, 7, 30]) if state is not left[0] else 9 for state in left}, left
        )
    driver.generate(states, NEW)
    assert [driver.output(state)[:NEW] for state in states] == case.answers


def test_without_graphs(llama: Case) -> None:
    backend = host_backend(llama.directory, graphs=False)
    driver = Driver(backend, 16)
    states = [driver.sequence(prompt) for prompt in llama.prompts]
    assert driver.generate(states, NEW) == llama.answers
    assert backend.runner.graphs.num_replayed == 0


def test_a_model_that_cannot_be_recorded_runs_without_graphs(llama: Case) -> None:
    backend = host_backend(llama.directory, HostDevice(refuses_capture=True))
    driver = Driver(backend, 16)
    states = [driver.sequence(prompt) for prompt in llama.prompts]
    assert driver.generate(states, NEW) == llama.answers
    assert not backend.runner.graphs.enabled


def test_contexts_of_several_splits(tmp_path: Path) -> None:
    """Decodes over more keys than one work item takes: partial results, merged, in graphs too, beside short ones."""
    model = save_small_model("llama", tmp_path, max_position_embeddings=1024)
    backend = host_backend(tmp_path)
    prompts = prompts_of([700, 509, 3], seed=5)
    answers = [reference(model, prompt, NEW) for prompt in prompts]
    driver = PipelinedDriver(backend, block_size=16)
    assert driver.generate([driver.sequence(prompt) for prompt in prompts], NEW, chunk=600) == answers
    assert backend.runner.graphs.num_replayed > 0


def test_a_launch_never_waits_for_the_device(llama: Case) -> None:
    """Prompts, decodes and every way to sample; with and without a recorded graph."""
    kinds = [
        Sampling(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, seed=2, logprobs=3),
        Sampling(
            presence_penalty=0.5,
            repetition_penalty=1.3,
            bias_token_ids=(7,),
            biases=(3.0,),
            min_tokens=9,
            banned_until_min=(5,),
        ),
        Sampling(min_tokens=9, banned_until_min=(5,)),
        Sampling(),
    ]
    driver = PipelinedDriver(llama.backend)
    states = [driver.sequence(prompt, sampling=kind) for prompt, kind in zip(llama.prompts, kinds, strict=False)]
    for _ in range(6):
        with NeverWaits():
            driver.launch({state.seq_id: 20 for state in states}, states)
        driver.collect()


def test_seeded_sampling_equals_the_cpu_backend(llama: Case) -> None:
    """Every way to sample, launched ahead, beside plainly greedy neighbours."""
    kinds = [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=2, sequence_index=1),
        Sampling(temperature=0.7, min_p=0.02, repetition_penalty=1.2, seed=3),
        Sampling(presence_penalty=0.5, frequency_penalty=0.3, bias_token_ids=(7,), biases=(3.0,), logprobs=4),
        Sampling(min_tokens=4, banned_until_min=(5, 6)),
        Sampling(),
    ]
    theirs = Driver(CpuBackend(llama.directory, "m", threads=1))
    mine = PipelinedDriver(llama.backend)
    pairs = list(zip(llama.prompts, kinds, strict=True))
    expected = theirs.generate([theirs.sequence(prompt, sampling=kind) for prompt, kind in pairs], 12)
    assert mine.generate([mine.sequence(prompt, sampling=kind) for prompt, kind in pairs], 12) == expected


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "auto"), ("float16", "auto"), ("float16", "fp8")])
def test_sixteen_and_eight_bits(llama: Case, dtype: str, kv_dtype: str) -> None:
    """Tensor-core kernels: where transformers is sure of a token, it is the same token. One text is fed token by token,
    so that no choice hangs on the one before. The reference has weights of the same type and computes in float32, so
    that it is the same on every processor.
    """
    backend = host_backend(llama.directory, dtype=dtype, kv_dtype=kv_dtype)
    tokens = prompts_of([60], seed=6)[0]
    rounded = copy.deepcopy(llama.model).to(getattr(torch, dtype)).float()
    with torch.inference_mode():
        logits = rounded(torch.tensor([tokens])).logits[0]
    best = logits.topk(2).values
    driver = Driver(backend, 16, num_blocks=16)
    state = driver.sequence(tokens[:20])
    matches = []
    for at in range(19, 59):
        driver.step({state.seq_id: 20}, [state])
        if best[at, 0] - best[at, 1] > (1.5 if kv_dtype == "fp8" else 0.7):
            matches.append(state.token_ids[-1] == int(logits[at].argmax()))
        state.token_ids[-1] = tokens[at + 1]
    print(f"{len(matches)} tokens compared")
    assert len(matches) > 4
    assert all(matches)


def test_unwritten_slots_are_noticed(llama: Case) -> None:
    """The judge works: reading a block nobody wrote is an error, not an answer."""
    driver = Driver(llama.backend, block_size=4)
    state = driver.sequence(llama.prompts[2])
    state.block_table, state.computed_tokens = [driver.free.pop() for _ in range(5)], 20
    with pytest.raises(ArithmeticError, match=rf"sequences \[{state.seq_id}\]"):
        driver.generate([state], 1)
