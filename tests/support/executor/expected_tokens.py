"""The tokens that a sequence must generate over the oracle backend."""

from __future__ import annotations

from collections.abc import Sequence

from pagekv.executor.oracle.reference import FACTOR, FIRST, MASK, choose_token, mix


def expected_tokens(
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    min_tokens: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    sequence_index: int = 0,
) -> list[int]:
    """The output of a sequence, independent of everything around it: up to `max_tokens` tokens, the one that ends it
    included. `eos_token_ids` are the oracle's, in its order; the rest is as in the request.
    """
    ends = {*stop_token_ids, *(() if ignore_eos else eos_token_ids)}
    state, read, known = FIRST, 0, len(prompt_ids)
    for token in prompt_ids:
        state = (state * FACTOR + mix(token)) & MASK
        read = (read + mix(state)) & MASK
    output: list[int] = []
    while len(output) < max_tokens:
        token, _ = choose_token(
            read,
            known + len(output),
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            banned=sorted(ends) if len(output) < min_tokens else (),
            temperature=temperature,
            seed=seed,
            sequence_index=sequence_index,
        )
        output.append(token)
        if token in ends and len(output) >= min_tokens:
            break
        state = (state * FACTOR + mix(token)) & MASK
        read = (read + mix(state)) & MASK
    return output
