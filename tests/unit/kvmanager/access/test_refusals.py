"""Reasons for refusals: each has its words, and the error is the one that the status table knows."""

from __future__ import annotations

import grpc

from pagekv.common.statuses import status_row
from pagekv.kvmanager.access.refusals import WORDS, RefusalReason, UnknownCaller


def test_every_reason_has_words() -> None:
    assert set(WORDS) == set(RefusalReason)
    assert len(set(WORDS.values())) == len(WORDS)


def test_the_error_is_unauthenticated() -> None:
    error = UnknownCaller(RefusalReason.UNKNOWN_KEY)
    assert str(error) == "unknown key"
    assert status_row(error).code is grpc.StatusCode.UNAUTHENTICATED
