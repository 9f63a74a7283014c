"""The sampler in torch's operators, used where the kernel cannot serve. It computes the same function of (logits, seed,
sequence index, position) and the tokens so far as the CPU backend's sampler, for many rows at once and without waiting
for the device.

On the host, `TorchSampling` turns the sampled rows into sections of the step's upload; on the device, `sample` reads
them as `RowChunk`s. Rows that are not plain greedy are computed in float64, in the same order as by the CPU sampler and
with the same random numbers; only `exp`, `log` and sums may differ from NumPy's in the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagekv.executor.backend.interface import NOT_A_NUMBER, SequenceState
from pagekv.executor.backend.sampling import (
    FIRST_GROUP,
    GOLDEN_GAMMA,
    GROUP_SIZE,
    LAST_SHIFT,
    MIXES,
    banned_tokens,
    draw_key,
    is_penalised,
    is_plain,
)
from pagekv.executor.cuda.logprobs import Logprobs, below_largest, first_of_largest, log_probabilities
from pagekv.executor.cuda.penalties import PenaltyTable, StepPenalties
from pagekv.executor.cuda.step_inputs import DeviceSequence
from pagekv.executor.cuda.step_sampling import Find
from pagekv.kernels.tensors import Ints

# Elements of logits that are processed at a time in float64, in about ten tensors of this size.
CHUNK_ELEMENTS = 4 * 2**20
# Columns of `numbers`.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
# Columns of 64 bits: their types on the host and on the device. All others are int32 in the upload and int64 on the
# device.
WIDE_COLUMNS: Mapping[str, tuple[type[np.generic], torch.dtype]] = {
    "numbers": (np.float64, torch.float64),
    "biases": (np.float64, torch.float64),
    "draw_keys": (np.uint64, torch.int64),
}


@dataclass(slots=True)
class RowChunk:
    """A chunk of R sampled rows that are not plain greedy. Columns that no row needs are absent:

    rows, greedy [R]: the row of the logits; 1 if the likeliest token is taken
    numbers [R, 6]: parameters (see the constants above); the temperature is 1 where `greedy`
    draw_keys [R]: int64 with the bits of the keys
    top_k [R]: vocab_size if the row has none
    bias_at [n, 2] (row, token), biases [n]; ban_at [n, 2]
    penalised, penalty_rows [p]: the row, and its row of the penalty table
    logprob_at [l]: the rows that ask for log-probabilities

    All row numbers except those in `rows` are relative to the chunk.
    """

    states: list[SequenceState] = field(default_factory=list)
    # Columns on the host; `on_device` has them on the device after `TorchSampling._on_device`.
    columns: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    on_device: dict[str, torch.Tensor] = field(default_factory=dict)
    # Whether the chunk has rows that are not greedy; such rows with top-p; with min-p.
    any_random: bool = False
    any_top_p: bool = False
    any_min_p: bool = False
    # The largest top_k below vocab_size; 0: none.
    max_top_k: int = 0
    # The most of the likeliest tokens that any row asks for.
    num_top: int = 0


class TorchSampling:
    """The sampling of one step by torch's operators. Implements `StepSampling`."""

    def __init__(self, entries: Sequence[DeviceSequence], vocab_size: int, penalties: PenaltyTable) -> None:
        """`vocab_size`: columns of the logits. Allocates a row of the penalty table for each sequence that needs
        one.
        """
        self.states = [entry.state for entry in entries]
        self._indices = np.array([entry.device_index for entry in entries], np.int32)
        self._vocab_size = vocab_size
        self._table = penalties
        self._penalties = StepPenalties(penalties)
        self._chunks: list[RowChunk] = []
        rows_at_once = max(1, CHUNK_ELEMENTS // vocab_size)
        for row, entry in enumerate(entries):
            if is_plain(entry.state):
                continue
            if not self._chunks or len(self._chunks[-1].states) == rows_at_once:
                self._chunks.append(RowChunk())
            self._add(self._chunks[-1], row, entry)
        for chunk in self._chunks:
            if not chunk.max_top_k:
                del chunk.columns["top_k"]

    @property
    def logprobs_of(self) -> list[SequenceState]:
        return [chunk.states[at] for chunk in self._chunks for at in chunk.columns.get("logprob_at", ())]

    def _add(self, chunk: RowChunk, row: int, entry: DeviceSequence) -> None:
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
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
        )
        columns["draw_keys"].append(
            draw_key(sampling.seed, sampling.sequence_index, position) if sampling.temperature else 0
        )
        if sampling.temperature:
            chunk.any_random = True
            chunk.any_top_p |= sampling.top_p < 1
            chunk.any_min_p |= sampling.min_p > 0
        limited = 0 < sampling.top_k < self._vocab_size
        chunk.max_top_k = max(chunk.max_top_k, sampling.top_k if limited else 0)
        columns["top_k"].append(sampling.top_k if limited else self._vocab_size)
        if sampling.biases:
            columns["bias_at"] += [(at, token_id) for token_id in sampling.bias_token_ids]
            columns["biases"] += sampling.biases
        if sampling.banned_until_min and (banned := banned_tokens(state, self._vocab_size)):
            columns["ban_at"] += [(at, token_id) for token_id in banned]
        if is_penalised(sampling):
            columns["penalised"].append(at)
            columns["penalty_rows"].append(self._penalties.row_of(entry))
        if sampling.logprobs is not None:
            columns["logprob_at"].append(at)
            chunk.num_top = max(chunk.num_top, min(sampling.logprobs, self._vocab_size))

    def sections(self) -> dict[str, Ints]:
        sections: dict[str, npt.NDArray[Any]] = {"sampled_indices": self._indices, **self._penalties.sections()}
        for number, chunk in enumerate(self._chunks):
            for name, values in chunk.columns.items():
                column = np.array(values, WIDE_COLUMNS[name][0] if name in WIDE_COLUMNS else np.int32)
                sections[f"{name} {number}"] = column.view(np.int32)
        return sections

    def sample(
        self, logits: torch.Tensor, find: Find, last_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, list[Logprobs]]:
        self._penalties.begin(find)
        tokens, logprobs = sample(logits, self._on_device(find), self._table)
        indices = find("sampled_indices", (len(self._indices),)).long()
        last_tokens.index_copy_(0, indices, tokens.clamp(min=0).int())
        return tokens, logprobs

    def _on_device(self, find: Find) -> list[RowChunk]:
        for number, chunk in enumerate(self._chunks):
            for name, values in chunk.columns.items():
                section, shape = f"{name} {number}", (len(values), *np.shape(values[0]))
                wide = name in WIDE_COLUMNS
                chunk.on_device[name] = (
                    find(section, shape, WIDE_COLUMNS[name][1]) if wide else find(section, shape).long()
                )
        return self._chunks


def sample(logits: torch.Tensor, chunks: list[RowChunk], table: PenaltyTable) -> tuple[torch.Tensor, list[Logprobs]]:
    """The next token of each row of `logits` `[R, vocab_size]`, int64 `[R]`, -1 for rows with NaN; and the
    log-probabilities of each chunk that asks for them.
    """
    # argmax returns the first of equal values, and a NaN if there is one.
    tokens = logits.argmax(dim=-1)
    broken = logits.gather(1, tokens[:, None])[:, 0].isnan()
    logprobs = []
    for chunk in chunks:
        columns = chunk.on_device
        raw = logits[columns["rows"]].double()
        adjusted = _adjust(raw, columns, table)
        chosen = adjusted.argmax(dim=-1)
        if chunk.any_random:
            drawn = draw(filtered_weights(adjusted, chunk), columns["draw_keys"])
            chosen = torch.where(columns["greedy"].bool(), chosen, drawn)
        tokens[columns["rows"]] = chosen
        if "penalised" in columns:
            table.count(columns["penalty_rows"], chosen[columns["penalised"]])
        if "logprob_at" in columns:
            at = columns["logprob_at"]
            logprobs.append(log_probabilities(raw[at], chosen[at], chunk.num_top))
    return torch.where(broken, NOT_A_NUMBER.token_id, tokens), logprobs


def _adjust(raw: torch.Tensor, columns: Mapping[str, torch.Tensor], table: PenaltyTable) -> torch.Tensor:
    """The logits with biases, bans and penalties; a new tensor if anything changes."""
    if columns.keys().isdisjoint(("bias_at", "ban_at", "penalised")):
        return raw
    logits = raw.clone()
    if "bias_at" in columns:
        logits[*columns["bias_at"].unbind(1)] += columns["biases"]
    if "ban_at" in columns:
        logits[*columns["ban_at"].unbind(1)] = -torch.inf
    if "penalised" in columns:
        penalised, rows = columns["penalised"], columns["penalty_rows"]
        values, numbers = logits[penalised], columns["numbers"][penalised]
        factor = numbers[:, REPETITION, None]
        repeated = torch.where(values > 0, values / factor, values * factor)
        values = torch.where(table.seen[rows], repeated, values)
        counts = table.outputs[rows]
        penalty = numbers[:, PRESENCE, None] + counts * numbers[:, FREQUENCY, None]
        logits[penalised] = torch.where(counts > 0, values - penalty, values)
    return logits


def filtered_weights(logits: torch.Tensor, chunk: RowChunk) -> torch.Tensor:
    """Unnormalised probabilities `[R, vocab_size]` by token id; 0 for tokens that top-k, top-p or min-p excludes.

    Of equally likely tokens, those with the lower ids are kept.
    """
    numbers = chunk.on_device["numbers"]
    weights = (below_largest(logits) / numbers[:, TEMPERATURE, None]).exp()
    if "top_k" in chunk.on_device:
        top_k = chunk.on_device["top_k"]
        largest = logits.topk(chunk.max_top_k, dim=-1).values
        at = (top_k - 1).clamp(max=chunk.max_top_k - 1)[:, None]
        kept = first_of_largest(logits, largest.gather(1, at), top_k[:, None])
        weights = torch.where(kept | (top_k >= logits.shape[1])[:, None], weights, 0.0)
    if chunk.any_top_p:
        weights = _nucleus(weights, numbers[:, TOP_P, None])
    if chunk.any_min_p:
        # The likeliest token has weight 1.
        weights = torch.where(weights >= numbers[:, MIN_P, None], weights, 0.0)
    return weights


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the fewest largest weights whose sum is at least `top_p` `[R, 1]` of the sum of all; others become 0."""
    goal = top_p * weights.cumsum(-1)[:, -1:]
    largest = weights.sort(dim=-1, descending=True).values
    count = ((largest.cumsum(-1) < goal).sum(-1, keepdim=True) + 1).clamp(max=weights.shape[1])
    kept = first_of_largest(weights, largest.gather(1, count - 1), count)
    return torch.where(kept | (top_p >= 1), weights, 0.0)


def draw(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The token ids `[R]` that `keys` `[R]` draw from the distributions `weights` `[R, vocab_size]`: a race between
    groups, then one between the tokens of the winner, as in `row_sampler.draw`.
    """
    grouped = torch.nn.functional.pad(weights, (0, -weights.shape[1] % GROUP_SIZE)).unflatten(1, (-1, GROUP_SIZE))
    groups = torch.arange(grouped.shape[1], device=weights.device)
    winners = (grouped.sum(-1) / exponentials(keys, FIRST_GROUP + groups)).argmax(-1)
    token_ids = winners[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE, device=weights.device)
    held = grouped.take_along_dim(winners[:, None, None], 1)[:, 0]
    drawn: torch.Tensor = winners * GROUP_SIZE + (held / exponentials(keys, token_ids)).argmax(-1)
    return drawn


def exponentials(keys: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """`sampling.exponentials` `[R, n]` of `numbers` `[n]` or `[R, n]` for each of `keys` `[R]`."""
    # torch has no unsigned arithmetic. Products and sums wrap to the same bits; shifts need a mask.
    bits = keys[:, None] + numbers * _signed(GOLDEN_GAMMA)
    for shift, factor in MIXES:
        bits = (bits ^ _shifted(bits, shift)) * _signed(factor)
    bits = bits ^ _shifted(bits, LAST_SHIFT)
    return -((_shifted(bits, 12) * 2 + 1).double() * 2.0**-53).log()


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """64 bits, shifted right; zeros come in."""
    return (bits >> shift) & ((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64."""
    return value - 2**64 if value >= 2**63 else value
