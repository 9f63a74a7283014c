"""Sampling over the ranks of a split model: rank 0 has the logits and samples. The other ranks receive its tokens on
their devices, in stream order, so that no host waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from pagekv.executor.backend.interface import SequenceState
from pagekv.executor.cuda.choose_sampler import Sampler, choose_sampler
from pagekv.executor.cuda.device import CudaDevice
from pagekv.executor.cuda.logprobs import Logprobs
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.executor.cuda.step_inputs import DeviceSequence
from pagekv.executor.cuda.step_sampling import Find
from pagekv.executor.model.shards import Shards
from pagekv.kernels.tensors import Ints


class RankSampling:
    """The sampling of one rank. Only rank 0 has log-probabilities. Implements `StepSampling`."""

    def __init__(
        self, entries: Sequence[DeviceSequence], vocab_size: int, penalties: PenaltyTable, own: Sampler, shards: Shards
    ) -> None:
        """`own`: the sampler of rank 0. The other ranks use it only to upload the same sections: with uploads of
        another size, a rank might choose another graph, whose collectives have another size.
        """
        self._own = own(entries, vocab_size, penalties)
        self._shards = shards
        self.states = self._own.states
        self._indices = np.array([entry.device_index for entry in entries], np.int32)

    @property
    def logprobs_of(self) -> list[SequenceState]:
        return [] if self._shards.rank else self._own.logprobs_of

    def sections(self) -> dict[str, Ints]:
        return {**self._own.sections(), "told_indices": self._indices}

    def sample(
        self, logits: torch.Tensor, find: Find, last_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, list[Logprobs]]:
        if not self._shards.rank:
            tokens, logprobs = self._own.sample(logits, find, last_tokens)
            return self._shards.share(tokens.int()), logprobs
        tokens = self._shards.share(torch.empty(len(self.states), dtype=torch.int32, device=last_tokens.device))
        indices = find("told_indices", (len(self.states),)).long()
        last_tokens.index_copy_(0, indices, tokens.clamp(min=0))
        return tokens, []


def choose_rank_sampler(num_logits: int, dtype: torch.dtype, device: CudaDevice, shards: Shards) -> Sampler:
    """`choose_sampler` for a rank: takes the kernel only if every rank can use it."""
    return partial(RankSampling, own=choose_sampler(num_logits, dtype, device, shards.all_say), shards=shards)
