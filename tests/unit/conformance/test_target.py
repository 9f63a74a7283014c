"""Sizes that suit the executor, or a reason why it cannot be tested."""

from __future__ import annotations

import re
from unittest import mock

import pytest
from support.executor.judged import Edit, broken, kit_of, toy, verdicts

from pagekv.conformance.link import Refusal
from pagekv.conformance.target import FEATURES, Untestable
from pagekv.kvmanager.engine.features import feature_names
from pagekv.steps.v1 import executor_service_pb2 as pb


def test_features_are_named_after_the_contract_and_as_managers_tell_them() -> None:
    """One word for each thing: those of `GetModelInfo`."""
    assert FEATURES == {"host_pool": 1, "logprobs": 2, "logit_bias": 3, "min_tokens": 4, "penalties": 5}
    assert feature_names(FEATURES.values()) == list(FEATURES)


@pytest.mark.parametrize(
    ("edit", "size"),
    [(("300,", "70,"), 8), (("4 * 2**17", "4 * 128"), 2), (("return 1 <= size", "return 64 <= size"), 64)],
)
def test_another_block_size_where_managers_own_does_not_fit(edit: Edit, size: int) -> None:
    with toy(edit) as address, kit_of(address) as kit:
        assert kit.target.block_size == size
        assert kit.target.max_blocks * size >= kit.description.max_model_len
        assert kit.target.pool_blocks >= 48


def test_too_small_to_test() -> None:
    with (
        toy(("300,", "12,")) as address,
        pytest.raises(Untestable, match="cannot be tested: with blocks of 1 it has max_model_len 12"),
        kit_of(address),
    ):
        pass


def test_too_few_sequences_to_test() -> None:
    with (
        toy(("300, 256, 65536", "300, 4, 65536")) as address,
        pytest.raises(Untestable, match="and max_sequences 4, and must have 20, 48 and 5 or more"),
        kit_of(address),
    ):
        pass
    with toy(("300, 256, 65536", "300, 5, 65536")) as address:
        assert broken(verdicts(address)) == {}


def test_features_are_those_asked_for() -> None:
    revision = "contract_revision=1,\n"
    with toy((revision, revision + "            features=[1, 2, 77],\n")) as address:
        for wanted, features in ((None, {1, 2}), (frozenset({2}), {2}), (frozenset[int](), set())):
            with kit_of(address, wanted) as kit:
                assert kit.target.features == features
        with (
            pytest.raises(Untestable, match="does not list logit_bias, penalties"),
            kit_of(address, frozenset({2, 3, 5})),
        ):
            pass


def test_attach_asks_for_all_features_and_fields_override() -> None:
    with toy() as address, kit_of(address) as kit:
        asked: list[pb.AttachRequest] = []
        with mock.patch.object(kit.target.link, "attach", asked.append):
            kit.target.attach(features=[2, 1], layout="other")
            kit.target.attach("me", take_over=True, host_blocks=3)
        assert (list(asked[0].required_features), asked[0].layout) == ([1, 2], "other")
        assert re.fullmatch(r"pagekv-conformance-[0-9a-f]{8}", asked[0].manager_id)
        assert (asked[1].manager_id, asked[1].take_over, asked[1].num_host_blocks) == ("me", True, 3)
        with pytest.raises(Refusal, match="FAILED_PRECONDITION"):
            kit.target.attach(features=[1])
