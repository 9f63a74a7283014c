"""Checks of single fields. Each check raises InvalidRequest, with the proto path of the field, its bounds and, in a
step, the number of the violated rule of executor_service.proto.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from pagekv.common.errors import InvalidRequest
from pagekv.executor.backend.interface import BackendFeature, Sampling

MAX_BIASES = 1024
# A model's own end-of-sequence ids and at most 64 stop ids of a request.
MAX_BANNED = 1024


def check_range(path: str, value: float, low: int, high: int, rule: str = "") -> None:
    # This form of the comparison refuses NaN and infinities too.
    if not low <= value <= high:
        raise InvalidRequest(path, f"must be from {low} to {high}, got {value}", rule)


def check_columns(path: str, column: Sequence[object], name: str, other: Sequence[object], rule: str) -> None:
    """A column must have as many entries as the column `other` that it pairs with; `name` is the field of `other`."""
    if len(column) != len(other):
        raise InvalidRequest(path, f"must have {len(other)} entries, as {name}, has {len(column)}", rule)


def check_size(path: str, entries: Sequence[object], most: int, rule: str) -> None:
    if len(entries) > most:
        raise InvalidRequest(path, f"must have at most {most} entries, has {len(entries)}", rule)


def check_ids(path: str, ids: Sequence[int], kind: str, bound: int, rule: str) -> None:
    """Every id of this kind (token, block) must be below `bound`. The items of an array are read as uint32, whatever
    its type code.
    """
    if isinstance(ids, array):
        _check_array(path, ids, kind, bound, rule)
    elif ids and max(ids) >= bound:
        index = next(index for index, number in enumerate(ids) if number >= bound)
        raise InvalidRequest(f"{path}[{index}]", f"must be a {kind} id below {bound}, got {ids[index]}", rule)


def _check_array(path: str, ids: array[int], kind: str, bound: int, rule: str) -> None:
    # Imported here, because the checks before a start import this module and need no NumPy.
    import numpy as np

    # max() of a list of a million ids takes 10 ms, during which no other Python thread runs.
    numbers = np.frombuffer(ids, np.uint32)
    if len(numbers) and int(numbers.max()) >= bound:
        index = int((numbers >= bound).argmax())
        raise InvalidRequest(f"{path}[{index}]", f"must be a {kind} id below {bound}, got {numbers[index]}", rule)


def check_distinct(path: str, blocks: Sequence[int], rule: str) -> None:
    if len(set(blocks)) != len(blocks):
        firsts = {block: index for index, block in reversed(list(enumerate(blocks)))}
        index, block = next((index, block) for index, block in enumerate(blocks) if firsts[block] != index)
        raise InvalidRequest(f"{path}[{index}]", f"names block {block} twice", rule)


def check_sampling(path: str, sampling: Sampling, vocab_size: int, max_model_len: int, max_logprobs: int) -> None:
    """Every field must be within its bounds; `path` is the path of the message."""
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
        check_range(f"{path}.{name}", getattr(sampling, name), low, high, "R18")
    check_range(f"{path}.logprobs", sampling.logprobs or 0, 0, max_logprobs, "R18")
    for name, value in (("top_p", sampling.top_p), ("repetition_penalty", sampling.repetition_penalty)):
        if value == 0:
            raise InvalidRequest(f"{path}.{name}", f"must be above 0, got {value}", "R18")
    check_size(f"{path}.banned_until_min", sampling.banned_until_min, MAX_BANNED, "R19")
    check_ids(f"{path}.banned_until_min", sampling.banned_until_min, "token", vocab_size, "R19")
    ids, biases = sampling.bias_token_ids, sampling.biases
    check_size(f"{path}.bias_token_ids", ids, MAX_BIASES, "R19")
    check_ids(f"{path}.bias_token_ids", ids, "token", vocab_size, "R19")
    if len(set(ids)) != len(ids):
        raise InvalidRequest(f"{path}.bias_token_ids", "must name every token id at most once", "R19")
    check_columns(f"{path}.biases", biases, "bias_token_ids", ids, "R19")
    for index, bias in enumerate(biases):
        check_range(f"{path}.biases[{index}]", bias, -100, 100, "R18")


# Fields of sampling, the features that they need, and the values that need none.
_FEATURE_FIELDS = (
    ("logprobs", BackendFeature.LOGPROBS, None),
    ("bias_token_ids", BackendFeature.LOGIT_BIAS, ()),
    ("min_tokens", BackendFeature.MIN_TOKENS, 0),
    ("banned_until_min", BackendFeature.MIN_TOKENS, ()),
    ("repetition_penalty", BackendFeature.PENALTIES, 1),
    ("presence_penalty", BackendFeature.PENALTIES, 0),
    ("frequency_penalty", BackendFeature.PENALTIES, 0),
)


def check_features(path: str, sampling: Sampling, features: Collection[BackendFeature]) -> None:
    """No field may use a feature that is not in `features`; `path` is the path of the message."""
    if len(features) == len(BackendFeature):
        return
    words: dict[object, str] = {None: "absent", (): "empty"}
    for name, feature, unused in _FEATURE_FIELDS:
        if feature not in features and getattr(sampling, name) != unused:
            raise InvalidRequest(
                f"{path}.{name}",
                f"must be {words.get(unused, unused)}: Attach did not require EXECUTOR_FEATURE_{feature.name}",
                "R34",
            )
