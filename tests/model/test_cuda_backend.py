"""The CUDA backend's greedy output is token for token that of transformers' own `generate`, however it is computed.

No GPU: tensors are on the CPU and the kernels' sources run in the emulation of `tests/kernels`; what is not exercised
are streams, pinned memory and the recording of graphs.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from support.executor.backend_suite import BackendSuite, Case
from support.executor.cpu_driver import Driver, prompts_of, reference
from support.executor.cuda_host import HostDevice, NeverWaits, PipelinedDriver, host_backend, save_small_model

from pagekv.executor.backend.interface import (
    Sampling,
)
from pagekv.executor.cpu.backend import CpuBackend
from pagekv.executor.cuda.backend import CudaBackend

pytestmark = pytest.mark.usefixtures("one_thread")

# Longer than the window of the windowed models, several blocks, none a multiple of a block.
LENGTHS = [1, 23, 37, 5, 41, 2]
NEW = 6
# Groups of 2 and of 4 query heads, none; windows, alternating with full attention and with capped scores; sinks; no
# rotation.
NAMES = [
    "llama",
    "gpt2",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("llama-mqa", "qwen3", "mistral", "gemma2", "gpt-oss")),
]


def case_of(name: str, directory: Path) -> Case:
    return Case(directory, save_small_model(name, directory), host_backend(directory), LENGTHS, NEW)


def cuda(case: Case) -> CudaBackend:
    assert isinstance(case.backend, CudaBackend)
    return case.backend


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of("llama", tmp_path_factory.mktemp("plain-llama"))


class TestCudaBackend(BackendSuite):
    HITS = ((40, 1, 40), (24, 12, 24), (39, 0, 32))
    TAILS = (7,)


@pytest.mark.parametrize("block_size", [1, 16])
def test_mixed_lengths_in_one_batch(case: Case, block_size: int) -> None:
    driver = Driver(case.backend, block_size)
    states = [driver.sequence(prompt) for prompt in case.prompts]
    assert driver.generate(states, NEW) == case.answers
    assert cuda(case).runner.graphs.num_replayed >= NEW - 2


@pytest.mark.parametrize("chunk", [3, 16])
def test_chunked_prefill_and_steps_launched_ahead(case: Case, chunk: int) -> None:
    """Short prompts decode, by tokens only the device knows, while long ones are still computed."""
    driver = PipelinedDriver(cuda(case), block_size=8)
    states = [driver.sequence(prompt) for prompt in case.prompts]
    assert driver.generate(states, NEW, chunk) == case.answers


def test_random_schedules(case: Case) -> None:
    """Steps of random sequences and random sizes."""
    rng = random.Random(4)
    driver = PipelinedDriver(cuda(case), block_size=4)
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
    assert (backend.runner.graphs.num_captured, backend.runner.graphs.num_replayed) == (0, 0)
    assert backend.runner.graphs.num_failed > 0


@pytest.mark.long
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
    driver = PipelinedDriver(cuda(llama))
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
    mine = PipelinedDriver(cuda(llama))
    pairs = list(zip(llama.prompts, kinds, strict=True))
    expected = theirs.generate([theirs.sequence(prompt, sampling=kind) for prompt, kind in pairs], 12)
    assert mine.generate([mine.sequence(prompt, sampling=kind) for prompt, kind in pairs], 12) == expected


@pytest.mark.long
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
    assert len(matches) > 2
    assert all(matches)
