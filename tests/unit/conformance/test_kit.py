"""The parts that the layers share."""

from __future__ import annotations

import pytest
from support.executor.judged import kit_of, toy

from pagekv.conformance.kit import _names, refused
from pagekv.conformance.verdict import BrokenRule, NotTested
from pagekv.steps.v1 import executor_service_pb2 as pb


@pytest.mark.parametrize(
    ("field", "expected", "right"),
    [
        ("a.b", "a.b", True),
        ("a.b[3]", "a.b", True),
        ("a.b", "a.b[3]", True),
        ("a.b[3]", "a.b[3]", True),
        ("a.b[2]", "a.b[3]", False),
        ("a.bc", "a.b", False),
        ("", "a.b", False),
        ("a[0].b", "a[1].b", False),
    ],
)
def test_a_field_or_its_elements(field: str, expected: str, right: bool) -> None:
    assert _names(field, expected) == right


def test_needs_are_named() -> None:
    with toy() as address, kit_of(address) as kit:
        with pytest.raises(NotTested, match="no host_pool"):
            kit.need(pb.EXECUTOR_FEATURE_HOST_POOL)
        kit.goes_on()
        call = kit.target.run()
        call.half_close()
        with pytest.raises(BrokenRule, match="OK instead of an error"):
            refused(call)
