"""Rank 0 samples, every rank goes on with its tokens, and all upload as many words."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.executor.device_sampler import SAMPLERS

from pagekv.executor.backend.interface import Sampling, SequenceState
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.executor.cuda.rank_sampling import RankSampling
from pagekv.executor.cuda.step_inputs import DeviceSequence
from pagekv.executor.cuda.step_sampling import find_in
from pagekv.executor.model.shards import Shards
from pagekv.executor.world import World
from pagekv.kernels.attention_plan import pack

VOCAB = 8


class OneAfterTheOther(Shards):
    """Ranks that come to a collective one by one, rank 0 first, with what rank 0 told."""

    told: list[torch.Tensor]

    def __init__(self, rank: int) -> None:
        super().__init__(World(rank, 2, 2), pytest.fail)

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            OneAfterTheOther.told = [rows.clone()]
            return rows
        assert rows.dtype == self.told[0].dtype
        return rows.copy_(self.told[0])


@pytest.mark.parametrize("name", SAMPLERS)
def test_tokens_are_those_of_rank_0(name: str) -> None:
    kinds = (Sampling(), Sampling(temperature=0.9, seed=3, repetition_penalty=1.2), Sampling(logprobs=2))
    words, found, last = [], [], []
    for rank in (0, 1):
        table = PenaltyTable(VOCAB, torch.device("cpu"))
        states = [SequenceState(number, [1, 2], 2, [], 2, kind) for number, kind in enumerate(kinds)]
        # Device indices in another order than the rows.
        entries = [DeviceSequence(state, 4 - state.seq_id) for state in states]
        step = RankSampling(entries, VOCAB, table, partial(SAMPLERS[name]), OneAfterTheOther(rank))
        sections = step.sections()
        uploaded, offsets = pack(sections, {key: array.shape for key, array in sections.items()})
        words.append(uploaded.size)
        # Logits that only rank 0 has, of which the last row is no number.
        logits = torch.zeros(3, VOCAB)
        if rank == 0:
            logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
            logits[2, 0] = math.nan
        last_tokens = torch.full((6,), 7, dtype=torch.int32)
        tokens, logprobs = step.sample(logits, find_in(torch.from_numpy(uploaded), offsets), last_tokens)
        found.append(tokens.tolist())
        last.append(last_tokens.tolist())
        assert [state.seq_id for state in step.logprobs_of] == ([2] if rank == 0 else [])
        assert len(logprobs) == (1 if rank == 0 else 0)
    assert words[0] == words[1]
    assert found[0] == found[1]
    assert found[0][2] == -1
    assert last[0] == last[1] == [7, 7, 0, found[0][1], found[0][0], 7]
