"""Checks of single fields. Each raises InvalidRequest, with the proto path of the field and its bounds.

The bounds of a sequence's sampling fields are as types.proto states them for clients; that of log-probabilities is from
executor_service.proto, since beam search needs more of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagekv.common.errors import InvalidRequest
from pagekv.executor.backend.interface import Sampling

MAX_LOGPROBS = 128
MAX_BIASES = 1024
# A model's own end-of-sequence ids and at most 64 stop ids of a request.
MAX_BANNED = 1024


def check_range(path: str, value: float, low: int, high: int) -> None:
    """A number must be from `low` to `high`."""
    # Written like this it refuses NaN and infinities too.
    if not low <= value <= high:
        raise InvalidRequest(path, f"must be from {low} to {high}, got {value}")


def check_columns(path: str, column: Sequence[object], name: str, other: Sequence[object]) -> None:
    """A column must have as many entries as `other`, called `name`, with which it pairs."""
    if len(column) != len(other):
        raise InvalidRequest(path, f"must have {len(other)} entries, as {name}, has {len(column)}")


def check_ids(path: str, ids: Sequence[int], kind: str, bound: int, most: int | None = None) -> None:
    """Every id of this kind (token, block) must be below `bound`, and there may be at most so many."""
    if most is not None and len(ids) > most:
        raise InvalidRequest(path, f"must have at most {most} entries, has {len(ids)}")
    if ids and max(ids) >= bound:
        index = next(index for index, number in enumerate(ids) if number >= bound)
        raise InvalidRequest(f"{path}[{index}]", f"must be a {kind} id below {bound}, got {ids[index]}")


def check_distinct(path: str, blocks: Sequence[int]) -> None:
    """No block may be named twice."""
    if len(set(blocks)) != len(blocks):
        firsts = {block: index for index, block in reversed(list(enumerate(blocks)))}
        index, block = next((index, block) for index, block in enumerate(blocks) if firsts[block] != index)
        raise InvalidRequest(f"{path}[{index}]", f"names block {block} twice")


def check_sampling(path: str, sampling: Sampling, vocab_size: int, max_model_len: int) -> None:
    """Every field must be within its bounds; `path` is that of the message."""
    for name, low, high in (
        ("temperature", 0, 100),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("repetition_penalty", 0, 10),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("top_k", 0, vocab_size),
        ("min_tokens", 0, max_model_len),
    ):
        check_range(f"{path}.{name}", getattr(sampling, name), low, high)
    check_range(f"{path}.logprobs", sampling.logprobs or 0, 0, MAX_LOGPROBS)
    for name, value in (("top_p", sampling.top_p), ("repetition_penalty", sampling.repetition_penalty)):
        if value == 0:
            raise InvalidRequest(f"{path}.{name}", f"must be above 0, got {value}")
    check_ids(f"{path}.banned_until_min", sampling.banned_until_min, "token", vocab_size, MAX_BANNED)
    ids, biases = sampling.bias_token_ids, sampling.biases
    check_ids(f"{path}.bias_token_ids", ids, "token", vocab_size, MAX_BIASES)
    if len(set(ids)) != len(ids):
        raise InvalidRequest(f"{path}.bias_token_ids", "must name every token id at most once")
    check_columns(f"{path}.biases", biases, "bias_token_ids", ids)
    for index, bias in enumerate(biases):
        check_range(f"{path}.biases[{index}]", bias, -100, 100)
