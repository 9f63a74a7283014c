"""Reasons for which a caller is not identified, too general to help in guessing a key; and the error with a reason."""

from __future__ import annotations

from enum import StrEnum

from pagekv.common.errors import Unauthenticated


class RefusalReason(StrEnum):
    """Reasons as counters and records name them; `WORDS` has the texts for callers."""

    NO_IDENTITY = "no_identity"
    SENT_TWICE = "sent_twice"
    UNKNOWN_KEY = "unknown_key"
    EXPIRED_TOKEN = "expired_token"
    INVALID_TOKEN = "invalid_token"
    UNKNOWN_CERTIFICATE = "unknown_certificate"
    # Expired, or not valid yet: the caller knows its own certificate's dates.
    EXPIRED_CERTIFICATE = "expired_certificate"


WORDS: dict[RefusalReason, str] = {
    RefusalReason.NO_IDENTITY: "no identity: send an API key in authorization, or a client certificate",
    RefusalReason.SENT_TWICE: "authorization was sent more than once: send one",
    RefusalReason.UNKNOWN_KEY: "unknown key",
    RefusalReason.EXPIRED_TOKEN: "expired token",
    RefusalReason.INVALID_TOKEN: "token is not valid",
    RefusalReason.UNKNOWN_CERTIFICATE: "certificate is not known",
    RefusalReason.EXPIRED_CERTIFICATE: "certificate expired",
}


class UnknownCaller(Unauthenticated):
    """The caller could not be identified, for this reason."""

    def __init__(self, reason: RefusalReason, words: str = "") -> None:
        """`words`: a text with details that the caller itself has shown; "": the reason's text."""
        super().__init__(words or WORDS[reason])
        self.reason = reason
