"""The tokens that a sequence must generate over the oracle backend."""

from __future__ import annotations

from collections.abc import Sequence

from pagekv.executor.oracle.reference import EOS_ONE_IN, FACTOR, FIRST, MASK


def mix(value: int) -> int:
    """The finaliser of splitmix64, one value at a time."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def chain(token_ids: Sequence[int], state: int = FIRST) -> list[int]:
    """The oracle's h of every position of a sequence, or of one that goes on from `state`; digests are mixes of h."""
    states = []
    for token in token_ids:
        state = (state * FACTOR + mix(token)) & MASK
        states.append(state)
    return states


def choose_token(
    read: int,
    position: int,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    banned: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
    sequence_index: int = 0,
) -> tuple[int, int]:
    """The token at `position` after digests that sum to `read` (modulo 2**64), and the number it was drawn from.

    Seed and index matter only above temperature 0. A banned choice moves on to the next id that is not banned.
    """
    if temperature > 0:
        for part in (seed, sequence_index, position):
            read = mix(read ^ mix(part))
    drawn = mix(read)
    token = drawn % vocab_size
    if eos_token_ids and mix(drawn) % EOS_ONE_IN == 0:
        token = eos_token_ids[drawn % len(eos_token_ids)]
    allowed = (t % vocab_size for t in range(token, token + vocab_size) if t % vocab_size not in banned)
    return next(allowed, token), drawn


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
    states = chain(prompt_ids)
    state, read, known = states[-1], sum(map(mix, states)) & MASK, len(prompt_ids)
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
        [state] = chain([token], state)
        read = (read + mix(state)) & MASK
    return output
