"""The device's sampler chooses what the CPU's does, for many rows at once, with tokens counted on the device."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor.samplings import samplings

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Sampled, Sampling, SequenceState
from pagekv.executor.cpu import sampler as cpu_sampler
from pagekv.executor.cuda import sampling_inputs
from pagekv.executor.cuda.device_sequences import DeviceSequences
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.executor.cuda.sampler import sample
from pagekv.executor.cuda.sampling_inputs import SamplingInputs
from pagekv.kernels.attention_plan import pack

VOCAB = 40


class DeviceSampler:
    """Sampling over some steps, as the runner does it, on CPU tensors."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.table = PenaltyTable(vocab_size, torch.device("cpu"))
        self.live = DeviceSequences(64, self.table)

    def sample(self, logits: torch.Tensor, states: Sequence[SequenceState]) -> list[Sampled]:
        inputs = SamplingInputs([self.live.get(state) for state in states], logits.shape[1], self.table)
        words, offsets = pack(inputs.sections(), {})
        uploaded = torch.from_numpy(words)

        def find(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            size = math.prod(shape) * dtype.itemsize // 4
            return uploaded[offsets[name] : offsets[name] + size].view(dtype).view(shape)

        chosen = sample(logits, inputs.chunks(find), self.table)
        tokens = {state.seq_id: Sampled(token) for state, token in zip(states, chosen.tokens.tolist(), strict=True)}
        rows = [row for chunk in chosen.logprobs for row in zip(*(part.tolist() for part in chunk), strict=True)]
        for state, (logprob, ids, values) in zip(inputs.logprobs_of, rows, strict=True):
            top = tuple(zip(ids, values, strict=True))[: state.sampling.logprobs]
            tokens[state.seq_id] = Sampled(tokens[state.seq_id].token_id, logprob, top)
        return [tokens[state.seq_id] for state in states]


def agree(mine: Sequence[Sampled], theirs: Sequence[Sampled]) -> None:
    assert [one.token_id for one in mine] == [one.token_id for one in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-12)
        assert one.logprob == (other.logprob if other.logprob is None else pytest.approx(other.logprob, abs=1e-12))


@given(kinds=st.lists(samplings(VOCAB), min_size=1, max_size=6), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_chooses_what_the_cpu_sampler_chooses(kinds: list[Sampling], seed: int) -> None:
    """Over four steps. Random logits: where a sum meets a bound exactly, the last bit of `exp` would decide."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    states = []
    for seq_id, sampling in enumerate(kinds):
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        states.append(SequenceState(seq_id, tokens, rng.randint(1, len(tokens)), [], 0, sampling))
    device = DeviceSampler()
    for _ in range(4):
        logits = torch.randn(len(states), VOCAB, generator=generator) * 4
        theirs = cpu_sampler.sample(logits, states)
        agree(device.sample(logits, states), theirs)
        for state, chosen in zip(states, theirs, strict=True):
            state.token_ids.append(chosen.token_id)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1000, 20_000])
def test_large_vocabularies_and_coarse_logits(monkeypatch: pytest.MonkeyPatch, dtype: Any, vocab_size: int) -> None:
    """16-bit logits have many ties: which tokens a filter keeps goes by id. Rows come in several chunks."""
    monkeypatch.setattr(sampling_inputs, "CHUNK_ELEMENTS", 3 * vocab_size)
    kinds = [
        Sampling(temperature=1.0, seed=1, top_p=0.5),
        Sampling(temperature=0.8, seed=2, top_k=50),
        Sampling(),
        Sampling(temperature=1.0, seed=3, top_k=700, top_p=0.95, min_p=0.001),
        Sampling(temperature=0.9, seed=4, logprobs=20),
        Sampling(logprobs=5, repetition_penalty=1.5),
        Sampling(temperature=1.2, seed=5, top_p=0.999),
        Sampling(temperature=1.0, seed=6, min_p=0.05),
    ]
    generator = torch.Generator().manual_seed(vocab_size)
    states = [SequenceState(n, [1, 2, 3], 2, [], 0, kind) for n, kind in enumerate(kinds)]
    device = DeviceSampler(vocab_size)
    for _ in range(6):
        logits = (torch.randn(len(states), vocab_size, generator=generator) * 3).to(dtype)
        theirs = cpu_sampler.sample(logits, states)
        agree(device.sample(logits, states), theirs)
        for state, chosen in zip(states, theirs, strict=True):
            state.token_ids.append(chosen.token_id)


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.full((3, VOCAB), 0.25)
    logits[:, 5] = logits[:, 7] = logits[:, 9] = 1.0
    kinds = [Sampling(), Sampling(logprobs=2), Sampling(temperature=1.0, top_k=1)]
    states = [SequenceState(n, [1], 1, [], 0, kind) for n, kind in enumerate(kinds)]
    chosen = DeviceSampler().sample(logits, states)
    assert [one.token_id for one in chosen] == [5, 5, 5]
    assert [token_id for token_id, _ in chosen[1].top] == [5, 7]


def test_tokens_the_host_does_not_know_are_counted() -> None:
    """Penalties follow what the device sampled, though the host learns of it only later."""
    kinds = [Sampling(frequency_penalty=2.0), Sampling(repetition_penalty=3.0, temperature=1.0, seed=8)]
    device = DeviceSampler()
    known = [SequenceState(n, [1, 4], 1, [], 0, kind) for n, kind in enumerate(kinds)]
    blind = [SequenceState(n, [1, 4], 1, [], 0, kind) for n, kind in enumerate(kinds)]
    generator = torch.Generator().manual_seed(2)
    for _ in range(8):
        logits = torch.randn(2, VOCAB, generator=generator)
        theirs = cpu_sampler.sample(logits, known)
        agree(device.sample(logits, blind), theirs)
        for state, other, chosen in zip(known, blind, theirs, strict=True):
            state.token_ids.append(chosen.token_id)
            other.token_ids.append(UNKNOWN_TOKEN)


def test_a_row_of_the_table_begins_anew_for_the_next_sequence() -> None:
    device, sampling = DeviceSampler(), Sampling(frequency_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    for seq_id in range(9):
        state = SequenceState(seq_id, [0], 1, [], 0, sampling)
        # Token 0 of the prompt is no output; then 0 was, and 1 is the first of the best.
        assert [device.sample(logits, [state])[0].token_id for _ in range(2)] == [0, 1]
        device.live.remove([state])
    assert len(device.table.outputs) == 4


def test_a_weightless_token_is_never_drawn() -> None:
    """Whatever the prefix sum says at it."""
    from pagekv.executor.cuda.sampler import draw

    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64)
    for number, expected in ((0.0, 1), (0.29999, 1), (0.3, 3), (math.nextafter(1, 0), 3), (1.0, 3)):
        assert draw(weights, torch.tensor([number], dtype=torch.float64)).tolist() == [expected]


def test_what_is_no_number_is_marked() -> None:
    rows = torch.zeros(3, VOCAB)
    rows[1, 4] = math.nan
    for kind in (Sampling(), Sampling(temperature=1.0, top_k=3, top_p=0.5, logprobs=3, frequency_penalty=1.0)):
        states = [SequenceState(n, [1], 1, [], 0, kind) for n in range(3)]
        assert [one.token_id < 0 for one in DeviceSampler().sample(rows, states)] == [False, True, False]
