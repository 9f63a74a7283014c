"""The sampler on the device: the function of (logits, seed, sequence index, position) and the tokens so far that
the CPU backend's sampler describes, for many rows at once and without waiting for the device.

All arithmetic on the rows that are not plainly greedy is in float64, in the order of the CPU sampler, with the same
number drawn; only `exp` and sums may differ from NumPy's in the last bit. Sums on a GPU are not monotone where they
should be (a parallel prefix sum rounds differently from place to place), so a token without weight is never looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagekv.executor.backend.interface import NOT_A_NUMBER
from pagekv.executor.cuda.penalties import PenaltyTable

# Columns of `RowChunk.numbers`.
TEMPERATURE, TOP_P, MIN_P, NUMBER, REPETITION, PRESENCE, FREQUENCY = range(7)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Some sampled rows that are not plainly greedy, R of them, on the device. None: no row of the chunk needs it.

    Positions in `bias_at`, `ban_at`, `penalised` and `logprob_at` count within the chunk.
    """

    # int64 [R]: which rows of the logits.
    rows: torch.Tensor
    # float64 [R, 7]; the temperature is 1 where `greedy`.
    numbers: torch.Tensor
    # bool [R]
    greedy: torch.Tensor
    any_random: bool
    any_top_p: bool
    any_min_p: bool
    # int64 [R], vocab_size where there is none; and the largest of those that there are.
    top_k: torch.Tensor | None
    max_top_k: int
    # int64 [n, 2] (row, token) and float64 [n].
    bias_at: torch.Tensor | None
    biases: torch.Tensor | None
    # int64 [n, 2]
    ban_at: torch.Tensor | None
    # int64 [p] rows of the chunk, and as many rows of the penalty table.
    penalised: torch.Tensor | None
    penalty_rows: torch.Tensor | None
    # int64 [l], and the most of the likeliest tokens that any row asks for.
    logprob_at: torch.Tensor | None
    num_top: int


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Results of the sampled rows of a step, on the device."""

    # int64 [R]; -1 where the logits are not numbers.
    tokens: torch.Tensor
    # One entry for each chunk that wants log-probabilities: those of the tokens, float64 [l]; the likeliest tokens,
    # int64 [l, n], and their log-probabilities, float64 [l, n].
    logprobs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def sample(logits: torch.Tensor, chunks: list[RowChunk], table: PenaltyTable) -> SampledRows:
    """The next token of each row of `logits` `[R, vocab_size]`, with log-probabilities where asked for."""
    # NaN counts as the largest; of equals the first.
    tokens = logits.argmax(dim=-1)
    broken = logits.gather(1, tokens[:, None])[:, 0].isnan()
    logprobs = []
    for chunk in chunks:
        raw = logits[chunk.rows].double()
        adjusted = _adjust(raw, chunk, table)
        chosen = adjusted.argmax(dim=-1)
        if chunk.any_random:
            drawn = draw(filtered_weights(adjusted, chunk), chunk.numbers[:, NUMBER])
            chosen = torch.where(chunk.greedy, chosen, drawn)
        tokens[chunk.rows] = chosen
        if chunk.penalised is not None and chunk.penalty_rows is not None:
            table.count(chunk.penalty_rows, chosen[chunk.penalised])
        if chunk.logprob_at is not None:
            logprobs.append(_logprobs(raw[chunk.logprob_at], chosen[chunk.logprob_at], chunk.num_top))
    return SampledRows(torch.where(broken, NOT_A_NUMBER.token_id, tokens), logprobs)


def _adjust(raw: torch.Tensor, chunk: RowChunk, table: PenaltyTable) -> torch.Tensor:
    """Logits with bias, ban and penalties; a new tensor where anything changes."""
    if chunk.bias_at is None and chunk.ban_at is None and chunk.penalised is None:
        return raw
    logits = raw.clone()
    if chunk.bias_at is not None and chunk.biases is not None:
        logits[chunk.bias_at[:, 0], chunk.bias_at[:, 1]] += chunk.biases
    if chunk.ban_at is not None:
        logits[chunk.ban_at[:, 0], chunk.ban_at[:, 1]] = -torch.inf
    if chunk.penalised is not None and chunk.penalty_rows is not None:
        values, numbers = logits[chunk.penalised], chunk.numbers[chunk.penalised]
        factor = numbers[:, REPETITION, None]
        repeated = torch.where(values > 0, values / factor, values * factor)
        values = torch.where(table.seen[chunk.penalty_rows], repeated, values)
        counts = table.outputs[chunk.penalty_rows]
        penalty = numbers[:, PRESENCE, None] + counts * numbers[:, FREQUENCY, None]
        logits[chunk.penalised] = torch.where(counts > 0, values - penalty, values)
    return logits


def filtered_weights(logits: torch.Tensor, chunk: RowChunk) -> torch.Tensor:
    """Unnormalised probabilities `[R, vocab_size]` by token id; 0 for what top-k, top-p and min-p exclude.

    Of equally likely tokens, those with the lower ids are kept.
    """
    best = logits.max(dim=-1, keepdim=True).values
    weights = ((logits - best) / chunk.numbers[:, TEMPERATURE, None]).exp()
    if chunk.top_k is not None:
        largest = logits.topk(chunk.max_top_k, dim=-1).values
        at = (chunk.top_k - 1).clamp(max=chunk.max_top_k - 1)[:, None]
        kept = _first_of_largest(logits, largest.gather(1, at), chunk.top_k[:, None])
        weights = torch.where(kept | (chunk.top_k >= logits.shape[1])[:, None], weights, 0.0)
    if chunk.any_top_p:
        weights = _nucleus(weights, chunk.numbers[:, TOP_P, None])
    if chunk.any_min_p:
        # The likeliest token has weight 1.
        weights = torch.where(weights >= chunk.numbers[:, MIN_P, None], weights, 0.0)
    return weights


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The fewest largest weights whose sum is at least `top_p` `[R, 1]` of all."""
    goal = top_p * weights.cumsum(-1)[:, -1:]
    largest = weights.sort(dim=-1, descending=True).values
    count = ((largest.cumsum(-1) < goal).sum(-1, keepdim=True) + 1).clamp(max=weights.shape[1])
    kept = _first_of_largest(weights, largest.gather(1, count - 1), count)
    return torch.where(kept | (top_p >= 1), weights, 0.0)


def _first_of_largest(values: torch.Tensor, bound: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """Where the `count` (`[R, 1]`, or one for all) largest values are, given the smallest of them, `bound` `[R, 1]`; of
    equals the first ones.
    """
    above, equal = values > bound, values == bound
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The token ids `[R]` at `numbers` `[R]`, in [0, 1), of the distributions that `weights` describe."""
    cumulative = weights.cumsum(-1)
    beyond = (cumulative > numbers[:, None] * cumulative[:, -1:]) & (weights > 0)
    # argmax of 0 and 1 is the first 1. Rounding may take the product up to the total, and then there is none.
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.where(beyond.any(-1), beyond.int().argmax(-1), last)


def _logprobs(raw: torch.Tensor, tokens: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural-log probability of the tokens, and the `num_top` likeliest: ids and log-probabilities, best first."""
    vocab_size = raw.shape[1]
    shifted = raw - raw.max(dim=-1, keepdim=True).values
    logprobs = shifted - shifted.exp().sum(-1, keepdim=True).log()
    of_tokens = logprobs.gather(1, tokens[:, None])[:, 0]
    if not num_top:
        return of_tokens, tokens.new_empty(len(tokens), 0), logprobs[:, :0]
    bound = raw.topk(num_top, dim=-1).values[:, -1:]
    kept = _first_of_largest(raw, bound, num_top)
    # Their ids in order of id, without a shape that depends on data, for which the host would have to wait.
    ids = torch.where(kept, torch.arange(vocab_size, device=raw.device), vocab_size)
    ids = ids.topk(num_top, largest=False, sorted=True).values.clamp(max=vocab_size - 1)
    values = logprobs.gather(1, ids)
    order = raw.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return of_tokens, ids.gather(1, order), values.gather(1, order)
