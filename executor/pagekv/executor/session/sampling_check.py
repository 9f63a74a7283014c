"""The bounds of a sequence's sampling fields, as types.proto states them for clients. The bound of log-probabilities is
that of executor_service.proto, since beam search needs more of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagekv.common.errors import InvalidRequest
from pagekv.executor.backend.interface import Sampling

MAX_LOGPROBS = 128
MAX_BIASES = 1024
# A model's own end-of-sequence ids and at most 64 stop ids of a request.
MAX_BANNED = 1024


def check_columns(path: str, column: Sequence[object], name: str, other: Sequence[object]) -> None:
    """Raises InvalidRequest where a column has not as many entries as `other`, called `name`, with which it pairs."""
    if len(column) != len(other):
        raise InvalidRequest(path, f"must have {len(other)} entries, as {name}, has {len(column)}")


def check_sampling(path: str, sampling: Sampling, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequest for a field out of its bounds; `path` is the proto path of the message."""
    # A bound written as `low <= value <= high` refuses NaN and infinities too.
    number_bounds = (
        ("temperature", sampling.temperature, 0, 100),
        ("top_p", sampling.top_p, 0, 1),
        ("min_p", sampling.min_p, 0, 1),
        ("repetition_penalty", sampling.repetition_penalty, 0, 10),
        ("presence_penalty", sampling.presence_penalty, -2, 2),
        ("frequency_penalty", sampling.frequency_penalty, -2, 2),
        ("top_k", sampling.top_k, 0, vocab_size),
        ("min_tokens", sampling.min_tokens, 0, max_model_len),
        ("logprobs", sampling.logprobs or 0, 0, MAX_LOGPROBS),
    )
    for name, value, low, high in number_bounds:
        if not low <= value <= high:
            raise InvalidRequest(f"{path}.{name}", f"must be from {low} to {high}, got {value}")
    for name, value in (("top_p", sampling.top_p), ("repetition_penalty", sampling.repetition_penalty)):
        if value == 0:
            raise InvalidRequest(f"{path}.{name}", f"must be above 0, got {value}")
    _check_ids(f"{path}.banned_until_min", sampling.banned_until_min, MAX_BANNED, vocab_size)
    _check_biases(path, sampling, vocab_size)


def _check_biases(path: str, sampling: Sampling, vocab_size: int) -> None:
    ids, biases = sampling.bias_token_ids, sampling.biases
    _check_ids(f"{path}.bias_token_ids", ids, MAX_BIASES, vocab_size)
    if len(set(ids)) != len(ids):
        raise InvalidRequest(f"{path}.bias_token_ids", "must name every token id at most once")
    check_columns(f"{path}.biases", biases, "bias_token_ids", ids)
    for index, bias in enumerate(biases):
        if not -100 <= bias <= 100:
            raise InvalidRequest(f"{path}.biases[{index}]", f"must be from -100 to 100, got {bias}")


def _check_ids(path: str, ids: tuple[int, ...], most: int, vocab_size: int) -> None:
    if len(ids) > most:
        raise InvalidRequest(path, f"must have at most {most} entries, has {len(ids)}")
    for index, token in enumerate(ids):
        if token >= vocab_size:
            raise InvalidRequest(f"{path}[{index}]", f"must be a token id below {vocab_size}, got {token}")
