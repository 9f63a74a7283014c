"""The sampling of a step's rows, whichever way: arrays for the step's upload, then work on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from pagekv.executor.backend.interface import SequenceState
from pagekv.executor.cuda.logprobs import Logprobs
from pagekv.kernels.tensors import Ints

# Section name -> view of it on the device: `find(name, shape)` is int32, `find(name, shape, torch.float64)` its words
# as doubles.
Find = Callable[..., torch.Tensor]


def find_in(words: torch.Tensor, offsets: Mapping[str, int]) -> Find:
    """Finds sections, which begin at these offsets, in the int32 words of an upload."""

    def find(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        first, size = offsets[name], math.prod(shape) * dtype.itemsize // 4
        return words[first : first + size].view(dtype).view(shape)

    return find


class StepSampling(Protocol):
    """One step's sampling. `states[i]` samples from row i of the logits."""

    states: list[SequenceState]

    @property
    def logprobs_of(self) -> list[SequenceState]:
        """The sequences that ask for log-probabilities, in the order of the log-probabilities of `sample`."""
        ...

    def sections(self) -> dict[str, Ints]:
        """The arrays to upload."""
        ...

    def sample(
        self, logits: torch.Tensor, find: Find, last_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, list[Logprobs]]:
        """Enqueues the sampling of `logits` `[R, vocab_size]`. Returns the tokens, an integer tensor `[R]`, -1 where
        logits are not numbers, and log-probabilities of those who ask, in parts. Writes the tokens, 0 where logits are
        not numbers, to `last_tokens` `[max_sequences + 1]` at the device indices of the sequences.
        """
        ...
