"""Flags of TLS: which need each other."""

from __future__ import annotations

import pytest

from pagekv.common.flags import FlagParser
from pagekv.common.tls_flags import TlsConfig, check_tls

CERT, KEY, CA = "c.pem", "c.key", "ca.pem"


@pytest.mark.parametrize("config", [TlsConfig(), TlsConfig(CERT, KEY), TlsConfig(CERT, KEY, CA)])
def test_what_goes_together(config: TlsConfig) -> None:
    check_tls(FlagParser("prog", "", env={}), config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TlsConfig(tls_cert=CERT), "argument --tls-cert: needs --tls-key, too"),
        (TlsConfig(tls_key=KEY), "argument --tls-key: needs --tls-cert, too"),
        (TlsConfig(tls_cert=CERT, tls_client_ca=CA), "argument --tls-cert: needs --tls-key, too"),
        # Else nothing would be encrypted, and nobody asked for a certificate.
        (TlsConfig(tls_client_ca=CA), "argument --tls-client-ca: needs --tls-cert and --tls-key, too"),
    ],
)
def test_what_is_missing_ends_the_process(config: TlsConfig, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_tls(FlagParser("prog", "", env={}), config)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
