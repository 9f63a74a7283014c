"""Steps of the cuda backend that mix decodes with a chunk of a prompt, over kernels and matrix products that compute
nothing: the rest is the host's work.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.executor.cuda_host import HostDevice, host_backend, save_small_model
from support.executor.launch_count import CountingLauncher
from torch.utils._python_dispatch import TorchDispatchMode

from pagekv.executor.backend.interface import Sampling, Scheduled, SequenceState

BLOCK_SIZE = 16
KINDS = {"greedy": Sampling(), "top-p": Sampling(temperature=0.8, top_p=0.95)}


def _no_product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One operator, as the product is one."""
    return rows.new_empty(len(rows), len(weight))


class AllOperators(TorchDispatchMode):
    """Counts operators, views among them: the host runs each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class MixedSteps:
    """A backend with `decodes` sequences that decode, beside chunks of `chunk` tokens of a long prompt."""

    def __init__(self, directory: Path, layers: int, decodes: int, chunk: int) -> None:
        save_small_model("llama", directory, num_hidden_layers=layers, max_position_embeddings=chunk + 64)
        # The checks at the start need kernels that compute.
        launcher = CountingLauncher(HostDevice().launcher)
        self.backend = host_backend(directory, HostDevice(launcher=launcher), max_sequences=decodes + 1)
        self.backend.allocate(BLOCK_SIZE, 2 * decodes + -(-chunk // BLOCK_SIZE), 0)
        self.launcher = launcher
        launcher.silence()
        self._chunk = chunk
        self._states = [SequenceState(at, [1] * 20, 10, [2 * at, 2 * at + 1], 0, Sampling()) for at in range(decodes)]

    def next(self, kind: str) -> list[Scheduled]:
        """A step: the decodes, then the first chunk of a new prompt."""
        for state in self._states:
            state.sampling = replace(KINDS[kind], seed=state.seq_id)
        first, tokens = 2 * len(self._states), [1] * (self._chunk + 8)
        blocks = [*range(first, first + -(-self._chunk // BLOCK_SIZE))]
        prompt = SequenceState(len(self._states), tokens, len(tokens), blocks, 0, Sampling())
        return [*(Scheduled(state, 19, 1) for state in self._states), Scheduled(prompt, 0, self._chunk)]

    def launch(self, scheduled: list[Scheduled]) -> None:
        """The step, without products."""
        with mock.patch("pagekv.executor.cuda.fused_decoder.linear", _no_product):
            self.backend.launch(scheduled)

    def counted(self, kind: str) -> tuple[int, int]:
        """Kernels that a step starts, and operators of torch that it runs."""
        scheduled = self.next(kind)
        self.launcher.counts.clear()
        with AllOperators() as operators:
            self.launch(scheduled)
        return self.launcher.counts.total(), operators.counts.total()
