"""The sampler by PageKV's kernels: one launch for all rows of a step, and one launch before it for the logits that
biases, bans or penalties change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from pagekv.executor.backend.sampling import banned_tokens, changes_logits, draw_key, is_penalised
from pagekv.executor.cuda.logprobs import Logprobs, log_probabilities
from pagekv.executor.cuda.penalties import PenaltyTable, StepPenalties
from pagekv.executor.cuda.step_inputs import DeviceSequence
from pagekv.executor.cuda.step_sampling import Find
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.params import ADJUSTMENT, CHOICE, EDIT
from pagekv.kernels.sampling import NONE, SamplingKernels, min_weight, scales, top_p_share
from pagekv.kernels.tensors import Ints
from pagekv.kernels.variants import DTYPE_PAIRS

# Most bytes of adjusted logits, and most float64 elements for log-probabilities, in memory at a time.
ADJUSTED_BYTES = 128 * 2**20
LOGPROB_ELEMENTS = 4 * 2**20
NO_ROW = -1
CHOICE_WORDS, ADJUSTMENT_WORDS = CHOICE.itemsize // 4, ADJUSTMENT.itemsize // 4


class KernelSampling:
    """The sampling of one step by the kernels. Implements `StepSampling`."""

    def __init__(
        self, entries: Sequence[DeviceSequence], vocab_size: int, penalties: PenaltyTable, launcher: Launcher
    ) -> None:
        """`vocab_size`: columns of the logits. Allocates a row of the penalty table for each sequence that needs
        one.
        """
        self.states = [entry.state for entry in entries]
        self.logprobs_of = [state for state in self.states if state.sampling.logprobs is not None]
        self._vocab_size, self._launcher = vocab_size, launcher
        self._table, self._penalties = penalties, StepPenalties(penalties)
        self._choices: list[tuple[float, ...]] = []
        self._adjustments: list[tuple[float, ...]] = []
        self._edits: list[tuple[int, float]] = []
        # The number of rows sampled at a time, and the first adjustment of each such part.
        self._at_once = max(1, ADJUSTED_BYTES // (4 * vocab_size))
        self._first_adjustments: list[int] = []
        for row, entry in enumerate(entries):
            if row % self._at_once == 0:
                self._first_adjustments.append(len(self._adjustments))
            self._add(row, entry)

    def _add(self, row: int, entry: DeviceSequence) -> None:
        state, sampling = entry.state, entry.state.sampling
        penalty_row = self._penalties.row_of(entry) if is_penalised(sampling) else NO_ROW
        adjusted = NO_ROW
        if changes_logits(state):
            adjusted = len(self._adjustments) - self._first_adjustments[-1]
            edits = list(zip(sampling.bias_token_ids, sampling.biases, strict=True))
            edits += [(token_id, -math.inf) for token_id in {*banned_tokens(state, self._vocab_size)}]
            penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
            self._adjustments.append((row % self._at_once, len(self._edits), len(edits), penalty_row, *penalties))
            self._edits += edits
        filters = _filters(sampling.temperature, sampling.top_p, sampling.min_p)
        limited = 0 < sampling.top_k < self._vocab_size
        self._choices.append(
            (
                draw_key(sampling.seed, sampling.sequence_index, len(state.token_ids)) if sampling.temperature else 0,
                *filters[:2],
                sampling.top_k if limited else 0,
                adjusted,
                entry.device_index,
                penalty_row,
                *filters[2:],
            )
        )

    def sections(self) -> dict[str, Ints]:
        columns: dict[str, tuple[list[Any], np.dtype[np.void]]] = {
            "choices": (self._choices, CHOICE),
            "adjustments": (self._adjustments, ADJUSTMENT),
            "edits": (self._edits, EDIT),
        }
        sections = {name: np.array(rows, kind).view(np.int32) for name, (rows, kind) in columns.items() if rows}
        if self.logprobs_of:
            asking = [row for row, state in enumerate(self.states) if state.sampling.logprobs is not None]
            sections["logprob_rows"] = np.array(asking, np.int32)
        return sections | self._penalties.sections()

    def sample(
        self, logits: torch.Tensor, find: Find, last_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, list[Logprobs]]:
        self._penalties.begin(find)
        served = str(logits.dtype).removeprefix("torch.") in DTYPE_PAIRS
        rows = (logits if served else logits.float()).contiguous()
        kernels = SamplingKernels(self._launcher, str(rows.dtype).removeprefix("torch."), self._vocab_size)
        tokens = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
        ends = [*self._first_adjustments[1:], len(self._adjustments)]
        for part, (first, end) in enumerate(zip(self._first_adjustments, ends, strict=True)):
            of_part = slice(part * self._at_once, (part + 1) * self._at_once)
            adjusted = self._adjust(kernels, rows[of_part], find, first, end) if first < end else None
            choices = find("choices", (len(rows), CHOICE_WORDS))[of_part]
            counts, seen = self._table.outputs, self._table.seen
            kernels.sample(rows[of_part], adjusted, choices, tokens[of_part], last_tokens, counts, seen)
        return tokens, self._logprobs(logits, tokens, find)

    def _adjust(self, kernels: SamplingKernels, rows: torch.Tensor, find: Find, first: int, end: int) -> torch.Tensor:
        """The adjusted logits of a part, float32 `[end - first, vocab_size]`, one row for each adjustment."""
        out = torch.empty((end - first, self._vocab_size), dtype=torch.float32, device=rows.device)
        adjustments = find("adjustments", (len(self._adjustments), ADJUSTMENT_WORDS))[first:end]
        edits = find("edits", (len(self._edits), 2)) if self._edits else None
        kernels.adjust(rows, out, adjustments, edits, self._table.outputs, self._table.seen)
        return out

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, find: Find) -> list[Logprobs]:
        if not self.logprobs_of:
            return []
        asking = find("logprob_rows", (len(self.logprobs_of),)).long()
        most = max(min(state.sampling.logprobs or 0, self._vocab_size) for state in self.logprobs_of)
        parts = asking.split(max(1, LOGPROB_ELEMENTS // self._vocab_size))
        return [log_probabilities(logits[at].double(), tokens[at].clamp(min=0).long(), most) for at in parts]


@lru_cache(maxsize=4096)
def _filters(temperature: float, top_p: float, min_p: float) -> tuple[float, ...]:
    """`top_p`, `min_weight`, `scale`, `scale_low` of a `Choice`."""
    if not temperature:
        return NONE, 0, 0.0, 0.0
    return top_p_share(top_p), min_weight(min_p), *scales(temperature)
