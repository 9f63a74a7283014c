"""Reasons for which a caller is not known, few and of no help in guessing a key; and the error that says one."""

from __future__ import annotations

from enum import StrEnum

from pagekv.common.errors import Unauthenticated


class RefusalReason(StrEnum):
    """Words of counters and records; `WORDS` has the sentence for the caller."""

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
    """A caller that could not be identified, for this reason."""

    def __init__(self, reason: RefusalReason, words: str = "") -> None:
        """`words` say more of what the caller itself has shown; "": the reason's own."""
        super().__init__(words or WORDS[reason])
        self.reason = reason
