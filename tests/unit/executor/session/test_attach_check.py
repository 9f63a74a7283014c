"""Refusals of Describe and Attach, by name, before anything is ended or allocated."""

from __future__ import annotations

from typing import Any

import pytest
from support.executor.executor_steps import World, attach_order

from pagekv.common.errors import FailedPrecondition, InvalidRequest, OutOfMemory
from pagekv.executor.backend.interface import BackendFeature
from pagekv.executor.session.attach_check import (
    CONTRACT_REVISION,
    MAX_BLOCKS,
    AttachOrder,
    check_describe,
    check_fit,
    check_order,
)

# The oracle has HOST_POOL, LOGPROBS and MIN_TOKENS.
DESCRIPTION = World().backend.describe(16, 1)
HOST_POOL = (BackendFeature.HOST_POOL,)


def check(order: AttachOrder) -> None:
    check_order(order)
    check_fit(order, DESCRIPTION)


@pytest.mark.parametrize(
    ("fields", "field"),
    [((size, 1, 0), "block_size") for size in (0, 3, 512, 2**32 - 1)]
    + [((1, budget, 0), "token_budget") for budget in (0, 65537)]
    + [((1, 1, 65536), "contract_revision")],
)
def test_describe_is_refused_by_field(fields: tuple[int, int, int], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_describe(*fields)
    assert caught.value.field == field


def test_describe_answers_every_revision() -> None:
    for revision in (0, 1, 2, 65535):
        check_describe(256, 65536, revision)


@pytest.mark.parametrize(
    "fields",
    [
        {"manager_id": "x"},
        {"manager_id": "x" * 128, "num_device_blocks": 65536},
        {"required_features": HOST_POOL, "num_host_blocks": 65536},
        {"required_features": (*DESCRIPTION.features, *HOST_POOL)},
    ],
)
def test_bounds_themselves_are_let_through(fields: dict[str, Any]) -> None:
    order = attach_order(**fields)
    check(order)
    assert order.features == set(order.required_features)


@pytest.mark.parametrize(
    ("fields", "field", "part"),
    [
        ({"manager_id": ""}, "manager_id", "1 to 128 characters, has 0"),
        ({"manager_id": "x" * 129}, "manager_id", "has 129"),
        ({"block_size": 12}, "block_size", "a power of two from 1 to 256, got 12"),
        ({"num_device_blocks": 0}, "num_device_blocks", f"from 1 to {MAX_BLOCKS}, got 0"),
        ({"num_device_blocks": MAX_BLOCKS + 1}, "num_device_blocks", "from 1"),
        ({"required_features": HOST_POOL, "num_host_blocks": MAX_BLOCKS + 1}, "num_host_blocks", "from 0"),
        ({"num_host_blocks": 1}, "num_host_blocks", "required_features has EXECUTOR_FEATURE_HOST_POOL, got 1"),
        ({"layout": "blocks-last"}, "layout", "got 'blocks-last'"),
    ],
)
def test_a_field_out_of_its_bounds(fields: dict[str, Any], field: str, part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(attach_order(**fields))
    assert caught.value.field == field
    assert part in caught.value.description


@pytest.mark.parametrize(
    ("fields", "words", "subject"),
    [
        ({"contract_revision": 0}, "contract_revision: must be from 1 to 1", "0"),
        ({"contract_revision": CONTRACT_REVISION + 1}, "got 2", "2"),
        ({"required_features": (0,)}, r"required_features\[0\]: feature 0 is not supported", "feature 0"),
        ({"required_features": (2, 99)}, r"required_features\[1\]: feature 99 is not supported", "feature 99"),
        (
            {"required_features": (BackendFeature.PENALTIES,)},
            "EXECUTOR_FEATURE_PENALTIES is not supported: this executor has EXECUTOR_FEATURE_HOST_POOL, EXECUTOR_",
            "EXECUTOR_FEATURE_PENALTIES",
        ),
    ],
)
def test_what_is_not_known_or_not_here(fields: dict[str, Any], words: str, subject: str) -> None:
    with pytest.raises(FailedPrecondition, match=words) as caught:
        check(attach_order(**fields))
    assert caught.value.subject == subject


@pytest.mark.parametrize(
    "fields", [{"num_device_blocks": 65537}, {"num_host_blocks": 65537, "required_features": HOST_POOL}]
)
def test_pools_that_do_not_fit(fields: dict[str, Any]) -> None:
    with pytest.raises(OutOfMemory, match=r"65537 blocks of 192 bytes .* at most 65536"):
        check(attach_order(**fields))
