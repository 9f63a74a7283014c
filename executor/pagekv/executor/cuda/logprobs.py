"""Log-probabilities of sampled tokens, and of the likeliest ones beside them."""

from __future__ import annotations

import torch

# Log-probabilities of tokens, float64 [l]; the likeliest tokens, int64 [l, n], and their log-probabilities [l, n].
Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def log_probabilities(raw: torch.Tensor, tokens: torch.Tensor, num_top: int) -> Logprobs:
    """Natural-log probability of the tokens, and the `num_top` likeliest: ids and log-probabilities, best first."""
    vocab_size = raw.shape[1]
    shifted = below_largest(raw)
    logprobs = shifted - shifted.exp().sum(-1, keepdim=True).log()
    of_tokens = logprobs.gather(1, tokens[:, None])[:, 0]
    if not num_top:
        return of_tokens, tokens.new_empty(len(tokens), 0), logprobs[:, :0]
    bound = raw.topk(num_top, dim=-1).values[:, -1:]
    kept = first_of_largest(raw, bound, num_top)
    # Their ids in order of id, without a shape that depends on data, for which the host would have to wait.
    ids = torch.where(kept, torch.arange(vocab_size, device=raw.device), vocab_size)
    ids = ids.topk(num_top, largest=False, sorted=True).values.clamp(max=vocab_size - 1)
    values = logprobs.gather(1, ids)
    order = raw.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return of_tokens, ids.gather(1, order), values.gather(1, order)


def first_of_largest(values: torch.Tensor, bound: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """Where the `count` (`[R, 1]`, or one for all) largest values are, given the smallest of them, `bound` `[R, 1]`; of
    equals the first ones.
    """
    above, equal = values > bound, values == bound
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def below_largest(logits: torch.Tensor) -> torch.Tensor:
    """Each row of logits less its largest; of an infinite one, 0 for those that are as large and minus infinity for
    others.
    """
    largest = logits.max(dim=-1, keepdim=True).values
    return torch.where(logits == largest, 0.0, logits - largest)
