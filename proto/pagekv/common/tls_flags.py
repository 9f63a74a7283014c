"""The flags of TLS that both processes have."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.common.flags import FlagParser, flag


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Files in PEM, read again when they change; empty: none."""

    tls_cert: str = flag(
        "certificate to serve TLS with, followed by its intermediate certificates (PEM); read again when it changes",
        default="",
        metavar="FILE",
    )
    tls_key: str = flag("private key of --tls-cert, without a passphrase", default="", metavar="FILE")
    tls_client_ca: str = flag(
        "authorities of client certificates (PEM): every client must present a certificate (mutual TLS)",
        default="",
        metavar="FILE",
    )


def check_tls(parser: FlagParser, config: TlsConfig) -> None:
    """Ends the process with status 2, and one line, if a flag that another one needs is missing."""
    if bool(config.tls_cert) != bool(config.tls_key):
        there, missing = ("tls-cert", "tls-key") if config.tls_cert else ("tls-key", "tls-cert")
        parser.error(f"argument --{there}: needs --{missing}, too")
    if config.tls_client_ca and not config.tls_cert:
        parser.error("argument --tls-client-ca: needs --tls-cert and --tls-key, too")
