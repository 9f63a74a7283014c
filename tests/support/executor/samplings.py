"""Sampling parameters of every kind, as a Hypothesis strategy."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pagekv.executor.backend.interface import Sampling


def samplings(vocab_size: int, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Sampling]:
    """Every parameter varies; `fields` override."""
    token = st.integers(0, vocab_size - 1)
    values: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5, 100.0]),
        "top_p": st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
        "top_k": st.integers(0, vocab_size),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3, 10.0]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.4, -1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "sequence_index": st.integers(0, 63),
        "min_tokens": st.integers(0, 4),
        "banned_until_min": st.lists(token, max_size=3).map(tuple),
        "bias": st.dictionaries(token, st.sampled_from([-100.0, -1.0, 2.0, 100.0]), max_size=3),
        "logprobs": st.sampled_from([None, 0, 3, 128]),
    }
    return st.fixed_dictionaries({**values, **fields}).map(_sampling)


def _sampling(values: dict[str, Any]) -> Sampling:
    bias: dict[int, float] = values.pop("bias")
    return Sampling(**values, bias_token_ids=tuple(bias), biases=tuple(bias.values()))
