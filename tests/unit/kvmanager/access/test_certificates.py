"""Subjects of certificates, and bytes that are none."""

from __future__ import annotations

import ssl

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificate
from support.access.client_certificates import BEGINS, ENDS, certificate

from pagekv.kvmanager.access.certificates import MAX_CACHED, MAX_PEM_BYTES, Certificate, normal_subject, subject_of


@pytest.mark.parametrize("subject", ["CN=prometheus", "CN=alice,O=Example\\, Inc.,C=DE", "CN=ä,2.5.4.99=x"])
def test_a_subject_is_as_the_identities_file_has_it(subject: str) -> None:
    assert subject_of(certificate(subject)) == Certificate(normal_subject(subject), BEGINS, ENDS)


def test_the_first_of_several_counts() -> None:
    assert subject_of(certificate("CN=a") + certificate("CN=b")).subject == "CN=a"


def test_an_attribute_may_be_written_by_its_number() -> None:
    assert normal_subject("2.5.4.3=prometheus") == "CN=prometheus"


def test_a_comma_in_a_name_is_no_second_attribute() -> None:
    assert subject_of(certificate("CN=eve\\,CN=alice")).subject != normal_subject("CN=eve,CN=alice")


def of_version_9() -> bytes:
    """A certificate of a version that there is not."""
    der = load_pem_x509_certificate(certificate("CN=a")).public_bytes(Encoding.DER)
    changed = der.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x08", 1)
    assert changed != der
    return ssl.DER_cert_to_PEM_cert(changed).encode()


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"\x00\xff",
        b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
        certificate("CN=a")[:-60],
        certificate("CN=a").replace(b"CERTIFICATE", b"PUBLIC KEY"),
        of_version_9(),
        b" " * (MAX_PEM_BYTES + 1) + certificate("CN=a"),
    ],
    ids=["empty", "noise", "hollow", "cut", "a-key", "version", "long"],
)
def test_bytes_that_are_no_certificate_are_refused(pem: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # words are cryptography's
        subject_of(pem)


@pytest.mark.parametrize("text", ["", "alice", "CN=", "CN=a,", "cn=a"])
def test_a_text_that_is_no_subject_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # words are cryptography's
        normal_subject(text)


def test_a_certificate_is_read_once_and_the_cache_is_bounded() -> None:
    pem = certificate("CN=again")
    assert subject_of(pem) is subject_of(bytes(bytearray(pem)))
    assert subject_of.cache_info().maxsize == MAX_CACHED
