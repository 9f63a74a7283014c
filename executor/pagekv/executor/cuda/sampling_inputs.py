"""The host's side of sampling: what a step's sampled rows need, as sections of its upload, and found again there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Sampling, SequenceState
from pagekv.executor.cpu.sampler import uniform
from pagekv.executor.cuda.device_sequences import DeviceSequence
from pagekv.executor.cuda.penalties import PenaltyTable
from pagekv.executor.cuda.sampler import NUM_NUMBERS, RowChunk
from pagekv.kernels.attention_plan import Ints

# Elements of logits at a time that are worked on in float64, at 8 bytes and with some ten tensors of this size.
CHUNK_ELEMENTS = 4 * 2**20
# Section name -> view of it: `find(name, shape)` is int32, `find(name, shape, torch.float64)` its words as doubles.
Find = Callable[..., torch.Tensor]


@dataclass(slots=True)
class _Chunk:
    """Columns of one chunk while they are gathered."""

    rows: list[int] = field(default_factory=list)
    numbers: list[tuple[float, ...]] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)
    top_k: list[int] = field(default_factory=list)
    bias_at: list[tuple[int, int]] = field(default_factory=list)
    biases: list[float] = field(default_factory=list)
    ban_at: list[tuple[int, int]] = field(default_factory=list)
    penalised: list[int] = field(default_factory=list)
    penalty_rows: list[int] = field(default_factory=list)
    logprob_at: list[int] = field(default_factory=list)
    num_top: int = 0
    samplings: list[Sampling] = field(default_factory=list)


class SamplingInputs:
    """One step's sampling. `states[i]` samples from row i of the logits."""

    def __init__(self, entries: Sequence[DeviceSequence], vocab_size: int, penalties: PenaltyTable) -> None:
        """`vocab_size`: columns of the logits. Gives the sequences that need one a row of the penalty table."""
        self.states = [entry.state for entry in entries]
        self._vocab_size = vocab_size
        self._penalties = penalties
        self._chunks: list[_Chunk] = []
        # Rows of the penalty table that begin in this step, and (row, token, times generated).
        self._fresh: list[int] = []
        self._past: list[tuple[int, int, int]] = []
        rows_at_once = max(1, CHUNK_ELEMENTS // vocab_size)
        for row, entry in enumerate(entries):
            if _is_plain(entry.state):
                continue
            if not self._chunks or len(self._chunks[-1].rows) == rows_at_once:
                self._chunks.append(_Chunk())
            self._add(self._chunks[-1], row, entry)

    @property
    def logprobs_of(self) -> list[SequenceState]:
        """The sequences that ask for log-probabilities, in the order in which `Chosen.logprobs` has them."""
        return [self.states[chunk.rows[at]] for chunk in self._chunks for at in chunk.logprob_at]

    def _add(self, chunk: _Chunk, row: int, entry: DeviceSequence) -> None:
        state, at = entry.state, len(chunk.rows)
        sampling, position = state.sampling, len(state.token_ids)
        chunk.rows.append(row)
        chunk.samplings.append(sampling)
        chunk.greedy.append(sampling.temperature == 0)
        chunk.numbers.append(
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
        chunk.top_k.append(sampling.top_k if 0 < sampling.top_k < self._vocab_size else self._vocab_size)
        for token_id, bias in zip(sampling.bias_token_ids, sampling.biases, strict=True):
            chunk.bias_at.append((at, token_id))
            chunk.biases.append(bias)
        # A ban of the whole vocabulary cannot be kept.
        if _is_banning(state) and len(set(sampling.banned_until_min)) < self._vocab_size:
            chunk.ban_at += [(at, token_id) for token_id in sampling.banned_until_min]
        if _is_penalised(sampling):
            chunk.penalised.append(at)
            chunk.penalty_rows.append(self._penalty_row(entry))
        if sampling.logprobs is not None:
            chunk.logprob_at.append(at)
            chunk.num_top = max(chunk.num_top, min(sampling.logprobs, self._vocab_size))

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
            columns: dict[str, npt.NDArray[Any]] = {
                "rows": np.array(chunk.rows, np.int32),
                "numbers": np.array(chunk.numbers, np.float64).view(np.int32),
                "greedy": np.array(chunk.greedy, np.int32),
                "top_k": np.array(chunk.top_k, np.int32),
                "bias_at": np.array(chunk.bias_at, np.int32),
                "biases": np.array(chunk.biases, np.float64).view(np.int32),
                "ban_at": np.array(chunk.ban_at, np.int32),
                "penalised": np.array(chunk.penalised, np.int32),
                "penalty_rows": np.array(chunk.penalty_rows, np.int32),
                "logprob_at": np.array(chunk.logprob_at, np.int32),
            }
            sections |= {f"{name} {number}": column for name, column in columns.items() if column.size}
        if self._fresh:
            sections |= {"fresh": np.array(self._fresh, np.int32), "past": np.array(self._past, np.int32)}
        return sections

    def chunks(self, find: Find) -> list[RowChunk]:
        """The chunks as the device sees them. Enqueues the beginning of fresh penalty rows."""
        if self._fresh:
            past = find("past", (len(self._past), 3)).long()
            self._penalties.begin(find("fresh", (len(self._fresh),)).long(), past[:, 0], past[:, 1], past[:, 2].int())
        return [self._chunk(chunk, number, find) for number, chunk in enumerate(self._chunks)]

    def _chunk(self, chunk: _Chunk, number: int, find: Find) -> RowChunk:
        def ints(name: str, *shape: int) -> torch.Tensor | None:
            return find(f"{name} {number}", shape).long() if shape[0] else None

        count, num_biases, num_penalised = len(chunk.rows), len(chunk.biases), len(chunk.penalised)
        random = [sampling for sampling in chunk.samplings if sampling.temperature]
        limited = [top_k for top_k in chunk.top_k if top_k < self._vocab_size]
        return RowChunk(
            rows=find(f"rows {number}", (count,)).long(),
            numbers=find(f"numbers {number}", (count, NUM_NUMBERS), torch.float64),
            greedy=find(f"greedy {number}", (count,)).bool(),
            any_random=bool(random),
            any_top_p=any(sampling.top_p < 1 for sampling in random),
            any_min_p=any(sampling.min_p > 0 for sampling in random),
            top_k=ints("top_k", count) if limited else None,
            max_top_k=max(limited, default=0),
            bias_at=ints("bias_at", num_biases, 2),
            biases=find(f"biases {number}", (num_biases,), torch.float64) if num_biases else None,
            ban_at=ints("ban_at", len(chunk.ban_at), 2),
            penalised=ints("penalised", num_penalised),
            penalty_rows=ints("penalty_rows", num_penalised),
            logprob_at=ints("logprob_at", len(chunk.logprob_at)),
            num_top=chunk.num_top,
        )


def _is_plain(state: SequenceState) -> bool:
    """Greedy with nothing that changes the logits, and nothing to tell about them."""
    sampling = state.sampling
    return not (
        sampling.temperature
        or sampling.logprobs is not None
        or sampling.biases
        or _is_penalised(sampling)
        or (_is_banning(state) and sampling.banned_until_min)
    )


def _is_penalised(sampling: Sampling) -> bool:
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)


def _is_banning(state: SequenceState) -> bool:
    return len(state.token_ids) - state.num_prompt_tokens < state.sampling.min_tokens
