"""Subject and dates of a client certificate. TLS has checked before any call that a known authority signed it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from cryptography import x509

MAX_PEM_BYTES = 64 * 2**10
# Most parsed certificates that are kept, so that a certificate is not parsed for each call of a connection.
MAX_CACHED = 1024


@dataclass(frozen=True, slots=True)
class Certificate:
    """`subject` is the whole subject as RFC 4514 text, normalised; the dates are in UTC."""

    subject: str
    not_valid_before: datetime
    not_valid_after: datetime


@lru_cache(maxsize=MAX_CACHED)
def subject_of(pem: bytes) -> Certificate:
    """The first certificate in these bytes, which is the client's own in TLS. Raises ValueError without one."""
    if len(pem) > MAX_PEM_BYTES:
        raise ValueError(f"a certificate must have at most {MAX_PEM_BYTES} bytes, has {len(pem)}")
    try:
        read = x509.load_pem_x509_certificate(pem)
        return Certificate(read.subject.rfc4514_string(), read.not_valid_before_utc, read.not_valid_after_utc)
    except x509.InvalidVersion as error:
        raise ValueError(str(error)) from error


def normal_subject(text: str) -> str:
    """An RFC 4514 text in the form that `subject_of` gives. Raises ValueError for other text and an empty subject."""
    name = x509.Name.from_rfc4514_string(text)
    if not name.rdns:
        raise ValueError("a subject has one attribute at least")
    return name.rfc4514_string()
