"""Checks the facts in which all ranks of a group must agree, and combines the descriptions of the ranks into one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from pagekv.executor.backend.interface import BackendDescription, BackendFeature
from pagekv.executor.ranks.start_errors import CannotStart

# The name of a fact that stands for all others: the reason why this rank cannot start.
FAILURE = "why it cannot start"
# Fields of a description in which ranks may differ: mostly measured memory and speed.
_MEASURED = {
    "device_kv_bytes",
    "host_kv_bytes",
    "device_to_host_bytes_per_s",
    "host_to_device_bytes_per_s",
    "prefill_tokens_per_s",
    "features",
    "max_sequences",
}
_WORD = 96


class RanksDisagree(CannotStart):
    """Two ranks differ in a fact that has to be equal; the message names both ranks and both values."""


def check_facts(facts: Mapping[int, Mapping[str, Any]]) -> None:
    """`facts`: by rank, then by name. Raises CannotStart if a rank reports a failure, and RanksDisagree if a rank
    differs from rank 0 in a fact.
    """
    for rank, own in sorted(facts.items()):
        if FAILURE in own:
            raise CannotStart(f"rank {rank}: {own[FAILURE]}")
    first = facts[0]
    for rank, others in sorted(facts.items()):
        for name in sorted({*first, *others}):
            ours, theirs = first.get(name), others.get(name)
            if ours != theirs:
                raise RanksDisagree(
                    f"rank 0 and rank {rank} differ in {name}: {_shown(ours)} and {_shown(theirs)}; start all ranks "
                    "with the same flags, packages and model"
                )


def _shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= _WORD else text[:_WORD] + "..."


def group_description(descriptions: Mapping[int, BackendDescription]) -> BackendDescription:
    """The description of the group from the descriptions of its ranks: the least memory and the lowest speeds of any
    rank, the features that all have, and the fields that are equal on all. Raises RanksDisagree.
    """
    check_facts(
        {
            rank: {name: value for name, value in asdict(each).items() if name not in _MEASURED}
            for rank, each in descriptions.items()
        }
    )
    every = list(descriptions.values())
    features = tuple(one for one in every[0].features if all(one in each.features for each in every))
    least = {
        name: min(getattr(each, name) for each in every)
        for name in _MEASURED
        if name not in ("features", "host_kv_bytes")
    }
    host = min(each.host_kv_bytes for each in every) if BackendFeature.HOST_POOL in features else 0
    if not host:
        features = tuple(one for one in features if one is not BackendFeature.HOST_POOL)
    return replace(every[0], **least, host_kv_bytes=host, features=features)


def description_from_json(content: Mapping[str, Any]) -> BackendDescription:
    """The description in a rank's answer. Raises KeyError, TypeError or ValueError for content that no rank sends."""
    values = {field.name: content[field.name] for field in fields(BackendDescription)}
    values["eos_token_ids"] = tuple(values["eos_token_ids"])
    values["features"] = tuple(map(BackendFeature, values["features"]))
    return BackendDescription(**values)
