"""The interface of a step's sampling, by the kernel or by torch: arrays to upload, then work on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from pagekv.executor.backend.interface import SequenceState
from pagekv.executor.cuda.logprobs import Logprobs
from pagekv.kernels.tensors import Ints

# Returns a section of the upload as a view on the device: `find(name, shape)` as int32, `find(name, shape, dtype)` as
# another type.
Find = Callable[..., torch.Tensor]


def find_in(words: torch.Tensor, offsets: Mapping[str, int]) -> Find:
    """A `Find` over the int32 words of an upload, with sections at these offsets."""

    def find(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        first, size = offsets[name], math.prod(shape) * dtype.itemsize // 4
        return words[first : first + size].view(dtype).view(shape)

    return find


class StepSampling(Protocol):
    """The sampling of one step. `states[i]` samples from row i of the logits."""

    states: list[SequenceState]

    @property
    def logprobs_of(self) -> list[SequenceState]:
        """The sequences that ask for log-probabilities, in the order in which `sample` returns them."""
        ...

    def sections(self) -> dict[str, Ints]:
        """The arrays to upload, by name."""
        ...

    def sample(
        self, logits: torch.Tensor, find: Find, last_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, list[Logprobs]]:
        """Enqueues the sampling of `logits` `[R, vocab_size]`. Returns the tokens, an integer tensor `[R]` with -1 for
        rows with NaN, and the log-probabilities for `logprobs_of`, in parts. Writes the tokens, 0 for rows with NaN, to
        `last_tokens` `[max_sequences + 1]` at the device indices of the sequences.
        """
        ...
