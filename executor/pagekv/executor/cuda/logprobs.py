"""Log-probabilities of the sampled tokens and of the likeliest tokens."""

from __future__ import annotations

import torch

# Log-probabilities of tokens, float64 [l]; the likeliest tokens, int64 [l, n], and their log-probabilities [l, n].
Logprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def log_probabilities(raw: torch.Tensor, tokens: torch.Tensor, num_top: int) -> Logprobs:
    """The natural logarithms of the probabilities of `tokens`, and the `num_top` likeliest tokens of each row, best
    first.
    """
    vocab_size = raw.shape[1]
    shifted = below_largest(raw)
    logprobs = shifted - shifted.exp().sum(-1, keepdim=True).log()
    of_tokens = logprobs.gather(1, tokens[:, None])[:, 0]
    if not num_top:
        return of_tokens, tokens.new_empty(len(tokens), 0), logprobs[:, :0]
    bound = raw.topk(num_top, dim=-1).values[:, -1:]
    kept = first_of_largest(raw, bound, num_top)
    # The kept ids in ascending order, by operators whose shapes do not depend on data: the host need not wait.
    ids = torch.where(kept, torch.arange(vocab_size, device=raw.device), vocab_size)
    ids = ids.topk(num_top, largest=False, sorted=True).values.clamp(max=vocab_size - 1)
    values = logprobs.gather(1, ids)
    order = raw.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return of_tokens, ids.gather(1, order), values.gather(1, order)


def first_of_largest(values: torch.Tensor, bound: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """A mask of the `count` (`[R, 1]`, or one number for all rows) largest values of each row, given the smallest of
    them, `bound` `[R, 1]`. Of equal values the first ones are taken.
    """
    above, equal = values > bound, values == bound
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def below_largest(logits: torch.Tensor) -> torch.Tensor:
    """Each row of logits minus its largest value. If that is infinite: 0 for logits that equal it, minus infinity for
    the others.
    """
    largest = logits.max(dim=-1, keepdim=True).values
    return torch.where(logits == largest, 0.0, logits - largest)
