"""The device's samplers as the runner uses them, on CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from support.kernels.host_build import HostLauncher

from pagekv.executor.backend.interface import Sampled, SequenceState
from pagekv.executor.cuda.choose_sampler import Sampler
from pagekv.executor.cuda.kernel_sampler import KernelSampling
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.executor.cuda.step_inputs import DeviceSequences
from pagekv.executor.cuda.step_sampling import find_in
from pagekv.executor.cuda.torch_sampler import TorchSampling
from pagekv.kernels.attention_plan import pack

# By name: the kernel in the emulation, and torch's operators.
SAMPLERS: Mapping[str, Sampler] = {
    "kernel": partial(KernelSampling, launcher=HostLauncher()),
    "torch": TorchSampling,
}


class DeviceSampler:
    """Sampling over some steps."""

    def __init__(self, vocab_size: int, sampler: Sampler = SAMPLERS["torch"]) -> None:
        self.sampler = sampler
        self.last_tokens = torch.zeros(65, dtype=torch.int32)
        self.table = PenaltyTable(vocab_size, torch.device("cpu"))
        self.live = DeviceSequences(64, self.table)

    def sample(self, logits: torch.Tensor, states: Sequence[SequenceState]) -> list[Sampled]:
        inputs = self.sampler([self.live.get(state) for state in states], logits.shape[1], self.table)
        sections = inputs.sections()
        words, offsets = pack(sections, {name: array.shape for name, array in sections.items()})
        find = find_in(torch.from_numpy(words), offsets)
        chosen, logprobs = inputs.sample(logits, find, self.last_tokens)
        kept = [int(self.last_tokens[self.live.get(state).device_index]) for state in states]
        assert kept == [max(token, 0) for token in chosen.tolist()]
        tokens = {state.seq_id: Sampled(token) for state, token in zip(states, chosen.tolist(), strict=True)}
        rows = [row for chunk in logprobs for row in zip(*(part.tolist() for part in chunk), strict=True)]
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
