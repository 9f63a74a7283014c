"""Client certificates as PEM."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from support.access.issuer import ec_key

BEGINS = datetime(2026, 1, 1, tzinfo=UTC)
ENDS = BEGINS + timedelta(days=30)


def certificate(subject: str, begins: datetime = BEGINS, ends: datetime = ENDS) -> bytes:
    """Signed by itself: that the signer is a known authority is for TLS to see."""
    name = x509.Name.from_rfc4514_string(subject)
    builder = x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=ec_key().public_key())
    builder = builder.serial_number(1).not_valid_before(begins).not_valid_after(ends)
    return builder.sign(ec_key(), hashes.SHA256()).public_bytes(Encoding.PEM)
