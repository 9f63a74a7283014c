"""The host's side of sampling: what a step's sampled rows need, as sections of its upload, and found again there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, SequenceState
from pagekv.executor.backend.sampling import banned_tokens, is_penalised, is_plain, uniform
from pagekv.executor.cuda.device_sequences import DeviceSequence
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.executor.cuda.sampler import RowChunk
from pagekv.kernels.attention_plan import Ints

# Elements of logits at a time that are worked on in float64, at 8 bytes and with some ten tensors of this size.
CHUNK_ELEMENTS = 4 * 2**20
# Columns of float64; all others are int32.
REAL_COLUMNS = ("numbers", "biases")
# Section name -> view of it: `find(name, shape)` is int32, `find(name, shape, torch.float64)` its words as doubles.
Find = Callable[..., torch.Tensor]


@dataclass(slots=True)
class _ChunkColumns:
    """A `RowChunk` on the host: its sequences, and its columns under the names of `RowChunk`, none of them empty."""

    states: list[SequenceState] = field(default_factory=list)
    columns: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))


class SamplingInputs:
    """One step's sampling. `states[i]` samples from row i of the logits."""

    def __init__(self, entries: Sequence[DeviceSequence], vocab_size: int, penalties: PenaltyTable) -> None:
        """`vocab_size`: columns of the logits. Gives the sequences that need one a row of the penalty table."""
        self.states = [entry.state for entry in entries]
        self._vocab_size = vocab_size
        self._penalties = penalties
        self._chunks: list[_ChunkColumns] = []
        # Rows of the penalty table that begin in this step, and (row, token, times generated).
        self._fresh: list[int] = []
        self._past: list[tuple[int, int, int]] = []
        rows_at_once = max(1, CHUNK_ELEMENTS // vocab_size)
        for row, entry in enumerate(entries):
            if is_plain(entry.state):
                continue
            if not self._chunks or len(self._chunks[-1].states) == rows_at_once:
                self._chunks.append(_ChunkColumns())
            self._add(self._chunks[-1], row, entry)

    @property
    def logprobs_of(self) -> list[SequenceState]:
        """The sequences that ask for log-probabilities, in the order of `SampledRows.logprobs`."""
        return [chunk.states[at] for chunk in self._chunks for at in chunk.columns.get("logprob_at", ())]

    def _add(self, chunk: _ChunkColumns, row: int, entry: DeviceSequence) -> None:
        state, columns, at = entry.state, chunk.columns, len(chunk.states)
        sampling, position = state.sampling, len(state.token_ids)
        chunk.states.append(state)
        columns["rows"].append(row)
        columns["greedy"].append(sampling.temperature == 0)
        columns["numbers"].append(
            (
                sampling.temperature or 1.0,
                sampling.top_p,
                sampling.min_p,
                uniform(sampling.seed, sampling.sequence_index, position) if sampling.temperature else 0.0,
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
        )
        columns["top_k"].append(sampling.top_k if 0 < sampling.top_k < self._vocab_size else self._vocab_size)
        if sampling.biases:
            columns["bias_at"] += [(at, token_id) for token_id in sampling.bias_token_ids]
            columns["biases"] += sampling.biases
        if sampling.banned_until_min and (banned := banned_tokens(state, self._vocab_size)):
            columns["ban_at"] += [(at, token_id) for token_id in banned]
        if is_penalised(sampling):
            columns["penalised"].append(at)
            columns["penalty_rows"].append(self._penalty_row(entry))
        if sampling.logprobs is not None:
            columns["logprob_at"].append(at)

    def _penalty_row(self, entry: DeviceSequence) -> int:
        if entry.penalty_row is None:
            state = entry.state
            if UNKNOWN_TOKEN in state.token_ids:
                raise RuntimeError(f"sequence {state.seq_id} entered with a token that is not known yet")
            row = entry.penalty_row = self._penalties.allocate()
            self._fresh.append(row)
            prompt = state.num_prompt_tokens
            self._past += [(row, token, int(at >= prompt)) for at, token in enumerate(state.token_ids)]
        return entry.penalty_row

    def sections(self) -> dict[str, Ints]:
        """The arrays to upload."""
        sections: dict[str, npt.NDArray[Any]] = {}
        for number, chunk in enumerate(self._chunks):
            for name, values in chunk.columns.items():
                column = np.array(values, np.float64 if name in REAL_COLUMNS else np.int32)
                sections[f"{name} {number}"] = column.view(np.int32)
        if self._fresh:
            sections |= {"fresh": np.array(self._fresh, np.int32), "past": np.array(self._past, np.int32)}
        return sections

    def chunks(self, find: Find) -> list[RowChunk]:
        """The chunks as the device sees them. Enqueues the beginning of fresh penalty rows."""
        if self._fresh:
            past = find("past", (len(self._past), 3)).long()
            self._penalties.begin(find("fresh", (len(self._fresh),)).long(), past[:, 0], past[:, 1], past[:, 2].int())
        return [self._chunk(chunk, number, find) for number, chunk in enumerate(self._chunks)]

    def _chunk(self, chunk: _ChunkColumns, number: int, find: Find) -> RowChunk:
        def column(name: str) -> torch.Tensor:
            values = chunk.columns[name]
            shape = (len(values), *np.shape(values[0]))
            if name in REAL_COLUMNS:
                return find(f"{name} {number}", shape, torch.float64)
            return find(f"{name} {number}", shape).long()

        def optional(name: str) -> torch.Tensor | None:
            return column(name) if name in chunk.columns else None

        samplings = [state.sampling for state in chunk.states]
        random = [sampling for sampling in samplings if sampling.temperature]
        limited = [top_k for top_k in chunk.columns["top_k"] if top_k < self._vocab_size]
        return RowChunk(
            rows=column("rows"),
            numbers=column("numbers"),
            greedy=column("greedy").bool(),
            any_random=bool(random),
            any_top_p=any(sampling.top_p < 1 for sampling in random),
            any_min_p=any(sampling.min_p > 0 for sampling in random),
            top_k=column("top_k") if limited else None,
            max_top_k=max(limited, default=0),
            bias_at=optional("bias_at"),
            biases=optional("biases"),
            ban_at=optional("ban_at"),
            penalised=optional("penalised"),
            penalty_rows=optional("penalty_rows"),
            logprob_at=optional("logprob_at"),
            num_top=max((min(sampling.logprobs or 0, self._vocab_size) for sampling in samplings), default=0),
        )
