"""The parts that every layer of the rules works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from pagekv.conformance.answers import Answers
from pagekv.conformance.link import Refusal, StepsCall
from pagekv.conformance.played import PlayedEpoch
from pagekv.conformance.target import FEATURES, Target
from pagekv.conformance.verdict import BrokenRule, NotTested, require
from pagekv.steps.v1 import executor_service_pb2 as pb

# The number of a field that no message has.
NO_FIELD = 1999

T = TypeVar("T", bound=Message)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule by its number in executor_service.proto, in words, with the check that raises where it does not hold."""

    number: str
    words: str
    check: Callable[[Kit], None]


class Kit:
    """An executor under test and its answers so far."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.answers = Answers(target)

    @property
    def description(self) -> pb.DescribeResponse:
        return self.target.description

    def epoch(self, *free: Any, **attaching: Any) -> PlayedEpoch:
        return PlayedEpoch(self.target, *free, **attaching)

    def need(self, feature: int) -> None:
        """Raises NotTested without the feature."""
        if feature not in self.target.features:
            name = next(name for name, number in FEATURES.items() if number == feature)
            raise NotTested(f"no {name}")

    def goes_on(self) -> None:
        """A new epoch answers as ever. Raises BrokenRule where it does not."""
        self.answers.prepare()
        with self.epoch() as epoch:
            seq = epoch.alone(self.answers.prompts[1], 2)
        self.answers.compare(seq, "the epoch after it")


def expect(refusal: Refusal, code: grpc.StatusCode, rules: Sequence[str] = (), fields: Sequence[str] = ()) -> None:
    """Raises BrokenRule where a refusal has another status, another rule than these, or names none of the fields.

    A field may stand for its elements; an element that is named must be the right one.
    """
    require(refusal.code is code, f"{refusal}, not {code.name}")
    if fields:
        right = any(_names(refusal.field, field) for field in fields)
        require(right, f"names the field {refusal.field or '(none)'}, not {' or '.join(fields)}")
    if refusal.rule and rules:
        require(refusal.rule in rules, f"refused by rule {refusal.rule}, not {' or '.join(rules)}")


def _names(field: str, expected: str) -> bool:
    """Whether a field is the expected one, an element of it, or the whole of which an element was expected."""
    whole = expected.rpartition("[")[0] if expected.endswith("]") else expected
    return field in (expected, whole) or (whole == expected and field.startswith(f"{expected}["))


def with_unknown(message: T) -> T:
    """The message and a field that its type does not have."""
    # A varint field of this number, with value 1.
    tag = NO_FIELD << 3
    unknown = bytes([tag & 0x7F | 0x80, tag >> 7, 1])
    return type(message).FromString(message.SerializeToString() + unknown)


def refused(call: StepsCall) -> Refusal:
    """The error that ends the stream; results before it are dropped."""
    while isinstance(outcome := call.outcome(), pb.StepResult):
        pass
    if outcome is None:
        raise BrokenRule("the stream ended with OK instead of an error")
    return outcome
